"""Which key a query row may see: one meaning for bool masks, additive masks, `is_causal` and `CausalBias`.

Batch dimensions are counted as one (0 for a query without any), heads are query heads. Nothing here
materialises a broadcast mask: callers ask for a block of rows of one batch and head.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from sdpa_repro.attention import AttentionCall, is_rule
from sdpa_repro.errors import InputError

BLOCK_ENTRIES = 1 << 24
"""Mask entries looked at together; bounds the memory of everything that walks over a mask."""


def scores_shape(call: AttentionCall) -> tuple[int, int, int, int]:
    """(B, H, L, S) of the score matrix, all batch dimensions multiplied into B.

    Raises `InputError` for tensors that have none.
    """
    if min(call.query.dim(), call.key.dim()) < 2:
        raise InputError("query or key has fewer than two dimensions: PyTorch rejects such a call")
    batch = math.prod(batch_shape(call))
    heads = call.query.shape[-3] if call.query.dim() > 2 else 1
    return batch, heads, call.query.shape[-2], call.key.shape[-2]


def batch_shape(call: AttentionCall) -> tuple[int, ...]:
    """The batch dimensions of query, key and value, broadcast."""
    shapes = (call.query.shape[:-3], call.key.shape[:-3], call.value.shape[:-3])
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        raise InputError(f"query, key and value have batch dimensions that do not broadcast: {shapes}") from None


def is_tensor_mask(call: AttentionCall) -> bool:
    """Whether the call has a mask made of values: a `CausalBias` is a tensor subclass without any."""
    return call.attn_mask is not None and not is_rule(call.attn_mask)


def causal_offset(call: AttentionCall) -> int | None:
    """d when the call itself says "row i sees keys up to i + d" (`is_causal`, `CausalBias`), else None.

    `is_causal` is aligned to the top left also when L and S differ; `CausalBias` may be aligned to the bottom right.
    """
    variant = getattr(call.attn_mask, "variant", None)
    if variant is not None:
        lower_right = getattr(variant, "name", "") == "LOWER_RIGHT"
        return call.key.shape[-2] - call.query.shape[-2] if lower_right else 0
    return 0 if call.is_causal else None


def mask_values(call: AttentionCall) -> Tensor | None:
    """The mask as a view (*batch, H, L, S) with stride 0 where it is broadcast; None when there are no values.

    Raises `InputError` when the mask does not broadcast to the scores.
    """
    mask = call.attn_mask
    if mask is None or not is_tensor_mask(call):
        return None
    _, heads, rows, keys = scores_shape(call)
    shape = (*batch_shape(call), heads, rows, keys)
    extra = (1,) * (mask.dim() - len(shape))  # a (1, 1, L, S) mask over a 3-D query
    try:
        return mask.detach().expand(extra + shape)
    except RuntimeError:
        raise InputError(f"attn_mask {tuple(mask.shape)} does not broadcast to the scores {shape}") from None


def mask_plane(call: AttentionCall, batch: int, head: int) -> Tensor | None:
    """The mask's values for one batch and head as a view (L, S), or None when the call has no mask values."""
    values = mask_values(call)
    if values is None:
        return None
    index = []
    for size in reversed(values.shape[:-3]):
        batch, position = divmod(batch, size)
        index.append(position)
    place = (*reversed(index), head)
    return values[place]


def distinct_planes(call: AttentionCall) -> tuple[list[int], list[int]]:
    """Batches and heads whose masks lie at different addresses; the others are broadcasts of these.

    Batch b and head h use the mask of `b if len(batches) > 1 else 0` and `h if len(heads) > 1 else 0`.
    """
    batch, heads, _, _ = scores_shape(call)
    values = mask_values(call)
    if values is None:
        return [0][:batch], [0][:heads]
    one_batch = all(
        stride == 0 or size == 1 for size, stride in zip(values.shape[:-3], values.stride()[:-3], strict=True)
    )
    one_head = values.stride(-3) == 0
    return list(range(1 if one_batch and batch else batch)), list(range(1 if one_head and heads else heads))


def lowest_value(mask: Tensor) -> float:
    """finfo.min of an additive mask's dtype: what many programs write where they mean -inf."""
    return torch.finfo(mask.dtype).min


def comparable(values: Tensor) -> Tensor:
    """Mask values in a dtype that can be compared: bool and ordinary floats as they are, others as float64."""
    ordinary = values.dtype == torch.bool or (values.dtype.is_floating_point and values.element_size() > 1)
    return values if ordinary else values.double()


def visible_values(values: Tensor, *, lowest_hidden: bool = True) -> Tensor:
    """Which entries of a block of mask values let the key take part (bool, same shape)."""
    values = comparable(values)
    if values.dtype == torch.bool:
        return values
    visible = values != -math.inf
    if lowest_hidden:
        visible &= values != lowest_value(values)
    return visible


def bias_rows(
    call: AttentionCall, batch: int, head: int, first: int, last: int, *, lowest_hidden: bool = True
) -> Tensor:
    """Bool (rows, S): which keys the query rows [first, last) of one batch and head may see.

    An additive mask hides a key with -inf. `finfo.min` of its dtype counts as hidden too, as its author meant;
    for PyTorch it is a number (a row of nothing else still attends): `lowest_hidden=False` reads it that way.
    """
    rows, keys = call.query.shape[-2], call.key.shape[-2]
    first, last = max(first, 0), min(last, rows)
    plane = mask_plane(call, batch, head)
    offset = causal_offset(call)
    if plane is None:
        visible = torch.ones(last - first, keys, dtype=torch.bool, device=call.query.device)
    else:
        visible = visible_values(plane[first:last], lowest_hidden=lowest_hidden)
    if offset is not None:
        row = torch.arange(first, last, dtype=torch.int32, device=visible.device)[:, None]
        visible = visible & (torch.arange(keys, dtype=torch.int32, device=visible.device) <= row + offset)
    return visible


def row_blocks(rows: int, keys: int) -> Iterator[tuple[int, int]]:
    """[first, last) blocks of rows that hold about `BLOCK_ENTRIES` entries each."""
    step = max(1, BLOCK_ENTRIES // max(keys, 1))
    for first in range(0, rows, step):
        yield first, min(first + step, rows)


def fully_masked_rows(call: AttentionCall) -> Tensor:
    """Bool (B, H, L) on the CPU: rows that may see no key at all (finfo.min does not count as hidden)."""
    batch, heads, rows, _ = scores_shape(call)
    batches, head_list = distinct_planes(call)
    empty = torch.zeros(len(batches), len(head_list), rows, dtype=torch.bool)
    for b in batches:
        for h in head_list:
            empty[b, h] = _empty_rows(call, b, h)
    return empty.expand(batch, heads, rows)


def _empty_rows(call: AttentionCall, batch: int, head: int) -> Tensor:
    rows, keys = call.query.shape[-2], call.key.shape[-2]
    offset, plane = causal_offset(call), mask_plane(call, batch, head)
    if not keys:
        return torch.ones(rows, dtype=torch.bool)
    if plane is None:
        return torch.arange(rows) < -(offset or 0)
    if offset is None and plane.stride(0) == 0 and rows:  # one row for all
        seen = bias_rows(call, batch, head, 0, 1, lowest_hidden=False).any(1)
        return ~seen.cpu().expand(rows)
    blocks = [bias_rows(call, batch, head, *block, lowest_hidden=False).any(1) for block in row_blocks(rows, keys)]
    return ~torch.cat(blocks).cpu() if blocks else torch.zeros(0, dtype=torch.bool)


def ranges(indices: Iterable[int]) -> list[tuple[int, int]]:
    """Whole numbers as inclusive ranges: [0, 1, 2, 9] becomes [(0, 2), (9, 9)]."""
    found: list[tuple[int, int]] = []
    for index in sorted(set(indices)):
        if found and found[-1][1] + 1 == index:
            found[-1] = (found[-1][0], index)
        else:
            found.append((index, index))
    return found


def true_ranges(flags: Tensor) -> list[tuple[int, int]]:
    """Inclusive ranges of the True entries of a bool vector."""
    if not flags.numel():
        return []
    edges = torch.nn.functional.pad(flags.to(torch.int8), (1, 1)).diff().nonzero().flatten().view(-1, 2)
    return [(start, stop - 1) for start, stop in edges.tolist()]


def ranges_text(found: Iterable[tuple[int, int]], limit: int = 12) -> str:
    """Inclusive ranges for people: "0–6, 9", cut after `limit` with the number left out."""
    parts = [str(first) if first == last else f"{first}–{last}" for first, last in found]
    if len(parts) > limit:
        parts[limit:] = [f"and {len(parts) - limit} more ranges"]
    return ", ".join(parts)
