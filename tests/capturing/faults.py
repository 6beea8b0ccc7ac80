"""Faults planted in this process for the tests of the recorder; `conftest.plant` takes them away again."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

FAULTS = Path(__file__).resolve().parent.parent / "faults"


def plant(name: str) -> None:
    """Run a file of tests/faults here."""
    runpy.run_path(str(FAULTS / f"{name}.py"))


def restore() -> None:
    """Give the kernels their real implementation back."""
    if "emulation" in sys.modules:
        sys.modules["emulation"].restore()
