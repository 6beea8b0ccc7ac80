"""Run a script or program under the guard, its child processes included, and add up what they report."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdpa_repro.capturing.script import PACKAGE, command_of, environment_with, read_reports, run_command
from sdpa_repro.environment import preload_records
from sdpa_repro.guarding.child import VARIABLE
from sdpa_repro.guarding.remedies import devices_here
from sdpa_repro.guarding.rule_file import read_rule


@dataclass(frozen=True)
class GuardedRun:
    """How the script ended, and what the guards in its processes did.

    status: its exit status as a shell gives it. reports: a dict a process that imported torch, with `pid`, `state`
    ("ended", "running" for one that was killed, or "failed") and a `summary` as `Guard.report` gives it.
    """

    status: int
    reports: tuple[dict[str, Any], ...]
    preloaded: tuple[dict[str, str], ...] = ()
    interrupted: bool = False

    @property
    def summaries(self) -> list[dict[str, Any]]:
        """What was reported by processes in which the guard was."""
        return [report["summary"] for report in self.reports if isinstance(report.get("summary"), dict)]

    def document(self) -> dict[str, Any]:
        """As plain JSON types; counts are over all processes."""
        summaries = self.summaries
        issues = {issue["issue"]: issue for summary in summaries for issue in summary["issues"]}
        return {
            "sentence": self.sentence,
            "exit_status": self.status,
            "interrupted": self.interrupted,
            "processes": len(summaries),
            "needed": any(summary["needed"] for summary in summaries),
            "why": next((summary["why"] for summary in summaries if summary["why"]), ""),
            "calls": sum(summary["calls"] for summary in summaries),
            "changed": self._total("changed"),
            "issues": list(issues.values()),
            "passed": self._total("passed"),
            "not_guarded": self.not_guarded,
            "preloaded": [dict(record) for record in self.preloaded],
        }

    @property
    def sentence(self) -> str:
        """One line: what was changed, or why nothing was."""
        summaries = self.summaries
        if not summaries:
            return "the guard was in no process: none imported torch and came to its end"
        if not any(summary["needed"] for summary in summaries):
            return f"the guard is not needed and did nothing: {summaries[0]['why']}"
        calls, changed = sum(summary["calls"] for summary in summaries), self._total("changed")
        head = f"{calls} attention call{'s' * (calls != 1)} in {_processes(len(summaries))}"
        if not changed:
            return f"{head}, none of which had to be changed"
        fixes = {issue["issue"]: issue for summary in summaries for issue in summary["issues"]}
        parts = [f"{count} for {_fix(fixes[name])}" for name, count in changed.items()]
        return f"{head}, changed {'; '.join(parts)}"

    @property
    def not_guarded(self) -> list[str]:
        """Child processes that could not get the guard, and processes in which it failed; a phrase each."""
        found = [text for report in self.reports for text in report.get("unrecorded", [])]
        return found + [str(report["error"]) for report in self.reports if report.get("state") == "failed"]

    def _total(self, key: str) -> dict[str, int]:
        total: Counter[str] = Counter()
        for summary in self.summaries:
            total.update(summary[key])
        return dict(total)


def run_guarded(
    words: Sequence[str],
    *,
    rule: str | os.PathLike[str] | None = None,
    preload: Sequence[str | os.PathLike[str]] = (),
    stdout: int | None = None,
) -> GuardedRun:
    """Run `words` (a Python file or `-m module`, or any program that starts Python, with arguments) to its end.

    rule: as for `guard`. `stdout` is the child's standard output as `subprocess` takes it (None: this process's).
    Raises InputError when there is no such script, or a preload file or the rule cannot be used.
    """
    command = command_of(words)
    records = preload_records([Path(path) for path in preload])
    if rule is not None:
        read_rule(rule, devices_here())
    with tempfile.TemporaryDirectory(prefix="sdpa-repro-guard-") as folder:
        plan = {
            "reports": folder,
            "package": str(PACKAGE),
            "preload": [str(Path(path).absolute()) for path in preload],
            "rule": None if rule is None else str(Path(rule).absolute()),
        }
        status, interrupted = run_command(command, environment_with(plan, VARIABLE), stdout)
        return GuardedRun(status, tuple(read_reports(Path(folder))), tuple(records), interrupted)


def _processes(count: int) -> str:
    return f"{count} process{'es' * (count != 1)}"


def _fix(issue: dict[str, Any]) -> str:
    fixed = f"fixed in {issue['fixed_in']}" if issue["fixed_in"] else "no release with a fix known"
    return f"{issue['issue']} ({fixed}; {issue['cure']})"
