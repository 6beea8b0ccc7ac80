"""Put a call's tensors into memory of our own: at a chosen alignment, between guard zones, gaps filled with a byte.

The strides stay. Tensors that share memory go on sharing it unless they are named in `apart`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sdpa_repro.attention import ALIGNMENT, AttentionCall, copy_view, empty_aligned, memory_groups, span, span_elements
from sdpa_repro.visibility import is_tensor_mask


@dataclass(frozen=True)
class Filling:
    """The byte that stands where no view looks: for numbers, and for bool masks, where only 0 and 1 are legal."""

    numbers: int = 0x00
    bools: int = 0x00


def placed(
    call: AttentionCall,
    *,
    align: int | None = None,
    guard: int | Mapping[str, int] = 0,
    filling: Filling | None = None,
    around: Collection[str] | None = None,
    apart: Collection[str] = (),
) -> AttentionCall:
    """A copy of the call with the same strides in fresh memory.

    align: `data_ptr() % 256` of the first byte of each piece of memory (None: as it is), rounded down to whole
    elements. guard: bytes of `filling` before and after each piece, a multiple of 256, or by tensor, of which the
    largest of a piece counts; gaps between views of one piece hold `filling` too. around: the tensors whose pieces get
    it, the others get zeros (None: all get it).
    A `CausalBias` has no memory and is handed on.
    """
    guards = dict.fromkeys(call.tensors, guard) if isinstance(guard, int) else guard
    for size in guards.values():
        if size % ALIGNMENT:
            raise ValueError(f"guard must be a multiple of {ALIGNMENT}, not {size}")
    filling = Filling() if filling is None else filling
    fresh: dict[str, Tensor] = {}
    for names in _pieces(call, apart):
        members = {name: call.tensors[name].detach() for name in names}
        first = next(iter(members.values()))
        start = min(span(member).start for member in members.values())
        length = max(span(member).stop for member in members.values()) - start
        at = (start if align is None else align) % ALIGNMENT // first.element_size() * first.element_size()
        zone = max(guards[name] for name in names)
        memory = empty_aligned(length + 2 * zone, at, first.device)
        chosen = filling if around is None or set(names) & set(around) else Filling()
        memory.fill_(chosen.bools if first.dtype == torch.bool else chosen.numbers)
        flat = memory.view(first.dtype)
        for name, member in members.items():
            offset = flat.storage_offset() + (zone + member.data_ptr() - start) // first.element_size()
            view = flat.as_strided(member.shape, member.stride(), offset)
            if member.numel():
                copy_view(member, view)
            fresh[name] = view
    return call.with_tensors(fresh)


def _pieces(call: AttentionCall, apart: Collection[str]) -> Iterator[list[str]]:
    """Names of tensors that lie in one piece of memory and have one dtype."""
    tensors = {name: tensor for name, tensor in call.tensors.items() if name != "attn_mask" or is_tensor_mask(call)}
    together = {name: tensor for name, tensor in tensors.items() if name not in apart}
    for names in [*memory_groups(together), *([name] for name in tensors if name in apart)]:
        if len({tensors[name].dtype for name in names}) == 1:
            yield names
        else:
            yield from ([name] for name in names)


def blank_like(
    tensor: Tensor,
    shape: Sequence[int] | None = None,
    stride: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Zeros with the tensor's shape, strides, dtype and pointer alignment, each of which may be given instead."""
    shape = tuple(tensor.shape if shape is None else shape)
    stride = tuple(tensor.stride() if stride is None else stride)
    dtype = tensor.dtype if dtype is None else dtype
    size = torch.empty((), dtype=dtype).element_size()
    count = span_elements(torch.empty(0, dtype=dtype, device="meta").as_strided(shape, stride))
    align = tensor.data_ptr() % ALIGNMENT // size * size
    flat = empty_aligned(count * size, align, tensor.device).view(dtype).zero_()
    return flat.as_strided(shape, stride, flat.storage_offset())
