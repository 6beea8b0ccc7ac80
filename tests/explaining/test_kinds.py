"""The forms of a call that a grid goes through."""

from __future__ import annotations

import pytest
import torch

from sdpa_repro.attention import AttentionCall
from sdpa_repro.errors import InputError
from sdpa_repro.explaining.kinds import LAYOUTS, Kind, kinds_of, with_one_head
from sdpa_repro.replaying.backends import Backend
from tests.calls import make_call


def test_what_is_not_asked_for_is_as_it_was_dumped() -> None:
    call = make_call(width=136)
    assert kinds_of(call, "FLASH_ATTENTION") == [Kind(Backend.FLASH_ATTENTION, "bfloat16", 136, "as-dumped")]


@pytest.mark.parametrize("ran", [None, "EFFICIENT_ATTENTION", "overrideable"])
def test_a_kernel_that_is_unknown_or_not_here_gives_way_to_the_plain_call(ran: str | None) -> None:
    assert [kind.backend for kind in kinds_of(make_call(), ran)] == [Backend.DEFAULT]


def test_all_combinations_are_made_once_each() -> None:
    kinds = kinds_of(
        make_call(),
        None,
        backends=("MATH", "eager"),
        dtypes=("captured", "bfloat16", "float32"),
        head_dims=(64, 136),
        layouts=("as-dumped", "dense"),
    )
    assert len(kinds) == len(set(kinds)) == 2 * 2 * 2 * 2


def test_all_backends_are_those_of_the_device() -> None:
    backends = {kind.backend for kind in kinds_of(make_call(), None, backends=("all",))}
    assert backends == {Backend.DEFAULT, Backend.EAGER, Backend.MATH, Backend.FLASH_ATTENTION}


@pytest.mark.parametrize(
    "asked", [{"backends": ("math",)}, {"dtypes": ("int8",)}, {"layouts": ("tidy",)}, {"head_dims": (0,)}]
)
def test_what_does_not_exist_is_an_error_that_says_what_does(asked: dict[str, tuple[object, ...]]) -> None:
    with pytest.raises(InputError, match=r"choose from|at least 1"):
        kinds_of(make_call(), None, **asked)  # type: ignore[arg-type]


def made(call: AttentionCall, **changed: object) -> AttentionCall:
    own = {"backend": Backend.DEFAULT, "dtype": "bfloat16", "head_dim": call.query.shape[-1], "layout": "as-dumped"}
    form = Kind(**{**own, **changed}).made_from(call)  # type: ignore[arg-type]
    assert isinstance(form, AttentionCall), form
    return form


def test_each_form_differs_from_the_dumped_call_in_what_it_says() -> None:
    call = make_call(width=136)
    assert made(call).key.stride() == call.key.stride()
    assert made(call, dtype="float32").query.dtype == torch.float32
    assert made(call, dtype="float32").key.stride()[1] == 0
    assert made(call, head_dim=64).query.shape[-1] == made(call, head_dim=64).value.shape[-1] == 64
    assert made(call, head_dim=64).key.stride()[1] == 0
    dense = made(call, layout="dense-key-value")
    assert dense.key.is_contiguous()
    assert dense.query.stride() == call.query.stride()
    assert made(call, layout="dense").query.is_contiguous()


def test_a_form_that_the_call_cannot_have_says_why() -> None:
    dense = make_call(layout="dense")
    assert "as it was dumped" in str(Kind(Backend.DEFAULT, "bfloat16", 136, "dense-key-value").made_from(dense))
    huge = make_call(dtype=torch.float32)
    huge.query[0, 0, 0, 0] = 1e30
    assert "overflows" in str(Kind(Backend.DEFAULT, "float16", 136, "as-dumped").made_from(huge))


def test_one_head_repeats_the_first_one() -> None:
    call = make_call(heads=4, kv_heads=2)
    one = with_one_head(call)
    assert one is not None
    assert one.key.stride()[1] == one.value.stride()[1] == 0
    assert torch.equal(one.key[:, 3], call.key[:, 0])
    assert with_one_head(one) is None


def test_every_layout_has_a_name_and_as_dumped_changes_nothing() -> None:
    call = make_call()
    assert LAYOUTS["as-dumped"](call) is call
