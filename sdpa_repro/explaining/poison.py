"""Does a kernel read outside its inputs, or leave output unwritten? Fill the surroundings and see what moves.

The call is built anew between guard zones, gaps between its views included, and run over surroundings of zeros,
of NaN (every byte 0xFF) and of a large finite number. A kernel that keeps to its inputs returns the same bits each
time. What PyTorch itself allocates on the way (a bool mask turned into numbers) cannot be surrounded.
"""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sdpa_repro.attention import ALIGNMENT, AttentionCall
from sdpa_repro.explaining.pacing import OutOfTimeError
from sdpa_repro.explaining.placing import Filling, placed
from sdpa_repro.replaying.backends import Backend
from sdpa_repro.replaying.trial import Trial
from sdpa_repro.visibility import fully_masked_rows, is_tensor_mask, ranges, ranges_text, scores_shape

LEAST_GUARD = 64 << 10
MOST_GUARD = 64 << 20
"""Bytes before and after each piece of memory; as many as its tensor would take without repeated heads or masks."""

FILLINGS = (Filling(0xFF, 0x01), Filling(0x7B, 0x01), Filling(0xFF, 0x00))
"""NaN in every float dtype; 1.3e36 in bfloat16 and float32, 61296 in float16. Bools may hold 0 and 1 only."""

PATTERNS = (0xFF, 0x7B)
LEAST_BLOCKS, MOST_BLOCKS, PREPARED = 8, 1024, 8 << 20
"""Freed blocks of the output's size that hold a pattern, so that the allocator hands one to the kernel: as many as
fit into so many bytes, since a heap that has been used for long has small holes elsewhere."""

ATTEMPTS = 8
"""Times each pattern is tried before the allocator is said not to let it be shown."""

NOISE = 4.0
"""A kernel whose runs differ must move by more than this multiple of their difference."""


@dataclass(frozen=True)
class Poison:
    """reads_outside: None when that could not be told. tensors: those whose surroundings move the output.

    unwritten: True when output elements hold what was in the memory before, False when the output lay in prepared
    memory and all of it was overwritten, None when the allocator did not let it be shown.
    """

    reads_outside: bool | None
    words: str
    tensors: tuple[str, ...] = ()
    unwritten: bool | None = None

    def document(self) -> dict[str, Any]:
        """As plain JSON types."""
        return {**asdict(self), "tensors": list(self.tensors)}


def poison(call: AttentionCall, trial: Trial, *, deadline: float | None = None) -> Poison:
    """Look for reads outside the inputs and for unwritten output.

    trial: must run the kernel in this process on the very tensors it is given, as `trial.in_process` does; a worker
    gets copies, without these surroundings (see `poison_isolated`). Stops early after `deadline` (`time.monotonic`).
    """
    try:
        guard = _guards(call)
        clean = [_output(trial, placed(call, guard=guard)) for _ in range(2)]
        if clean[0] is None or clean[1] is None:
            return Poison(None, "not tested: the backend gives no output for this call")
        live = ~fully_masked_rows(call)
        noise = _difference(clean[0], clean[1], live)
        moved = torch.zeros_like(live)
        for filling in FILLINGS:
            if deadline is not None and time.monotonic() > deadline:
                return Poison(None, "stopped before all surroundings were tried")
            moved |= _moved(trial, placed(call, guard=guard, filling=filling), clean[0], live, noise)
            if bool(moved.any()):
                break
        outside = bool(moved.any())
        tensors = _blamed(call, trial, guard, filling, clean[0], live, noise) if outside else ()
        stale, reused = _stale_rows(placed(call, guard=guard), trial, clean[0])
    except torch.OutOfMemoryError:
        return Poison(None, "not tested: not enough memory for guard zones")
    except (KeyboardInterrupt, OutOfTimeError):
        return Poison(None, "stopped before all surroundings were tried")
    unwritten = True if bool(stale.any()) else False if reused else None
    return Poison(outside, _words(outside, tensors, moved, stale, unwritten), tensors, unwritten)


def _guards(call: AttentionCall) -> dict[str, int]:
    """Bytes of the guard zones: enough for a kernel that takes a tensor for contiguous, or a mask for every head's."""
    found = {}
    for name, tensor in _solid(call).items():
        count = math.prod(scores_shape(call)) if name == "attn_mask" else tensor.numel()
        needed = min(max(LEAST_GUARD, count * tensor.element_size()), MOST_GUARD)
        found[name] = -(-needed // ALIGNMENT) * ALIGNMENT
    return found


def _solid(call: AttentionCall) -> dict[str, Tensor]:
    """The tensors that have memory of their own (a `CausalBias` has none)."""
    return {name: tensor for name, tensor in call.tensors.items() if name != "attn_mask" or is_tensor_mask(call)}


def _output(trial: Trial, call: AttentionCall) -> Tensor | None:
    """The output as (B, H, L, Ev), all batch dimensions in one."""
    output = trial(call).output
    return None if output is None else output.reshape(-1, *output.shape[-3:])


def _bits(tensor: Tensor) -> Tensor:
    width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.contiguous().view(width)


def _difference(one: Tensor, other: Tensor, live: Tensor) -> float:
    """How far two runs of the same call are apart in rows that see a key; 0 when they are bit-equal there."""
    if torch.equal(_bits(one), _bits(other)):
        return 0.0
    distance = (one.double() - other.double()).abs().nan_to_num(torch.inf).amax(-1).cpu()
    same = (_bits(one) == _bits(other)).all(-1).cpu()
    return float(torch.where(live & ~same, distance, 0.0).max())


def _moved(trial: Trial, call: AttentionCall, clean: Tensor, live: Tensor, noise: float) -> Tensor:
    """Rows (B, H, L) that the surroundings change by more than runs differ anyway."""
    output = _output(trial, call)
    if output is None:
        return torch.zeros_like(live)
    same = (_bits(output) == _bits(clean)).all(-1).cpu()
    if noise:
        distance = (output.double() - clean.double()).abs().nan_to_num(torch.inf).amax(-1).cpu()
        same |= distance <= NOISE * noise
    return live & ~same


def _blamed(
    call: AttentionCall,
    trial: Trial,
    guard: Mapping[str, int],
    filling: Filling,
    clean: Tensor,
    live: Tensor,
    noise: float,
) -> tuple[str, ...]:
    """The tensors whose surroundings alone move the output."""
    found = []
    for name in _solid(call):
        alone = placed(call, guard=guard, filling=filling, around=(name,))
        if bool(_moved(trial, alone, clean, live, noise).any()):
            found.append(name)
    return tuple(found)


def _stale_rows(call: AttentionCall, trial: Trial, clean: Tensor) -> tuple[Tensor, bool]:
    """Rows (B, H, L) with elements that keep what memory held before, whatever that was; and whether each time the
    output lay in memory prepared here."""
    nbytes = max(1, clean.numel() * clean.element_size())
    stale, reused = torch.ones_like(clean, dtype=torch.bool, device="cpu"), True
    for pattern in PATTERNS:
        output, inside = _in_prepared_memory(call, trial, nbytes, pattern, clean.device)
        if output is None:
            return torch.zeros(clean.shape[:-1], dtype=torch.bool), False
        reused &= inside
        prepared = torch.full((output.element_size(),), pattern, dtype=torch.uint8).view(output.dtype)
        stale &= (_bits(output.reshape(clean.shape)).cpu() == _bits(prepared)).view(clean.shape)
    return stale.any(-1), reused


def _in_prepared_memory(
    call: AttentionCall, trial: Trial, nbytes: int, pattern: int, device: torch.device
) -> tuple[Tensor | None, bool]:
    """The call's output (B, H, L, Ev; None without one) and whether it lies in memory that held the pattern."""
    output, inside = None, False
    for _ in range(ATTEMPTS):
        places = _leave_behind(nbytes, pattern, device)
        output = trial(call).output
        inside = output is not None and any(start <= output.data_ptr() < start + nbytes for start in places)
        if output is None or inside:
            break
    return output, inside


def _leave_behind(nbytes: int, pattern: int, device: torch.device) -> list[int]:
    """Fill blocks of memory and give them back to the allocator; returns their addresses."""
    count = min(MOST_BLOCKS, max(LEAST_BLOCKS, PREPARED // nbytes))
    blocks = [torch.full((nbytes,), pattern, dtype=torch.uint8, device=device) for _ in range(count)]
    return [block.data_ptr() for block in blocks]


def _words(outside: bool, tensors: Sequence[str], moved: Tensor, stale: Tensor, unwritten: bool | None) -> str:
    """One sentence for each finding."""
    if outside:
        where = " and ".join(tensors) or "the inputs"
        text = f"the kernel reads memory outside {where}: what lies there changes {_rows(moved)}"
    else:
        text = "nothing outside the inputs moves the output"
    if unwritten:
        text += f"; it leaves output unwritten: {_rows(stale)}"
    return text


def _rows(flags: Tensor) -> str:
    found = ranges(int(row) for row in flags.flatten(0, -2).any(0).nonzero().flatten())
    single = len(found) == 1 and found[0][0] == found[0][1]
    return f"query row{'s' * (not single)} {ranges_text(found)}"


_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "import sdpa_repro.explaining.poison_child as child; child.main()"
)


def poison_isolated(
    path: str | Path,
    backend: Backend,
    *,
    device: str = "cpu",
    preload: Sequence[str | Path] = (),
    timeout: float = 60.0,
) -> Poison:
    """`poison` for the call of a dump in a process that may die, for backends that crash or hang."""
    job = {
        "dump": str(Path(path).resolve()),
        "backend": backend.value,
        "device": device,
        "preload": [str(Path(file).resolve()) for file in preload],
    }
    package = str(Path(__file__).resolve().parents[2])
    places = [package, *(entry for entry in sys.path if entry and entry != package)]
    command = [sys.executable, "-I", "-c", _CODE, json.dumps(places), json.dumps(job)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout, start_new_session=True
        )
    except subprocess.TimeoutExpired:
        return Poison(None, f"not tested: no answer within {timeout:.0f} s")
    if done.returncode < 0:
        known = -done.returncode in set(signal.Signals)
        name = signal.Signals(-done.returncode).name if known else f"signal {-done.returncode}"
        return Poison(None, f"the backend crashes between guard zones too ({name})")
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        return Poison(None, "not tested: the process that should have tried it failed")
    return Poison(**{**answer, "tensors": tuple(answer["tensors"])})
