"""The work that `tests.killing` kills: a capture, a reduction, and a diagnosis whose stages are cheap stand-ins."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from sdpa_repro import capture as record
from sdpa_repro.capturing import folder as dumps
from sdpa_repro.cli import main
from sdpa_repro.diagnosing import chain
from sdpa_repro.dump import load
from sdpa_repro.errors import InputError
from sdpa_repro.explaining.explain import Explanation
from sdpa_repro.publishing import files
from sdpa_repro.publishing.published import Published
from sdpa_repro.publishing.running import ScriptRun
from sdpa_repro.reducing.dump_reducer import reduce_dump
from sdpa_repro.replaying import worker
from sdpa_repro.replaying.cells import Cell
from sdpa_repro.replaying.fidelity import Fidelity
from sdpa_repro.replaying.replay import Replay, replay
from sdpa_repro.replaying.verdict import Bad, Status, Verdict
from tests.calls import make_call
from tests.killing import attempt, tell, temporary
from tests.replaying.dumps import fault, write_dump

MOST = 200
"""More changes of the disk than any of the works makes."""

EACH = 4
"""Of a diagnosis one moment in so many: each is a start, a kill and a second start."""


def readable(folder: Path) -> list[str]:
    """The listed dumps, each read in full. Raises InputError for a broken one."""
    names = [str(entry["file"]) for entry in dumps.entries(folder)]
    for name in names:
        load(folder / name)
    return names


def capture(folder: Path) -> None:
    """Three calls, all kept, killed at every moment; then once undisturbed into the same folder."""
    call = make_call(rows=5, heads=2, width=8)

    def work() -> None:
        with record(folder, keep="all"), torch.no_grad():
            for _ in range(3):
                F.scaled_dot_product_attention(call.query, call.key, call.value, **call.keywords)

    for kill in range(1, MOST):
        status = attempt(work, folder, kill=kill)
        tell(kill=kill, status=status, listed=readable(folder) if folder.is_dir() else [])
        if status == 0:
            break
    for size in (1, 600, 3000):
        tell(size=size, status=attempt(work, folder, size=size), listed=readable(folder))
    before = len(readable(folder))
    tell(undisturbed=True, status=attempt(work, folder), more=len(readable(folder)) - before)


def reduce(folder: Path) -> None:
    """One reduction, killed in its search and at every change of the disk; then once undisturbed."""
    folder.mkdir()
    path = write_dump(make_call(rows=33, heads=2, padding=3), folder / "x.pt")
    preload = fault("pytorch_191937")
    torch.set_num_threads(1)
    seen = replay(path, dtypes=("captured",), runs=1, preload=preload)
    frozen = ("L", "S", "E", "mask", "values", "layout", "flags")
    target = folder / "x.min.pt"

    def work(stop_at: int = 0) -> None:
        said: list[str] = []

        def progress(text: str) -> None:
            said.append(text)
            if len(said) == stop_at:
                os.kill(os.getpid(), signal.SIGKILL)

        reduce_dump(path, target, preload=preload, replayed=seen, freeze=frozen, progress=progress)

    for moment in (1, 2):
        tell(said=moment, status=attempt(lambda moment=moment: work(moment), folder), there=target.exists())
    for kill in (1, 2):
        status = attempt(work, folder, kill=kill)
        tell(kill=kill, status=status, there=target.exists(), source=bool(load(path)))
    for size in (1, 500, 2000):
        tell(size=size, status=attempt(work, folder, size=size), there=target.exists())
    tell(undisturbed=True, status=attempt(work, folder), read=bool(load(target)))


def diagnose(folder: Path) -> None:
    """`sdpa-repro diagnose x.pt` with stand-ins for what computes, killed at every moment, then started again."""
    folder.mkdir()
    path = write_dump(make_call(rows=5, heads=2, width=8), folder / "x.pt")
    with stand_ins():
        for kill in range(1, MOST, EACH):
            out = folder / f"kill-{kill}"
            status, _ = diagnosed(path, out, kill=kill)
            ended = finished_stages(out / "x")
            again, said = diagnosed(path, out)
            tell(kill=kill, status=status, ended=ended, **after(again, said, out / "x"))
            shutil.rmtree(out)
            if status != -9:
                break
        for limit in ({"size": 100}, {"size": 1200}, {"full": 1}, {"full": 100}, {"full": 1200}):
            out = folder / "limited"
            status, said = diagnosed(path, out, **limit)
            told: dict[str, Any] = {"limit": limit, "status": status, "said": said}
            again, said = diagnosed(path, out)
            tell(**told, **after(again, said, out / "x"))
            shutil.rmtree(out)


def diagnosed(path: Path, out: Path, **how: int) -> tuple[int, str]:
    """One start; its status, and what it said on stderr when it came to its end."""
    said = out.with_name("said")
    said.write_text("")

    def work() -> int:
        errors = io.StringIO()
        with redirect_stdout(io.StringIO()), redirect_stderr(errors):
            status = main(["diagnose", str(path), "-o", str(out)])
        if not how.get("full"):
            said.write_text(errors.getvalue())
        else:
            print(json.dumps({"stderr": errors.getvalue()}), flush=True)
        return status

    return attempt(work, out, **how), said.read_text()


def finished_stages(folder: Path) -> list[str]:
    """The stages whose result is kept."""
    return sorted(path.stem for path in (folder / ".stages").glob("*.json") if path.stem != "run")


def after(status: int, said: str, folder: Path) -> dict[str, Any]:
    """What is there after the second start."""
    result = json.loads((folder / "result.json").read_bytes())
    return {
        "again": status,
        "again_said": said,
        "reused": sorted(stage["name"] for stage in result["stages"] if stage["reused"]),
        "stages": [stage["name"] for stage in result["stages"]],
        "temporary": temporary(folder),
        "files": sorted(each.name for each in folder.iterdir() if each.is_file()),
        "read": _reads(folder),
    }


def _reads(folder: Path) -> bool:
    try:
        return all(bool(load(path)) for path in folder.glob("*.pt"))
    except InputError:
        return False


class Idle:
    """A worker that does nothing."""

    def __init__(self, *_: Any) -> None:
        pass

    def __enter__(self) -> Idle:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def close(self) -> None:
        """Nothing."""


@contextmanager
def stand_ins() -> Iterator[None]:
    """Replace everything that computes by what it might have found.

    Replace nothing further of `chain` within, unless that ends within too: it would be put back later, as it is here.
    """
    cheap = {
        "replay": lambda path, **_: made_replay(path),
        "explain": lambda path, replayed, **_: Explanation(path, "MATH", replayed),
        "reduce_dump": _reduce,
        "publish": _publish,
        "section": lambda *_, **__: None,
        "page": lambda _: "<html></html>",
    }
    with mock.patch.multiple(chain, **cheap), mock.patch.object(worker, "Worker", Idle):
        yield


def made_replay(path: Path, **other: Any) -> Replay:
    """The replay of a call that MATH gets wrong in its last row; `other` fields as given."""
    bad = Bad((0,), (0,), (4,), 1, (0, 0, 4))
    fields: dict[str, Any] = {
        "path": path,
        "verdict": Verdict.BACKEND_WRONG,
        "ran": "MATH",
        "guilty": ("MATH",),
        "sentence": "MATH is wrong in query row 4",
        "known": (),
        "fidelity": Fidelity(None, None),
        "cells": (Cell("MATH", "bfloat16", Status.DIVERGES, max_abs=1.0, threshold=0.1, ratio=10.0, bad=bad),),
        "device": "cpu",
        "dtype": "bfloat16",
        "notes": (),
        "preloaded": (),
        "captured_with": (),
        "exit_status": 1,
    }
    return Replay(**{**fields, **other})


def _reduce(path: Path, target: Path, **_: Any) -> Any:
    files.write(target.parent, target.name, path.read_bytes())
    told = {"output": str(target), "sentence": "smaller"}
    return SimpleNamespace(output=target, proven=True, sentence="smaller", document=lambda: told)


def _publish(path: Path, folder: Path, *, replayed: Replay, **_: Any) -> Published:
    script = files.write(folder, files.SCRIPT, "import torch\n")
    issue = files.write(folder, files.ISSUE, "### bug\n")
    run = ScriptRun(1, "AssertionError", 1.0, "here")
    return Published("repro.py fails", 1, replayed, folder=folder, script=script, issue=issue, run=run)
