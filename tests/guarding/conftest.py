"""What the guard's tests share: a planted fault, and proof that every test leaves torch and threading as they were."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sdpa_repro.capturing import recorder
from sdpa_repro.environment import preload

FAULT = Path(__file__).resolve().parent.parent / "faults" / "pytorch_191937.py"
ORIGINALS = (torch.nn.functional.scaled_dot_product_attention, threading.Thread.start)
"""In a tuple: a guard replaces what modules refer to, and this module's own names would be no proof."""


@pytest.fixture
def planted() -> list[dict[str, str]]:
    """pytorch#191937 planted in this process, as `--preload` does it; the suite's own fixture takes it away."""
    return preload([FAULT])


@pytest.fixture(autouse=True)
def everything_is_put_back() -> Iterator[None]:
    """After every test the functions of torch and threading are the ones from before."""
    yield
    assert torch.nn.functional.scaled_dot_product_attention is ORIGINALS[0]
    assert torch._C._nn.scaled_dot_product_attention is ORIGINALS[0]
    assert threading.Thread.start is ORIGINALS[1]
    assert recorder.SDPA.original is ORIGINALS[0]
