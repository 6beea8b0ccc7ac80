"""One change to a call at a time, everything else as it was, layout included.

Each function takes a call and returns the changed one, or None when the change has nothing to hold on to in this
call. Shapes as in `attention`: query (B, H, L, E), key (B, Hkv, S, E), value (B, Hkv, S, Ev).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from sdpa_repro.attention import AttentionCall, dense, overlaps_itself, repeats_one, span, span_elements, viewed_once
from sdpa_repro.explaining.length_layout import restride
from sdpa_repro.explaining.lengths import with_lengths
from sdpa_repro.explaining.placing import blank_like, placed
from sdpa_repro.replaying.variants import recast
from sdpa_repro.visibility import bias_rows, distinct_planes, is_tensor_mask, row_blocks, visible_values


def without_mask(call: AttentionCall) -> AttentionCall | None:
    """No mask at all; `is_causal` stays."""
    return None if call.attn_mask is None else replace(call, attn_mask=None)


def with_open_mask(call: AttentionCall) -> AttentionCall | None:
    """A bool mask that hides nothing, for a call that has neither mask nor `is_causal`."""
    if call.attn_mask is not None or call.is_causal:
        return None
    return replace(call, attn_mask=_square(call))


def with_causal_mask(call: AttentionCall) -> AttentionCall | None:
    """`is_causal` written out as a bool mask (1, 1, L, S), aligned to the top left."""
    if not call.is_causal or call.attn_mask is not None:
        return None
    return replace(call, attn_mask=_square(call).tril(), is_causal=False)


def with_causal_flag(call: AttentionCall) -> AttentionCall | None:
    """`is_causal` instead of a mask that says exactly the same."""
    mask = call.attn_mask
    if mask is None or call.is_causal or not is_tensor_mask(call) or not says_only_hidden_or_not(mask):
        return None
    rows, keys = call.query.shape[-2], call.key.shape[-2]
    batches, heads = distinct_planes(call)
    for first, last in row_blocks(rows, keys):
        row = torch.arange(first, last, device=mask.device)[:, None]
        causal = torch.arange(keys, device=mask.device) <= row
        for batch in batches:
            for head in heads:
                if not torch.equal(bias_rows(call, batch, head, first, last, lowest_hidden=False), causal):
                    return None
    return replace(call, attn_mask=None, is_causal=True)


def _square(call: AttentionCall) -> Tensor:
    shape = (1,) * (call.query.dim() - 2) + (call.query.shape[-2], call.key.shape[-2])
    return torch.ones(shape, dtype=torch.bool, device=call.query.device)


def says_only_hidden_or_not(mask: Tensor) -> bool:
    """Whether a mask is bool or holds nothing but 0 and -inf."""
    if mask.dtype == torch.bool:
        return True
    values = viewed_once(mask.detach())
    return mask.dtype.is_floating_point and bool(((values == 0) | (values == -torch.inf)).all())


def with_float_mask(call: AttentionCall) -> AttentionCall | None:
    """The bool mask as numbers to add, 0 and -inf in the query's dtype, over the bool mask's strides."""
    mask = call.attn_mask
    if mask is None or mask.dtype != torch.bool:
        return None
    changed = _remasked(call, torch.zeros_like, call.query.dtype)
    if changed is not None and changed.attn_mask is not None:
        viewed_once(changed.attn_mask).masked_fill_(~viewed_once(mask.detach()), -torch.inf)
    return changed


def with_bool_mask(call: AttentionCall) -> AttentionCall | None:
    """A bool mask instead of one of 0 and -inf, over the same strides."""
    mask = call.attn_mask
    if mask is None or mask.dtype == torch.bool or not is_tensor_mask(call) or not says_only_hidden_or_not(mask):
        return None
    return _remasked(call, lambda old: old == 0, torch.bool)


def with_mask_in_query_dtype(call: AttentionCall) -> AttentionCall | None:
    """The additive mask rounded to the query's dtype, over the same strides."""
    mask = call.attn_mask
    if mask is None or not mask.dtype.is_floating_point or not is_tensor_mask(call) or mask.dtype == call.query.dtype:
        return None
    return _remasked(call, lambda old: old, call.query.dtype)


def with_mask_per_head(call: AttentionCall) -> AttentionCall | None:
    """The mask copied for every batch row and head: contiguous (B, H, L, S)."""
    mask = call.attn_mask
    if mask is None or not is_tensor_mask(call) or call.query.dim() != 4:
        return None
    batch, heads, rows, _ = call.query.shape
    shape = (batch, heads, rows, call.key.shape[-2])
    if mask.shape == shape and 0 not in mask.stride():
        return None
    return replace(call, attn_mask=mask.detach().expand(shape).contiguous())


def with_a_key_in_every_row(call: AttentionCall) -> AttentionCall | None:
    """Fully masked mask rows get one visible key, the first."""

    def open_first(old: Tensor) -> Tensor:
        empty = ~visible_values(old, lowest_hidden=False).any(-1)
        new = old.clone()
        new[..., 0] = torch.where(empty, torch.ones_like(new[..., 0]) if _is_bool(new) else 0.0, new[..., 0])
        return new

    return _changed_mask(call, open_first)


def without_left_padding(call: AttentionCall) -> AttentionCall | None:
    """Leading keys that no row sees are shown: column p, the first one seen, moved up along the diagonal.

    For a causal mask with left padding that gives the plain causal mask; a window stays a window.
    """

    def filled(old: Tensor) -> Tensor:
        new = old.clone().reshape(-1, *old.shape[-2:])
        for plane in new:
            seen = visible_values(plane).any(0)
            first = int(seen.int().argmax()) if bool(seen.any()) else 0
            source = plane[:, first].clone()
            for key in range(first):
                row = torch.arange(plane.shape[0], device=plane.device) + first - key
                plane[:, key] = source[row.clamp(max=plane.shape[0] - 1)]
        return new.reshape(old.shape)

    return _changed_mask(call, filled)


def _is_bool(tensor: Tensor) -> bool:
    return tensor.dtype == torch.bool


def _changed_mask(call: AttentionCall, change: Callable[[Tensor], Tensor]) -> AttentionCall | None:
    """The call with its mask changed, None when that changes nothing or the keys are broadcast."""
    mask = call.attn_mask
    if mask is None or not is_tensor_mask(call) or mask.dim() < 2:
        return None
    if viewed_once(mask).shape[-1] != call.key.shape[-2]:
        return None
    changed = _remasked(call, change, mask.dtype)
    if changed is None or changed.attn_mask is None or torch.equal(viewed_once(changed.attn_mask), viewed_once(mask)):
        return None
    return changed


def _remasked(call: AttentionCall, change: Callable[[Tensor], Tensor], dtype: torch.dtype) -> AttentionCall | None:
    """The mask's elements changed, each once, and laid out as they were."""
    mask = call.attn_mask
    assert mask is not None
    old = viewed_once(mask.detach())
    if overlaps_itself(old):
        return None
    new = blank_like(mask, dtype=dtype)
    viewed_once(new).copy_(change(old))
    return replace(call, attn_mask=new)


def with_dense(call: AttentionCall, *names: str) -> AttentionCall | None:
    """The named tensors with the strides of their shapes (`attention.dense`); None when all of them have those."""
    tensors = {name: call.tensors[name] for name in names}
    if all(tensor.is_contiguous() and not repeats_one(tensor) for tensor in tensors.values()):
        return None
    return call.with_tensors({name: dense(tensor) for name, tensor in tensors.items()})


def with_dense_head(call: AttentionCall, *names: str) -> AttentionCall | None:
    """The memory of the named tensors made contiguous, repeated (stride-0) dimensions still repeated."""
    fresh = {}
    for name in names:
        tensor = call.tensors[name]
        once = viewed_once(tensor)
        if not once.is_contiguous():
            fresh[name] = once.contiguous().expand(tensor.shape)
    return call.with_tensors(fresh) if fresh else None


def with_value_apart(call: AttentionCall) -> AttentionCall | None:
    """Value in memory of its own, same strides, when it lies in key's."""
    shared = call.key.numel() and call.value.numel() and span(call.key).overlaps(span(call.value))
    return placed(call, apart=("value",)) if shared else None


def with_alignment(call: AttentionCall, align: int) -> AttentionCall:
    """Every tensor moved to `data_ptr() % 256 == align`."""
    return placed(call, align=align)


def with_batch(call: AttentionCall, batch: int) -> AttentionCall | None:
    """One batch row alone, as views of the same memory."""
    if call.query.dim() != 4 or call.query.shape[0] < 2:
        return None

    def cut(tensor: Tensor) -> Tensor:
        return tensor.narrow(0, batch, 1) if tensor.dim() == 4 and tensor.shape[0] > 1 else tensor

    return call.with_tensors({name: cut(tensor) for name, tensor in call.tensors.items()})


def with_heads(call: AttentionCall, head: int, count: int) -> AttentionCall | None:
    """`count` query heads around `head` with the key/value heads they use, as views of the same memory.

    Grouped queries keep their grouping: the heads chosen share one key/value head when a group has that many.
    """
    if call.query.dim() != 4 or call.query.shape[1] <= count:
        return None
    heads, kv_heads = call.query.shape[1], call.key.shape[1]
    if not kv_heads or heads % kv_heads:
        return None
    group = heads // kv_heads
    start = head // group * group
    if group >= count:
        first = min(head, start + group - count)
    elif count % group == 0:
        first = min(start, heads - count)
    else:
        return None
    kv_first, kv_count = first // group, max(1, count // group)

    def cut(name: str, tensor: Tensor) -> Tensor:
        if tensor.dim() != 4 or tensor.shape[1] == 1:
            return tensor
        if name in ("key", "value"):
            return tensor.narrow(1, kv_first, kv_count)
        return tensor.narrow(1, first, count)

    return call.with_tensors({name: cut(name, tensor) for name, tensor in call.tensors.items()})


def without_gqa(call: AttentionCall) -> AttentionCall | None:
    """Key and value heads copied for every query head instead of `enable_gqa`."""
    if not call.enable_gqa or call.query.shape[-3] == call.key.shape[-3] or not call.key.shape[-3]:
        return None
    repeats = call.query.shape[-3] // call.key.shape[-3]
    key, value = (tensor.repeat_interleave(repeats, -3) for tensor in (call.key, call.value))
    return replace(call, key=key, value=value, enable_gqa=False)


def without_scale(call: AttentionCall) -> AttentionCall | None:
    """No `scale`, so that 1/sqrt(E) applies."""
    return None if call.scale is None else replace(call, scale=None)


def with_default_scale(call: AttentionCall) -> AttentionCall | None:
    """`scale` given as what the default is, 1/sqrt(E)."""
    return None if call.scale is not None else replace(call, scale=call.softmax_scale)


def cast(call: AttentionCall, dtype: torch.dtype) -> AttentionCall | None:
    """The call in another dtype; None when a finite value overflows in it.

    An additive mask that had another dtype than the query keeps its own.
    """
    changed = recast(call, dtype)
    if call.attn_mask is not None and call.attn_mask.dtype != call.query.dtype:
        changed = replace(changed, attn_mask=call.attn_mask)
    for name, tensor in call.tensors.items():
        if changed.tensors[name] is not tensor and tensor.dtype.is_floating_point:
            before, after = viewed_once(tensor.detach()), viewed_once(changed.tensors[name])
            if not torch.equal(before.isfinite(), after.isfinite()):
                return None
    return changed


def with_other_values(call: AttentionCall, seed: int, *, unit_scores: bool = False) -> AttentionCall:
    """Seeded normal values in query, key and value, laid out as they were; the mask as it is.

    Each tensor keeps the spread of its own values, or with `unit_scores` the scores get a standard deviation of 1.
    """
    random = torch.Generator().manual_seed(seed)
    changed = recast(call)
    share = abs(call.softmax_scale) * max(1, call.query.shape[-1]) ** 0.5
    for name in ("query", "key", "value"):
        view = _elements(changed.tensors[name])
        spread = 1.0 if name == "value" or not share else share**-0.5
        if not unit_scores:
            spread = _spread(view)
        view.copy_((torch.randn(view.shape, generator=random) * spread).to(view.dtype))
    return changed


def with_value_of_ones(call: AttentionCall) -> AttentionCall | None:
    """Value all ones, so that every row's right output is 1 whatever the weights; None when key shares its memory."""
    if span(call.key).overlaps(span(call.value)):
        return None
    value = blank_like(call.value)
    _elements(value).fill_(1.0)
    return replace(call, value=value)


def _elements(tensor: Tensor) -> Tensor:
    """A view that reaches every element of the tensor's view once, to be written through."""
    once = viewed_once(tensor)
    if overlaps_itself(once):
        once = tensor.as_strided((span_elements(tensor),), (1,), tensor.storage_offset())
    return once


def _spread(values: Tensor) -> float:
    """Standard deviation of the finite values; 1 when there is none."""
    finite = values[values.isfinite()].double()
    spread = float(finite.std()) if finite.numel() > 1 else 0.0
    return spread if 0.0 < spread < torch.inf else 1.0


def with_head_dim(call: AttentionCall, width: int) -> AttentionCall | None:
    """E and Ev cut to `width`, or both filled up to it with zeros, in strides of the same family.

    Tensors that share memory are cut as views of it, and cannot grow. Without `scale` the default follows E.
    """
    old = call.query.shape[-1]
    shared = call.key.numel() and span(call.key).overlaps(span(call.value))
    fresh = {}
    for name in ("query", "key", "value"):
        tensor = call.tensors[name]
        goal = max(width, tensor.shape[-1]) if width > old else min(width, tensor.shape[-1])
        if goal <= tensor.shape[-1] and shared and name != "query":
            fresh[name] = tensor[..., :goal]
            continue
        shape = (*tensor.shape[:-1], goal)
        if shared or overlaps_itself(viewed_once(tensor)):
            return None
        stride, _ = restride(tensor.shape, tensor.stride(), shape)
        fresh[name] = blank_like(tensor, shape, stride)
        kept = min(goal, tensor.shape[-1])
        viewed_once(fresh[name])[..., :kept].copy_(viewed_once(tensor.detach())[..., :kept])
    return call.with_tensors(fresh)


def with_straight_lengths(call: AttentionCall, rows: int, keys: int, end: str = "tail") -> AttentionCall | None:
    """The call at other lengths in which what stays sees what it saw before: the right rows' results do not move.

    Positions are cut at `end`; added query rows (at the tail) see what the last row sees, and added keys are hidden
    by the mask where there is one. Values and layout as in `lengths.with_lengths`.
    """
    mask = call.attn_mask
    if mask is None or not is_tensor_mask(call):
        return with_lengths(call, rows, keys, end=end, mask="kept")
    resized = with_lengths(replace(call, attn_mask=None), rows, keys, end=end)
    shape = list(mask.shape)
    if mask.dim() < 2 or overlaps_itself(viewed_once(mask)):
        return None
    shape[-2] = rows if shape[-2] == call.query.shape[-2] and shape[-2] > 1 else shape[-2]
    shape[-1] = keys if shape[-1] == call.key.shape[-2] else shape[-1]
    new = blank_like(mask, shape, restride(mask.shape, mask.stride(), shape)[0])
    source, target = viewed_once(mask.detach()), viewed_once(new)
    tall, wide = min(source.shape[-2], target.shape[-2]), min(source.shape[-1], target.shape[-1])
    kept = source[..., :tall, :wide] if end == "tail" else source[..., -tall:, -wide:]
    target[..., :tall, :wide] = kept
    target[..., tall:, :wide] = kept[..., -1:, :]
    target[..., wide:] = False if _is_bool(target) else -torch.inf
    return replace(resized, attn_mask=new)
