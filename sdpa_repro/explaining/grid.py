"""A dumped call at many lengths in many forms: which of them fail, and by which rule of the length.

The cells of the grid are dealt out to the ranks of torchrun, each of which tries its share on a device of its own.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sdpa_repro import environment, ranks
from sdpa_repro.attention import AttentionCall
from sdpa_repro.dump import load
from sdpa_repro.errors import InputError
from sdpa_repro.explaining.explain import throttled
from sdpa_repro.explaining.grid_result import Cell, Grid, Row
from sdpa_repro.explaining.kinds import Kind, kinds_of
from sdpa_repro.explaining.length_probe import ONE_KEY, Axis
from sdpa_repro.explaining.length_ranks import attempt
from sdpa_repro.explaining.length_result import KEYS, ROWS, TOGETHER
from sdpa_repro.explaining.length_sweeps import COSTLY_FAILURES
from sdpa_repro.explaining.lengths import Resize, resizer
from sdpa_repro.replaying.backends import Backend
from sdpa_repro.replaying.jobs import prepared
from sdpa_repro.replaying.table import choose_device
from sdpa_repro.replaying.trial import Trial, in_process, isolated
from sdpa_repro.replaying.verdict import Status

__all__ = ["Grid", "Row", "sweep"]

BEFORE, AFTER = 65, 64
"""Lengths below and above the dumped one that are tried by default: each residue modulo 64 twice."""

SECONDS = 10.0
"""A sign of life at most this often."""

Progress = Callable[[str], None]


def sweep(
    path: str | Path,
    *,
    lengths: Sequence[int] = (),
    vary: str = TOGETHER,
    head_dims: Sequence[int] = (),
    dtypes: Sequence[str] = (),
    layouts: Sequence[str] = (),
    backends: Sequence[str] = (),
    device: str | None = None,
    preload: Sequence[str | Path] = (),
    apart: bool = True,
    timeout: float = 30.0,
    budget: float | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Grid:
    """Try a dump's call at each length in each combination of head_dim, dtype, layout and backend.

    lengths: values of L (of S with vary="S"; with "L and S" the difference between them stays), by default those
    around the dumped one. apart: trials in a worker process, so that a crash costs one cell. timeout: seconds a cell.
    budget: seconds after which what is known is returned, as it is on Ctrl-C (`complete=False`). Under torchrun every
    rank calls this with the same arguments and gets the whole result. Raises InputError for a bad dump or option.
    """
    start = time.monotonic()
    records = environment.preload_records([Path(file) for file in preload])
    dump = load(path)
    place = choose_device(dump, device)
    dump = load(path, place)
    call = prepared(dump, None)
    kinds = kinds_of(
        call,
        (dump.live or {}).get("ran"),
        backends=backends,
        dtypes=dtypes,
        head_dims=head_dims,
        layouts=layouts,
    )
    axis = Axis(_checked(vary), call.query.shape[-2], call.key.shape[-2])
    numbers = _numbers(lengths, axis)
    if not apart:
        environment.preload([Path(file) for file in preload])
    with ExitStack() as stack:
        trials = _Trials(stack, dump.context, tuple(preload), timeout, apart)
        work = _Work(call, axis, trials, seed, start + budget if budget else None, progress)
        found, complete = work.tried([(kind, number) for kind in kinds for number in numbers])
    rows = [Row(kind, axis, tuple(cell for cell in found if cell.kind == kind)) for kind in kinds]
    return Grid(
        path=Path(path),
        device=str(place),
        axis=axis,
        lengths=tuple(numbers),
        rows=tuple(rows),
        complete=complete,
        ranks=ranks.world(),
        seconds=time.monotonic() - start,
        preloaded=tuple(records),
        environment=environment.software(place),
    )


def _checked(vary: str) -> str:
    if vary not in (TOGETHER, ROWS, KEYS):
        raise InputError(f"vary {vary!r}: use one of {TOGETHER}, {ROWS}, {KEYS}")
    return vary


def _numbers(lengths: Sequence[int], axis: Axis) -> list[int]:
    """The lengths to try, in order, those with both L and S at least 1."""
    asked = sorted(set(lengths)) or range(axis.origin - BEFORE, axis.origin + AFTER + 1)
    numbers = [number for number in asked if min(axis.at(number)) >= 1]
    if not numbers:
        raise InputError("no length to try: L and S have to be at least 1")
    return numbers


@dataclass
class _Trials:
    """One trial function a backend, made when it is first needed."""

    stack: ExitStack
    context: Mapping[str, Any]
    preload: tuple[str | Path, ...]
    timeout: float
    apart: bool
    made: dict[Backend, Trial] = field(default_factory=dict)

    def through(self, backend: Backend) -> Trial:
        if backend not in self.made:
            self.made[backend] = (
                self.stack.enter_context(isolated(backend, self.context, preload=self.preload, timeout=self.timeout))
                if self.apart
                else in_process(backend, self.context)
            )
        return self.made[backend]


@dataclass
class _Work:
    """What is shared by all cells that this rank tries."""

    call: AttentionCall
    axis: Axis
    trials: _Trials
    seed: int
    deadline: float | None
    progress: Progress | None
    forms: dict[tuple[Kind, str], Resize | str] = field(default_factory=dict)
    costly: Counter[Kind] = field(default_factory=Counter)

    def tried(self, cells: Sequence[tuple[Kind, int]]) -> tuple[list[Cell], bool]:
        """The outcomes of all ranks' shares, in the order of `cells`, and whether that is all of them."""
        own: list[Cell] = []
        complete = True
        with ranks.gentle_stop():
            try:
                mask = self._mask(cells[0][0])
                share = ranks.mine(cells)
                say = throttled(self.progress, SECONDS) if self.progress is not None else None
                for kind, number in share:
                    if self.deadline is not None and time.monotonic() >= self.deadline:
                        complete = False
                        break
                    own.append(self._cell(kind, number, mask))
                    if say is not None:
                        failed = sum(cell.fails for cell in own)
                        say(f"{len(own)} of {len(share)} cells tried, {failed} fail; now {kind}, {number}")
            except KeyboardInterrupt:
                complete = False
            try:
                shares = ranks.of_all((own, complete))
            except (RuntimeError, KeyboardInterrupt):
                shares = [(own, False)]
        order = {cell: index for index, cell in enumerate(cells)}
        found = sorted((cell for part, _ in shares for cell in part), key=lambda cell: order[cell.kind, cell.number])
        return found, all(done for _, done in shares)

    def _mask(self, kind: Kind) -> str:
        """The kind of mask, of those that other lengths can have, with which the dumped call still fails if it does.

        Rank 0 says which, so that all cells of a grid are alike.
        """
        chosen = "distinct"
        if ranks.is_first():
            for mask in ("distinct", "kept"):
                form = self._form(kind, mask)
                if isinstance(form, str):
                    break
                result, _ = attempt(self.trials.through(kind.backend), form, self.axis.at(self.axis.origin))
                if result is not None and result.fails:
                    chosen = mask
                    break
        told = ranks.of_all(chosen)[0]
        if not isinstance(told, str):  # rank 0 was stopped and has gone on to its last word
            raise KeyboardInterrupt
        return told

    def _form(self, kind: Kind, mask: str) -> Resize | str:
        """What makes the call of this kind at other lengths, or why there is none."""
        if (kind, mask) not in self.forms:
            made = kind.made_from(self.call)
            self.forms[kind, mask] = made if isinstance(made, str) else resizer(made, seed=self.seed, mask=mask)
        return self.forms[kind, mask]

    def _cell(self, kind: Kind, number: int, mask: str) -> Cell:
        form = self._form(kind, mask)
        if isinstance(form, str):
            return Cell(kind, number, "not_tested", reason=form)
        if self.costly[kind] >= COSTLY_FAILURES:
            return Cell(kind, number, "not_tested", reason=f"given up after {COSTLY_FAILURES} crashes or hangs")
        rows, keys = self.axis.at(number)
        result, reason = attempt(self.trials.through(kind.backend), form, (rows, keys))
        if result is None:
            return Cell(kind, number, "not_tested", reason=reason)
        self.costly[kind] += result.status in (Status.CRASHED, Status.TIMEOUT)
        if result.status is Status.AGREES and keys == 1:
            return Cell(kind, number, "not_tested", reason=ONE_KEY)
        if not result.fails and result.status is not Status.AGREES:
            return Cell(kind, number, "not_tested", reason=f"{result.status.value}: {reason}")
        return Cell(kind, number, result.status.value, result.ratio, "" if result.checked else reason)
