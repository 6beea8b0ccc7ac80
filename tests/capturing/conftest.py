"""What the recorder's tests share: a planted fault, and proof that every test leaves torch as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.capturing import faults

ORIGINAL = torch.nn.functional.scaled_dot_product_attention


@pytest.fixture
def plant() -> Iterator[Callable[[str], None]]:
    """Plants a fault file of tests/faults in this process; the real kernels are back after the test."""
    yield faults.plant
    faults.restore()


@pytest.fixture(autouse=True)
def sdpa_is_put_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After every test the functions of torch are the ones from before."""
    yield
    monkeypatch.undo()
    assert torch.nn.functional.scaled_dot_product_attention is ORIGINAL
    assert torch._C._nn.scaled_dot_product_attention is ORIGINAL
