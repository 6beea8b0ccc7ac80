"""The whole table: one dump, every backend, several dtypes, each against float64; and the verdict."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from sdpa_repro.attention import AttentionCall
from sdpa_repro.dump import Dump, load
from sdpa_repro.environment import preload_records, software
from sdpa_repro.errors import InputError
from sdpa_repro.known_issues import Match, matches
from sdpa_repro.replaying.backends import Backend
from sdpa_repro.replaying.cells import Cell, load_outputs
from sdpa_repro.replaying.conclusion import Conclusion, Live, conclude, with_known
from sdpa_repro.replaying.fidelity import Fidelity, compared, layout_of, prove
from sdpa_repro.replaying.table import Table, choose_device
from sdpa_repro.replaying.verdict import Status, Verdict
from sdpa_repro.replaying.worker import Worker
from sdpa_repro.switches import dtype_name

__all__ = ["ALL_DTYPES", "Fidelity", "Replay", "prove", "replay"]

ALL_DTYPES = ("captured", "bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Replay:
    """What became of one dump. `cells` in table order; `known`: upstream issues that fit a guilty backend."""

    path: Path
    verdict: Verdict
    ran: str | None
    """The kernel that ran live, or what the default path takes here when that is not recorded."""
    guilty: tuple[str, ...]
    sentence: str
    known: tuple[Match, ...]
    fidelity: Fidelity
    cells: tuple[Cell, ...]
    device: str
    dtype: str
    notes: tuple[str, ...]
    preloaded: tuple[Mapping[str, str], ...]
    captured_with: tuple[Mapping[str, str], ...]
    """Files that were preloaded when the call was captured."""
    exit_status: int
    environment: Mapping[str, Any] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """As plain JSON types; the keys are stable (DESIGN section 9)."""
        return {
            "file": self.path.name,
            "verdict": self.verdict.value,
            "ran": self.ran,
            "guilty": list(self.guilty),
            "sentence": self.sentence,
            "known": [
                {"issue": match.issue, "match": match.match, "fixed_in": match.fixed_in, "title": match.title}
                for match in self.known
            ],
            "fidelity": self.fidelity.document(),
            "cells": [cell.document() for cell in self.cells],
            "device": self.device,
            "dtype": self.dtype,
            "notes": list(self.notes),
            "preloaded": [dict(record) for record in self.preloaded],
            "preloaded_at_capture": [dict(record) for record in self.captured_with],
            "environment": dict(self.environment),
        }


class Interrupted(KeyboardInterrupt):
    """Ctrl-C after the captured dtype was done: `partial` holds the verdict and the cells so far."""

    def __init__(self, partial: Replay) -> None:
        super().__init__()
        self.partial = partial


def replay(
    path: str | Path,
    *,
    device: str | None = None,
    dtypes: Sequence[str] = ALL_DTYPES,
    backends: Sequence[Backend | str] | None = None,
    runs: int = 3,
    timeout: float = 120.0,
    preload: Sequence[str | Path] = (),
    progress: Callable[[str], None] | None = None,
    worker: Worker | None = None,
    deadline: float = math.inf,
) -> Replay:
    """Run a dump through every backend in a worker process and judge each output against float64.

    device: "cpu", "cuda", …; by default where a wrong call was captured, otherwise a GPU if there is one.
    dtypes: of `ALL_DTYPES`; the captured one is always run, since the verdict rests on it alone. backends: those
    to list (default: all); MATH and eager run in any case, for their noise. runs: repetitions per cell.
    timeout: seconds per cell. worker: one to use and leave running, for several dumps; its preloads then count.
    deadline: of `time.monotonic`, when a reference that has not come to its end is given up, and nothing judged.
    Raises InputError for a bad dump, device, dtype, backend or preload.
    """
    shown = [Backend(backend) for backend in backends] if backends is not None else list(Backend)
    _check(dtypes, runs, timeout)
    records = preload_records(preload if worker is None else worker.preload)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="sdpa-repro-"))
        worker = worker or stack.enter_context(Worker(preload))
        dump = load(path)
        place = choose_device(dump, device)
        table = Table(worker, Path(folder), Path(path), dump, place, shown, runs, timeout, progress, deadline)
        try:
            for dtype in _distinct(dtypes, dump.call):
                table.add(dtype)
        except KeyboardInterrupt:
            if not table.captured:
                raise
            raise Interrupted(_result(table, records)) from None
        return _result(table, records)


def _check(dtypes: Sequence[str], runs: int, timeout: float) -> None:
    unknown = [dtype for dtype in dtypes if dtype not in ALL_DTYPES]
    if unknown:
        raise InputError(f"unknown dtype {unknown[0]!r}: choose from {', '.join(ALL_DTYPES)}")
    if runs < 1 or timeout <= 0:
        raise InputError("--runs must be at least 1 and --timeout more than 0 seconds")


def _distinct(dtypes: Sequence[str], call: AttentionCall) -> list[str]:
    """The captured dtype first, then the others without repeating it."""
    others = [dtype for dtype in dtypes if dtype not in ("captured", dtype_name(call.query.dtype))]
    return ["captured", *dict.fromkeys(others)]


def _result(table: Table, records: Sequence[Mapping[str, str]]) -> Replay:
    """The conclusion from the captured dtype's cells."""
    dump, call = table.dump, table.dump.call
    loaded = {record["sha256"] for record in records}
    planted = ", ".join(record["name"] for record in dump.preloaded if record["sha256"] not in loaded)
    live = replace(Live.of(dump.live, dump.context, dump.origin), planted=planted)
    math_rejects = [c for c in table.captured if c.backend == Backend.MATH.value and c.status is Status.ERROR]
    listed = [cell for cell in table.captured if Backend(cell.backend) in table.shown]
    heads = call.query.shape[-3] if call.query.dim() > 2 else 1
    batches = call.query.shape[:-3].numel()
    conclusion = conclude(
        [*math_rejects, *listed],
        live,
        table.device.type,
        batches=batches,
        heads=heads,
        undecided=table.first.undecided if table.first else "",
    )
    known = known_for(dump, table.captured, conclusion, table.device, bool(records))
    chosen = next((cell.kernel for cell in table.captured if cell.backend == Backend.DEFAULT.value), None)
    return Replay(
        path=table.path,
        verdict=conclusion.verdict,
        ran=live.ran or chosen,
        guilty=conclusion.guilty,
        sentence=with_known(conclusion.sentence, known, records),
        known=tuple(known),
        fidelity=_fidelity(table, records),
        cells=tuple(table.cells),
        device=str(table.device),
        dtype=dtype_name(call.query.dtype),
        notes=tuple(_notes(table, records)),
        preloaded=tuple(records),
        captured_with=tuple(dump.preloaded),
        exit_status=conclusion.exit_status,
        environment=software(table.device),
    )


def _fidelity(table: Table, records: Sequence[Mapping[str, str]]) -> Fidelity:
    output = None
    if table.default.kind == "done":
        output = load_outputs(table.saved(Backend.DEFAULT, "captured"))["first"]
    return compared(table.dump, table.device, table.default, output, records, layout_of(table.dump))


def _notes(table: Table, records: Sequence[Mapping[str, str]]) -> list[str]:
    """What a reader must know about this replay beyond the table."""
    said = list(table.first.notes) if table.first else []
    if records:
        said.append(f"preloaded here: {', '.join(record['name'] for record in records)}")
    if table.dump.preloaded:
        said.append(f"preloaded at capture: {', '.join(record['name'] for record in table.dump.preloaded)}")
    if table.dump.call.dropout_p > 0:
        said.append(f"dropout_p={table.dump.call.dropout_p:g} was left out: its result is random")
    skipped = table.default.answer.get("not_restored")
    if skipped:
        said.append(f"recorded settings that do not exist here: {', '.join(map(str, skipped))}")
    return said


def known_for(
    dump: Dump, cells: Sequence[Cell], conclusion: Conclusion, device: torch.device, emulated: bool
) -> list[Match]:
    """Upstream issues that fit the guilty backends, the best fit first, each once."""
    context = dump.context
    wants = context.get("requires_grad")
    recorded = isinstance(wants, Mapping) and any(wants.get(name) is True for name in ("query", "key", "value"))
    grad = context.get("grad") is True and context.get("inference") is not True and recorded
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    found: dict[str, Match] = {}
    for name in conclusion.guilty:
        cell = next((cell for cell in cells if name in (cell.backend, cell.kernel) and cell.wrong), None)
        if cell is None or name == Backend.EAGER.value or (emulated and not _may_be_planted(cell)):
            continue
        for match in matches(
            dump.call,
            name,
            device.type,
            torch.__version__,
            grad,
            capability=capability,
            emulated=emulated,
            status=cell.status.value,
            wrong_rows=cell.bad.rows if cell.bad else None,
        ):
            found.setdefault(match.issue, match)
    return sorted(found.values(), key=lambda match: ("exact", "emulated", "possible").index(match.match))


def _may_be_planted(cell: Cell) -> bool:
    """Whether a preloaded file may emulate a known bug here: those of fused kernels, which are deterministic."""
    return cell.kernel != Backend.MATH.value and cell.status is not Status.UNSTABLE
