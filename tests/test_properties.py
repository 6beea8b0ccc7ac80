"""Every transformation of a call keeps what it promises, over calls of any mix of shapes, layouts and masks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from sdpa_repro import dump
from sdpa_repro.attention import (
    ALIGNMENT,
    AttentionCall,
    copy_view,
    empty_aligned,
    map_dense,
    memory_groups,
    overlaps_itself,
    rebuild,
    span,
    span_elements,
    viewed_once,
)
from sdpa_repro.explaining import changes
from sdpa_repro.explaining.placing import Filling, placed
from sdpa_repro.recipe import Kind, Recipe, build, from_document, line, to_document
from sdpa_repro.reducing import candidate as candidates
from sdpa_repro.reducing import layout as layouts
from sdpa_repro.reducing import mask as masks
from sdpa_repro.reducing import shape as shapes
from sdpa_repro.reducing import values
from sdpa_repro.reducing.candidate import Candidate, Sizes
from sdpa_repro.reducing.forms import Form
from sdpa_repro.reducing.reducer import Clues
from tests.definition import attention
from tests.strategies import DTYPES, calls, odd_calls, recipes

Change = Callable[[AttentionCall], AttentionCall | None]
FIRST = 6
"""Proposals of a pass that are looked at."""


def bits(tensor: Tensor) -> Tensor:
    """The elements as integers, so that NaN and -0 are compared too."""
    dense = tensor.detach().contiguous()
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dense.element_size()]
    return dense.view(whole) if dense.numel() else torch.empty(dense.shape, dtype=whole)


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(bits(one), bits(other))


def addresses(tensor: Tensor) -> Tensor:
    """The element number of each index of the view, from its first element on."""
    count = span_elements(tensor)
    return torch.arange(count).as_strided(tensor.shape, tensor.stride()) if count else torch.empty(0)


def assert_same_layout(new: AttentionCall, old: AttentionCall) -> None:
    for name, tensor in old.tensors.items():
        fresh = new.tensors[name]
        assert (fresh.shape, fresh.stride()) == (tensor.shape, tensor.stride()), name
        if tensor.numel():
            assert fresh.data_ptr() % ALIGNMENT == tensor.data_ptr() % ALIGNMENT, name


def assert_same_flags(new: AttentionCall, old: AttentionCall) -> None:
    for name in ("dropout_p", "is_causal", "scale", "enable_gqa"):
        assert getattr(new, name) == getattr(old, name)


# ---- attention


@given(odd_calls())
def test_viewed_once_reaches_each_element_and_expands_back(call: AttentionCall) -> None:
    for tensor in call.tensors.values():
        once = viewed_once(tensor)
        assert torch.equal(addresses(tensor).unique(), addresses(once).unique())
        assert same(once.expand(tensor.shape), tensor)


@given(odd_calls())
def test_overlap_is_never_missed_and_a_span_ends_at_the_last_element(call: AttentionCall) -> None:
    for tensor in call.tensors.values():
        reached = addresses(tensor)
        if tensor.numel():
            assert int(reached.max()) + 1 == span_elements(tensor)
            assert overlaps_itself(tensor) or reached.unique().numel() == tensor.numel()


@given(odd_calls())
def test_rebuild_keeps_layout_bits_flags_and_distances(call: AttentionCall) -> None:
    before = {name: bits(tensor).clone() for name, tensor in call.tensors.items()}
    fresh = rebuild(call)
    assert_same_layout(fresh, call)
    assert_same_flags(fresh, call)
    for name, tensor in call.tensors.items():
        assert same(fresh.tensors[name], tensor)
        assert torch.equal(bits(tensor), before[name])
        assert not tensor.numel() or not span(tensor).overlaps(span(fresh.tensors[name]))
    for group in memory_groups({name: t for name, t in call.tensors.items() if t.dtype != torch.bool}):
        starts = [fresh.tensors[name].data_ptr() - call.tensors[name].data_ptr() for name in group]
        assert len(set(starts)) == 1, group


@given(calls(), st.sampled_from(DTYPES))
def test_a_cast_rounds_each_value_as_torch_does_and_keeps_strides(call: AttentionCall, dtype: torch.dtype) -> None:
    fresh = rebuild(call, dtype=dtype)
    for name, tensor in call.tensors.items():
        assert fresh.tensors[name].stride() == tensor.stride()
        assert same(fresh.tensors[name], tensor if tensor.dtype == torch.bool else tensor.to(dtype))


@given(odd_calls(), st.integers(0, 2))
def test_copy_view_writes_the_view_and_nothing_else(call: AttentionCall, which: int) -> None:
    source = (call.query, call.key, call.value)[which]
    count = span_elements(source) + 8
    memory = torch.full((count,), 7.0).to(source.dtype)
    target = memory.as_strided(source.shape, source.stride(), 4)
    if source.numel():
        copy_view(source, target)
    assert same(target, source)
    outside = torch.ones(count, dtype=torch.bool)
    outside[4 + addresses(source).flatten().long()] = False
    if not overlaps_itself(viewed_once(source)):
        assert bool((memory[outside] == 7).all())


@given(odd_calls(), st.sets(st.sampled_from(("query", "key", "value", "attn_mask"))))
def test_map_dense_makes_the_named_tensors_contiguous_and_leaves_the_others(
    call: AttentionCall, names: set[str]
) -> None:
    fresh = map_dense(call, *names)
    assert_same_flags(fresh, call)
    for name, tensor in call.tensors.items():
        assert same(fresh.tensors[name], tensor)
        assert fresh.tensors[name].is_contiguous() if name in names or not names else fresh.tensors[name] is tensor


@given(st.integers(0, 5000), st.integers(0, ALIGNMENT - 1), st.booleans())
def test_memory_is_made_as_long_and_as_aligned_as_asked_for(nbytes: int, align: int, zero: bool) -> None:
    memory = empty_aligned(nbytes, align, "cpu", zero=zero)
    assert memory.numel() == nbytes
    assert not nbytes or memory.data_ptr() % ALIGNMENT == align
    assert not zero or not bool(memory.any())


# ---- dumps


@given(odd_calls(), st.booleans())
def test_a_dump_gives_back_bits_strides_alignment_and_overlap(call: AttentionCall, with_output: bool) -> None:
    output = call.value.clone() if with_output else None
    with TemporaryDirectory() as folder:
        path = Path(folder) / "x.pt"
        dump.save(dump.snapshot(call, output), path)
        read = dump.load(path)
        assert dump.layout_differences(call, read.call) == []
        assert_same_layout(read.call, call)
        assert_same_flags(read.call, call)
        for name, tensor in call.tensors.items():
            assert same(read.call.tensors[name], tensor)
        for group in memory_groups(call.tensors):
            starts = [read.call.tensors[name].data_ptr() - call.tensors[name].data_ptr() for name in group]
            assert len(set(starts)) == 1, group
        assert (read.output is None) == (output is None)
        assert output is None or read.output is None or same(read.output, output)


# ---- changes that mean the same

SAME: dict[str, Change] = {
    "a bool mask as numbers": changes.with_float_mask,
    "a mask of 0 and -inf as bool": changes.with_bool_mask,
    "the causal flag written out": changes.with_causal_mask,
    "a causal mask as the flag": changes.with_causal_flag,
    "an open mask": changes.with_open_mask,
    "a mask for each head": changes.with_mask_per_head,
    "the default scale given": changes.with_default_scale,
    "heads copied": changes.without_gqa,
    "all dense": lambda call: changes.with_dense(call, *call.tensors),
    "key and value dense but repeated": lambda call: changes.with_dense_head(call, "key", "value"),
    "value apart": changes.with_value_apart,
    "another alignment": lambda call: changes.with_alignment(call, 16),
    "between guards": lambda call: placed(call, guard=ALIGNMENT, filling=Filling(0xFF, 0x01)),
}


@pytest.mark.parametrize("name", SAME)
@given(call=calls())
def test_a_change_of_form_changes_no_result(name: str, call: AttentionCall) -> None:
    changed = SAME[name](call)
    assume(changed is not None)
    assert changed is not None
    assert torch.equal(attention(changed), attention(call))


def test_changes_have_calls_to_hold_on_to() -> None:
    """The property above would hold of changes that never apply."""
    applied: set[str] = set()

    @settings(max_examples=200)
    @given(calls())
    def look(call: AttentionCall) -> None:
        applied.update(name for name, change in SAME.items() if change(call) is not None)

    look()
    assert applied == set(SAME)


@given(calls(), st.data())
def test_one_batch_row_or_some_heads_give_their_part_of_the_result(call: AttentionCall, data: st.DataObject) -> None:
    batch, heads = call.query.shape[:2]
    chosen = data.draw(st.integers(0, batch - 1))
    row = changes.with_batch(call, chosen)
    if row is not None:
        torch.testing.assert_close(attention(row), attention(call)[chosen : chosen + 1], rtol=1e-12, atol=1e-12)
    head, count = data.draw(st.integers(0, heads - 1)), data.draw(st.integers(1, heads))
    some = changes.with_heads(call, head, count)
    if some is not None:
        assert some.query.shape[1] == count
        whole, part = attention(call), attention(some)
        assert any(torch.allclose(part, whole[:, at : at + count], atol=1e-12) for at in range(heads - count + 1))
        assert all(some.tensors[name].stride() == tensor.stride() for name, tensor in call.tensors.items())


@given(calls(), st.integers(0, 9), st.booleans())
def test_other_values_keep_the_layout_and_the_mask(call: AttentionCall, seed: int, unit: bool) -> None:
    changed = changes.with_other_values(call, seed, unit_scores=unit)
    assert_same_layout(changed, call)
    assert_same_flags(changed, call)
    assert call.attn_mask is None or same(changed.tensors["attn_mask"], call.attn_mask)
    assert all(bool(tensor.isfinite().all()) for name, tensor in changed.tensors.items() if name != "attn_mask")


@given(calls())
def test_a_key_in_every_row_leaves_the_rows_that_had_one(call: AttentionCall) -> None:
    changed = changes.with_a_key_in_every_row(call)
    assume(changed is not None)
    assert changed is not None
    before, after = attention(call), attention(changed)
    seen = torch.ones(call.query.shape[-2], call.key.shape[-2])
    mask = call.attn_mask
    assert mask is not None
    visible = mask if mask.dtype == torch.bool else mask > -math.inf
    alive = (visible & seen.bool()).any(-1).expand(call.query.shape[:3])
    assert torch.equal(before[alive], after[alive])


@given(calls(), st.integers(1, 12))
def test_a_cut_head_dim_keeps_the_first_columns_and_a_longer_one_adds_zeros(call: AttentionCall, width: int) -> None:
    changed = changes.with_head_dim(call, width)
    if changed is None:
        return
    for name in ("query", "key", "value"):
        old, new = call.tensors[name], changed.tensors[name]
        kept = min(old.shape[-1], new.shape[-1])
        assert same(new[..., :kept], old[..., :kept])
        assert not bool(new[..., kept:].any())


@given(calls(shared=False), st.integers(1, 7), st.integers(1, 7))
def test_straight_lengths_leave_the_rows_that_stay(call: AttentionCall, rows: int, keys: int) -> None:
    assume(call.attn_mask is not None and keys >= call.key.shape[2])
    changed = changes.with_straight_lengths(call, rows, keys)
    assume(changed is not None)
    assert changed is not None
    kept = min(rows, call.query.shape[2])
    torch.testing.assert_close(attention(changed)[:, :, :kept], attention(call)[:, :, :kept], rtol=1e-12, atol=1e-12)


@given(calls(), st.sampled_from(DTYPES))
def test_a_cast_that_is_made_overflows_nowhere(call: AttentionCall, dtype: torch.dtype) -> None:
    changed = changes.cast(call, dtype)
    assume(changed is not None)
    assert changed is not None
    assert changed.query.dtype == dtype
    for name in ("query", "key", "value"):
        assert torch.equal(changed.tensors[name].isfinite(), call.tensors[name].isfinite())


# ---- reducing

CLUES = Clues(batch=0, head=0)


def proposals(found: Iterator[Candidate]) -> list[Candidate]:
    """The first few of a pass."""
    return list(islice(found, FIRST))


@given(calls(), st.data())
def test_a_call_in_smaller_sizes_has_them_and_keeps_its_dtypes(call: AttentionCall, data: st.DataObject) -> None:
    old = Sizes.of(call)
    size = {name: data.draw(st.integers(1, getattr(old, name)), label=name) for name in ("B", "L", "S", "E", "Ev")}
    size["E"], size["Ev"] = max(size["E"], size["Ev"]), min(size["E"], size["Ev"])
    assume(size["E"] <= old.E and size["Ev"] <= old.Ev)
    wanted = replace(old, **size)
    small = candidates.sized(Candidate(call), wanted)
    assert small.sizes == wanted
    assert all(small.call.tensors[name].dtype == tensor.dtype for name, tensor in call.tensors.items())
    if (wanted.L, wanted.S) == (old.L, old.S):
        assert same(small.call.query, call.query[: wanted.B, :, :, : wanted.E])
        assert same(small.call.key, call.key[: wanted.B, :, :, : wanted.E])


@given(calls())
def test_passes_that_make_a_call_smaller_propose_smaller_ones(call: AttentionCall) -> None:
    here = Candidate(call)
    for step in (shapes.batch, shapes.heads, shapes.lengths, shapes.widths):
        for found in proposals(step(here, CLUES)):
            sizes, old = found.sizes, here.sizes
            assert sizes.B <= old.B
            assert sizes.H <= old.H
            assert sizes.E <= old.E
            assert max(sizes.L, sizes.S) <= max(old.L, old.S)
            assert sizes.H % sizes.Hkv == 0


@given(calls())
def test_passes_over_the_layout_change_no_value(call: AttentionCall) -> None:
    here = Candidate(call)
    for step in (layouts.apart, layouts.layout):
        for found in proposals(step(here, CLUES)):
            for name, tensor in call.tensors.items():
                assert same(found.call.tensors[name], tensor)
    for name, tensor in layouts.loose(here).call.tensors.items():
        assert same(tensor, call.tensors[name])


@given(calls())
def test_passes_over_the_mask_leave_the_other_tensors(call: AttentionCall) -> None:
    for found in proposals(masks.mask(Candidate(call), CLUES)):
        for name in ("query", "key", "value"):
            assert found.call.tensors[name] is call.tensors[name]
        if found.call.attn_mask is not None:
            shape = (*call.query.shape[:3], call.key.shape[2])
            assert torch.broadcast_shapes(found.call.attn_mask.shape, shape) == shape


@given(calls())
def test_values_in_closed_form_are_laid_out_as_the_captured_ones_and_stated(call: AttentionCall) -> None:
    here = Candidate(call)
    for found in proposals(values.values(here, CLUES)):
        assert found.forms.keys() & {"query", "key", "value"}
        for name, tensor in found.call.tensors.items():
            old = call.tensors[name]
            assert (tensor.shape, tensor.dtype) == (old.shape, old.dtype)
            pairs = zip(tensor.shape, tensor.stride(), old.stride(), strict=True)
            assert all(new == step for size, new, step in pairs if size > 1)
        for name, recipe in found.recipes.items():
            assert same(build(recipe), found.call.tensors[name])


@given(calls(), st.sampled_from([Form(Kind.RANDINT, seed=3), Form(Kind.RANDN, seed=3), Form(Kind.ARANGE, dim=-1)]))
def test_a_candidates_key_tells_calls_apart_and_only_those(call: AttentionCall, form: Form) -> None:
    here = Candidate(call)
    assert here.key == Candidate(replace(call)).key
    assert here.key != Candidate(replace(call, scale=0.25)).key
    made = candidates.formed(here, {"query": form})
    assert made is None or made.key != here.key


# ---- recipes


@given(recipes())
def test_a_recipe_comes_back_from_its_document_and_builds_the_same(recipe: Recipe) -> None:
    back = from_document(to_document(recipe))
    assert back == recipe
    assert same(build(back), build(recipe))


@given(recipes())
def test_a_recipes_line_builds_the_tensor_it_states(recipe: Recipe) -> None:
    names: dict[str, object] = {"torch": torch}
    exec(line(recipe, "made"), names)
    made, built = names["made"], build(recipe)
    assert isinstance(made, Tensor)
    assert same(made, built)
    assert (made.stride(), made.storage_offset()) == (built.stride(), built.storage_offset())
