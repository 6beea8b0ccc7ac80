"""Run a prompt with every padding on every path, and beside longer rows, each once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from torch import Tensor

from sdpa_repro import ranks
from sdpa_repro.capturing.prefill import Prefill, forward, padded
from sdpa_repro.errors import InputError
from sdpa_repro.locating.judging import compared, judged, rms
from sdpa_repro.locating.lengthening import batched, companions
from sdpa_repro.locating.measuring import Given, Run, differences, measure
from sdpa_repro.locating.perturbing import shaken
from sdpa_repro.locating.running import Path, running
from sdpa_repro.locating.sweep import Row, Sweep

__all__ = ["sweep"]

DRAWS = 3
"""Shaken runs, for the noise."""

BATCHES = (2, 3)
"""Rows of the batches in which the prompt is run beside longer ones."""

Say = Callable[[str], None]


@dataclass
class State:
    """What has been measured so far."""

    prefill: Prefill
    say: Say
    rows: list[Row] = field(default_factory=list)
    shaken: list[float] = field(default_factory=list)
    plain: Given | None = None
    missing: dict[Path, str] = field(default_factory=dict)

    def judged(self, *, complete: bool = True) -> Sweep:
        """The sweep as far as it went."""
        notes = [f"{path.value} is not available: {reason}" for path, reason in self.missing.items()]
        return judged(self.rows, self.prefill.length, self.shaken, self.prefill.dtype, complete=complete, notes=notes)


def sweep(
    prefill: Prefill, pads: Sequence[int], *, batches: bool = True, progress: Say = lambda sentence: None
) -> Sweep:
    """Run the prompt with each padding (0 is always among them) as default and under MATH; then, unpadded and with
    the worst padding, eager and in float32, and in batches beside longer rows.

    Under torchrun each rank runs its share of the paddings and all get the same result. After Ctrl-C the result is what
    there is (`complete` is False). Raises InputError when the default path runs out of memory.
    """
    state = State(prefill, progress)
    wanted = sorted({0, *pads})
    try:
        _paddings(state, wanted)
        _noise(state)
        found = state.judged()
        worst = found.worst
        _others(state, sorted({0, worst.pad} if worst is not None else {0}))
        if batches and worst is not None and prefill.inputs["input_ids"].shape[0] == 1:
            for pad in _batch_pads(found, worst):
                for count in BATCHES:
                    _beside(state, pad, count)
    except KeyboardInterrupt:
        if ranks.world() > 1:
            raise
        return state.judged(complete=False)
    return state.judged()


def _paddings(state: State, pads: Sequence[int]) -> None:
    """Every padding as default and under MATH."""
    own = ranks.mine(pads)
    if 0 not in own:
        state.plain = measure(state.prefill, padded(state.prefill, state.prefill.length)).given
    for number, pad in enumerate(own):
        total = state.prefill.length + pad
        state.say(f"{number + 1} of {len(own)}: total length {total} (padding {pad}, {total % 32} mod 32)")
        for path in (Path.DEFAULT, Path.MATH):
            _one(state, pad, path)
    if ranks.world() > 1:
        rows = ranks.gathered([[row for row in state.rows if row.pad == pad] for pad in own])
        state.rows = [row for each in rows for row in each]


def _one(state: State, pad: int, path: Path) -> None:
    """One run, kept as a row; a path that the model cannot take is noted once."""
    prompt = state.prefill.length
    if path in state.missing:
        return
    try:
        with running(state.prefill, path) as prefill:
            default = path is Path.DEFAULT
            check = (
                default or pad == 0
            )  # a check costs as much as a run, and MATH is beside its own unpadded run anyway
            run = measure(prefill, padded(prefill, prompt + pad), given=default, check=check)
    except InputError as error:
        if path is Path.DEFAULT:
            raise
        _unavailable(state, pad, path, str(error))
        return
    if path is Path.DEFAULT and state.plain is None:
        state.plain = run.given
    differ = differences(state.plain or {}, run.given) if path is Path.DEFAULT else ()
    wrong = tuple(call for row in run.wrong for call in row)
    state.rows.append(
        Row(prompt, pad, path, logits=run.logits, wrong_calls=wrong, calls=run.calls, inputs_differ=differ)
    )
    for call in wrong if path is Path.DEFAULT else ():
        state.say(f"  {call.kernel} is wrong in {call.module}, by {call.max_abs:.3g}")


def _unavailable(state: State, pad: int, path: Path, reason: str) -> None:
    state.missing[path] = reason
    state.rows.append(Row(state.prefill.length, pad, path, reason=reason))


def _noise(state: State) -> None:
    """How far roundings alone move the unpadded logits: under MATH, or as default when MATH cannot run."""
    plain = {row.path: row.logits for row in state.rows if row.pad == 0 and row.logits is not None}
    path = Path.MATH if Path.MATH in plain else Path.DEFAULT
    if path not in plain:
        return
    state.say("measuring the noise of rounding")
    with suppress(InputError), running(state.prefill, path) as prefill:  # no memory for it: see `judging.limit`
        inputs = padded(prefill, prefill.length)
        for seed in range(DRAWS):
            with shaken(prefill.model, seed):
                state.shaken.append(rms(forward(prefill, inputs), plain[path]))


def _others(state: State, pads: Sequence[int]) -> None:
    """Eager and float32: the model is switched or copied once for all paddings."""
    for path in (Path.EAGER, Path.FLOAT32):
        state.say(f"{path.value}, {' and '.join('unpadded' if pad == 0 else f'padding {pad}' for pad in pads)}")
        try:
            with running(state.prefill, path) as prefill:
                for pad in pads:
                    run = measure(prefill, padded(prefill, prefill.length + pad), given=False)
                    wrong = tuple(call for row in run.wrong for call in row)
                    row = Row(prefill.length, pad, path, logits=run.logits, wrong_calls=wrong, calls=run.calls)
                    state.rows.append(row)
        except InputError as error:
            _unavailable(state, pads[-1], path, str(error))


def _batch_pads(found: Sweep, worst: Row) -> list[int]:
    """The worst padding, and the nearest one that is not flagged."""
    clean = [row.pad for row in found.alone(Path.DEFAULT) if row.pad > 0 and not row.flagged and row.pad != worst.pad]
    return [worst.pad, *sorted(clean, key=lambda pad: (abs(pad - worst.pad), pad))[:1]]


def _beside(state: State, pad: int, count: int) -> None:
    """The prompt in a batch of `count` rows: itself, one that fills the batch's length, and one between."""
    own = state.prefill
    others = companions(own, pad, count)
    if others is None:
        return
    state.say(f"batch of {count}, total length {own.length + pad}")
    alone, alone_math = _alone(state, others[0])
    for path in (Path.DEFAULT, Path.MATH):
        if path in state.missing:
            continue
        try:
            with running(own, path) as prefill:
                rows = [replace(prefill, inputs=each.inputs, length=each.length) for each in (own, *others)]
                inputs = batched(rows, own.length + pad)
                run = measure(prefill, inputs, given=False, check=path is Path.DEFAULT)
        except InputError as error:
            state.rows.append(Row(own.length, pad, path, companions=count - 1, reason=str(error)))
            continue
        first = Row(own.length, pad, path, count - 1, logits=run.logits[:1], wrong_calls=run.wrong[0], calls=run.calls)
        beside = alone if path is Path.DEFAULT else alone_math
        state.rows += [first, _companion(run, path, count, others[0].length, beside)]


def _alone(state: State, other: Prefill) -> tuple[Tensor, Tensor]:
    """The longer row by itself, as default and under MATH; MATH for both when the default run is wrong itself."""
    run = measure(other, padded(other, other.length), given=False)
    if Path.MATH in state.missing:
        return run.logits, run.logits
    with running(other, Path.MATH) as prefill:
        exact = forward(prefill, padded(prefill, prefill.length))
    return (exact if run.wrong[0] else run.logits), exact


def _companion(run: Run, path: Path, count: int, length: int, alone: Tensor) -> Row:
    """The row without padding, held against the same row alone."""
    row = Row(length, 0, path, count - 1, "companion", run.logits[1:2], run.wrong[1], run.calls)
    return replace(compared(row, alone, "alone"), spread=rms(run.logits[1:2], alone))
