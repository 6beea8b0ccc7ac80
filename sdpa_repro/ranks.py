"""The ranks of a run under torchrun: which one this is, its share of the work, and the results of all of them."""

from __future__ import annotations

import atexit
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import zip_longest
from typing import Any, TypeVar

import torch
import torch.distributed

T = TypeVar("T")

PATIENCE = timedelta(hours=12)
"""How long a rank waits for the others: their shares of the work may take longer than its own.

A rank that died is not waited for: its connection closes, and torchrun ends the others.
"""

OWN = "sdpa-repro"
"""Prefix of what is written to torchrun's store, which a script that runs under the same torchrun uses too."""


def rank() -> int:
    """This process's number among its peers, from 0: in the process group, else torchrun's RANK; 0 without ranks."""
    return torch.distributed.get_rank() if _initialised() else _number("RANK", 0)


def world() -> int:
    """How many ranks there are: in the process group, else torchrun's WORLD_SIZE; 1 without ranks."""
    return torch.distributed.get_world_size() if _initialised() else max(1, _number("WORLD_SIZE", 1))


def is_first() -> bool:
    """Whether this is rank 0, the one that speaks for all. True without ranks."""
    return rank() == 0


def mine(items: Sequence[T]) -> list[T]:
    """This rank's share of `items`, which must be the same on all ranks: every world-th one, so that costs even out."""
    return list(items[rank() :: world()])


def gathered(results: Sequence[T]) -> list[T]:
    """On every rank, the results of all ranks in the order of the items that `mine` dealt out.

    Every rank has to call it, with one result (anything that pickles) for each of its items. A rank that stopped
    early leaves its later results out: pair each result with its item where that can happen. Raises RuntimeError
    when a rank has died.
    """
    if world() == 1:
        return list(results)
    absent = object()
    rounds: Any = zip_longest(*of_all(list(results)), fillvalue=absent)
    return [result for each in rounds for result in each if result is not absent]


def of_all(value: T) -> list[T]:
    """On every rank, the value of each rank, by rank. Every rank has to call it; the value has to pickle.

    Raises RuntimeError when a rank has died.
    """
    if world() == 1:
        return [value]
    found: list[Any] = [None] * world()
    torch.distributed.all_gather_object(found, value, group=_group())
    return found


def keep_to_one_gpu() -> None:
    """Let each rank of this machine, and the processes it starts, see one GPU of its own where there are enough.

    To be called before CUDA is used. Ranks share GPUs, in turn, where there are fewer.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count() if _number("LOCAL_WORLD_SIZE", 1) > 1 else 0
    names = visible.split(",") if visible else [str(number) for number in range(count)]
    if count > 1 and not torch.cuda.is_initialized():
        os.environ["CUDA_VISIBLE_DEVICES"] = names[local_rank() % count]


def local_rank() -> int:
    """This process's number on its machine, from torchrun's LOCAL_RANK; 0 without one."""
    return _number("LOCAL_RANK", 0)


@contextmanager
def gentle_stop() -> Iterator[None]:
    """When torchrun ends this rank because another one died, raise KeyboardInterrupt in the block, once.

    What was found so far can then be told: torchrun waits half a minute. Later signals are ignored, to the end of the
    process. Without ranks, and outside the main thread, nothing changes.
    """
    if world() == 1 or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _group() -> Any:
    """A process group that moves objects through host memory; joined here when the run has none.

    One that was made here stays until the process ends, since a store cannot be joined twice.
    """
    if not _initialised():
        distributed: Any = torch.distributed
        store, number, count = next(distributed.rendezvous("env://", timeout=PATIENCE))
        own = distributed.PrefixStore(OWN, store)
        distributed.init_process_group("gloo", store=own, rank=number, world_size=count, timeout=PATIENCE)
        atexit.register(_leave)
    if "gloo" in str(torch.distributed.get_backend_config()):
        return None
    return torch.distributed.new_group(backend="gloo", timeout=PATIENCE)


def _leave() -> None:
    if _initialised():
        torch.distributed.destroy_process_group()


def _initialised() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _number(variable: str, otherwise: int) -> int:
    """What torchrun says. RANK and WORLD_SIZE alone are no sign of it: some clusters set them in every shell."""
    text = os.environ.get(variable, "") if "LOCAL_RANK" in os.environ else ""
    return int(text) if text.isascii() and text.isdigit() else otherwise
