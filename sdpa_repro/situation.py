"""A call together with what it ran on, and the questions the known upstream bugs ask about it.

Every question looks at shapes, strides and dtypes, or at a mask small enough to be read at once; none copies
query, key or value. Where an answer cannot be had (an unknown GPU, a mask too large to look through) it is
MAYBE, never a guess.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from sdpa_repro.attention import AttentionCall, is_rule, viewed_once

LARGEST_MASK = 1 << 24
"""A mask with more distinct elements than this is not searched for fully masked rows."""

FLASH_CPU_KEY_BLOCK = 512
"""Keys the CPU flash kernel takes at a time (aten/src/ATen/native/cpu/FlashAttentionKernel.cpp)."""

MPS_VECTOR_ROWS = 8
MPS_VECTOR_WIDTHS = (64, 96, 128)
"""Query rows (at most) and head dims for which MPS uses its vector kernel (pytorch PR 169222)."""


class Answer(IntEnum):
    """Whether a condition holds; ordered so that `min` is "and" and `max` is "or"."""

    NO = 0
    MAYBE = 1
    YES = 2


@dataclass(frozen=True)
class Situation:
    """One attention call and what ran it.

    backend: a name as in `torch.nn.attention.SDPBackend`, "default" when the kernel is not known, or the name of
    a module that calls no SDPA ("nn.TransformerEncoderLayer"). device_type: "cpu", "cuda" (ROCm too), "mps".
    grad: autograd records the call for query, key or value. capability: CUDA compute capability, None if unknown.
    emulated: a fault was planted here, so a kernel is taken for what it is on the GPUs in use today.
    """

    call: AttentionCall
    backend: str
    device_type: str
    torch_version: str
    grad: bool
    capability: tuple[int, int] | None = None
    emulated: bool = False

    @property
    def rows(self) -> int:
        """L, the number of query rows."""
        return int(self.call.query.shape[-2])

    @property
    def keys(self) -> int:
        """S, the number of keys."""
        return int(self.call.key.shape[-2])

    @property
    def heads(self) -> int:
        """H, the heads of query."""
        return int(self.call.query.shape[-3])

    @property
    def kv_heads(self) -> int:
        """Hkv, the heads of key as its shape has them."""
        return int(self.call.key.shape[-3])

    @property
    def width(self) -> int:
        """The larger of the head dims of query/key and value: kernels are compiled for it."""
        return max(int(self.call.query.shape[-1]), int(self.call.value.shape[-1]))


def yes(condition: bool) -> Answer:
    """YES or NO for a condition that is known."""
    return Answer.YES if condition else Answer.NO


def every(*answers: Answer | bool) -> Answer:
    """All of them hold: NO if one does not, MAYBE if one is unknown."""
    return min((a if isinstance(a, Answer) else yes(a) for a in answers), default=Answer.YES)


def release(version: str) -> tuple[tuple[int, int, int], bool]:
    """(major, minor, patch) and whether it is a pre-release, of "2.13.0+cpu", "2.14.0.dev20260612", "2.12.0a0+git1".

    ValueError when the text does not begin with a release number.
    """
    found = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?(.*)", version.strip())
    if found is None:
        raise ValueError(f"{version!r} is not a torch version")
    rest = found[4].split("+")[0]
    return (int(found[1]), int(found[2]), int(found[3] or 0)), bool(re.search(r"dev|a|b|rc", rest))


def affected(version: str, first: str | None, last: str | None, fixed_in: str | None) -> Answer:
    """Whether a torch release has a bug that was seen from `first` to `last` and fixed in `fixed_in`.

    MAYBE for a pre-release of the first release with or without the bug, for a pre-release of the one after the
    fix (the main branch carries the next number while a fix is picked onto a release branch), and for a release
    newer than the last one tried when no fix is known.
    """
    try:
        number, early = release(version)
    except ValueError:
        return Answer.MAYBE
    if first is not None:
        start = release(first)[0]
        if number < start:
            return Answer.NO
        if number == start and early:
            return Answer.MAYBE
    if fixed_in is not None:
        end = release(fixed_in)[0]
        if number < end:
            return Answer.YES
        near = number[0] == end[0] and number[1] - end[1] <= 1
        return Answer.MAYBE if early and near else Answer.NO
    if last is not None and number > release(last)[0] and number[:2] != _minor(last):
        return Answer.MAYBE
    return Answer.YES


def _minor(version: str) -> tuple[int, int] | None:
    """The minor release, when the text names a whole minor release ("2.13") rather than a patch ("2.14.1")."""
    return release(version)[0][:2] if version.count(".") == 1 else None


def on_rocm(torch_version: str) -> bool:
    """Wheels for AMD GPUs say so in their local version; such devices are named "cuda" as well."""
    return "rocm" in torch_version.partition("+")[2]


def query_block(situation: Situation) -> int | None:
    """Query rows one block of the memory-efficient CUDA kernel takes; None when it depends on an unknown GPU.

    From the kernels compiled in aten/src/ATen/native/transformers/cuda/mem_eff_attention: 64 rows up to head dim
    64 and 32 above 128 everywhere; between the two 64 from compute capability 8.0 on, 32 before.
    """
    if situation.width <= 64:
        return 64
    if situation.width > 128:
        return 32
    if situation.emulated:
        return 64
    if situation.capability is None:
        return None
    return 64 if situation.capability >= (8, 0) else 32


def one_row_in_last_block(situation: Situation) -> Answer:
    """The last block of query rows holds exactly one row, also when it is the only block (L = 1)."""
    block = query_block(situation)
    if block is None:
        if situation.rows % 32 != 1:
            return Answer.NO
        return Answer.YES if situation.rows % 64 == 1 else Answer.MAYBE
    return yes(situation.rows % block == 1)


def one_kv_head(situation: Situation) -> bool:
    """Key and value repeat one head with stride 0, as `expand` over the head dimension leaves them."""
    key, value = situation.call.key, situation.call.value
    return key.dim() == 4 and value.dim() == 4 and key.stride(-3) == 0 and value.stride(-3) == 0


def mask_rows_differ(situation: Situation) -> bool:
    """There is a mask with one row for each query row (and not one row, or one expanded, for all of them)."""
    mask = situation.call.attn_mask
    if mask is None or is_rule(mask):  # a `CausalBias` reaches the kernel as a flag
        return False
    return mask.dim() >= 2 and bool(mask.shape[-2] > 1 and mask.stride(-2) != 0)


def _hidden(mask: Tensor) -> Tensor:
    """True where the mask lets a query not see a key."""
    return ~mask if mask.dtype == torch.bool else mask == float("-inf")


def fully_masked_row(situation: Situation) -> Answer:
    """Some query row may see no key at all (bool mask all False, or float mask all -inf)."""
    mask = situation.call.attn_mask
    if mask is None:
        return yes(situation.keys == 0)
    small = viewed_once(mask)
    if small.numel() > LARGEST_MASK:
        return Answer.MAYBE
    return yes(bool(_hidden(small).all(-1).any()))


def first_key_block_hidden(situation: Situation) -> Answer:
    """Some query row sees none of the first 512 keys, but a later one."""
    mask = situation.call.attn_mask
    if mask is None or mask.shape[-1] <= FLASH_CPU_KEY_BLOCK:
        return Answer.NO
    small = viewed_once(mask)
    if small.numel() > LARGEST_MASK:
        return Answer.MAYBE
    hidden = _hidden(small)
    return yes(bool((hidden[..., :FLASH_CPU_KEY_BLOCK].all(-1) & ~hidden.all(-1)).any()))


def inner_stride_not_one(*tensors: Tensor) -> bool:
    """Some tensor is not dense along its last dimension."""
    return any(tensor.shape[-1] > 1 and tensor.stride(-1) != 1 for tensor in tensors)


def few_kv_heads(situation: Situation, fewer_than: int) -> Answer:
    """Grouped-query attention with fewer key/value heads than `fewer_than`.

    Repeated heads that were copied (`repeat_kv`) look like separate ones; they are told by equal values at the
    first and last position, which is a hint and no more.
    """
    if situation.kv_heads != situation.heads:
        return yes(0 < situation.kv_heads < min(fewer_than, situation.heads))
    if situation.heads < 2 or situation.keys == 0:
        return Answer.NO
    ends = situation.call.key[..., [0, situation.keys - 1], :]
    distinct = 1 + int((ends[..., 1:, :, :] != ends[..., :-1, :, :]).flatten(-2).any(-1).sum(-1).max())
    return Answer.MAYBE if distinct < min(fewer_than, situation.heads) else Answer.NO


def mps_vector_kernel(situation: Situation) -> bool:
    """MPS takes its vector kernel: few query rows, no more than keys, certain head dims, no causal flag."""
    call = situation.call
    return (
        situation.rows <= min(MPS_VECTOR_ROWS, situation.keys)
        and call.query.shape[-1] == call.value.shape[-1]
        and call.query.shape[-1] in MPS_VECTOR_WIDTHS
        and not call.is_causal
    )
