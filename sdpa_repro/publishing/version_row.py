"""What one environment gave: the machine, a word for every backend, and how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from sdpa_repro.publishing.story import BACKENDS

COLUMNS = (*BACKENDS[:-1], "eager", "default")
"""Backends that a row may speak of, in the order in which they are shown."""

WORDS = ("ok", "wrong", "declined", "crashed", "no answer", "unstable", "not comparable", "error", "not run")
BAD_WORDS = ("wrong", "crashed", "no answer", "unstable")
MACHINE = ("torch", "torch_git", "device", "gpu", "capability", "driver", "cudnn", "cuda", "hip", "python", "cpu")
"""What is told of a machine; nothing that names it or its user."""


class Outcome(str, Enum):
    """How an environment took it."""

    FAILS = "fails"
    PASSES = "passes"
    CRASHED = "crashed"
    TIMEOUT = "no answer"
    ERROR = "error"
    """It ran and said nothing about the bug: an exception, no backend that took the call."""
    MISSING = "not run"
    """There is no such environment."""

    @property
    def bad(self) -> bool:
        return self in (Outcome.FAILS, Outcome.CRASHED, Outcome.TIMEOUT)


@dataclass(frozen=True)
class Row:
    """One environment. results: word of `WORDS` by backend. planted: files that were run first."""

    name: str
    outcome: Outcome
    results: Mapping[str, str] = field(default_factory=dict)
    machine: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""
    seconds: float | None = None
    planted: tuple[str, ...] = ()

    @property
    def torch(self) -> str:
        """The release, or what was asked for where it did not run; "" where that is not known."""
        asked = self.name.removeprefix("torch ") if self.name.startswith("torch ") else ""
        return self.machine.get("torch") or asked

    @property
    def where(self) -> str:
        """The device: a GPU by its name with driver and cuDNN, else its kind."""
        kind = self.machine.get("device", "")
        if kind.partition(":")[0] not in ("cuda", ""):
            return kind
        gpu = self.machine.get("gpu")
        if not gpu:
            return kind
        driver, cudnn = self.machine.get("driver"), cudnn_version(self.machine.get("cudnn", ""))
        return ", ".join(filter(None, (gpu, driver and f"driver {driver}", cudnn and f"cuDNN {cudnn}")))

    def document(self) -> dict[str, Any]:
        """As plain JSON types."""
        return {
            "name": self.name,
            "outcome": self.outcome.value,
            "results": dict(self.results),
            "machine": dict(self.machine),
            "reason": self.reason,
            "seconds": None if self.seconds is None else round(self.seconds, 1),
            "planted": list(self.planted),
        }


def cudnn_version(number: str) -> str:
    """The version behind cuDNN's number: 91501 is 9.15.1, 8902 is 8.9.2."""
    if not number.isdecimal() or len(number) > 7:
        return number
    value = int(number)
    major, rest = divmod(value, 10_000) if value >= 90_000 else divmod(value, 1_000)
    return f"{major}.{rest // 100}.{rest % 100}" if major else number


def machine_of(software: Mapping[str, Any], device: str | None = None) -> dict[str, str]:
    """The entries of `environment.software` that a row keeps, as text."""
    found = {name: str(software[name]) for name in MACHINE if software.get(name) is not None}
    return {**found, "device": device} if device else found
