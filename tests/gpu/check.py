"""`make gpu-check`, or `python3 -m tests.gpu.check`: everything that needs CUDA, in one run that ends with a table.

Needs torch, transformers, pytest, click and numpy; installs nothing and reaches no network. The steps stop at
their time limits, which together stay under ten minutes. Exit status: 0 when every step passed, 1 otherwise.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True)
class Step:
    """One command, the exit statuses that pass, and its time limit in seconds."""

    name: str
    arguments: tuple[str, ...]
    passes: tuple[int, ...]
    seconds: int


@dataclass(frozen=True)
class Result:
    """What became of a step; `line` is the line of its output that says most."""

    step: Step
    status: int | None
    seconds: float
    line: str

    @property
    def passed(self) -> bool:
        return self.status in self.step.passes


def environment() -> dict[str, str]:
    """What was tested: versions, GPU, driver."""
    import torch
    import transformers

    found = {"python": sys.version.split()[0], "torch": torch.__version__, "transformers": transformers.__version__}
    found["cuda"] = str(torch.version.cuda)
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        found["gpu"] = f"{torch.cuda.get_device_name()} (sm_{major}{minor})"
        found["cudnn"] = str(torch.backends.cudnn.version())
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            found["driver"] = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.strip()
        except OSError:
            found["driver"] = "unknown"
    return found


def steps(affected: bool) -> list[Step]:
    """The steps on this torch; `affected`: it has pytorch#191937, so the sample must diverge."""
    wrong = (1,) if affected else (0,)
    program = ("-m", "sdpa_repro")
    samples = sorted((ROOT / "dumps").glob("*.sample.pt"))
    tests = ("-m", "pytest", "-q", "-rs", "--durations=5", "-p", "no:cacheprovider", "tests/gpu")
    return [
        Step("tests/gpu", tests, (0,), 150),
        Step("demo", (*program, "diagnose", "--demo"), (0,), 150),
        Step("known bugs", (*program, "known", "--here"), (0, 1), 60),
        Step("cost of capture", ("-m", "tests.bench", "--only", "capture", "--output", os.devnull), (0, 124), 100),
        *(
            Step(f"replay {path.name} on the GPU", (*program, "replay", str(path), "--device", "cuda"), wrong, 50)
            for path in samples
        ),
        *(
            Step(f"replay {path.name} on the CPU", (*program, "replay", str(path), "--device", "cpu"), (0,), 50)
            for path in samples
        ),
    ]


def run(step: Step) -> Result:
    """Run one step, showing its output as it comes."""
    print(f"\n=== {step.name}: python {' '.join(step.arguments)}", flush=True)
    started = time.monotonic()
    lines: list[str] = []
    command = ["timeout", "-k", "5", str(step.seconds), sys.executable, *step.arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for text in process.stdout:
            print(text, end="", flush=True)
            lines.append(text.strip())
    return Result(step, process.returncode, time.monotonic() - started, telling(step, lines))


def telling(step: Step, lines: list[str]) -> str:
    """pytest's summary is its last line; a verdict is the first line of ours that is no progress."""
    filled = [line for line in lines if line]
    if not filled:
        return ""
    if "pytest" in step.arguments:
        return filled[-1].strip("= ")
    wanted = ("is wrong", "are wrong", "healthy", "agree", "error:", "verdict")
    return next((line for line in filled if any(word in line for word in wanted)), filled[-1])


def main() -> int:
    """Run all steps and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--allow-cpu", action="store_true", help="run without CUDA too, to try this script")
    arguments = parser.parse_args()
    import torch

    found = environment()
    for name, value in found.items():
        print(f"{name:13} {value}")
    if not torch.cuda.is_available() and not arguments.allow_cpu:
        print("error: torch sees no CUDA device here; nothing was checked", file=sys.stderr)
        return 2
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    affected = torch.cuda.is_available() and (2, 2) <= release < (2, 14)
    results = [run(step) for step in steps(affected)]
    width = max(len(result.step.name) for result in results)
    print(f"\n=== torch {found['torch']}, {found.get('gpu', 'no GPU')}")
    print(f"{'step':{width}}  result  status  seconds  what it said")
    for result in results:
        word = "passed" if result.passed else "FAILED"
        print(f"{result.step.name:{width}}  {word}  {result.status!s:>6}  {result.seconds:7.1f}  {result.line[:100]}")
    return 0 if all(result.passed for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
