"""What the tool costs, as ratios within one run: `make bench` prints the table and writes docs/bench.md.

Every row compares two ways of doing the same work in the same minutes on the same machine; absolute times
are given for orientation only.
"""

from __future__ import annotations

import argparse
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import sdpa_repro
from sdpa_repro.attention import AttentionCall
from sdpa_repro.capturing.tiny import tiny_inputs, widened
from sdpa_repro.dump import load, save, snapshot
from sdpa_repro.reducing.reduction import reduce
from sdpa_repro.replaying.backends import Backend
from sdpa_repro.replaying.reference import reference
from sdpa_repro.replaying.trial import Result, in_process
from tests.calls import make_call
from tests.reducing.test_faults import CASES

REPEATS = 3

OBVIOUS = """
import sys, torch, torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
query, key, value = torch.load(sys.argv[1])
with torch.inference_mode():
    with sdpa_kernel(SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(query.float(), key.float(), value.float(), is_causal=True)
    scores = query @ key.mT * query.shape[-1] ** -0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1, dtype=torch.float32).to(query.dtype)
    print("eager", (weights @ value - expected).abs().max())
    print("default", (F.scaled_dot_product_attention(query, key, value, is_causal=True) - expected).abs().max())
    for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel(backend):
            print(backend, (F.scaled_dot_product_attention(query, key, value, is_causal=True) - expected).abs().max())
"""
"""What one writes by hand to compare the backends on one call."""


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    what: str
    ratio: float
    aim: float
    detail: str


def seconds(action: Callable[[], Any]) -> float:
    """Wall time of one run."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def paired(first: Callable[[], Any], second: Callable[[], Any], repeats: int = REPEATS) -> tuple[float, float]:
    """Median wall times of two actions that take turns, after one run of each."""
    first(), second()
    times = [(seconds(first), seconds(second)) for _ in range(repeats)]
    return median(one for one, _ in times), median(two for _, two in times)


def causal_call(rows: int = 4096, heads: int = 16, width: int = 128) -> AttentionCall:
    """A causal bfloat16 call of normal values, 1 x heads x rows x width."""
    random = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, rows, width, generator=random).bfloat16() for _ in range(3))
    return AttentionCall(query, key, value, is_causal=True)


def bench_reference() -> Iterator[Row]:
    """The float64 reference over the matrix products it cannot avoid, and its memory."""
    call = causal_call()
    matrix = torch.randn(2048, 2048, dtype=torch.float64)
    measured, product = paired(lambda: reference(call), lambda: matrix @ matrix)
    rate = 2 * 2048**3 / product
    operations = 2 * (128 + 128) * 16 * 4096 * 4097 / 2
    ideal = operations / rate
    yield Row(
        "reference, 1x16x4096x128 causal bf16, over its unmasked operations at the float64 matmul rate",
        measured / ideal,
        1.8,
        f"{measured:.2f} s at {rate / 1e9:.0f} GFLOP/s",
    )
    before = _peak("causal_call()")
    after = _peak("reference(causal_call())")
    result = 16 * 4096 * 128 * 8
    beyond = max(0, after - before - result)
    yield Row(
        "reference, memory beyond its result, over 256 MiB",
        beyond / (256 << 20),
        1.0,
        f"peak memory grows by {beyond >> 20} MiB beyond the {result >> 20} MiB of its float64 output",
    )


def _peak(expression: str) -> int:
    """Peak resident bytes of a fresh process that evaluates an expression of this module."""
    report = "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    code = f"import resource\nfrom tests.bench import causal_call, reference\n{expression}\n{report}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1]) * 1024


def bench_replay(folder: Path) -> Iterator[Row]:
    """A whole `replay` over the script one writes by hand for the same cells, both as processes."""
    call = causal_call()
    torch.save([call.query, call.key, call.value], folder / "tensors.pt")
    save(snapshot(call, context={"grad": False, "inference": True}), folder / "call.pt")
    (folder / "obvious.py").write_text(OBVIOUS)
    command = ["-m", "sdpa_repro", "replay", "--dtype", "captured", "--runs", "1", str(folder / "call.pt")]

    def run(*words: str) -> None:
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr)

    ours, obvious = paired(
        lambda: run(*command), lambda: run(str(folder / "obvious.py"), str(folder / "tensors.pt")), repeats=2
    )
    yield Row(
        "replay of that call, over the obvious script with the same cells (imports included)",
        ours / obvious,
        0.5,
        f"{ours:.1f} s against {obvious:.1f} s",
    )


def bench_capture(folder: Path, dtype: torch.dtype) -> Iterator[Row]:
    """Time that capture with live check adds to a prefill, over what the obvious hook adds."""
    model = widened(dtype=dtype)
    inputs = tiny_inputs(model, 1024)

    def prefill() -> None:
        with torch.inference_mode():
            model(**inputs)

    def captured() -> None:
        with sdpa_repro.capture(folder / "dumps"):
            prefill()

    def hooked() -> None:
        with obvious_hook():
            prefill()

    prefill()
    plain, ours, theirs = ([], [], [])
    for _ in range(REPEATS):
        plain.append(seconds(prefill))
        ours.append(seconds(captured))
        theirs.append(seconds(hooked))
    base, added, hook = median(plain), median(ours) - median(plain), median(theirs) - median(plain)
    parameters = sum(weight.numel() for weight in model.parameters()) / 1e6
    yield Row(
        f"time added by capture to a prefill ({parameters:.0f} M parameters, L = 1024, {str(dtype)[6:]}), "
        "over a hook that recomputes MATH and clones whole storages",
        added / hook,
        0.5,
        f"prefill {base:.2f} s, capture adds {added:.2f} s, the hook {hook:.2f} s",
    )


@contextmanager
def obvious_hook() -> Iterator[list[float]]:
    """Patch SDPA; for every call recompute MATH in float32 on the live tensors and clone their storages."""
    original, errors = F.scaled_dot_product_attention, []

    def patched(query: Tensor, key: Tensor, value: Tensor, *args: Any, **words: Any) -> Tensor:
        output = original(query, key, value, *args, **words)
        mask = words.get("attn_mask")
        with sdpa_kernel(SDPBackend.MATH):
            expected = original(query.float(), key.float(), value.float(), *args, **words)
        errors.append(float((output.float() - expected).abs().max()))
        for tensor in (query, key, value, mask, output):
            if tensor is not None:
                tensor.untyped_storage().clone()
        return output

    F.scaled_dot_product_attention = patched
    try:
        yield errors
    finally:
        F.scaled_dot_product_attention = original


def bench_dump(folder: Path) -> Iterator[Row]:
    """Writing and reading a dump over `torch.save` and `torch.load` of the same viewed bytes."""
    dense = causal_call(2048)
    hidden = torch.rand(1, 1, 8192, 8192, generator=torch.Generator().manual_seed(0)) > 0.5
    masked = AttentionCall(dense.query[:, :1], dense.key[:, :1], dense.value[:, :1], hidden)
    for name, call in (("1x16x2048x128 bf16", dense), ("an 8192 x 8192 bool mask", masked)):
        tensors = [tensor.contiguous() for tensor in call.tensors.values()]
        ours, theirs = folder / "ours.pt", folder / "theirs.pt"
        write = paired(lambda c=call, p=ours: save(snapshot(c), p), lambda t=tensors, p=theirs: torch.save(t, p))
        read = paired(lambda p=ours: load(p), lambda p=theirs: torch.load(p, weights_only=True))
        size, plain = ours.stat().st_size, theirs.stat().st_size
        sizes = f"{size >> 20} against {plain >> 20} MiB"
        yield Row(f"dump written, {name}, over torch.save", write[0] / write[1], 2.0, sizes)
        yield Row(f"dump read, {name}, over torch.load", read[0] / read[1], 2.0, f"{read[0] * 1e3:.0f} ms")


def bench_reduce() -> Iterator[Row]:
    """Reducing over a bare loop of the trials it makes, and the number of trials for each planted fault."""
    call = make_call(rows=289, heads=16, width=512, scale=1.0, padding=7)
    with planted("pytorch_191937"):
        trial = in_process(Backend.FLASH_ATTENTION)
        asked: list[AttentionCall] = []

        def counted(call: AttentionCall) -> Result:
            asked.append(call)
            return trial(call)

        reduce(call, counted)
        calls = list(asked)
        whole, bare = paired(lambda: reduce(call, trial), lambda: [trial(each) for each in calls])
    yield Row(
        "reduce of 1x16x289x512 with pytorch#191937 planted, over a bare loop of the same trials",
        whole / bare,
        2.0,
        f"{len(calls)} trials in {whole:.1f} s",
    )
    for case in CASES:
        with planted(case.fault):
            found = reduce(case.call(), in_process(Backend.FLASH_ATTENTION))
        words = f"{found.calls} trials, {found.seconds:.1f} s, down to {found.shape}"
        yield Row(f"trials to reduce {case.fault}, over {case.calls}", found.calls / case.calls, 1.0, words)


@contextmanager
def planted(fault: str) -> Iterator[None]:
    """A fault of tests/faults in this process."""
    runpy.run_path(str(Path(__file__).parent / "faults" / f"{fault}.py"))
    try:
        yield
    finally:
        sys.modules["emulation"].restore()


HEADER = """# What it costs

Written by `make bench` on {cores} cores, torch {torch}: ratios of medians within one run; below the aim is good.

| what | ratio | aim | in this run |
|---|---|---|---|
"""


def main() -> int:
    """Run the parts asked for, print each row as it is measured, write the table when all were run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("reference", "replay", "capture", "dump", "reduce"))
    parser.add_argument("--output", type=Path, default=Path("docs/bench.md"))
    options = parser.parse_args()
    lines = []
    with tempfile.TemporaryDirectory(prefix="sdpa-repro-") as name:
        folder = Path(name)
        parts = {
            "reference": lambda: bench_reference(),
            "replay": lambda: bench_replay(folder),
            "capture": lambda: (row for kind in (torch.bfloat16, torch.float32) for row in bench_capture(folder, kind)),
            "dump": lambda: bench_dump(folder),
            "reduce": lambda: bench_reduce(),
        }
        for part, rows in parts.items():
            if options.only in (None, part):
                for row in rows():
                    lines.append(f"| {row.what} | {row.ratio:.2f} | {row.aim:g} | {row.detail} |")
                    print(lines[-1], flush=True)
    if options.only is None:
        header = HEADER.format(cores=_cores(), torch=torch.__version__)
        options.output.write_text(header + "\n".join(lines) + "\n")
    return 0


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


if __name__ == "__main__":
    raise SystemExit(main())
