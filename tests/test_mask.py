"""What a mask allows, in words that are checked by building the mask again from them."""

from __future__ import annotations

import math
import random
import time

import pytest
import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from sdpa_repro import mask as mask_module
from sdpa_repro import visibility
from sdpa_repro.attention import AttentionCall
from sdpa_repro.errors import InputError
from sdpa_repro.mask import MaskDescription, bias_rows, describe, fully_masked_rows, picture, ranges, ranges_text
from tests.calls import causal_mask, make_call


def masked_call(
    mask: Tensor | None, batch: int = 1, heads: int = 1, rows: int = 0, keys: int = 0, is_causal: bool = False
) -> AttentionCall:
    """A call of the mask's own L and S unless given; tensors of width 1, values do not matter."""
    rows = rows or (mask.shape[-2] if mask is not None else 1)
    keys = keys or (mask.shape[-1] if mask is not None else 1)
    query = torch.zeros(batch, heads, rows, 1)
    key = torch.zeros(batch, heads, keys, 1)
    return AttentionCall(query, key, key, mask, is_causal=is_causal)


def additive(visible: Tensor, dtype: torch.dtype = torch.float32, hidden: float = -math.inf) -> Tensor:
    return torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, hidden)


def grid(rows: int, keys: int) -> tuple[Tensor, Tensor]:
    """Row and key indices, to write masks from their definition."""
    return torch.arange(rows)[:, None], torch.arange(keys)[None]


def assert_exact(call: AttentionCall, description: MaskDescription) -> None:
    """Every part that claims a rule rebuilds the mask of its batches and heads bit for bit."""
    rows = call.query.shape[-2]
    for part in description.parts:
        if part.pattern.kind == "arbitrary":
            continue
        rebuilt = part.pattern.visible(0, rows)
        for b in (index for first, last in part.batches for index in range(first, last + 1)):
            for h in (index for first, last in part.heads for index in range(first, last + 1)):
                assert torch.equal(rebuilt, bias_rows(call, b, h, 0, rows))


def words_of(mask: Tensor) -> list[str]:
    call = masked_call(mask)
    description = describe(call)
    assert_exact(call, description)
    return [word for word in description.words() if not word.startswith("density")]


def test_a_causal_mask_with_left_padding_is_named_with_its_fully_masked_rows() -> None:
    assert words_of(causal_mask(33, 33, 7)) == ["causal", "left padding 7", "fully masked rows 0–6"]


def test_a_mask_that_hides_nothing_is_called_so() -> None:
    assert words_of(torch.ones(5, 8, dtype=torch.bool)) == ["every row sees every key"]
    assert describe(masked_call(torch.ones(5, 8, dtype=torch.bool))).headline == "mask that hides nothing"


def test_no_mask_and_no_flag_is_not_a_mask() -> None:
    description = describe(masked_call(None, rows=3, keys=4))
    assert (description.kind, description.density) == ("none", 1.0)
    assert description.words() == ["no mask: every row sees every key"]


def test_right_padding_is_told_from_left_padding() -> None:
    _, key = grid(6, 10)
    assert words_of((key < 7).expand(6, 10)) == ["right padding 3"]
    assert words_of((key >= 2).expand(6, 10)) == ["left padding 2"]
    row, key = grid(10, 10)
    assert words_of((key <= row) & (key < 7)) == ["causal", "right padding 3"]


def test_a_hole_between_visible_keys_is_named() -> None:
    row, key = grid(12, 12)
    assert words_of((key <= row) & ((key < 4) | (key > 6))) == ["causal", "keys 4–6 hidden from every row"]


def test_unused_cache_slots_beyond_a_causal_limit_are_not_called_padding() -> None:
    row, key = grid(8, 32)
    assert words_of(key <= row) == ["causal"]


@pytest.mark.parametrize("window", [1, 4, 9])
def test_a_sliding_window_is_measured(window: int) -> None:
    row, key = grid(24, 24)
    assert words_of((key <= row) & (key > row - window)) == ["causal", f"sliding window {window}"]


def test_a_sliding_window_with_left_padding_names_both() -> None:
    row, key = grid(24, 24)
    visible = (key <= row) & (key > row - 5) & (key >= 3)
    assert words_of(visible) == ["causal", "sliding window 5", "left padding 3", "fully masked rows 0–2"]


def test_an_image_block_sees_both_ways() -> None:
    row, key = grid(40, 40)
    block = (row >= 5) & (row <= 20) & (key >= 5) & (key <= 20)
    assert words_of((key <= row) | block) == ["causal", "image block 5–20 (bidirectional)"]


def test_image_blocks_within_a_sliding_window_and_padding_are_all_named() -> None:
    row, key = grid(64, 64)
    visible = (key <= row) & (key > row - 8)
    for start, stop in ((5, 20), (21, 30), (50, 55)):
        visible |= (row >= start) & (row <= stop) & (key >= start) & (key <= stop)
    visible &= key >= 2
    assert words_of(visible) == [
        "causal",
        "sliding window 8",
        "image blocks 5–20, 21–30, 50–55 (bidirectional)",
        "left padding 2",
        "fully masked rows 0–1",
    ]


def test_a_chunk_after_a_cache_is_causal_to_the_bottom_right() -> None:
    row, key = grid(4, 20)
    assert words_of(key <= row + 16)[0] == "causal, aligned to the bottom right (row i sees keys up to i +16)"
    assert words_of((key <= row + 16) & (key > row + 12))[1] == "sliding window 4"


def test_a_band_is_given_by_its_limits() -> None:
    row, key = grid(30, 30)
    assert words_of((key <= row + 3) & (key >= row - 2)) == ["band (row i sees keys from i -2 to i +3)"]
    assert words_of(key < row) == ["causal, shifted (row i sees keys up to i -1)", "fully masked rows 0"]
    assert words_of(key >= row - 4) == ["band (row i sees keys from i - 4 on)"]


def test_packed_documents_are_block_diagonal() -> None:
    document = torch.tensor([0] * 10 + [1] * 5 + [2] * 9)
    same = document[:, None] == document[None]
    assert words_of(same) == ["block-diagonal", "3 blocks on the diagonal: 0–9, 10–14, 15–23"]
    assert words_of(same.tril()) == ["causal", "3 blocks on the diagonal: 0–9, 10–14, 15–23"]


def test_blocks_of_cross_attention_name_rows_and_keys() -> None:
    visible = torch.zeros(8, 12, dtype=torch.bool)
    visible[:3, :5] = True
    visible[3:, 5:] = True
    assert words_of(visible) == [
        "block-diagonal",
        "2 blocks on the diagonal: rows 0–2 with keys 0–4, rows 3–7 with keys 5–11",
    ]


def test_padding_rows_opened_to_every_key_are_named() -> None:
    visible = causal_mask(20, 20, 4)[0, 0].clone()
    visible[:4] = True
    assert words_of(visible) == ["causal", "left padding 4", "rows 0–3 see every key"]


def test_rows_masked_against_the_rule_are_named_as_fully_masked() -> None:
    visible = torch.ones(20, 20, dtype=torch.bool).tril()
    visible[11:13] = False
    assert words_of(visible) == ["causal", "fully masked rows 11–12"]


def test_a_mask_without_rule_is_arbitrary_with_what_is_certain() -> None:
    torch.manual_seed(0)
    visible = torch.rand(40, 40) < 0.5
    visible[:, :3] = False
    assert words_of(visible) == ["arbitrary", "left padding 3"]
    assert words_of(visible.tril())[:2] == ["arbitrary", "no row sees a later key"]


def test_one_flipped_entry_makes_a_causal_mask_arbitrary() -> None:
    visible = causal_mask(50, 50)[0, 0].clone()
    visible[30, 12] = False
    assert words_of(visible)[0] == "arbitrary"


def test_a_mask_that_hides_everything_is_called_so() -> None:
    visible = torch.zeros(4, 6, dtype=torch.bool)
    assert words_of(visible) == ["every key hidden from every row", "fully masked rows 0–3"]


def random_mask(choose: random.Random) -> Tensor:
    """A small mask made of a few rules and a few exceptions, so that rules are near and often just missed."""
    rows, keys = choose.randint(1, 24), choose.randint(1, 24)
    row, key = grid(rows, keys)
    visible = torch.ones(rows, keys, dtype=torch.bool)
    size = choose.randint(-3, 12)
    for limit in (key <= row + size, key > row - choose.randint(-3, 12), key >= choose.randint(0, 9), key < size + 5):
        if choose.random() < 0.5:
            visible &= limit
    for _ in range(choose.randint(0, 2)):
        start, stop = sorted((choose.randint(0, rows), choose.randint(0, rows)))
        visible[start:stop, start:stop] = choose.random() < 0.5
    for _ in range(choose.randint(0, 2)):
        visible[choose.randrange(rows)] = choose.random() < 0.5
    if choose.random() < 0.3:
        visible[choose.randrange(rows), choose.randrange(keys)] ^= True
    return visible


def test_a_rule_found_in_any_mask_rebuilds_it_exactly() -> None:
    choose = random.Random(0)
    ruled = 0
    for _ in range(600):
        visible = random_mask(choose)
        call = masked_call(visible)
        description = describe(call)
        assert_exact(call, description)
        assert description.density == pytest.approx(visible.float().mean().item(), abs=1e-6)
        assert torch.equal(fully_masked_rows(call)[0, 0], ~visible.any(1))
        ruled += description.kind != "arbitrary"
    assert 200 < ruled < 600


def test_is_causal_is_read_from_the_top_left_also_when_lengths_differ() -> None:
    call = masked_call(None, rows=4, keys=9, is_causal=True)
    assert torch.equal(bias_rows(call, 0, 0, 1, 3), torch.ones(4, 9, dtype=torch.bool).tril()[1:3])
    description = describe(call)
    assert (description.source, description.words()[0]) == ("is_causal", "causal")
    assert description.headline == "is_causal, no mask tensor"
    assert describe(masked_call(None, rows=1, keys=9, is_causal=True)).words()[0] == "causal"


def test_a_causal_bias_is_read_as_its_rule() -> None:
    upper = masked_call(causal_upper_left(4, 9), rows=4, keys=9)
    lower = masked_call(causal_lower_right(4, 9), rows=4, keys=9)
    assert torch.equal(bias_rows(upper, 0, 0, 0, 4), torch.ones(4, 9, dtype=torch.bool).tril())
    assert torch.equal(bias_rows(lower, 0, 0, 0, 4), torch.ones(4, 9, dtype=torch.bool).tril(5))
    assert describe(lower).words()[0].startswith("causal, aligned to the bottom right")
    assert describe(upper).source == "CausalBias"
    assert not fully_masked_rows(lower).any()


def test_a_lower_right_bias_with_more_rows_than_keys_masks_its_first_rows() -> None:
    with pytest.warns(UserWarning, match="NaN"):
        bias = causal_lower_right(6, 4)
    call = masked_call(bias, rows=6, keys=4)
    assert fully_masked_rows(call)[0, 0].tolist() == [True, True, False, False, False, False]
    assert_exact(call, describe(call))


@pytest.mark.parametrize(
    "shape", [(5,), (3, 5), (1, 3, 5), (2, 1, 3, 5), (1, 4, 3, 5), (1, 1, 1, 5), (2, 1, 1, 5), (3, 1)]
)
def test_masks_broadcast_as_pytorch_broadcasts_them(shape: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    mask = torch.rand(shape) < 0.6
    call = masked_call(mask, batch=2, heads=4, rows=3, keys=5)
    full = mask.expand(2, 4, 3, 5)
    for b in range(2):
        for h in range(4):
            assert torch.equal(bias_rows(call, b, h, 0, 3), full[b, h])
    assert torch.equal(fully_masked_rows(call), ~full.any(-1))
    description = describe(call)
    assert description.density == pytest.approx(full.float().mean().item())
    assert_exact(call, description)


def test_queries_of_other_ranks_have_their_masks_read_too() -> None:
    mask = torch.rand(2, 3, 1, 4, 5) < 0.5
    query, key = torch.zeros(2, 3, 2, 4, 8), torch.zeros(2, 3, 2, 5, 8)
    call = AttentionCall(query, key, key, mask)
    assert torch.equal(bias_rows(call, 4, 1, 0, 4), mask[1, 1, 0])
    assert fully_masked_rows(call).shape == (6, 2, 4)
    flat = AttentionCall(torch.zeros(7, 4, 8), torch.zeros(7, 5, 8), torch.zeros(7, 5, 8), mask[0, 0, 0])
    assert torch.equal(bias_rows(flat, 0, 6, 0, 4), mask[0, 0, 0])


def test_batch_rows_with_different_padding_are_told_apart() -> None:
    mask = torch.cat([causal_mask(12, 12, padding) for padding in (3, 0, 0)])
    call = masked_call(mask, batch=3, heads=2)
    description = describe(call)
    assert description.words()[:2] == [
        "batch row 0: causal, left padding 3, fully masked rows 0–2",
        "batch row 1–2: causal",
    ]
    assert description.headline == "causal mask that differs between batch rows"
    assert_exact(call, description)


def test_heads_with_different_masks_are_told_apart() -> None:
    row, key = grid(12, 12)
    window = (key <= row) & (key > row - 4)
    mask = torch.stack([causal_mask(12, 12)[0, 0], window, window])[None]
    call = masked_call(mask, batch=2, heads=3)
    assert describe(call).words()[:2] == ["head 0: causal", "head 1–2: causal, sliding window 4"]
    assert_exact(call, describe(call))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_an_additive_mask_of_zero_and_infinity_reads_like_a_bool_mask(dtype: torch.dtype) -> None:
    visible = causal_mask(33, 33, 7)
    description = describe(masked_call(additive(visible, dtype)))
    assert description.words() == describe(masked_call(visible)).words()
    assert description.additive is None


def test_finfo_min_counts_as_hidden_but_its_rows_are_not_fully_masked() -> None:
    visible = causal_mask(9, 9, 2)
    mask = additive(visible, torch.bfloat16, torch.finfo(torch.bfloat16).min)
    call = masked_call(mask)
    description = describe(call)
    assert torch.equal(bias_rows(call, 0, 0, 0, 9), visible[0, 0])
    assert bias_rows(call, 0, 0, 0, 9, lowest_hidden=False).all()
    assert not fully_masked_rows(call).any()
    assert description.lowest_entries == int((~visible).sum())
    assert description.parts[0].lowest_rows == ((0, 1),)
    assert description.words()[:2] == ["causal", "left padding 2"]
    assert "finfo.min" in description.words()[2]


def test_values_added_to_allowed_scores_are_reported() -> None:
    row, key = grid(16, 16)
    alibi = torch.stack([-slope * (row - key).float() for slope in (0.5, 0.25)])
    mask = alibi.masked_fill(key > row, -math.inf)[None]
    words = describe(masked_call(mask, heads=2)).words()
    assert words[0] == "causal"
    assert "additive values from -7.5 to 0, different in different heads or batch rows" in words
    constant = torch.full((4, 4), 0.5)
    assert "constant 0.5 added to every allowed score" in describe(masked_call(constant)).words()


def test_a_large_negative_value_is_not_taken_for_hidden() -> None:
    mask = additive(causal_mask(4, 4), torch.float32, -10000.0)
    words = describe(masked_call(mask)).words()
    assert words[0] == "every row sees every key"
    assert words[1] == "additive values from -10000 to 0, large but not -inf: such keys still take part"


def test_nan_and_integer_masks_are_noted() -> None:
    mask = torch.zeros(3, 3)
    mask[1, 1] = math.nan
    assert "the mask holds NaN" in describe(masked_call(mask)).words()
    for dtype in (torch.int64, torch.uint8):
        words = describe(masked_call(torch.zeros(3, 3, dtype=dtype))).words()
        assert any("rejects" in word for word in words)


def test_a_mask_together_with_is_causal_applies_both_and_says_so() -> None:
    call = masked_call(torch.ones(4, 4, dtype=torch.bool), is_causal=True)
    assert torch.equal(bias_rows(call, 0, 0, 0, 4), torch.ones(4, 4, dtype=torch.bool).tril())
    words = describe(call).words()
    assert words[0] == "causal"
    assert "invalid" in words[-1]


def test_a_mask_that_does_not_broadcast_is_described_and_refused() -> None:
    call = masked_call(torch.ones(4, 5, dtype=torch.bool), rows=4, keys=6)
    assert describe(call).kind == "invalid"
    with pytest.raises(InputError, match="does not broadcast"):
        bias_rows(call, 0, 0, 0, 4)


@pytest.mark.parametrize(("rows", "keys"), [(0, 4), (4, 0), (0, 0)])
def test_empty_lengths_have_words_and_no_picture(rows: int, keys: int) -> None:
    query, key = torch.zeros(1, 2, rows, 8), torch.zeros(1, 2, keys, 8)
    call = AttentionCall(query, key, key, torch.zeros(rows, keys, dtype=torch.bool))
    assert describe(call).kind == "empty"
    assert picture(call) == [f"nothing to draw: L = {rows}, S = {keys}"]
    assert fully_masked_rows(call).shape == (1, 2, rows)
    assert fully_masked_rows(call).all()


def test_blocks_of_rows_give_the_same_answer_as_the_whole_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    row, key = grid(61, 70)
    visible = (key <= row) | ((row < 9) & (key < 70))
    for mask in (visible, additive(visible, torch.float16), additive(visible, hidden=torch.finfo(torch.float32).min)):
        call = masked_call(mask)
        whole, shown = describe(call), picture(call)
        monkeypatch.setattr(visibility, "BLOCK_ENTRIES", 70 * 7)
        assert describe(call) == whole
        assert picture(call) == shown
        monkeypatch.undo()


def test_a_picture_marks_allowed_partly_allowed_hidden_and_fully_masked() -> None:
    lines = picture(masked_call(causal_mask(8, 8, 2)), width=4, height=4, ascii_only=True)
    assert lines[:4] == ["0 xxxx", "2 .+..", "4 .#+.", "6 .##+"]
    assert picture(masked_call(causal_mask(8, 8, 1)), width=4, height=4, ascii_only=True)[0] == "0 +... x"


def test_a_picture_of_a_long_mask_fits_a_terminal() -> None:
    lines = picture(masked_call(None, rows=5000, keys=300, is_causal=True))
    assert max(len(text) for text in lines) <= 80
    assert len(lines) <= 26


def test_a_call_with_an_expanded_mask_is_drawn_and_described_in_passing() -> None:
    mask = torch.ones(1, 1, 1, 4096, dtype=torch.bool).expand(64, 32, 4096, 4096)
    query = torch.zeros(1).expand(64, 32, 4096, 8)
    description = describe(AttentionCall(query, query, query, mask))
    assert description.words()[0] == "every row sees every key"
    assert description.parts[0].batches == ((0, 63),)
    assert len(picture(AttentionCall(query, query, query, mask))) == 26


def test_more_masks_than_anybody_reads_are_cut_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_module, "MAX_PLANES", 3)
    mask = torch.stack([causal_mask(6, 6, padding)[0] for padding in range(5)])
    description = describe(masked_call(mask, batch=5, heads=2))
    assert "only the first 3 of 5 masks (batch row, head) were looked at" in description.words()
    assert [part.batches for part in description.parts] == [((0, 0),), ((1, 1),), ((2, 2),)]


def test_ranges_are_inclusive_and_cut_when_many() -> None:
    assert ranges([9, 0, 1, 2, 2]) == [(0, 2), (9, 9)]
    assert ranges_text([(0, 6), (9, 9)]) == "0–6, 9"
    assert ranges_text([(2 * n, 2 * n) for n in range(20)], limit=3) == "0, 2, 4, and 17 more ranges"


@pytest.mark.slow
def test_a_mask_of_16384_rows_is_described_in_seconds() -> None:
    mask = torch.ones(16384, 16384, dtype=torch.bool).tril_()
    mask[:, :7] = False
    start = time.perf_counter()
    words = describe(masked_call(mask)).words()
    assert words[:3] == ["causal", "left padding 7", "fully masked rows 0–6"]
    assert time.perf_counter() - start < 30  # about half a second on two idle cores


def test_the_mask_of_the_issue_reads_as_a_headline() -> None:
    call = make_call(rows=33, padding=7)
    assert describe(call).headline == "causal mask with left padding 7"
    document = describe(call).document()
    assert document["words"][0] == "causal"
    assert document["shape"] == (1, 1, 33, 33)
