"""Attention inside compiled code is either recorded or named as not seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sdpa_repro.capturing.elsewhere import compiled_regions
from sdpa_repro.capturing.session import Session, capture
from sdpa_repro.errors import InputError


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def attend(query: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, query, query) * 2


def told(session: Session) -> str:
    return " ".join([*session.summary()["passed"], *session.summary()["hints"]])


QUERY = torch.randn(1, 2, 9, 16)


def test_calls_of_the_eager_backend_are_recorded_and_the_trace_is_counted(tmp_path: Path) -> None:
    compiled = torch.compile(attend, backend="eager")
    with torch.no_grad(), capture(tmp_path) as session:
        for _ in range(3):
            compiled(QUERY)
    assert len(session.calls) == 3
    assert "torch.compile tracing" in told(session)


def test_a_region_that_was_lowered_is_named_by_its_trace(tmp_path: Path) -> None:
    compiled = torch.compile(attend, backend="aot_eager")
    with torch.no_grad(), capture(tmp_path) as session:
        compiled(QUERY)
        attend(QUERY)
    assert len(session.calls) == 1
    assert "torch.compile tracing" in told(session)


def test_a_region_lowered_before_the_session_is_named_though_it_is_not_traced_again(tmp_path: Path) -> None:
    compiled = torch.compile(attend, backend="aot_eager")
    with torch.no_grad():
        with capture(tmp_path) as session:
            compiled(QUERY)
            attend(QUERY)
        with capture(tmp_path) as session:
            compiled(QUERY)
            attend(QUERY)
    assert len(session.calls) == 1
    assert not session.summary()["passed"]
    assert f"{compiled_regions()} region" in told(session)
    assert "compiled by torch.compile" in told(session)


def test_a_session_that_sees_only_lowered_regions_is_an_error_that_names_them(tmp_path: Path) -> None:
    compiled = torch.compile(attend, backend="aot_eager")
    with torch.no_grad():
        with capture(tmp_path):
            compiled(QUERY)
            attend(QUERY)
        with pytest.raises(InputError, match=r"compiled by torch\.compile.*TORCH_COMPILE_DISABLE=1"), capture(tmp_path):
            compiled(QUERY)


def test_calls_of_a_function_that_the_compiler_gave_up_are_recorded(tmp_path: Path) -> None:
    """It goes on as plain Python, but what it calls is looked at by the compiler: the recorder must not be."""

    class Block:
        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...

    def broken(query: Tensor) -> Tensor:
        with Block():
            torch._dynamo.graph_break()
            return attend(query) - F.scaled_dot_product_attention(query, query, query)

    expected = broken(QUERY)
    compiled = torch.compile(broken, backend="eager")
    with torch.no_grad(), capture(tmp_path) as session:
        assert torch.equal(compiled(QUERY), expected)
    assert [call.status for call in session.calls] == ["agrees"] * 2


def test_a_function_of_the_users_is_compiled_as_without_a_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Block:
        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...

    def mine(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return (query @ key.mT).softmax(-1) @ value

    def broken(query: Tensor) -> Tensor:
        with Block():
            torch._dynamo.graph_break()
            return F.scaled_dot_product_attention(query, query, query)

    def compiled_regions_of(action: Callable[[], object]) -> dict[str, int]:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        action()
        return dict(torch._dynamo.utils.counters["frames"]) | dict(torch._dynamo.utils.counters["stats"])

    def watched() -> None:
        with capture(tmp_path) as session:
            run()
        assert len(session.calls) == 1

    def run() -> None:
        torch.compile(broken, backend="eager")(QUERY)

    monkeypatch.setattr(F, "scaled_dot_product_attention", mine)
    with torch.no_grad():
        assert compiled_regions_of(watched) == compiled_regions_of(run)
