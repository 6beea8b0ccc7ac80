"""The values that the cells of one dtype compute on, their float64 reference, and whether the cast left them a call
that can be compared with the captured one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sdpa_repro.attention import AttentionCall, viewed_once
from sdpa_repro.dump import Dump, load
from sdpa_repro.errors import InputError
from sdpa_repro.replaying.backends import first_line
from sdpa_repro.replaying.reference import Reference, reference
from sdpa_repro.replaying.variants import is_narrow, recast
from sdpa_repro.switches import DTYPES, dtype_name

POISONED = "can see NaN or Inf in masked-out positions, where backends differ legitimately"

LATE = "no reference: there was no time for it"
"""Why nothing is judged after a reference that was stopped."""


@dataclass(frozen=True)
class Values:
    """A call as one dtype's kernels see it (on the reference's device) and its reference.

    `not_comparable`: why the cells of this dtype are not run. `reference` is None when the arguments do not
    describe one attention; `why` then says so.
    """

    call: AttentionCall
    reference: Reference | None = None
    why: str = ""
    not_comparable: str = ""
    notes: tuple[str, ...] = ()

    @property
    def undecided(self) -> str:
        """Why no row can decide anything; "" when some row can."""
        if self.reference is None:
            return self.why
        if bool(self.reference.decides.any()):
            return ""
        if bool(self.reference.live.any()):
            return f"every row that is not fully masked {POISONED}"
        return "every query row is fully masked" if self.reference.live.numel() else "the output is empty"


def values_of(
    dump: Dump,
    dtype: str,
    device: torch.device,
    captured: Values | None,
    late: Callable[[], bool] | None = None,
) -> Values:
    """Cast the dump's call to `dtype` ("captured": as it is, or as autocast casts it) and compute its reference.

    The reference runs on `device` when the tensors fit there. `captured`, from an earlier call of this function,
    is reused where the cast changes no value. `late`: whether the reference is to be stopped, as in `reference`.
    """
    if captured is None:
        call = replace(_placed(dump, device), dropout_p=0.0)
        cast = recorded_autocast(dump)
        if cast is not None:
            call = recast(call, cast)
        values = _with_reference(call, late)
        notes = [] if cast is None else [f"autocast to {dtype_name(cast)} as recorded: judged in that dtype"]
        return replace(values, notes=(*notes, *_left_out(values.reference)))
    base = replace(_placed(dump, device), dropout_p=0.0)
    call = recast(base, DTYPES[dtype])
    broken = overflow(base, call)
    if broken:
        return Values(call, not_comparable=broken)
    if same_values(captured.call, call):
        return replace(captured, call=call, notes=())
    values = _with_reference(call, late)
    if captured.reference is not None and values.reference is not None:
        changed = int((captured.reference.live != values.reference.live).sum())
        if changed:
            return Values(call, not_comparable=f"the cast changes which rows are fully masked ({changed} rows)")
    return values


def _left_out(expected: Reference | None) -> list[str]:
    """Rows that do not decide, counted."""
    if expected is None:
        return []
    total, masked = expected.live.numel(), int((~expected.live).sum())
    poisoned = int((expected.live & expected.poisoned).sum())
    said = [f"{masked} of {total} rows are fully masked and do not decide"] if masked else []
    if poisoned:
        said.append(f"{poisoned} of {total} rows do not decide: each {POISONED}")
    return said


def _placed(dump: Dump, device: torch.device) -> AttentionCall:
    """The call on the device where its reference is computed: the replay's GPU when it fits, else the CPU."""
    if device.type != "cuda" or dump.path is None:
        return dump.call
    try:
        return load(dump.path, device).call
    except InputError:
        return dump.call


def _with_reference(call: AttentionCall, late: Callable[[], bool] | None) -> Values:
    if not call.query.dtype.is_floating_point:
        return Values(call, why=f"no reference: query is {dtype_name(call.query.dtype)}")
    try:
        wide = recast(call, torch.float64) if any(map(is_narrow, (call.query, call.key, call.value))) else call
        return Values(call, reference(wide, late=late))
    except TimeoutError:
        return Values(call, why=LATE)
    except (ValueError, RuntimeError, IndexError, TypeError) as error:
        return Values(call, why=f"no reference: {first_line(error)}")


def recorded_autocast(dump: Dump) -> torch.dtype | None:
    """The dtype that the recorded autocast casts this call to; None when it was off or leaves the call alone."""
    recorded = dump.context.get("autocast")
    if not isinstance(recorded, Mapping) or recorded.get("enabled") is not True:
        return None
    dtype = DTYPES.get(str(recorded.get("dtype")))
    if dump.call.query.dtype not in (torch.float32, torch.float16, torch.bfloat16) or dtype == dump.call.query.dtype:
        return None
    return dtype


def overflow(before: AttentionCall, after: AttentionCall) -> str:
    """Why a cast cannot be compared: the tensor in which finite values became infinite; "" when none did.

    A mask may overflow to −inf, which hides what a very negative number hid.
    """
    for name in before.tensors:
        old, new = (_once(call.tensors[name]) for call in (before, after))
        if old is None or new is None or not new.dtype.is_floating_point:
            continue
        lost = (old.isfinite() & (new == torch.inf)) if name == "attn_mask" else (old.isfinite() & new.isinf())
        if bool(lost.any()):
            return f"{name} overflows in {dtype_name(new.dtype)} ({int(lost.sum())} values)"
    return ""


def same_values(one: AttentionCall, other: AttentionCall) -> bool:
    """Whether two calls hold equal numbers, dtypes aside."""
    for name in one.tensors:
        left, right = _once(one.tensors[name]), _once(other.tensors[name])
        if left is None or right is None:
            continue
        wide = torch.promote_types(left.dtype, right.dtype)
        if not bool(torch.equal(left.to(wide), right.to(wide))):
            return False
    return True


def _once(tensor: Tensor) -> Tensor | None:
    """The tensor without repetitions, float8 as float32; None for a `CausalBias`, which has no values."""
    if getattr(tensor, "variant", None) is not None:
        return None
    once = viewed_once(tensor)
    return once.float() if is_narrow(once) else once
