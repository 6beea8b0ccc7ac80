"""No network, few threads, and what several test files use."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("NO_COLOR", None)
os.environ.pop("SDPA_REPRO_TRACEBACK", None)

import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

torch.set_num_threads(1)

ROOT = Path(__file__).resolve().parent.parent
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def pytest_sessionstart() -> None:
    """Let Ctrl-C through, as in a terminal: a background job of a shell starts with it ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that opens a connection beyond this machine fails at once."""
    connect = socket.socket.connect

    def refuse(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in ("127.0.0.1", "::1", "localhost"):
            raise OSError(f"a test tried to reach {address}")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture(autouse=True)
def nothing_stays_planted() -> Iterator[None]:
    """A fault file planted in this process, by the test or by a verb's --preload, is gone after the test."""
    yield
    for name in ("emulation", "tests.faults.emulation"):
        if name in sys.modules:
            sys.modules[name].restore()


@pytest.fixture(autouse=True)
def torch_as_it_was() -> Iterator[None]:
    """Thread count and grad mode after a test are those before it."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.set_grad_enabled(True)
