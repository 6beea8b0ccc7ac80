"""One call of `scaled_dot_product_attention`: its tensors and arguments, and moves that keep the layout.

Shapes follow PyTorch: query (B, H, L, E), key (B, Hkv, S, E), value (B, Hkv, S, Ev), attn_mask
broadcastable to (B, H, L, S). Batch dimensions may be missing or more than one; helpers that need
exactly four dimensions say so.

Copying a tensor with `.clone()`, `.to()` or `.cpu()` replaces the strides of an expanded or
interleaved view by dense ones. The functions here copy the memory under the view instead and lay the
same view over the copy, so that a kernel sees the strides, overlaps and alignment it saw before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 256
"""Pointers are remembered modulo this many bytes; kernels look at 16 at most."""


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of one `torch.nn.functional.scaled_dot_product_attention` call."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors by argument name; `attn_mask` only when there is one."""
        found = {"query": self.query, "key": self.key, "value": self.value}
        if self.attn_mask is not None:
            found["attn_mask"] = self.attn_mask
        return found

    @property
    def keywords(self) -> dict[str, Any]:
        """The keyword arguments that follow query, key and value in the call.

        `enable_gqa` (new in torch 2.5) is left out when it is off, so that older releases accept the call.
        """
        words: dict[str, Any] = {
            "attn_mask": self.attn_mask,
            "dropout_p": self.dropout_p,
            "is_causal": self.is_causal,
            "scale": self.scale,
        }
        if self.enable_gqa:
            words["enable_gqa"] = True
        return words

    @property
    def softmax_scale(self) -> float:
        """The factor on query·key: `scale`, or 1/sqrt(E) when none was given."""
        if self.scale is not None:
            return self.scale
        return float(self.query.shape[-1] ** -0.5) if self.query.shape[-1] else 1.0

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> AttentionCall:
        """The same call over other tensors (names as in `tensors`)."""
        changes: dict[str, Any] = dict(tensors)
        return replace(self, **changes)


@dataclass(frozen=True)
class Span:
    """The bytes a tensor's view touches, first to last, whether or not there are gaps between them."""

    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    def overlaps(self, other: Span) -> bool:
        return self.start < other.stop and other.start < self.stop


def is_rule(mask: Tensor | None) -> bool:
    """Whether a mask is a `torch.nn.attention.bias.CausalBias`: it has a rule, and memory that means nothing."""
    return getattr(mask, "variant", None) is not None


def span(tensor: Tensor) -> Span:
    """Address range of a strided tensor's view in bytes; empty tensors have an empty span at their pointer."""
    start = tensor.data_ptr()
    return Span(start, start + span_elements(tensor) * tensor.element_size())


def span_elements(tensor: Tensor) -> int:
    """How many elements lie between the first and the last one the view touches, both included."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def viewed_once(tensor: Tensor) -> Tensor:
    """The view without its repetitions: expanded (stride-0) dimensions are cut to length 1."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def empty_aligned(nbytes: int, align: int, device: torch.device | str, *, zero: bool = False) -> Tensor:
    """uint8 memory of `nbytes` whose `data_ptr() % 256` is `align`; uninitialised unless `zero`.

    Zeros come from the allocator, so that on a CPU the gaps of a sparse view never become resident.
    """
    make = torch.zeros if zero else torch.empty
    raw = make(nbytes + 2 * ALIGNMENT, dtype=torch.uint8, device=device)
    first = (align - raw.data_ptr()) % ALIGNMENT
    return raw[first : first + nbytes]


def memory_groups(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """Names of tensors whose address ranges touch, grouped; each group in address order."""
    groups: list[list[str]] = []
    reach = -1
    for name in sorted(tensors, key=lambda name: span(tensors[name]).start):
        here = span(tensors[name])
        if groups and here.nbytes and here.start < reach:
            groups[-1].append(name)
        else:
            groups.append([name])
        reach = max(reach, here.stop)
    return groups


def rebuild(
    call: AttentionCall,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> AttentionCall:
    """A copy of the call on `device` and in `dtype` with the layout of the original.

    Kept: shape, strides, pointer alignment, and overlap between tensors (value = key[..., :n] stays so).
    `dtype` casts query, key, value and a floating-point mask; a bool mask stays bool, a `CausalBias` (a rule whose
    memory is never initialised) stays the object it is. Casting rounds values
    and may overflow: see `replaying.replay` for when such a cast is not comparable.
    """
    fresh: dict[str, Tensor] = {}
    tensors = {name: tensor for name, tensor in call.tensors.items() if not is_rule(tensor)}
    for names in memory_groups(tensors):
        members = {name: tensors[name] for name in names}
        if len({member.dtype for member in members.values()}) > 1:
            for name, member in members.items():
                fresh.update(_rebuild_group({name: member}, dtype, device))
        else:
            fresh.update(_rebuild_group(members, dtype, device))
    return call.with_tensors(fresh)


def _rebuild_group(
    members: Mapping[str, Tensor], dtype: torch.dtype | None, device: torch.device | str | None
) -> dict[str, Tensor]:
    """Copy the memory under tensors of one dtype that share it, and lay the same views over the copy."""
    first = next(iter(members.values())).detach()
    size = first.element_size()
    target = dtype if dtype is not None and first.dtype.is_floating_point else first.dtype
    start = min(span(member).start for member in members.values())
    length = max(span(member).stop for member in members.values()) - start
    place = torch.device(device) if device is not None else first.device
    width = torch.empty((), dtype=target).element_size()
    align = start % ALIGNMENT // width * width
    flat = empty_aligned(length // size * width, align, place, zero=True).view(target)
    fresh = {}
    for name, member in members.items():
        offset = (member.data_ptr() - start) // size
        view = torch.as_strided(flat, member.shape, member.stride(), flat.storage_offset() + offset)
        if member.numel():
            copy_view(member.detach(), view)
        fresh[name] = view
    return fresh


def copy_view(source: Tensor, target: Tensor) -> None:
    """Copy values between two views of the same shape and strides, each element of memory once.

    A view that overlaps itself (`unfold`) is written in memory order from a flat span; any other one is
    copied with its expanded dimensions cut, so nothing outside the view is read or written.
    """
    if source.dtype == torch.bool and target.dtype == torch.bool:  # a copy of bools would turn a stray byte 7 into 1
        source, target = source.view(torch.uint8), target.view(torch.uint8)
    narrow_source, narrow_target = viewed_once(source), viewed_once(target)
    if overlaps_itself(narrow_source):
        count = (span_elements(source),)
        narrow_source = source.as_strided(count, (1,), source.storage_offset())
        narrow_target = target.as_strided(count, (1,), target.storage_offset())
    narrow_target.copy_(narrow_source)


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether two indices of the view may reach one element (a sufficient test; expanded dimensions count)."""
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < reach:
                return True
            reach = stride * (size - 1) + reach
    return False


def map_dense(call: AttentionCall, *names: str) -> AttentionCall:
    """The call with the named tensors made contiguous, all when none is named; a `CausalBias` is left as it is."""
    tensors = {name: tensor for name, tensor in call.tensors.items() if not is_rule(tensor)}
    return call.with_tensors({name: tensors[name].contiguous() for name in names or tensors if name in tensors})


def dense(tensor: Tensor) -> Tensor:
    """The tensor with the strides of its shape; itself where it has them.

    `Tensor.contiguous` leaves a stride of 0 alone where the size is 1 (one head, expanded to one), and a kernel that
    looks at strides then still sees a repeated head. This copies it too; empty tensors have no stride to mind.
    """
    fresh = tensor.contiguous()
    return fresh.clone(memory_format=torch.contiguous_format) if repeats_one(fresh) else fresh


def repeats_one(tensor: Tensor) -> bool:
    """Whether `Tensor.contiguous` would do nothing although a stride is 0: a dimension of size 1, expanded."""
    return tensor.is_contiguous() and bool(tensor.numel()) and 0 in tensor.stride()


def output_shape(call: AttentionCall) -> tuple[int, ...]:
    """Shape of the result, (B, H, L, Ev), batch dimensions broadcast as SDPA does."""
    batch = torch.broadcast_shapes(call.query.shape[:-3], call.key.shape[:-3], call.value.shape[:-3])
    heads = tuple(call.query.shape[-3:-2])
    return (*batch, *heads, call.query.shape[-2], call.value.shape[-1])


Transformation = Callable[[AttentionCall], AttentionCall]
"""The type of every step that turns a call into another: cast, make dense, slice, re-mask."""
