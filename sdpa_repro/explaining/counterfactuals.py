"""What a broken kernel would have computed, in float64: one small function for each way of being wrong.

Each takes some query rows of one head and rewrites the attention of just these rows (`rows_of`): another scale,
fewer keys, another head's key and value. Attention by its definition of the rewritten call is what the broken
kernel is believed to have returned. Mask rows have a module of their own (`mask_rows`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from sdpa_repro.attention import AttentionCall
from sdpa_repro.explaining.believed import Believed, Counterfactual, Part, by_definition, defined, log_sum_exp, own_rows
from sdpa_repro.explaining.key_counterfactuals import last_keys, more_keys
from sdpa_repro.explaining.mask_counterfactuals import causal, masks
from sdpa_repro.replaying.reference import four_dims, head_groups, rows_of


def counterfactuals(call: AttentionCall) -> list[Counterfactual]:
    """Every way of being wrong that this call can show, the plainest first (those about mask rows not included)."""
    flat = four_dims(call)
    return [
        *_symptoms(flat),
        *masks(call, flat),
        *_scales(flat),
        *_heads_and_batches(flat),
        *_layouts(call),
        *last_keys(flat),
        *more_keys(flat),
        *causal(call, flat),
        *_sums(flat),
    ]


def _symptoms(flat: AttentionCall) -> Iterator[Counterfactual]:
    """Rows that hold nothing: what they are is said, not why."""

    def filled(number: float) -> Callable[[int, int, Tensor], Believed]:
        def compute(batch: int, head: int, rows: Tensor) -> Believed:
            output = torch.full((len(rows), flat.value.shape[-1]), number, dtype=torch.float64, device=rows.device)
            return Believed(output, output.new_zeros(len(rows)))

        return compute

    yield Counterfactual("rows_zero", ("rows_zero",), "zero", filled(0.0), symptom=True)
    yield Counterfactual("rows_nan", ("rows_nan",), "NaN", filled(float("nan")), symptom=True)


def _scales(flat: AttentionCall) -> Iterator[Counterfactual]:
    """Another factor on query·key than the one asked for."""
    scale, width = flat.softmax_scale, flat.query.shape[-1]
    default = replace(flat, scale=None).softmax_scale
    given = f"instead of the scale given, {scale:g}" if flat.scale is not None else f"instead of {scale:g}"
    others = {
        "default": (default, f"computed with the default scale 1/sqrt({width}) = {default:g} {given}"),
        "missing": (1.0, f"computed without the scale {scale:g}"),
        "squared": (scale * scale, f"computed with the scale applied twice ({scale:g} squared)"),
        "root": (abs(scale) ** 0.5, f"computed with the square root of the scale {scale:g}"),
    }
    known = [scale]
    for name, (factor, clause) in others.items():
        if all(abs(factor - other) > 1e-6 * max(1.0, abs(other)) for other in known):
            known.append(factor)
            yield defined(f"scale_{name}", clause, own_rows(replace(flat, scale=factor)))


def _heads_and_batches(flat: AttentionCall) -> Iterator[Counterfactual]:
    """Key and value taken from another head or batch entry."""
    heads, kv_heads, batches = flat.query.shape[1], flat.key.shape[1], flat.query.shape[0]
    sources = {first: shared[0] for first, last, shared in head_groups(flat) for first in range(first, last)}

    def from_head(wrong: Callable[[int], int]) -> Part:
        def part(batch: int, head: int, rows: Tensor) -> AttentionCall | None:
            right = rows_of(flat, batch, head, rows)
            key, value = (tensor[batch, wrong(head)][None, None] for tensor in (flat.key, flat.value))
            return replace(right, key=key, value=value)

        return part

    def from_batch(batch: int, head: int, rows: Tensor) -> AttentionCall:
        first = rows_of(flat, 0, head, rows)
        return replace(rows_of(flat, batch, head, rows), key=first.key, value=first.value)

    if kv_heads == flat.value.shape[1] and len(set(sources.values())) > 1:
        if kv_heads < heads:
            clause = f"computed with key/value head h % {kv_heads} instead of h // {heads // kv_heads}"
            yield defined("head_interleaved", clause, from_head(lambda head: head % kv_heads))
        yield defined("head_0", "computed with key/value head 0", from_head(lambda head: 0))
    if batches > 1:
        yield defined("batch_0", "computed with the key and value of batch entry 0", from_batch)
        clause = "computed from batch entry 0"
        yield defined("all_batch_0", clause, lambda batch, head, rows: rows_of(flat, 0, head, rows))


def _layouts(call: AttentionCall) -> Iterator[Counterfactual]:
    """Tensors read as if they were contiguous from their first element, where that memory exists."""
    dense = {name: _read_as_contiguous(tensor) for name, tensor in call.tensors.items() if name != "attn_mask"}
    found = {name: tensor for name, tensor in dense.items() if tensor is not None}
    choices: list[tuple[str, ...]] = [(name,) for name in found]
    choices += [("key", "value")] if {"key", "value"} <= found.keys() else []
    choices += [("query", "key", "value")] if len(found) == 3 else []
    for names in choices:
        misread = four_dims(call.with_tensors({name: found[name] for name in names}))
        text = " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
        clause = f"computed with {text} read as if contiguous, {'its' if len(names) == 1 else 'their'} strides ignored"
        id = f"{'_'.join(names)}_strides"
        yield defined(id, clause, own_rows(misread))


def _read_as_contiguous(tensor: Tensor) -> Tensor | None:
    """The tensor's shape laid over its memory in storage order; None when it is contiguous or memory is missing."""
    held = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
    if tensor.is_contiguous() or held < tensor.numel():
        return None
    strides = torch.empty(tensor.shape, device="meta").stride()
    return tensor.detach().as_strided(tensor.shape, strides, tensor.storage_offset())


def _sums(flat: AttentionCall) -> Iterator[Counterfactual]:
    """The softmax left without its division, after or without subtracting the row's largest score."""
    for name, clause in (("shifted", "softmax not normalised"), ("plain", "exp(score) not normalised")):

        def compute(batch: int, head: int, rows: Tensor, subtracts: bool = name == "shifted") -> Believed | None:
            part = rows_of(flat, batch, head, rows)
            right = by_definition(part)
            total, top = log_sum_exp(part)
            factor = (total - top if subtracts else total).exp()
            return right and Believed(right.output * factor[:, None], right.limit * factor)

        yield Counterfactual("not_normalised", ("not_normalised", name), f"computed with {clause}", compute)
