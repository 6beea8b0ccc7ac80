"""The demo: what it plants, where, and whether it found what it should."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from sdpa_repro.errors import InputError
from sdpa_repro.replaying.replay import Replay
from sdpa_repro.situation import release

DEMO_ISSUE = "pytorch#191937"
DEMO_PAD = 7
"""Tokens of padding that make the embedded prompt of 282 tokens 289 long, and 289 % 32 == 1."""

FIXED_IN = (2, 14)
FAULT = Path("tests") / "faults" / "pytorch_191937.py"


@dataclass(frozen=True)
class Plan:
    """How the demo runs here. `preload`: the file that plants the fault, or nothing where the real bug is expected."""

    device: str
    preload: tuple[Path, ...]
    words: str


def demo_plan() -> Plan:
    """Real bug on CUDA with torch before 2.14; elsewhere its emulation on the CPU. Raises InputError without it."""
    version, _ = release(torch.__version__)
    cuda = torch.cuda.is_available()
    if cuda and version < FIXED_IN:
        words = (
            f"demo: nothing is planted; torch {torch.__version__} on {torch.cuda.get_device_name()} has {DEMO_ISSUE}, "
            "and the embedded model must show it"
        )
        return Plan("cuda", (), words)
    why = f"torch {torch.__version__} has the fix" if cuda else "there is no CUDA device here"
    fault = Path(__file__).resolve().parents[2] / FAULT
    if not fault.is_file():
        raise InputError(f"{why}, and the demo's fault {FAULT} comes with the repository only: clone it, run make demo")
    words = (
        f"demo: {why}, so the bug is PLANTED: {FAULT.name} is preloaded and makes the CPU kernel FLASH_ATTENTION "
        f"behave as {DEMO_ISSUE} does on a GPU; torch itself is not at fault below"
    )
    return Plan("cpu", (fault,), words)


def demo_found(result: Replay | None, plan: Plan) -> bool:
    """Whether the demo found exactly what it should: the issue, in the last query row, and nothing planted unseen."""
    if result is None or not result.known or result.known[0].issue != DEMO_ISSUE:
        return False
    cell = next((cell for cell in result.cells if cell.wrong and cell.dtype == result.dtype), None)
    planted = {record["name"] for record in result.preloaded} == {path.name for path in plan.preload}
    return planted and cell is not None and cell.bad is not None and cell.bad.rows == (288,)
