"""What the guard does to a call: exact changes after which the faulty kernel, or its faulty path, is not used.

MATH is called as an aten op and not by `sdpa_kernel`, whose switches belong to the whole process: another
thread would run under them too, and two threads could leave them changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sdpa_repro.attention import AttentionCall, dense
from sdpa_repro.replaying.backends import Backend, math_op, needed_bytes
from sdpa_repro.replaying.variants import autocast_dtype, rows_of

MOST_BYTES = 2 << 30
"""MATH holds all scores at once; a call that would take more memory than this goes in blocks of query rows."""

WRAPS = 1 << 32
"""Mask entries from which pytorch#187227 mistakes one row for another."""


@dataclass(frozen=True)
class Cure:
    """An exact change: tensors made contiguous, blocks of query rows, or the MATH path for this one call."""

    dense: tuple[str, ...] = ()
    """Names of tensors, such as ("key", "value")."""
    blocks: bool = False
    math: bool = False

    @property
    def words(self) -> str:
        """What becomes of the call: "contiguous key and value"."""
        if self.math:
            return "MATH for this call"
        return "blocks of query rows" if self.blocks else f"contiguous {' and '.join(self.dense)}"


def combined(cures: Iterable[Cure]) -> Cure:
    """One change that does what all of them do."""
    found = list(cures)
    names = ("query", "key", "value")
    dense = tuple(name for name in names if any(name in cure.dense for cure in found))
    return Cure(dense, any(cure.blocks for cure in found), any(cure.math for cure in found))


def attend(original: Callable[..., Any], call: AttentionCall, cure: Cure) -> Tensor:
    """The output of `call` with `cure` applied, (B, H, L, Ev), in the caller's grad mode and autocast.

    original: `scaled_dot_product_attention` itself. Raises what PyTorch raises, out of memory included: a call that
    cannot be cured must not be answered wrongly.
    """
    if cure.math:
        return _math(call)
    fresh = _dense(call, cure.dense)
    return _in_blocks(fresh, lambda part: _plain(original, part)) if cure.blocks else _plain(original, fresh)


def as_cast(call: AttentionCall) -> AttentionCall:
    """The call as its kernel gets it: under autocast in autocast's dtype, cast as autocast casts (layouts may go)."""
    dtype = autocast_dtype(call)
    if dtype is None:
        return call
    tensors = call.tensors.items()
    return call.with_tensors({name: tensor.to(dtype) for name, tensor in tensors if tensor.is_floating_point()})


def _plain(original: Callable[..., Any], call: AttentionCall) -> Tensor:
    output: Tensor = original(call.query, call.key, call.value, **call.keywords)
    return output


def _dense(call: AttentionCall, names: tuple[str, ...]) -> AttentionCall:
    """The named tensors contiguous; value stays key where it is the same tensor, so that it is copied once."""
    fresh = {name: dense(call.tensors[name]) for name in names}
    if call.value is call.key and "key" in fresh and "value" in fresh:
        fresh["value"] = fresh["key"]
    return call.with_tensors(fresh)


def _in_blocks(call: AttentionCall, run: Callable[[AttentionCall], Tensor]) -> Tensor:
    """Blocks of query rows, none with 2**31 mask entries or more."""
    keys = -(-call.key.shape[-2] // 8) * 8  # the kernel's copy of the mask has rows of a multiple of 8
    return _by_rows(call, max(1, (WRAPS // 2) // max(1, keys)), run)


def _by_rows(call: AttentionCall, step: int, run: Callable[[AttentionCall], Tensor]) -> Tensor:
    rows = call.query.shape[-2]
    parts = [run(rows_of(call, first, min(first + step, rows))) for first in range(0, rows, step)]
    return torch.cat(parts, -2)


def _math(call: AttentionCall) -> Tensor:
    """What `sdpa_kernel(SDPBackend.MATH)` around the call gives, bit for bit while it fits into `MOST_BYTES`."""
    cast = as_cast(call)
    with torch.autocast(call.query.device.type, enabled=False):
        needed = needed_bytes(cast, Backend.MATH)
        if needed <= MOST_BYTES:
            return math_op(cast)
        rows = cast.query.shape[-2]
        return _by_rows(cast, max(1, rows * MOST_BYTES // needed), math_op)
