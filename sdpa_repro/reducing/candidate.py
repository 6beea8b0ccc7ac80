"""A call on its way to becoming small: its tensors, which of them have a closed form, and how to change its size."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from sdpa_repro.attention import AttentionCall, is_rule, overlaps_itself, viewed_once
from sdpa_repro.explaining.length_layout import restride
from sdpa_repro.explaining.lengths import Resize, resizer
from sdpa_repro.explaining.placing import blank_like
from sdpa_repro.recipe import Kind, Recipe, build
from sdpa_repro.reducing.forms import Form, recipe_of
from sdpa_repro.visibility import fully_masked_rows

INPUTS = ("query", "key", "value")


@dataclass(frozen=True)
class Sizes:
    """The sizes of a call: query (B, H, L, E), key (B, Hkv, S, E), value (B, Hkv, S, Ev)."""

    B: int
    H: int
    Hkv: int
    L: int
    S: int
    E: int
    Ev: int

    @staticmethod
    def of(call: AttentionCall) -> Sizes:
        """The sizes of a call with four dimensions."""
        batch, heads, rows, width = call.query.shape
        return Sizes(batch, heads, call.key.shape[1], rows, call.key.shape[2], width, call.value.shape[3])

    def __str__(self) -> str:
        """B×H×L×E, and what differs from it."""
        text = f"{self.B}×{self.H}×{self.L}×{self.E}"
        more = {"Hkv": (self.Hkv, self.H), "S": (self.S, self.L), "Ev": (self.Ev, self.E)}
        return text + "".join(f", {name} {here}" for name, (here, usual) in more.items() if here != usual)


@dataclass(frozen=True)
class Candidate:
    """A call, and the form of each tensor that has one; the others hold captured values.

    `exact`: strides of dimensions of size 1 matter to this failure and are kept.
    """

    call: AttentionCall
    forms: Mapping[str, Form] = field(default_factory=dict)
    exact: bool = False
    resizers: dict[str, Resize] = field(default_factory=dict, init=False, compare=False, repr=False)
    """By the end where positions are cut off: the call is looked through once for all its lengths."""

    @property
    def sizes(self) -> Sizes:
        return Sizes.of(self.call)

    @property
    def captured(self) -> tuple[str, ...]:
        """Names of the tensors without a closed form; a `CausalBias` has no values."""
        tensors = self.call.tensors
        return tuple(name for name in tensors if name not in self.forms and not is_rule(tensors[name]))

    @property
    def elements(self) -> int:
        """Numbers in query, key, value and mask, repeated ones counted: the size that reducing brings down."""
        return sum(tensor.numel() for name, tensor in self.call.tensors.items() if not is_rule(tensor))

    @property
    def recipes(self) -> dict[str, Recipe]:
        """The recipe of each tensor with a form."""
        found = {name: recipe_for(self, name, form) for name, form in self.forms.items()}
        return {name: recipe for name, recipe in found.items() if recipe is not None}

    @cached_property
    def key(self) -> str:
        """Equal for two candidates that are the same call: forms, shapes, strides, flags, captured bytes."""
        call = self.call
        parts: list[tuple[object, ...]] = []
        for name, tensor in call.tensors.items():
            parts.append((name, str(tensor.dtype), tuple(tensor.shape), tensor.stride(), self.forms.get(name)))
            if name not in self.forms and not is_rule(tensor):
                parts.append((tensor.data_ptr() % 16, _digest(tensor)))
        return str((parts, call.is_causal, call.scale, call.enable_gqa))


def _digest(tensor: Tensor) -> str:
    once = viewed_once(tensor.detach())
    held = once.contiguous().cpu().view(-1)
    return hashlib.sha256(held.view(torch.uint8).numpy().data if held.numel() else b"").hexdigest()


def recipe_for(candidate: Candidate, name: str, form: Form) -> Recipe | None:
    """The form laid out as the candidate's tensor is now."""
    tensor = candidate.call.tensors[name]
    return recipe_of(form, tensor.shape, tensor.stride(), tensor.dtype, exact=candidate.exact)


def formed(candidate: Candidate, forms: Mapping[str, Form]) -> Candidate | None:
    """The candidate with some tensors in closed form, laid out as they are; None when one has no meaning there."""
    fresh: dict[str, Tensor] = {}
    for name, form in forms.items():
        recipe = recipe_for(candidate, name, form)
        if recipe is None:
            return None
        fresh[name] = build(recipe, candidate.call.query.device)
    return replace(candidate, call=candidate.call.with_tensors(fresh), forms={**candidate.forms, **forms})


def relaid(candidate: Candidate, name: str, stride: Sequence[int]) -> Candidate | None:
    """One tensor with other strides, its values as they are; its own memory at an alignment of 256 bytes."""
    tensor = candidate.call.tensors[name]
    fresh = _blank(tensor, tensor.shape, stride)
    if name in candidate.forms:
        changed = replace(candidate, call=candidate.call.with_tensors({name: fresh}))
        return formed(changed, {name: candidate.forms[name]})
    if not _copied(tensor, fresh):
        return None
    return replace(candidate, call=candidate.call.with_tensors({name: fresh}))


def _blank(tensor: Tensor, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
    aligned = tensor.new_empty(0)
    return blank_like(aligned, shape, stride)


def _copied(source: Tensor, target: Tensor) -> bool:
    """Copy values between layouts; False when the target cannot hold them (it repeats what differs)."""
    once = viewed_once(target)
    if overlaps_itself(once):
        return False
    index = tuple(slice(0, size) for size in once.shape)
    once.copy_(source.detach()[index])
    return torch.equal(target, source.detach()) or bool(source.isnan().any())


def sized(
    candidate: Candidate, sizes: Sizes, *, end: str = "tail", batch: int = 0, heads: Sequence[int] = ()
) -> Candidate:
    """The candidate in other sizes: captured tensors are cut, closed forms built anew, layouts stay in their family.

    end: where captured positions are cut off. batch: the first captured batch row kept. heads: the captured query
    heads kept (default: the first ones, evenly from each key/value head).
    """
    call, old = candidate.call, candidate.sizes
    if candidate.captured or is_rule(call.attn_mask):
        call = _cut(call, old, sizes, batch, heads or _first_heads(old, sizes), candidate.exact)
        if (sizes.L, sizes.S) != (old.L, old.S):
            call = _resizer(candidate, call, end)(sizes.L, sizes.S)
    fresh = {}
    for name in candidate.forms:
        tensor = candidate.call.tensors[name]
        shape = shape_for(name, tensor.shape, old, sizes)
        stride, _ = restride(tensor.shape, tensor.stride(), shape)
        fresh[name] = _blank(tensor, shape, stride if candidate.exact else _loosened(shape, stride))
    forms = {name: _grown(form, name, old, sizes, call) for name, form in candidate.forms.items()}
    found = formed(replace(candidate, call=call.with_tensors(fresh)), forms)
    return candidate if found is None else found


def _resizer(candidate: Candidate, call: AttentionCall, end: str) -> Resize:
    """`lengths.resizer` of a call, kept when it is the candidate's own."""
    if call is not candidate.call:
        return resizer(call, end=end)
    if end not in candidate.resizers:
        candidate.resizers[end] = resizer(call, end=end)
    return candidate.resizers[end]


def shape_for(name: str, shape: Sequence[int], old: Sizes, new: Sizes) -> tuple[int, ...]:
    """The shape of a tensor in other sizes; dimensions of a mask that are broadcast (size 1) stay so."""
    sizes: dict[str, tuple[int, ...]] = {
        "query": (new.B, new.H, new.L, new.E),
        "key": (new.B, new.Hkv, new.S, new.E),
        "value": (new.B, new.Hkv, new.S, new.Ev),
        "attn_mask": (new.B, new.H, new.L, new.S),
    }
    whole = sizes[name][4 - len(shape) :]
    if name != "attn_mask":
        return min(whole[0], shape[0]), *whole[1:]
    return tuple(1 if size == 1 else fresh for size, fresh in zip(shape, whole, strict=True))


def _grown(form: Form, name: str, old: Sizes, new: Sizes, call: AttentionCall) -> Form:
    """A constant query and key grow as E shrinks, so that their product stays what it was."""
    if form.kind is not Kind.FULL or name not in ("query", "key") or new.E >= old.E or abs(form.constant) <= 1:
        return form
    share = old.E / new.E if call.scale is not None else (old.E / new.E) ** 0.5
    return replace(form, constant=float(round(form.constant * share**0.5 + (0.5 if form.constant > 0 else -0.5))))


def _first_heads(old: Sizes, new: Sizes) -> list[int]:
    group, count = old.H // max(1, old.Hkv), new.H // max(1, new.Hkv)
    return [kv * group + index for kv in range(new.Hkv) for index in range(count)]


def _cut(call: AttentionCall, old: Sizes, new: Sizes, batch: int, heads: Sequence[int], exact: bool) -> AttentionCall:
    """Batch rows, heads and columns left out; L and S stay."""
    if (old.B, old.H, old.Hkv, old.E, old.Ev) == (new.B, new.H, new.Hkv, new.E, new.Ev):
        return call
    group = old.H // max(1, old.Hkv)
    kv_heads = list(dict.fromkeys(head // group for head in heads)) if old.Hkv > 1 else [0]
    fresh: dict[str, Tensor] = {}
    for name, tensor in call.tensors.items():
        if is_rule(tensor):
            continue
        picked = tensor.detach()
        front = picked.dim() - 4
        if front == 0 and picked.shape[0] > new.B:
            picked = picked.narrow(0, min(batch, picked.shape[0] - new.B), new.B)
        chosen = kv_heads if name in ("key", "value") else list(heads)
        if picked.dim() >= 3 and picked.shape[-3] > 1:
            picked = _picked(picked, picked.dim() - 3, chosen)
        if name in INPUTS:
            picked = picked.narrow(-1, 0, new.Ev if name == "value" else new.E)
        fresh[name] = _settled(tensor, picked, exact)
    return call.with_tensors(fresh)


def _picked(tensor: Tensor, dim: int, indices: Sequence[int]) -> Tensor:
    """Some positions of a dimension; a repeated one (stride 0) stays repeated."""
    if tensor.stride(dim) == 0:
        return tensor.narrow(dim, 0, len(indices))
    return tensor.index_select(dim, torch.tensor(indices, device=tensor.device))


def _settled(before: Tensor, picked: Tensor, exact: bool) -> Tensor:
    """`picked` (a part of `before`) in memory of its own with strides of the family of `before`."""
    stride, _ = restride(before.shape, before.stride(), picked.shape)
    target = blank_like(before, picked.shape, stride if exact else _loosened(picked.shape, stride))
    return target if _copied(picked, target) else picked


def _loosened(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Strides with those of size-1 dimensions set to what a dense tensor would have."""
    fresh, reach = list(stride), 1
    for dim in reversed(range(len(shape))):
        if shape[dim] == 1:
            fresh[dim] = reach
        reach = max(reach, fresh[dim] * shape[dim])
    return tuple(fresh)


def loosened(candidate: Candidate) -> Candidate:
    """The candidate with dense strides in every dimension of size 1, where nothing reads them."""
    fresh = {}
    for name, tensor in candidate.call.tensors.items():
        if is_rule(tensor) or 1 not in tensor.shape or tensor.dim() < 1:
            continue
        fresh[name] = tensor.as_strided(tensor.shape, _loosened(tensor.shape, tensor.stride()), tensor.storage_offset())
    return replace(candidate, call=candidate.call.with_tensors(fresh))


def sound(call: AttentionCall) -> str:
    """Why a failure of this call would mean nothing; "" when it is a proper call.

    A call that no backend has to take (wrong shapes, mask and flag together), without a number in it, or whose rows
    are all fully masked.
    """
    tensors: Mapping[str, Any] = call.tensors
    if any(not tensor.numel() for tensor in tensors.values() if not is_rule(tensor)):
        return "it has no elements"
    if call.key.shape[-2] != call.value.shape[-2]:
        return "key and value differ in length"
    if call.query.shape[-1] != call.key.shape[-1]:
        return "query and key differ in head_dim"
    if call.is_causal and call.attn_mask is not None:
        return "it has both attn_mask and is_causal"
    if bool(fully_masked_rows(call).all()):
        return "every row is fully masked"
    return ""
