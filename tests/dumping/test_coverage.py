"""What strided views cover, against a listing of their bytes one by one."""

from __future__ import annotations

import itertools
import random

import pytest

from sdpa_repro.dumping import Refused
from sdpa_repro.dumping.coverage import View, components, contains, cover, overlap


def listed(view: View) -> set[int]:
    """The bytes of a view, from the definition of strides."""
    found: set[int] = set()
    for index in itertools.product(*(range(size) for size in view.shape)):
        first = view.offset + view.itemsize * sum(i * step for i, step in zip(index, view.stride, strict=True))
        found.update(range(first, first + view.itemsize))
    return found


def random_view(chosen: random.Random) -> View:
    rank = chosen.randint(0, 4)
    shape = tuple(
        chosen.choice([0, 1, 2, 3, 5]) if chosen.random() < 0.1 else chosen.randint(1, 5) for _ in range(rank)
    )
    stride = tuple(chosen.choice([0, 1, 2, 3, 4, 6, 8, 12, 40]) for _ in range(rank))
    return View(chosen.randint(0, 60), chosen.choice([1, 2, 4, 8]), shape, stride)


@pytest.mark.parametrize("block", range(4))
def test_coverage_overlap_and_containment_equal_the_listing(block: int) -> None:
    for seed in range(250 * block, 250 * (block + 1)):
        chosen = random.Random(seed)
        one, other = random_view(chosen), random_view(chosen)
        if chosen.random() < 0.3:
            other = View(one.offset, one.itemsize, one.shape, tuple(chosen.sample(one.stride, len(one.stride))))
        first, second = listed(one), listed(other)
        assert cover([one, other]).nbytes == len(first | second), seed
        assert overlap(one, other) == bool(first & second), seed
        assert contains(one, other) == (second <= first), seed
        if first:
            assert one.stop == max(first) + 1


def test_a_view_that_is_not_tangled_reaches_each_element_once() -> None:
    for seed in range(400):
        view = random_view(random.Random(seed))
        if not view.tangled and view.numel:
            elements = 1
            for size in view.shape_once:
                elements *= size
            assert len(listed(view)) == elements * view.itemsize


def test_the_mask_has_an_entry_for_the_largest_block_that_no_view_cuts() -> None:
    heads, rows, width = 16, 1000, 128
    packed = [View(2 * i * heads * width, 2, (heads, rows, width), (width, 3 * heads * width, 1)) for i in range(3)]
    assert cover(packed).unit == 2 * heads * width
    assert cover(packed).mask.numel() == 3 * rows
    assert components({str(i): view for i, view in enumerate(packed)}) == [["0"], ["1"], ["2"]]


def test_windows_over_a_sequence_are_one_run() -> None:
    assert View(0, 4, (100_000, 50_000), (1, 1)).steps() == [(4 * 149_999, 1)]
    assert View(0, 2, (1000, 8), (3, 1)).steps() == [(2 * (3 * 999 + 8), 1)]


def test_views_are_grouped_by_what_they_share() -> None:
    views = {
        "a": View(0, 4, (10,), (1,)),
        "b": View(200, 4, (10,), (1,)),
        "c": View(36, 4, (50,), (1,)),
        "d": View(1000, 4, (3,), (1,)),
        "e": View(0, 4, (0,), (1,)),
    }
    assert sorted(map(sorted, components(views))) == [["a", "b", "c"], ["d"], ["e"]]


def test_a_mask_that_would_be_too_long_is_refused() -> None:
    with pytest.raises(Refused):
        cover([View(0, 1, (2, 3), (1 << 40, 2))])


def test_views_too_far_apart_to_compare_are_stored_apart() -> None:
    views = {"a": View(0, 1, (2, 3), (1 << 40, 2)), "b": View(1, 1, (2, 3), (1 << 40, 2))}
    assert components(views) == [["a"], ["b"]]


def test_a_view_that_would_take_forever_to_walk_is_refused() -> None:
    with pytest.raises(Refused):
        cover([View(0, 1, (1 << 20, 1 << 20, 1 << 20), (3, 5, 7))])
