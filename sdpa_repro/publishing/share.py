"""A dump for strangers: no names, no paths, and seeded values for the real ones where the failure survives that.

Strides, alignment and overlap stay as they were. So does what the mask and the sizes tell (lengths, padding),
without which there is no failure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sdpa_repro import environment
from sdpa_repro.attention import AttentionCall, overlaps_itself, rebuild, span_elements, viewed_once
from sdpa_repro.dump import Dump, load, save, snapshot
from sdpa_repro.errors import InputError
from sdpa_repro.explaining.explain import suspect
from sdpa_repro.publishing.facts import recipes_of
from sdpa_repro.publishing.files import check_writable
from sdpa_repro.replaying.jobs import prepared
from sdpa_repro.replaying.replay import Replay, replay
from sdpa_repro.replaying.trial import Result, Trial, in_process, isolated, same_failure
from sdpa_repro.replaying.verdict import Status, Verdict

VALUES = ("query", "key", "value")
NAMES = ("model", "module")
ORIGIN = ("phase", "call_index", "calls", "total_length", "padding")
"""Plain numbers and words about the call that say nothing about who made it."""

ENVIRONMENT = ("python", "torch", "torch_git", "cuda", "hip", "cudnn", "gpu", "capability", "driver", "cpu")
LIVE = ("ran", "status", "max_abs", "threshold", "ratio", "rows", "wrong_rows")
"""What a copy keeps of the live check: numbers, and words of this program's own."""

TRIES = 3
"""Seeds that are tried for a set of tensors."""


@dataclass(frozen=True)
class Shared:
    """What was written. real: arguments that still hold captured values; seeded: those that do not."""

    path: Path
    sentence: str
    real: tuple[str, ...]
    seeded: tuple[str, ...]
    kept: tuple[str, ...]
    """Keys of the origin that were kept."""
    replay: Replay

    @property
    def exit_status(self) -> int:
        """0 when no captured value is inside, else 1."""
        return 1 if self.real else 0

    def document(self) -> dict[str, Any]:
        """As plain JSON types."""
        return {
            "output": str(self.path),
            "sentence": self.sentence,
            "real_values": list(self.real),
            "seeded_values": list(self.seeded),
            "origin_kept": list(self.kept),
            "verdict": self.replay.verdict.value,
            "preloaded": [dict(record) for record in self.replay.preloaded],
            "environment": dict(self.replay.environment),
        }


def share(
    path: str | Path,
    output: str | Path,
    *,
    keep_names: bool = False,
    device: str | None = None,
    preload: Sequence[str | Path] = (),
    seed: int = 0,
    force: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Shared:
    """Write a copy of a dump that can be given away, and say what it still tells.

    Values of query, key and value are replaced by seeded normal ones, all together if the same failure survives
    that, else as many as it survives; the output is recorded anew. keep_names: model and module stay in the origin.
    The result is read back and must fail as before. Raises InputError for bad input or an output that is there.
    """
    path, output, say = Path(path), Path(output), progress or (lambda text: None)
    _check_output(path, output, force)
    say(f"replaying {path.name}")
    seen = replay(path, device=device, dtypes=("captured",), runs=1, preload=preload)
    dump = load(path, seen.device)
    call = prepared(dump, None)
    seeded: tuple[str, ...] = ()
    result: Result | None = None
    with ExitStack() as stack:
        trial = _trial(seen, dump, preload, stack)
        if trial is not None:
            first = trial(call)
            closed_already = set(VALUES) <= set(recipes_of(dump))
            if first.fails and not closed_already:
                call, seeded, result = _anonymous(call, trial, first, seed, say)
            else:
                result = first
        document = _document(dump, call, result, seeded, keep_names)
        output.parent.mkdir(parents=True, exist_ok=True)
        save(document, output)
        if trial is not None and result is not None and result.fails:
            again = trial(prepared(load(output, seen.device), None))
            if not same_failure(again, result):
                output.unlink()
                raise InputError(f"the copy of {path.name} does not fail when read back: share the dump itself")
    closed = tuple(recipes_of(dump))
    real = tuple(name for name in VALUES if name not in seeded and name not in closed)
    kept = tuple(document["origin"])
    shown = result is not None and result.fails
    return Shared(output, _sentence(shown, real, seeded, dump.preloaded), real, tuple(seeded), kept, seen)


def _check_output(path: Path, output: Path, force: bool) -> None:
    try:
        if output.exists() and (output.is_dir() or not force or output.samefile(path)):
            raise InputError(f"{output} is there already: give another name with -o, or --force to replace it")
        check_writable(output.parent)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot write {str(output)[:200]!r}: {error}; give another file with -o") from error


def _trial(seen: Replay, dump: Dump, preload: Sequence[str | Path], stack: ExitStack) -> Trial | None:
    """The question whether the guilty backend fails; None when none is guilty."""
    backend = suspect(seen) if seen.verdict is Verdict.BACKEND_WRONG else None
    if backend is None:
        return None
    cells = [cell for cell in seen.cells if backend.value in (cell.backend, cell.kernel)]
    if any(cell.status in (Status.CRASHED, Status.TIMEOUT) for cell in cells):
        return stack.enter_context(isolated(backend, dump.context, preload=preload))
    environment.preload([Path(file) for file in preload])
    return in_process(backend, dump.context)


def _anonymous(
    call: AttentionCall, trial: Trial, first: Result, seed: int, say: Callable[[str], None]
) -> tuple[AttentionCall, tuple[str, ...], Result]:
    """The call with as many tensors on seeded values as the failure survives, their names, and the last result."""
    for count in range(len(VALUES), 0, -1):
        for names in combinations(VALUES, count):
            say(f"seeded values in {_and(names)}")
            for number in range(TRIES):
                other = with_seeded(call, names, seed + number, own_size=number > 0)
                result = trial(other)
                if same_failure(result, first):
                    return other, names, result
    return call, (), first


def with_seeded(call: AttentionCall, names: Sequence[str], seed: int, *, own_size: bool = False) -> AttentionCall:
    """The call, same layout, with seeded normal values in the named tensors, also where others share their memory.

    own_size: times the power of two nearest to the root mean square of what was there.
    """
    fresh = rebuild(call)
    generator = torch.Generator().manual_seed(seed)
    for name in names:
        tensor = fresh.tensors[name]
        once = viewed_once(tensor)
        if overlaps_itself(once):
            once = tensor.as_strided((span_elements(tensor),), (1,), tensor.storage_offset())
        factor = _power_of_two(once) if own_size else 1.0
        once.copy_(torch.randn(once.shape, generator=generator) * factor)
        if call.tensors[name].requires_grad:
            tensor.requires_grad_(True)
    return fresh


def _power_of_two(values: Tensor) -> float:
    """The power of two nearest to the root mean square of the finite values; 1 when they are all zero."""
    finite = values[values.isfinite()].double()
    size = float(finite.square().mean().sqrt()) if finite.numel() else 0.0
    return 2.0 ** round(math.log2(size)) if size > 0 else 1.0


def _document(
    dump: Dump,
    call: AttentionCall,
    result: Result | None,
    seeded: Sequence[str],
    keep_names: bool,
) -> dict[str, Any]:
    """The new dump: scrubbed, with the output and the live check of the last trial."""
    names = (*NAMES, *ORIGIN) if keep_names else ORIGIN
    origin = {name: dump.origin[name] for name in names if dump.origin.get(name) is not None}
    if seeded:
        origin["values"] = f"seeded normal in {_and(seeded)}"
    context = {**dump.context, "layout": environment.memory_layout(call)}
    words = ("ran",) if seeded else LIVE
    live = None if dump.live is None else {name: dump.live[name] for name in words if name in dump.live}
    output = None if seeded else dump.output
    if result is not None and result.checked is not None:
        checked = result.checked
        live = {
            **(live or {}),
            "status": checked.status,
            "max_abs": checked.max_abs,
            "threshold": checked.threshold,
            "ratio": checked.ratio,
            "rows": [list(row) for row in checked.rows],
            "wrong_rows": checked.wrong_rows,
        }
        output = result.output
    return snapshot(
        replace(call, dropout_p=dump.call.dropout_p),
        output,
        context=context,
        origin=origin,
        environment={name: dump.environment[name] for name in ENVIRONMENT if dump.environment.get(name) is not None},
        live=live,
        recipe=None if seeded else dump.recipe,
        preloaded=dump.preloaded,
    )


def _sentence(
    shown: bool, real: Sequence[str], seeded: Sequence[str], captured_with: Sequence[Mapping[str, str]]
) -> str:
    """The answer: what is inside, what it says about the input, and whether it was seen to fail here."""
    rest = "sizes, layout and mask are as captured"
    files = " ".join(f"--preload {record.get('name')}" for record in captured_with)
    again = f" (it was captured with preloaded files: add {files})" if files else ""
    if not real:
        how = "seeded" if seeded else "in closed form"
        fails = "the call fails as before" if shown else f"it is not shown to fail here{again}"
        return f"no captured values inside: query, key and value are {how} and {fails}; {rest}"
    which = f"{_and(real)} {'holds' if len(real) == 1 else 'hold'} REAL values, which may reveal the input"
    if not shown:
        return f"{which}: no backend fails here{again}, so nothing shows whether seeded values would do"
    done = f"; {_and(seeded)} {'is' if len(seeded) == 1 else 'are'} seeded" if seeded else ""
    return f"{which}: the failure needs them{done}; {rest}"


def _and(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
