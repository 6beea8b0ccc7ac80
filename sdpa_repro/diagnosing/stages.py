"""Stages that are done once: each keeps its result in the folder, and a later start goes on behind the last one."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from sdpa_repro.diagnosing.codec import decoded, encoded
from sdpa_repro.diagnosing.naming import file_hash, key_of
from sdpa_repro.diagnosing.place import LOG, STATE
from sdpa_repro.errors import InputError
from sdpa_repro.publishing import files

T = TypeVar("T")

NAMES = ("capture", "replay", "locate", "explain", "reduce", "issue", "report")
"""The stages in their order; not every run has all of them."""


class Watch(Protocol):
    """Who is told how far it is."""

    def begin(self, name: str) -> None:
        """A stage begins."""

    def say(self, text: str) -> None:
        """A sign of life, or something to know."""

    def end(self, name: str, words: str) -> None:
        """A stage ended, with these words as its result."""


@dataclass(frozen=True)
class Done:
    """A stage that ended. reused: its result was there from an earlier run, which took `seconds`."""

    name: str
    seconds: float
    reused: bool


class Stages:
    """The stages of one run in `folder`. `key` is a hash of what all of them depend on."""

    def __init__(self, folder: Path, key: str, watch: Watch) -> None:
        self.folder = folder
        self.done: list[Done] = []
        self._key = key
        self._watch = watch
        self._start = time.monotonic()

    def say(self, text: str) -> None:
        """Tell the watcher and the log."""
        self.log(text)
        self._watch.say(text)

    def log(self, text: str) -> None:
        """A line in the log, with the seconds since the start; a log that cannot be written stops nothing."""
        line = f"{time.strftime('%H:%M:%S')} {time.monotonic() - self._start:7.1f} s  {text}\n"
        with suppress(OSError), (self.folder / LOG).open("a", encoding="utf-8", errors="replace") as file:
            file.write(line)

    def run(
        self,
        name: str,
        depends: Any,
        kind: type[T],
        work: Callable[[], T],
        *,
        words: Callable[[T], str],
        wrote: Callable[[T], Sequence[Path | None]] = lambda result: (),
        keep: Callable[[T], bool] = lambda result: True,
    ) -> T:
        """The result of a stage: the kept one when it is of this key and `depends`, else that of `work`, then kept.

        depends: plain data; what this stage depends on besides the common key. wrote: the files that belong to the
        result; it is not reused when one of them is missing, or a dump among them has changed. keep: whether the
        result may be used again (one that was cut short may not). Raises what `work` raises; that a result cannot be
        kept is said, no more.
        """
        key = key_of([self._key, name, depends])
        self.log(f"{name}: begins")
        self._watch.begin(name)
        kept = self._kept(name, key, kind)
        if kept is not None:
            result, seconds = kept
            self.done.append(Done(name, seconds, True))
            self.log(f"{name}: reused, it took {seconds:.1f} s: {words(result)}")
            self._watch.end(name, f"{words(result)} (from before)")
            return result
        began = time.monotonic()
        result = work()
        seconds = time.monotonic() - began
        if keep(result):
            try:
                self._keep(name, key, seconds, result, wrote(result))
            except InputError as error:  # a full disk: what was found is told all the same
                self.say(f"{name}: a later start has to do it again: {error}")
        self.done.append(Done(name, seconds, False))
        self.log(f"{name}: ended after {seconds:.1f} s: {words(result)}")
        self._watch.end(name, words(result))
        return result

    def _kept(self, name: str, key: str, kind: type[T]) -> tuple[T, float] | None:
        """The kept result and the seconds it took; None when there is none that can be used."""
        try:
            told = json.loads((self.folder / STATE / f"{name}.json").read_bytes())
            if told["key"] != key or not all(self._there(*each) for each in told["files"].items()):
                return None
            return decoded(told["value"], self.folder, kind), float(told["seconds"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None

    def _there(self, name: str, digest: str) -> bool:
        """Whether a file is there; texts may have been edited since, dumps may not."""
        path = self.folder / name
        if not path.is_file():
            return False
        try:
            return path.suffix != ".pt" or file_hash(path) == digest
        except InputError:
            return False

    def _keep(self, name: str, key: str, seconds: float, result: object, wrote: Sequence[Path | None]) -> None:
        """Write the result, whole or not at all. Raises InputError when the disk is full or the like."""
        hashes = {path.name: file_hash(path) for path in wrote if path is not None}
        told = {"key": key, "seconds": round(seconds, 3), "files": hashes, "value": encoded(result, self.folder)}
        files.write(self.folder / STATE, f"{name}.json", json.dumps(told, allow_nan=False))
