"""Puts mutants of dumps through the program: `python -m tests.fuzz --count 5000 --seed 0`.

Every mutant is loaded, and those that load are shown; some of those are also replayed and drawn on a report's page, in
the process that loads them, and batches of files go through the real command line. A finding is anything but the file's
use or one line that refuses it: another exception, a dead or silent process, something that was run, memory.
Prints what came of it; exit status 1 when there is a finding, whose files are then kept.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
import unicodedata
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sdpa_repro import dump
from sdpa_repro.cli import output
from sdpa_repro.cli.show import describe
from sdpa_repro.cli.show_text import print_dump
from sdpa_repro.dump import Dump
from sdpa_repro.errors import InputError
from sdpa_repro.publishing.page import page
from sdpa_repro.publishing.section import section, without_explanation
from sdpa_repro.replaying.replay import replay
from sdpa_repro.replaying.worker import Worker
from tests.mutants import MARK, mutant

ROOT = Path(__file__).resolve().parent.parent
LONGEST_LINE = 700
CPU_SECONDS = 30
"""Processor time for one stage of one mutant, after which the kernel ends the process: a hang."""
WALL_SECONDS = 300
"""Silence of a child, after which it is ended: it waits for something."""
ROOM = 6 << 30
"""Address space that a child may add: dumps may claim gaps, which take no memory."""
MEBIBYTES = 1024
"""Memory over the baseline that is a finding."""
BATCH = 250


class FoundError(Exception):
    """What a mutant brought about that it must not."""


def one_line(error: InputError) -> None:
    """Raise FoundError unless the refusal is one readable line."""
    text = str(error)
    if not text or len(text) > LONGEST_LINE or not all(letter.isprintable() for letter in text):
        raise FoundError(f"no readable line: {text[:300]!r}")


def loaded(path: Path) -> Dump | None:
    """The mutant when it loads without a word; None when it is refused in one line."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            return dump.load(path)
        except InputError as error:
            one_line(error)
            return None


def shown(found: Dump, path: Path) -> None:
    """`show` in words and as JSON."""
    room = io.StringIO()
    with contextlib.redirect_stdout(room):
        try:
            body = describe(found, path)
            print_dump(body)
        except InputError as error:
            return one_line(error)
    text = room.getvalue()
    odd = {letter for letter in text if letter != "\n" and unicodedata.category(letter)[0] == "C"}
    if odd or len(text) > 100_000:
        raise FoundError(f"show printed {odd or len(text)}")
    with contextlib.redirect_stdout(io.StringIO()) as document:
        output.document("show", body)
    json.loads(document.getvalue())


def drawn(path: Path, worker: Worker) -> None:
    """`replay` and the page of `report --no-explain`."""
    try:
        result = replay(path, dtypes=("captured",), runs=1, timeout=20, worker=worker)
        json.dumps(output._plain(result.document()), allow_nan=False)
        made = section(without_explanation(path, result), worker=worker)
    except InputError as error:
        return one_line(error)
    text = page([made])
    if "<script>alert" in text or "<img src=x" in text or 'javascript:alert(1)"' in text:
        raise FoundError("markup of the dump's is on the page")


class Watch:
    """Notes what no reading of a file does: unpickling by `pickle`, processes, connections, files written.

    An audit hook stays for good, so there is one for a process. It notes rather than raises: the reader would take an
    exception for the file's fault and refuse it.
    """

    BAD = (
        "pickle.find_class",
        "os.system",
        "os.exec",
        "os.posix_spawn",
        "os.fork",
        "subprocess.Popen",
        "socket.connect",
    )

    def __init__(self) -> None:
        self.on = False
        self.noted: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        written = event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")
        if written or event in self.BAD:
            self.noted.append(f"{event} {str(arguments)[:200]}")

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Raise FoundError when anything was noted meanwhile."""
        self.on = True
        try:
            yield
        finally:
            self.on = False
        if self.noted:
            raise FoundError("; ".join(self.noted))


def resident(who: int = resource.RUSAGE_SELF) -> int:
    """Most memory held so far, in MiB."""
    return resource.getrusage(who).ru_maxrss >> 10


def child(seed: int, first: int, last: int, replays: float, say: int) -> None:
    """Put mutants through; one JSON line for each stage begun, each result, and each finding is written to `say`."""

    def tell(**words: Any) -> None:
        os.write(say, json.dumps(words).encode() + b"\n")

    torch.set_num_threads(1)
    limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    watch = Watch()
    base = resident()
    path = Path("x.pt")
    chosen: list[int] = []
    for index in range(first, last):
        whole, what = mutant(seed, index)
        path.write_bytes(whole)
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        tell(index=index, what=what, stage="load")
        try:
            with watch():
                found = loaded(path)
                if found is not None:
                    shown(found, path)
        except (Exception, RecursionError) as error:
            tell(index=index, what=what, finding=f"{type(error).__name__}: {error}"[:500])
            continue
        tell(index=index, came="loaded" if found else "refused", level=what.split(":")[0], peak=resident() - base)
        if found is not None and (index * 7919) % 1000 < replays * 1000:
            chosen.append(index)
    if chosen:
        signal.setitimer(signal.ITIMER_PROF, 0)
        with Worker() as worker:
            for index in chosen:
                whole, what = mutant(seed, index)
                path.write_bytes(whole)
                signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
                tell(index=index, what=what, stage="replay")
                try:
                    drawn(path, worker)
                except (Exception, RecursionError) as error:
                    tell(index=index, what=what, finding=f"replay: {type(error).__name__}: {error}"[:500])
                    continue
                tell(index=index, came="replayed", level=what.split(":")[0], peak=resident() - base)
    signal.setitimer(signal.ITIMER_PROF, 0)
    tell(worker=resident(resource.RUSAGE_CHILDREN))


@dataclass
class Tally:
    """What came of all mutants. peak: MiB over what a child began with; worker: MiB of the largest worker."""

    came: Counter[tuple[str, str]] = field(default_factory=Counter)
    findings: list[tuple[int, str, str]] = field(default_factory=list)
    peak: int = 0
    worker: int = 0

    def take(self, line: dict[str, Any]) -> None:
        if "finding" in line:
            self.findings.append((line["index"], line["what"], line["finding"]))
        elif "came" in line:
            self.came[line["level"], line["came"]] += 1
            if line["peak"] - self.peak > 64:
                print(
                    f"{line['index']} ({line['level']}) took memory up to {line['peak']} MiB over the start", flush=True
                )
            if line["peak"] > MEBIBYTES >= self.peak:
                self.findings.append((line["index"], line["level"], f"{line['peak']} MiB"))
            self.peak = max(self.peak, line["peak"])
        self.worker = max(self.worker, line.get("worker", 0))


def batch(seed: int, first: int, last: int, replays: float, tally: Tally) -> None:
    """Run mutants in children: a child that dies or falls silent is a finding, and another one goes on behind it."""
    while first < last:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.close(reading)
                child(seed, first, last, replays, writing)
                status = 0
            finally:
                os._exit(status)
        os.close(writing)
        at: dict[str, Any] = {}
        silent = False
        with open(reading, "rb", buffering=0) as pipe:
            rest = b""
            while True:
                if not select.select([pipe], [], [], WALL_SECONDS)[0]:
                    silent = True
                    os.kill(pid, signal.SIGKILL)
                    break
                more = pipe.read(1 << 16)
                if not more:
                    break
                *lines, rest = (rest + more).split(b"\n")
                for text in lines:
                    line = json.loads(text)
                    at = line if "stage" in line else at
                    tally.take(line)
        status = os.waitpid(pid, 0)[1]
        if status == 0:
            return
        how = "silent" if silent else f"status {os.waitstatus_to_exitcode(status)}"
        tally.findings.append(
            (at.get("index", first), at.get("what", "?"), f"{at.get('stage')}: the process ended: {how}")
        )
        if at.get("stage") != "load":
            return  # the rest of this batch's replays is left out
        first = at["index"] + 1


def command_line(seed: int, indices: list[int], tally: Tally) -> None:
    """A folder of mutants through `show`, `replay` and `report`, as processes of their own."""
    folder = Path("files")
    folder.mkdir(exist_ok=True)
    for index in indices:
        (folder / f"{index}.pt").write_bytes(mutant(seed, index)[0])
    some = [str(folder / f"{index}.pt") for index in indices]
    runs = [["show", "files"], ["show", "--json", "files"]]
    runs += [["replay", "--dtype", "captured", name] for name in some[:2]]
    runs += [["replay", "--dtype", "captured", *some], ["replay", "--json", "--dtype", "captured", *some]]
    runs += [["report", "--no-explain", "--force", *some]]
    for words in runs:
        try:
            done = subprocess.run(
                [sys.executable, "-m", "sdpa_repro", *words],
                capture_output=True,
                text=True,
                timeout=1800,
                errors="replace",
            )
        except subprocess.TimeoutExpired:
            tally.findings.append((indices[0], "command line", f"{words[:2]} hangs"))
            continue
        odd = {
            letter for letter in done.stdout + done.stderr if letter != "\n" and unicodedata.category(letter)[0] == "C"
        }
        if done.returncode not in (0, 1, 2, 3) or "Traceback" in done.stderr or odd:
            said = f"{words[:3]} ended with {done.returncode}: {done.stderr[-300:]!r} {odd or ''}"
            tally.findings.append((indices[0], "command line", said))
        tally.came["command line", f"exit {done.returncode}"] += 1


def main() -> int:
    """Run, print, keep what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument(
        "--replays", type=float, default=0.3, help="Share of the loaded ones that are replayed and drawn."
    )
    parser.add_argument("--cli", type=int, default=60, help="Mutants that go through the real command line.")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-findings"))
    options = parser.parse_args()
    start, keep = time.monotonic(), options.keep.resolve()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    mutant(options.seed, 0)
    tally = Tally()
    with tempfile.TemporaryDirectory(prefix="sdpa-repro-fuzz-") as folder:
        os.chdir(folder)
        last = options.first + options.count
        for first in range(options.first, last, BATCH):
            batch(options.seed, first, min(first + BATCH, last), options.replays, tally)
            print(f"{min(first + BATCH, last)} of {last}, {time.monotonic() - start:.0f} s", flush=True)
        step = max(1, options.count // max(1, options.cli))
        if options.cli:
            command_line(options.seed, list(range(options.first, last, step))[: options.cli], tally)
        marks = [str(path) for path in Path(folder).rglob(MARK)]
        os.chdir(ROOT)
    if marks:
        tally.findings.append((-1, "", f"something was run: {marks}"))
    for (level, came), count in sorted(tally.came.items()):
        print(f"{level:14} {came:10} {count}")
    print(f"peak {tally.peak} MiB over the start, largest worker {tally.worker} MiB, {time.monotonic() - start:.0f} s")
    for index, what, said in tally.findings:
        print(f"FOUND {index} ({what}): {said}")
        if index >= 0:
            keep.mkdir(parents=True, exist_ok=True)
            (keep / f"{options.seed}-{index}.pt").write_bytes(mutant(options.seed, index)[0])
    print(f"{len(tally.findings)} findings in {options.count} mutants")
    return 1 if tally.findings else 0


if __name__ == "__main__":
    sys.exit(main())
