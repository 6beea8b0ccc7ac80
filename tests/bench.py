"""What the tool costs, as ratios within one run: `make bench` prints the table and writes docs/bench.md.

Every row compares two ways of doing the same work in the same minutes on the same machine; absolute times
are given for orientation only.
"""

from __future__ import annotations

import argparse
import os
import re
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from sdpa_repro.attention import AttentionCall
from sdpa_repro.dump import save, snapshot
from sdpa_repro.reducing.reduction import reduce
from sdpa_repro.replaying.backends import Backend
from sdpa_repro.replaying.reference import reference
from sdpa_repro.replaying.trial import Result, in_process
from tests.bench_capture import bench_capture, bench_dump
from tests.calls import make_call
from tests.measuring import Row, causal_call, paired
from tests.reducing.test_faults import CASES

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
        1.5,
        f"{measured:.2f} s at {rate / 1e9:.0f} GFLOP/s",
    )
    before = peak("causal_call()")
    after = peak("reference(causal_call())")
    result = 16 * 4096 * 128 * 8
    beyond = max(0, after - before - result)
    yield Row(
        "reference, memory beyond its result, over 256 MiB",
        beyond / (256 << 20),
        1.0,
        f"peak memory grows by {beyond >> 20} MiB beyond the {result >> 20} MiB of its float64 output",
    )


def peak(expression: str, module: str = "tests.bench") -> int:
    """Peak resident bytes of a fresh process that evaluates an expression of a module."""
    report = "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    code = f"import resource\nfrom {module} import *\n{expression}\n{report}"
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
        0.25,
        f"{ours:.1f} s against {obvious:.1f} s",
    )


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

Written by `make bench`, each part with the machine it ran on: ratios of medians within one run; below the aim is good.
"""
TABLE = "| what | ratio | aim | in this run |\n|---|---|---|---|\n"
PARTS = ("reference", "replay", "capture", "dump", "reduce", "guard", "long", "growth")


def main() -> int:
    """Run the parts asked for, print each row as it is measured, and put each part into the page when it is done."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=PARTS, action="append", help="This part; repeatable. The others stay.")
    parser.add_argument("--longest", type=int, default=16384, help="Last length of growth.")
    parser.add_argument("--output", type=Path, default=Path("docs/bench.md"))
    options = parser.parse_args()
    for part in options.only or PARTS:
        with tempfile.TemporaryDirectory(prefix="sdpa-repro-") as name:
            body = measured(part, Path(name), options)
        put(options.output, part, f"{_cores()} cores, torch {torch.__version__}.\n\n{body}")
    return 0


def measured(part: str, folder: Path, options: argparse.Namespace) -> str:
    """One part's text for the page, its rows printed as they come."""
    from tests import bench_guard, bench_long  # they import this module

    if part == "growth":
        found = bench_long.growth(folder, tuple(each for each in bench_long.LENGTHS if each <= options.longest))
        drawn = bench_long.picture(found, options.output.parent / "growth.svg")
        text = bench_long.table(found) + "\n" + "\n![time and memory by length](growth.svg)\n" * drawn
        print(text, flush=True)
        return text
    rows = {
        "reference": lambda: bench_reference(),
        "replay": lambda: bench_replay(folder),
        "capture": lambda: bench_capture(folder),
        "dump": lambda: bench_dump(folder),
        "reduce": lambda: bench_reduce(),
        "guard": lambda: bench_guard.rows(),
        "long": lambda: bench_long.rows(folder),
    }[part]
    lines = []
    for row in rows():
        lines.append(f"| {row.what} | {row.ratio:.2f} | {row.aim:g} | {row.detail} |")
        print(lines[-1], flush=True)
    return TABLE + "\n".join(lines) + "\n"


def put(page: Path, part: str, text: str) -> None:
    """Write one part of the page; the other parts stay as they are."""
    old = page.read_text(encoding="utf-8") if page.is_file() else ""
    sections = dict(re.findall(r"^## (\w+)\n\n(.*?)(?=^## |\Z)", old, re.M | re.S))
    sections[part] = text.rstrip("\n") + "\n\n"
    body = "".join(f"## {name}\n\n{sections[name]}" for name in PARTS if name in sections)
    page.write_text(f"{HEADER}\n{body.rstrip()}\n", encoding="utf-8")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


if __name__ == "__main__":
    raise SystemExit(main())
