"""What the guard costs a call that it does not change: rows for `tests.bench`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from timeit import repeat

import torch

from sdpa_repro.attention import AttentionCall
from sdpa_repro.guarding.guard import Guard
from sdpa_repro.guarding.remedies import known_remedies
from tests.bench import Row
from tests.calls import make_call

LIMIT = 5.0
"""Microseconds that a call may cost more."""
CALLS, ROUNDS = 500, 60

CASES = {
    "a bool mask, key and value of stride 0, L = 4": make_call(rows=4, width=8, heads=2, dtype=torch.float32),
    "no mask": make_call(rows=4, width=8, heads=2, dtype=torch.float32, mask=None),
    "one decoded token, key and value of stride 0": make_call(rows=1, keys=8, width=8, heads=2, dtype=torch.float32),
}


def rows() -> list[Row]:
    """Microseconds added to one unaffected call, over the limit, with what CUDA builds of torch 2.13 look for.

    CPU time, the least of many short rounds, guarded and not in turns: other programs add to a round, never take.
    By one thread: others of a pool would wait awake between the calls, more or less of them.
    """
    found = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for what, call in CASES.items():
        plain, guarded = float("inf"), float("inf")
        guard = Guard([replace(remedy, devices=("cpu",)) for remedy in known_remedies("2.13.0", ("cuda",))])
        for _ in range(ROUNDS):
            plain = min(plain, _microseconds(call))
            with guard:
                guarded = min(guarded, _microseconds(call))
        if guard.report()["changed"]:
            raise RuntimeError("the guard has changed a call that it should leave alone")
        added = guarded - plain
        detail = f"{added:.1f} µs beside {plain:.1f} µs"
        found.append(Row(f"guard, µs added to an unaffected call ({what}), over {LIMIT:g}", added / LIMIT, 1.0, detail))
    torch.set_num_threads(threads)
    return found


def _microseconds(call: AttentionCall) -> float:
    """CPU time of one call."""
    attend: Callable[..., object] = torch.nn.functional.scaled_dot_product_attention
    query, key, value, words = call.query, call.key, call.value, call.keywords
    with torch.no_grad():
        took = repeat(lambda: attend(query, key, value, **words), number=CALLS, repeat=1, timer=time.process_time)
    return min(took) / CALLS * 1e6


if __name__ == "__main__":
    for row in rows():
        print(f"| {row.what} | {row.ratio:.2f} | {row.aim:g} | {row.detail} |")
