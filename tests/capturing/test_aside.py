"""Work beside the recorded code: it keeps no thread and no tensor longer than it needs them."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sdpa_repro.capturing import aside
from sdpa_repro.capturing.aside import Aside, Job, apart

CPU = torch.device("cpu")


@pytest.fixture
def without_collector() -> Iterator[None]:
    """Training loops switch it off: what only it could free stays."""
    gc.disable()
    yield
    gc.enable()


class Tensors:
    """Stands for the tensors that a function works on; unlike one of them it has no other owner."""


def test_an_idle_thread_ends_and_another_one_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aside, "IDLE_SECONDS", 0.01)
    beside = Aside(lambda: None)
    first, second = (beside.run(threading.current_thread, CPU) for _ in range(2))
    for thread in (first, second):
        thread.join(60)  # what scripts do with every thread that is alive
        assert not thread.is_alive()
    third = beside.run(threading.current_thread, CPU)
    assert third not in (first, second, threading.current_thread())


def test_many_threads_may_ask_while_threads_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aside, "IDLE_SECONDS", 0.0)
    beside = Aside(lambda: None)
    found: list[int] = []
    askers = [
        threading.Thread(target=lambda: found.extend(beside.run(lambda: 1, CPU) for _ in range(50))) for _ in range(4)
    ]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join(60)
    assert len(found) == 200


def test_a_job_that_is_done_lets_go_of_its_tensors(without_collector: None) -> None:
    def begun() -> tuple[Job[int], weakref.ref[Tensors]]:
        tensors = Tensors()
        return Job(lambda: 1 if tensors else 0), weakref.ref(tensors)

    job, seen = begun()
    assert seen() is not None
    job.run()
    assert seen() is None
    assert job.result() == 1


def test_a_job_that_failed_lets_go_of_its_tensors(without_collector: None) -> None:
    def fail() -> weakref.ref[Tensors]:
        tensors = Tensors()
        seen = weakref.ref(tensors)

        def work() -> None:
            raise ValueError(tensors is None)

        with pytest.raises(ValueError, match="False"):
            Aside(lambda: None).run(work, CPU)
        return seen

    assert fail()() is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no os.fork")
def test_a_lock_that_was_held_at_a_fork_can_be_renewed() -> None:
    beside = Aside(lambda: None)
    beside._lock.acquire()
    beside.forked()
    assert beside.run(lambda: 1, CPU) == 1


class Casts(TorchDispatchMode):
    """Counts conversions."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is torch.ops.aten._to_copy.default
        return function(*args, **(kwargs or {}))


def without_autocast() -> None:
    with torch.autocast("cpu", enabled=False):
        pass


@pytest.mark.parametrize("run", [apart, lambda function: Aside(lambda: None).run(function, CPU)])
def test_weights_that_autocast_has_cast_stay_cast(run: Callable[[Callable[[], None]], None]) -> None:
    """Its cache is that of the process: a thread outside autocast that leaves one would empty it."""
    weight, numbers = torch.ones(2, 2, requires_grad=True), torch.ones(2, 2, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16), Casts() as casts:
        numbers @ weight
        assert casts.count == 1
        other = threading.Thread(target=run, args=(without_autocast,))  # whose own autocast is not entered
        other.start()
        other.join()
        numbers @ weight
        assert casts.count == 1


def test_the_end_of_the_interpreter_waits_for_what_is_computed() -> None:
    beside, go, done = Aside(lambda: None), threading.Event(), threading.Event()
    beside.begin(lambda: (go.wait(60), done.set()))
    threading.Timer(0.1, go.set).start()
    beside._settle()
    assert done.is_set()
    beside._settle()  # with nothing left


def test_nothing_is_kept_for_the_end_of_the_interpreter_once_the_thread_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(aside, "IDLE_SECONDS", 0.01)
    beside = Aside(lambda: None)
    seen = weakref.ref(beside)
    beside.run(threading.current_thread, CPU).join(60)
    del beside
    gc.collect()
    assert seen() is None
