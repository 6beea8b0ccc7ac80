"""What long contexts cost: rows for `tests.bench`, and how time and memory grow with the length (docs/growth.svg)."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from sdpa_repro.attention import AttentionCall
from sdpa_repro.dump import save, snapshot
from sdpa_repro.replaying.reference import reference
from tests.bench import peak
from tests.calls import make_call
from tests.measuring import Row, paired

ROWS, WINDOW = 32768, 1024
FAULT = Path(__file__).parent / "faults" / "pytorch_191937.py"
LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384)
BUDGET = 60
"""Seconds that reduce and explain may take at each length."""

REFERENCE = """
import sys, time
from sdpa_repro.dump import load
from sdpa_repro.replaying.reference import reference
call = load(sys.argv[1]).call
start = time.perf_counter()
reference(call)
print(time.perf_counter() - start)
"""


def long_call(rows: int = ROWS) -> AttentionCall:
    """A causal bfloat16 call of normal values, 1 x 4 x rows x 64."""
    random = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 4, rows, 64, generator=random).bfloat16() for _ in range(3))
    return AttentionCall(query, key, value, is_causal=True)


def window_call() -> AttentionCall:
    """The same with a sliding window as a bool mask, which takes 1 GiB of its own."""
    flag = long_call()
    mask = torch.ones(ROWS, ROWS, dtype=torch.bool).tril_().triu_(1 - WINDOW)
    return AttentionCall(flag.query, flag.key, flag.value, mask)


def rows(folder: Path) -> Iterator[Row]:
    """The reference of a sliding window, and a replay of a length at which the obvious script has no memory."""
    call, matrix = window_call(), torch.randn(2048, 2048, dtype=torch.float64)
    measured, product = paired(lambda: reference(call), lambda: matrix @ matrix)
    rate = 2 * 2048**3 / product
    operations = 2 * (64 + 64) * 4 * (WINDOW * ROWS - WINDOW * (WINDOW - 1) / 2)
    yield Row(
        f"reference, sliding window {WINDOW} at 1x4x{ROWS}x64 bf16, over its unmasked operations at that rate",
        measured / (operations / rate),
        2.0,
        f"{measured:.2f} s at {rate / 1e9:.0f} GFLOP/s; the mask holds 1 GiB",
    )
    result = 4 * ROWS * 64 * 8
    made = peak("window_call()", "tests.bench_long")
    beyond = max(0, peak("reference(window_call())", "tests.bench_long") - made - result)
    yield Row(
        "reference of that window, memory beyond its result, over 256 MiB",
        beyond / (256 << 20),
        1.0,
        f"peak memory grows by {beyond >> 20} MiB beyond the {result >> 20} MiB of its float64 output",
    )
    save(snapshot(long_call(), context={"grad": False, "inference": True}), folder / "long.pt")
    run = measure("-m", "sdpa_repro", "replay", "--dtype", "captured", "--runs", "1", str(folder / "long.pt"))
    scores = 4 * ROWS * ROWS * 4 >> 30
    yield Row(
        f"replay of 1x4x{ROWS}x64 is_causal, peak memory of both processes over 2 GiB",
        run.peak / (2 << 30),
        1.0,
        f"{run.seconds:.0f} s, {run.peak >> 20} MiB; a float32 score matrix alone takes {scores} GiB",
    )


@dataclass(frozen=True)
class Run:
    """A finished command: wall time, sum of the peak resident bytes of its processes, and what it printed."""

    seconds: float
    peak: int
    printed: str


def measure(*words: str) -> Run:
    """Run Python with these words and watch the memory of the process and its descendants (Linux; else 0).

    Raises RuntimeError when it ends with another status than 0 or 1 (a divergence was found) and not for want of time.
    """
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    peaks: dict[int, int] = {}
    while process.poll() is None:
        for pid in _family(process.pid):
            peaks[pid] = max(peaks.get(pid, 0), _high_water(pid))
        time.sleep(0.05)
    printed, errors = process.communicate()
    if process.returncode not in (0, 1) and "no answer" not in printed:
        raise RuntimeError(errors)
    return Run(time.perf_counter() - start, sum(peaks.values()), printed)


def _family(pid: int) -> list[int]:
    """A process and its descendants."""
    found = [pid]
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
                found += _family(int(child))
    return found


def _high_water(pid: int) -> int:
    """Peak resident bytes of a process so far."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    return 0


def growth(folder: Path, lengths: tuple[int, ...] = LENGTHS) -> dict[str, dict[int, Run]]:
    """Time and memory of the verbs by length, whole processes except for the reference's seconds.

    Reference and replay: 1x4xLx64 is_causal. Reduce and explain: one row more, an expanded key and a bool mask, with
    pytorch#191937 planted.
    """
    found: dict[str, dict[int, Run]] = {"reference": {}, "replay": {}, "reduce": {}, "explain": {}}
    planted = ("--preload", str(FAULT), "--budget", str(BUDGET))
    for length in lengths:
        causal, failing = folder / f"causal{length}.pt", folder / f"failing{length}.pt"
        save(snapshot(long_call(length), context={"grad": False, "inference": True}), causal)
        call = make_call(rows=length + 1, width=64, padding=7)
        save(snapshot(call, context={"grad": False, "inference": True}), failing)
        run = measure("-c", REFERENCE, str(causal))
        found["reference"][length] = Run(float(run.printed), run.peak, "")
        words = ("-m", "sdpa_repro")
        found["replay"][length] = measure(*words, "replay", "--dtype", "captured", "--runs", "1", str(causal))
        target = ("-o", str(folder / f"small{length}.pt"))
        found["reduce"][length] = measure(*words, "reduce", *planted, *target, str(failing))
        found["explain"][length] = measure(*words, "explain", *planted, str(failing))
        causal.unlink()
        failing.unlink()
    return found


def table(found: dict[str, dict[int, Run]]) -> str:
    """The growth as Markdown."""
    lines = [
        "### How cost grows",
        "",
        "1x4xLx64 bf16. Reference and replay: `is_causal`. Reduce and explain: L + 1 rows, one key head expanded to",
        f"four, a bool mask, pytorch#191937 planted, `--budget {BUDGET}` (where the budget ends them, what is known by",
        "then is printed). Seconds are wall time: of the reference alone, of whole commands with the start of Python.",
        "MiB are the peaks of all processes of a command added up, torch itself (about 200 MiB each) included.",
        "",
        "| L | " + " | ".join(found) + " |",
        "|---|" + "---|" * len(found),
    ]
    for length in found["reference"]:
        cells = (f"{runs[length].seconds:.2f} s, {runs[length].peak >> 20} MiB" for runs in found.values())
        lines.append(f"| {length} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def picture(found: dict[str, dict[int, Run]], path: Path) -> bool:
    """The growth as two charts; False without matplotlib, which is optional."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "sdpa-repro"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.6), constrained_layout=True)
    for verb, runs in found.items():
        axes[0].plot(list(runs), [run.seconds for run in runs.values()], marker="o", label=verb)
        axes[1].plot(list(runs), [run.peak / (1 << 20) for run in runs.values()], marker="o", label=verb)
    for axis, title in zip(axes, ("seconds", "peak memory, MiB"), strict=True):
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel("L = S")
        axis.set_title(title)
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(path, metadata={"Date": None})
    return True
