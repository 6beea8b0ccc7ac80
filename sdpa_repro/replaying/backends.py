"""One call through one backend: its output, or PyTorch's own reason why not.

MATH … OVERRIDEABLE are the members of `torch.nn.attention.SDPBackend`; DEFAULT is the call as users make it,
without `sdpa_kernel`; EAGER is matmul–softmax–matmul as transformers' `eager_attention_forward` writes it out.
"""

from __future__ import annotations

import math
import re
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sdpa_repro.attention import AttentionCall, is_rule, output_shape
from sdpa_repro.replaying.eager import eager, is_emulated
from sdpa_repro.replaying.variants import autocast_dtype, rows_of

BLOCK_BYTES = 256 << 20
"""Transient memory for one block of rows in `run_in_blocks`."""


class Backend(str, Enum):
    """The rows of the replay table, in the order in which they are shown."""

    DEFAULT = "default"
    EAGER = "eager"
    MATH = "MATH"
    FLASH_ATTENTION = "FLASH_ATTENTION"
    EFFICIENT_ATTENTION = "EFFICIENT_ATTENTION"
    CUDNN_ATTENTION = "CUDNN_ATTENTION"
    OVERRIDEABLE = "OVERRIDEABLE"


MISSING = {
    "cpu": (Backend.EFFICIENT_ATTENTION, Backend.CUDNN_ATTENTION, Backend.OVERRIDEABLE),
    "mps": (Backend.FLASH_ATTENTION, Backend.EFFICIENT_ATTENTION, Backend.CUDNN_ATTENTION, Backend.OVERRIDEABLE),
    "cuda": (Backend.OVERRIDEABLE,),
    "xpu": (Backend.EFFICIENT_ATTENTION, Backend.CUDNN_ATTENTION),
}
"""Kernels that a device type does not have in any release; `sdpa_kernel` would not say so in one line."""


class Declined(Exception):  # noqa: N818 (an outcome, not a fault)
    """PyTorch does not run this backend for this call; the message is its reason."""


class NoMemory(Declined):
    """The backend could run, but not in the memory that is free."""


DECLINES = re.compile(r"No (available|viable) (kernel|backend)|not (implemented|supported)|unsupported", re.IGNORECASE)
OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|not enough memory", re.IGNORECASE)
USELESS = re.compile(r"not used because|has been runtime disabled|attempting to run|override")
NAMES = {member.value: name for name, member in SDPBackend.__members__.items()}
SECTIONS = {
    Backend.FLASH_ATTENTION: "flash attention kernel not used",
    Backend.EFFICIENT_ATTENTION: "memory efficient kernel not used",
    Backend.CUDNN_ATTENTION: "cudnn attention kernel not used",
}
"""How the warnings that explain each backend begin; the reasons follow until the next such line."""


def run(call: AttentionCall, backend: Backend) -> Tensor:
    """The output of `call`, (B, H, L, Ev), through `backend` under the switches now in force.

    Raises Declined with PyTorch's reason, NoMemory when memory ran out, and whatever else the kernel raises.
    """
    missing = missing_reason(backend, call.query.device.type)
    if missing:
        raise Declined(missing)
    try:
        if backend is Backend.EAGER:
            return eager(call, emulated=is_emulated(call))
        if backend is Backend.DEFAULT:
            return attend(call)
        return _forced(call, backend)
    except (RuntimeError, NotImplementedError, MemoryError) as error:
        if OUT_OF_MEMORY.search(str(error)) or isinstance(error, MemoryError):
            raise NoMemory(f"out of memory: {first_line(error)}") from error
        raise


def missing_reason(backend: Backend, device_type: str) -> str:
    """One phrase when no release has this kernel for that type of device, else ""."""
    return f"does not exist on {device_type}" if backend in MISSING.get(device_type, ()) else ""


def attend(call: AttentionCall) -> Tensor:
    """The plain `scaled_dot_product_attention` call."""
    return F.scaled_dot_product_attention(call.query, call.key, call.value, **call.keywords)


def _forced(call: AttentionCall, backend: Backend) -> Tensor:
    """The call with every other kernel switched off; Declined when PyTorch takes none or another one."""
    member = getattr(SDPBackend, backend.value, None)
    if member is None:
        raise Declined(f"torch {torch.__version__} has no {backend.value}")
    with _warnings() as said, sdpa_kernel([member]):
        taken = chosen(call)
        if taken not in (backend.value, "unknown"):
            raise Declined(f"PyTorch takes {taken} even with only {backend.value} enabled")
        try:
            return attend(call)
        except (RuntimeError, NotImplementedError) as error:
            if not DECLINES.search(str(error)):
                raise
            texts = [str(message.message) for message in said]
            raise Declined(reason_in(texts, backend) or first_line(error)) from error


def reason_in(texts: list[str], backend: Backend) -> str:
    """The sentences among PyTorch's warnings that say why `backend` cannot run, each once; "" when none does."""
    sentences: dict[str, list[str]] = {"": []}
    section = ""
    for text in texts:
        text = text.split("(Triggered internally at")[0].strip()
        if "not used because" in text:
            section = text.lower()
            sentences.setdefault(section, [])
        elif not USELESS.search(text) and text not in sentences[section]:
            sentences[section].append(text)
    start = SECTIONS.get(backend, "")
    own = [found for name, group in sentences.items() if start and name.startswith(start) for found in group]
    return " ".join(own or [found for group in sentences.values() for found in group])[:400]


@contextmanager
def _warnings() -> Iterator[list[warnings.WarningMessage]]:
    """Every warning of the block, also those that PyTorch would give only once a process."""
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            yield said
    finally:
        torch.set_warn_always(always)


def first_line(error: BaseException) -> str:
    """The first line of an exception's text without PyTorch's location notes, at most 300 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return re.sub(r"\s*\((Triggered internally|Exception raised).*", "", text)[:300]


def chosen(call: AttentionCall) -> str:
    """The kernel that the dispatcher takes for this call under the switches now in force.

    A name as in `SDPBackend`, or "unknown" when the dispatcher refuses or this device does not tell.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dispatched(call)


def dispatched(call: AttentionCall) -> str:
    """`chosen` for a call that has just run: copies nothing and leaves the warning filters, which are global, alone.

    Where no kernel takes the call the dispatcher warns.
    """
    if call.enable_gqa and 0 in (call.key.shape[-3:-2].numel(), call.value.shape[-3:-2].numel()):
        return "unknown"  # the question, unlike the call, ends the process with SIGFPE (torch 2.10 and later)
    words = dict(call.keywords)
    del words["attn_mask"]
    dropout, causal = words.pop("dropout_p"), words.pop("is_causal")
    try:
        cast = _stand_in(call)
        number = torch._fused_sdp_choice(cast.query, cast.key, cast.value, cast.attn_mask, dropout, causal, **words)
    except Exception:
        return "unknown"
    return NAMES.get(int(number), "unknown")


def _stand_in(call: AttentionCall) -> AttentionCall:
    """The call itself, or under autocast tensors without values that look like those that the kernel gets."""
    dtype = autocast_dtype(call)
    if dtype is None:
        return call
    fresh = {}
    for name, tensor in call.tensors.items():
        kind = dtype if tensor.dtype.is_floating_point else tensor.dtype
        empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=kind, device=tensor.device)
        fresh[name] = empty.requires_grad_(tensor.requires_grad and torch.is_grad_enabled())
    return call.with_tensors(fresh)


def run_in_blocks(
    call: AttentionCall,
    backend: Backend,
    deadline: float = math.inf,
    wanted: Sequence[Sequence[int]] | None = None,
) -> Tensor:
    """MATH or EAGER on blocks of query rows, each with its explicit mask: the path's rounding, little memory.

    wanted: [first, last) pairs of rows, the others become NaN (default: all).

    Keys beyond a causal block's last row are left out. The result may only supply noise: it is not the
    call that a user makes. Raises Declined when `deadline` (of `time.monotonic`) passes before the end.
    """
    rows = call.query.shape[-2]
    dtype = autocast_dtype(call) or call.query.dtype
    output = torch.full(output_shape(call), math.nan, dtype=dtype, device=call.query.device)
    per_row = max(1, needed_bytes(call, backend) // max(rows, 1))
    step = max(1, min(rows, BLOCK_BYTES // per_row))
    spans = [(0, rows)] if wanted is None else wanted
    for first, last in ((at, min(at + step, end)) for start, end in spans for at in range(start, end, step)):
        if time.monotonic() > deadline:
            raise Declined("out of time")
        output[..., first:last, :] = run(rows_of(call, first, last), backend)
    return output


def math_op(call: AttentionCall) -> Tensor:
    """MATH without `sdpa_kernel`, whose switches hold in all threads: others may attend meanwhile.

    The op takes an additive mask; a bool one it would add as 0 and 1. Raises what PyTorch raises.
    """
    mask = call.attn_mask
    if mask is not None and mask.dtype == torch.bool:
        dtype, device = call.query.dtype, mask.device
        shown, hidden = (torch.scalar_tensor(v, dtype=dtype, device=device) for v in (0.0, float("-inf")))
        call = replace(call, attn_mask=torch.where(mask, shown, hidden))
    operators: Any = torch.ops.aten
    output: Tensor = operators._scaled_dot_product_attention_math(
        call.query,
        call.key,
        call.value,
        call.attn_mask,
        call.dropout_p,
        call.is_causal,
        None,
        scale=call.scale,
        enable_gqa=call.enable_gqa,
    )[0]
    return output


def needed_bytes(call: AttentionCall, backend: Backend) -> int:
    """Estimate of the memory in bytes that the backend takes for the call, output included.

    Measured on CPU, torch 2.13: MATH holds scores and softmax in float32 (float64 for float64) and one
    byte a score; eager in a half type holds the scores, a float32 softmax and its rounded copy.
    """
    dtype = autocast_dtype(call) or call.query.dtype
    size = torch.empty((), dtype=dtype).element_size()
    shape = output_shape(call)
    output = math.prod(shape) * size
    if backend is Backend.DEFAULT and chosen(call) == Backend.MATH.value:
        backend = Backend.MATH
    if backend not in (Backend.MATH, Backend.EAGER):
        return output
    scores = math.prod(shape[:-1]) * call.key.shape[-2]
    wide = max(4, size)
    per_score = 2 * wide + 1 if backend is Backend.MATH else max(2 * wide, 10)
    causal = call.is_causal or is_rule(call.attn_mask)
    mask = call.query.shape[-2] * call.key.shape[-2] * (1 + size) if causal else 0
    if call.attn_mask is not None and not is_rule(call.attn_mask):
        mask = call.attn_mask.numel() * size
    inputs = (math.prod(shape[:-1]) + 2 * math.prod(shape[:-2]) * call.key.shape[-2]) * call.query.shape[-1] * wide
    return scores * per_score + mask + inputs + output
