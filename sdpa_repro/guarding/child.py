"""The guard inside a process that `guard -- script.py` has started, directly or through the script.

Imports the standard library alone until the script imports torch; see `capturing.child`, which it shares.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from sdpa_repro.capturing.after_import import after_import
from sdpa_repro.capturing.child import Process

if TYPE_CHECKING:
    from sdpa_repro.guarding.guard import Guard

VARIABLE = "SDPA_REPRO_GUARD"
"""Environment variable with the plan, in JSON: `reports`, `package`, `preload`, `rule`."""


def install(plan: dict[str, Any]) -> Process:
    """Wait for torch in this process, and notice child processes that cannot be guarded."""
    process = GuardedProcess(plan)
    sys.addaudithook(process.audit)
    after_import("torch", process.start)
    return process


class GuardedProcess(Process):
    """This process's guard, over all of its threads, and its report."""

    variable = VARIABLE

    def _open(self) -> None:
        from sdpa_repro.guarding.guard import make_guard

        guard = make_guard(
            self.plan["rule"], all_threads=True, preloaded=self._preloaded, on_change=lambda: self._so_far()
        )
        self.session = _Guarding(guard)


class _Guarding:
    """A guard as a `Watch`."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        if not guard.unneeded:
            guard.__enter__()

    def summary(self) -> dict[str, Any]:
        found = self._guard.report()
        return {**found, "seen": found["calls"]}

    def close(self) -> None:
        if not self._guard.unneeded:
            self._guard.__exit__(None, None, None)

    def forget(self) -> None:
        from sdpa_repro.guarding import switch

        switch.forget()
