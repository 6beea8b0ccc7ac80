"""What a signal handler of the program raises is the program's, also when the recorder was at work at that moment."""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from sdpa_repro.capturing import capture, session
from sdpa_repro.capturing.handlers import hand_on
from sdpa_repro.replaying import check

pytestmark = pytest.mark.skipif(
    not hasattr(signal, "SIGUSR1") or threading.current_thread() is not threading.main_thread(),
    reason="handlers are set and run in the main thread, and there has to be a signal for it",
)


class TooLateError(Exception):
    """The program's own time limit."""


def late(number: int, frame: object) -> None:
    raise TooLateError


def prefixed(text: str, number: int, frame: object) -> None:
    raise TooLateError(text)


class Limit:
    def __call__(self, number: int, frame: object) -> None:
        raise TooLateError

    def pass_on(self, number: int, frame: object) -> None:
        late(number, frame)


HANDLERS = [late, functools.partial(prefixed, "limit"), Limit(), Limit().pass_on]


@pytest.fixture
def handled() -> Iterator[Callable[[Any], object]]:
    """Sets the handler of SIGUSR1; the old one is back after the test."""
    before = signal.getsignal(signal.SIGUSR1)
    yield lambda handler: signal.signal(signal.SIGUSR1, handler)
    signal.signal(signal.SIGUSR1, before)


def raised() -> Exception:
    """What the handler raises."""
    try:
        signal.raise_signal(signal.SIGUSR1)
    except Exception as error:
        return error
    raise AssertionError("the handler did not raise")


@pytest.mark.parametrize("handler", HANDLERS)
def test_what_a_handler_raised_is_raised_again(handler: Any, handled: Callable[[Any], object]) -> None:
    handled(handler)
    error = raised()
    with pytest.raises(TooLateError):
        hand_on(error)


def test_it_is_found_behind_the_error_that_it_became(handled: Callable[[Any], object]) -> None:
    handled(late)
    outer = OSError("cannot write")
    outer.__cause__ = raised()
    with pytest.raises(TooLateError):
        hand_on(outer)


def test_other_errors_are_left_to_the_recorder(handled: Callable[[Any], object]) -> None:
    handled(late)
    error = None
    try:
        int("no number")
    except ValueError as caught:
        error = caught
    assert error is not None
    hand_on(error)


@pytest.mark.parametrize("place", ["check", "progress"])
def test_a_time_limit_reaches_the_block_from_within_the_recorder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handled: Callable[[Any], object], place: str
) -> None:
    handled(late)
    real, query = check.check, torch.ones(1, 1, 3, 4)

    def checked(*arguments: Any, **words: Any) -> Any:
        os.kill(os.getpid(), signal.SIGUSR1)
        return real(*arguments, **words)

    def keep(self: Any, record: Any) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)

    if place == "check":
        monkeypatch.setattr(session, "check", checked)
    else:
        monkeypatch.setattr(session.Session, "_report", keep)
    with pytest.raises(TooLateError), capture(tmp_path):
        F.scaled_dot_product_attention(query, query, query)
    assert F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention
