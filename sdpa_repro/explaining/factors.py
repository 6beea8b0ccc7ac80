"""What may matter to a failing call, one factor at a time (see `factor`): what to change, and what the answer means."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from sdpa_repro.attention import ALIGNMENT, AttentionCall, repeats_one, viewed_once
from sdpa_repro.environment import free_memory
from sdpa_repro.errors import InputError
from sdpa_repro.explaining import changes
from sdpa_repro.explaining.factor import Decides, Factor, NoVariant, Setting, Variant
from sdpa_repro.explaining.lengths import with_lengths
from sdpa_repro.visibility import is_tensor_mask, scores_shape

WIDTH_CLASSES = (64, 128, 256)
"""Largest head_dim of the classes that kernels are built for; the last class is everything above."""

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MOST_SCORES = 1 << 26
"""Scores (B·H·L·S) of a trial with longer lengths; the attention matrix of one such trial takes a second or so."""

LONGEST = 1024
"""Length up to which half, twice and eight times the length are tried."""


def _one(words: str, changed: AttentionCall | None, absent: str, line: str = "") -> list[Variant] | NoVariant:
    return NoVariant(absent, True) if changed is None else [Variant(words, changed, line=line)]


def _attn_mask(call: AttentionCall, setting: Setting) -> list[Variant] | NoVariant:
    """Is a mask needed at all? Without it, and with `is_causal` in its place where the two are equal."""
    changed = changes.without_mask(call)
    if changed is None:
        return NoVariant("the call has no mask", True)
    if not _all_finite(call):
        return NoVariant("the mask hides NaN or Inf in key or value, which every row would see without it", False)
    variants = [Variant("no mask", changed)]
    flagged = changes.with_causal_flag(call)
    if flagged is not None:
        variants.append(Variant("is_causal instead of the mask", flagged, line="attn_mask, is_causal = None, True"))
    return variants


def _all_finite(call: AttentionCall) -> bool:
    return all(bool(viewed_once(tensor.detach()).isfinite().all()) for tensor in (call.key, call.value))


def _no_mask(call: AttentionCall, setting: Setting) -> list[Variant] | NoVariant:
    """Does it take the absence of a mask? With one that hides nothing."""
    return _one("a bool mask that hides nothing", changes.with_open_mask(call), "the call has a mask or is_causal")


def _causal_flag(call: AttentionCall, setting: Setting) -> list[Variant] | NoVariant:
    """Does it take `is_causal`? With the equal mask written out."""
    if not call.is_causal:
        return NoVariant("is_causal is not set", True)
    changed = changes.with_causal_mask(call)
    if changed is None:
        return NoVariant("is_causal is set together with a mask, which is an invalid call", False)
    line = "attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()"
    return [Variant("an equal bool mask instead of is_causal", changed, line=f"{line}; is_causal = False")]


def _bool_mask(call: AttentionCall, setting: Setting) -> list[Variant] | NoVariant:
    """Does it take a bool mask? With 0 and -inf in the query's dtype instead."""
    line = "attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, float('-inf'))"
    return _one("the same mask as 0 and -inf", changes.with_float_mask(call), "the mask is not bool", line)


def _float_mask(call: AttentionCall, setting: Setting) -> list[Variant] | NoVariant:
    """Does it take an additive mask? With an equal bool mask instead."""
    mask = call.attn_mask
    if mask is None or not mask.dtype.is_floating_point or not is_tensor_mask(call):
        return NoVariant("there is no additive mask", True)
    changed = changes.with_bool_mask(call)
    if changed is None:
        return NoVariant("the mask adds other values than 0 and -inf: no bool mask is equal to it", False)
    return [Variant("an equal bool mask", changed, line="attn_mask = attn_mask == 0")]


def _mask_dtype(call: AttentionCall, setting: Setting) -> list[Variant] | NoVariant:
    """Does it take a mask in another dtype than the query's? With the mask in that dtype."""
    words, line = "the mask in the query's dtype", "attn_mask = attn_mask.to(query.dtype)"
    absent = "there is no additive mask of another dtype than the query's"
    return _one(words, changes.with_mask_in_query_dtype(call), absent, line)


def _mask_head_broadcast(call: AttentionCall, setting: Setting) -> list[Variant] | NoVariant:
    """Does it take a mask that heads or batch rows share? With one copied for each."""
    mask = call.attn_mask
    batch, heads, rows, keys = scores_shape(call)
    if mask is not None and 4 * batch * heads * rows * keys * mask.element_size() > free_memory(mask.device):
        return NoVariant("not enough memory for a mask of every head", False)
    words, line = "the mask copied for every head", "attn_mask = attn_mask.expand(*query.shape[:-1], -1).contiguous()"
    return _one(words, changes.with_mask_per_head(call), "no mask is shared between heads", line)


def _fully_masked_rows(call: AttentionCall, setting: Setting) -> list[Variant] | NoVariant:
    """Does it take rows that may see no key? With the first key shown to them."""
    changed = changes.with_a_key_in_every_row(call)
    return _one("the first key shown in fully masked rows", changed, "the mask has no fully masked row")


def _left_padding(call: AttentionCall, setting: Setting) -> list[Variant] | NoVariant:
    """Does it take left padding? With the mask as it would be without."""
    return _one("the padding shown in the mask", changes.without_left_padding(call), "the mask has no left padding")


def _head_stride_0(call: AttentionCall, setting: Setting) -> list[Variant] | NoVariant:
    """Do key and value have to repeat one head with stride 0? Both dense, then each alone."""
    repeated = [name for name in ("key", "value") if _repeats_a_head(call, name)]
    if not repeated:
        return NoVariant("neither key nor value has head stride 0", True)
    return _dense_variants(call, repeated, changes.with_dense)


def _repeats_a_head(call: AttentionCall, name: str) -> bool:
    """Whether the head stride is 0: one head repeated, or one alone that was expanded (a kernel sees the stride)."""
    tensor = call.tensors[name]
    return tensor.dim() > 2 and tensor.stride(-3) == 0 and tensor.numel() > 0


def _key_value_layout(call: AttentionCall, setting: Setting) -> list[Variant] | NoVariant:
    """Does the memory of key and value matter (transposed views, slices of a cache) besides repeated heads?"""
    strided = [name for name in ("key", "value") if not viewed_once(call.tensors[name]).is_contiguous()]
    if not strided:
        return NoVariant("key and value are contiguous, repeated heads aside", True)
    return _dense_variants(call, strided, changes.with_dense_head)


def _dense_variants(
    call: AttentionCall, names: list[str], change: Callable[..., AttentionCall | None]
) -> list[Variant] | NoVariant:
    """All of the named tensors dense, which decides, then each alone. The lines to paste make them contiguous."""
    variants = []
    for chosen in [names, *([name] for name in names if len(names) > 1)]:
        changed = change(call, *chosen)
        if changed is not None:
            line = f"{', '.join(chosen)} = {', '.join(_made_dense(call, name) for name in chosen)}"
            words = f"contiguous {' and '.join(chosen)}" + (" alone" if len(names) > len(chosen) else "")
            variants.append(Variant(words, changed, line=line, decides=chosen is names))
    return variants


def _made_dense(call: AttentionCall, name: str) -> str:
    """Python that gives the tensor the strides of its shape."""
    copy = "clone(memory_format=torch.contiguous_format)" if repeats_one(call.tensors[name]) else "contiguous()"
    return f"{name}.{copy}"


def _query_layout(call: AttentionCall, setting: Setting) -> list[Variant] | NoVariant:
    """Does it take a query that is a view, such as a transposed projection? With a contiguous one."""
    changed = changes.with_dense(call, "query")
    return _one("contiguous query", changed, "the query is contiguous", f"query = {_made_dense(call, 'query')}")


def _memory_overlap(call: AttentionCall, setting: Setting) -> list[Variant] | NoVariant:
    """Does value have to share key's memory? With value in its own, same strides."""
    changed = changes.with_value_apart(call)
    return _one("value in memory of its own", changed, "key and value do not share memory", "value = value.clone()")


def _alignment(call: AttentionCall, setting: Setting) -> list[Variant] | NoVariant:
    """Does the pointers' alignment matter? All tensors 256-aligned, and all 16 bytes beyond that."""
    tensors = call.tensors if is_tensor_mask(call) else replace(call, attn_mask=None).tensors
    found = {tensor.data_ptr() % ALIGNMENT for tensor in tensors.values()}
    places = [align for align in (0, 16) if found != {align}]
    return [Variant(f"every pointer at {align} mod 256", changes.with_alignment(call, align)) for align in places]


def _no_grad(call: AttentionCall, setting: Setting) -> list[Variant] | NoVariant:
    """Does it take a call without gradient? With grad mode on and a query that requires it."""
    if _records_gradient(setting.context):
        return NoVariant("the call records a gradient", True)
    context = {**setting.context, "grad": True, "inference": False, "requires_grad": {"query": True}}
    return [Variant("grad on, query requires it", call, context)]


def _grad(call: AttentionCall, setting: Setting) -> list[Variant] | NoVariant:
    """Does it take a call that records a gradient? Without grad."""
    if not _records_gradient(setting.context):
        return NoVariant("the call records no gradient", True)
    context = {**setting.context, "grad": False, "requires_grad": {}}
    return [Variant("grad off", call, context)]


def _records_gradient(context: Mapping[str, Any]) -> bool:
    wants = context.get("requires_grad")
    wanted = isinstance(wants, Mapping) and any(value is True for value in wants.values())
    return context.get("grad") is True and context.get("inference") is not True and wanted


def _values(call: AttentionCall, setting: Setting) -> list[Variant] | NoVariant:
    """Do the values matter? Seeded normal ones of the same spread, and ones that give scores of spread 1."""
    variants = [
        Variant("normal values of the same spread", changes.with_other_values(call, seed=1)),
        Variant("other normal values of the same spread", changes.with_other_values(call, seed=2)),
        Variant("normal values with scores of spread 1", changes.with_other_values(call, seed=3, unit_scores=True)),
    ]
    ones = changes.with_value_of_ones(call)
    if ones is not None:
        variants.append(Variant("value all ones", ones, decides=False))
    return variants


def _scale(call: AttentionCall, setting: Setting) -> list[Variant] | NoVariant:
    """Does it take a given `scale`? Without it."""
    return _one("no scale given", changes.without_scale(call), "no scale is given")


def _default_scale(call: AttentionCall, setting: Setting) -> list[Variant] | NoVariant:
    """Does it take that no `scale` is given? With the same one given."""
    line = "scale = query.shape[-1] ** -0.5"
    return _one("scale = 1/sqrt(E) given", changes.with_default_scale(call), "a scale is given", line)


def _dtype(call: AttentionCall, setting: Setting) -> list[Variant] | NoVariant:
    """Does the dtype matter? In the other ones, without autocast."""
    context = {name: value for name, value in setting.context.items() if name != "autocast"}
    casts = {dtype: changes.cast(call, dtype) for dtype in DTYPES if dtype != call.query.dtype}
    names = {dtype: str(dtype).removeprefix("torch.") for dtype in casts}
    found = [Variant(names[dtype], changed, context) for dtype, changed in casts.items() if changed is not None]
    return found or NoVariant("the values overflow in every other dtype", False)


def _head_dim(call: AttentionCall, setting: Setting) -> list[Variant] | NoVariant:
    """Does the class of head_dim matter? Cut to the classes below, filled up with zeros to the one above."""
    width = max(call.query.shape[-1], call.value.shape[-1])
    below = [limit for limit in WIDTH_CLASSES if limit < width][::-1]
    above = next((limit for limit in WIDTH_CLASSES if width <= limit), None)
    widths = [*below, *([] if above is None else [above + 64 if above == WIDTH_CLASSES[-1] else above * 2])]
    changed = [(width, changes.with_head_dim(call, width)) for width in widths]
    found = [Variant(f"head_dim {width}", other) for width, other in changed if other is not None]
    return found or NoVariant("head_dim cannot be cut in this layout", False)


def _batch(call: AttentionCall, setting: Setting) -> list[Variant] | NoVariant:
    """Does it take more than one batch row? With the wrong one alone."""
    changed = changes.with_batch(call, setting.batch)
    return _one(f"batch row {setting.batch} alone", changed, "the batch has one row")


def _heads(call: AttentionCall, setting: Setting) -> list[Variant] | NoVariant:
    """Does it take several query heads? With two, then one, head strides of 0 still 0.

    Where there are such, one head with strides of its own too: that changes the layout as well and decides nothing,
    but a maintainer who writes one head down plainly gets that call.
    """
    two, one = (changes.with_heads(call, setting.head, count) for count in (2, 1))
    found = [] if two is None else [Variant("two query heads", two)]
    alone = f"query head {setting.head} alone"
    repeated = [] if one is None else [name for name in ("key", "value") if _repeats_a_head(one, name)]
    plain = None if one is None or not repeated else changes.with_dense(one, *repeated)
    if plain is not None and one is not None:
        which = " and ".join(repeated)
        found.append(Variant(f"{alone}, contiguous {which}", plain, decides=False, qualifies=True))
        found.append(Variant(f"{alone}, {which} still with head stride 0", one, qualifies=True))
    elif one is not None:
        found.append(Variant(alone, one))
    return found or NoVariant("there is one query head", True)


def _enable_gqa(call: AttentionCall, setting: Setting) -> list[Variant] | NoVariant:
    """Does it take grouped queries? With key and value heads copied for every query head."""
    line = "key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))"
    changed = changes.without_gqa(call)
    return _one("key and value heads copied", changed, "the call has no grouped queries", f"{line}; enable_gqa = False")


def _next_lengths(axis: str, call: AttentionCall, setting: Setting) -> Iterator[Variant]:
    """Does the length matter? One less and one more."""
    now = _length(axis, call)
    yield from (_with_length(axis, call, length, setting) for length in (now - 1, now + 1) if _tells(length, setting))


def _other_lengths(axis: str, call: AttentionCall, setting: Setting) -> Iterator[Variant]:
    """Does the bug begin or end at some size? One, half, twice and eight times the length, within bounds."""
    now, (batch, heads, rows, keys) = _length(axis, call), scores_shape(call)
    for length in dict.fromkeys((1, now // 2, 2 * now, 8 * now)):
        scores = batch * heads * rows * keys // max(1, now) * length
        if _tells(length, setting) and length <= LONGEST and abs(length - now) > 1 and scores <= MOST_SCORES:
            yield _with_length(axis, call, length, setting)


def _tells(length: int, setting: Setting) -> bool:
    """Whether a trial at this length says something.

    With one key the output is value whatever else is wrong, and with one row most layouts are the same.
    """
    return length > 1 or (length == 1 and setting.crashes)


def _length(axis: str, call: AttentionCall) -> int:
    return call.query.shape[-2] if axis == "L" else call.key.shape[-2]


def _with_length(axis: str, call: AttentionCall, length: int, setting: Setting) -> Variant:
    """One length in several forms, so that a cut or a mask that hides the failing rows does not pass for a cure."""
    rows, keys = call.query.shape[-2], call.key.shape[-2]
    size = (length, keys) if axis == "L" else (rows, length)
    ends = ("tail", "head") if length < _length(axis, call) else ("tail",)
    forms = [changes.with_straight_lengths(call, *size, end) for end in ends]
    if setting.controlled:
        forms.append(with_lengths(call, *size))
    made = [form for form in forms if form is not None]
    if not made:
        raise InputError("the mask cannot be made for other lengths")
    first, *others = made
    return Variant(f"{axis} = {length}", first, forms=tuple(others))


def _same_lengths(call: AttentionCall) -> AttentionCall:
    """The call's own lengths, with the mask that other lengths get."""
    return with_lengths(call, call.query.shape[-2], call.key.shape[-2])


FACTORS: tuple[Factor, ...] = (
    Factor("attn_mask", "a mask", _attn_mask),
    Factor("key_value_head_stride_0", "key and value that repeat one head with stride 0", _head_stride_0),
    Factor("no_grad", "the absence of a gradient", _no_grad),
    Factor(
        "length_L",
        "the query length L",
        partial(_next_lengths, "L"),
        Decides.ANY,
        partial(_other_lengths, "L"),
        _same_lengths,
    ),
    Factor(
        "length_S",
        "the key length S",
        partial(_next_lengths, "S"),
        Decides.ANY,
        partial(_other_lengths, "S"),
        _same_lengths,
    ),
    Factor("values", "these values", _values, Decides.ALL),
    Factor("dtype", "this dtype", _dtype, Decides.ANY),
    Factor("head_dim", "a head_dim of this class", _head_dim, Decides.ANY),
    Factor("query_layout", "a query that is not contiguous", _query_layout),
    Factor("key_value_layout", "key or value that are not contiguous", _key_value_layout),
    Factor("scale", "a given scale", _scale),
    Factor("batch", "several batch rows", _batch),
    Factor("heads", "several query heads", _heads, Decides.LAST),
    Factor("enable_gqa", "grouped queries", _enable_gqa),
    Factor("fully_masked_rows", "fully masked rows", _fully_masked_rows),
    Factor("left_padding", "left padding", _left_padding),
    Factor("bool_mask", "a bool mask", _bool_mask),
    Factor("float_mask", "an additive mask", _float_mask),
    Factor("mask_dtype", "a mask in another dtype than the query", _mask_dtype),
    Factor("mask_head_broadcast", "a mask that heads share", _mask_head_broadcast),
    Factor("no_mask", "the absence of a mask", _no_mask),
    Factor("default_scale", "the absence of a scale", _default_scale),
    Factor("causal_flag", "is_causal", _causal_flag),
    Factor("grad", "a gradient recorded", _grad),
    Factor("memory_overlap", "value in key's memory", _memory_overlap),
    Factor("alignment", "these pointers' alignment", _alignment, Decides.ANY),
)
"""In the order in which they are tried: what most often matters first, for when time runs out."""
