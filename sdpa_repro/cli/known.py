"""`sdpa-repro known`: the upstream bugs the program knows, and which of them this machine has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from sdpa_repro.cli import output
from sdpa_repro.cli.epilog import epilog
from sdpa_repro.errors import INTERRUPTED

if TYPE_CHECKING:
    from sdpa_repro.explaining.known_here import Outcome
    from sdpa_repro.known_issues import KnownIssue


@click.command(
    name="known",
    epilog=epilog(
        {0: "listed; with --here: none of them shows", 1: "with --here: this torch has one of them"},
        "sdpa-repro known",
        "sdpa-repro known --here        about 10 s",
    ),
)
@click.option("--here", is_flag=True, help="Try each on this machine and this torch, in child processes (about 10 s).")
@click.option(
    "--preload",
    multiple=True,
    metavar="FILE.py",
    type=click.Path(dir_okay=False, readable=False),
    help="With --here: run this Python file in every process first (repeatable).",
)
@click.option(
    "--timeout",
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    type=click.FloatRange(min=0, min_open=True),
    help="With --here: limit of each trial.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(here: bool, preload: tuple[str, ...], timeout: float, as_json: bool) -> None:
    """List the upstream attention bugs that sdpa-repro recognises; with --here run a trigger of each."""
    if preload and not here:
        raise click.UsageError("--preload is for --here")
    if here:
        raise SystemExit(_here(preload, timeout, as_json))
    _list(as_json)


def _list(as_json: bool) -> None:
    from sdpa_repro.known_issues import KNOWN_ISSUES, versions

    if as_json:
        output.document("known", {"preloaded": [], "environment": _environment(), "issues": _entries(KNOWN_ISSUES)})
        return
    output.answer(f"{len(KNOWN_ISSUES)} upstream attention bugs are known to sdpa-repro")
    rows = [[known.issue, known.device, _short(known.backend), versions(known), known.title] for known in KNOWN_ISSUES]
    output.table(["issue", "device", "backend", "torch", "what"], rows)
    output.next_command("sdpa-repro known --here")


def _here(preload: tuple[str, ...], timeout: float, as_json: bool) -> int:
    """Run the triggers; what was found is printed also after Ctrl-C."""
    from sdpa_repro.environment import preload_records
    from sdpa_repro.explaining.known_here import AFFECTED, check_here

    preloaded = preload_records(preload)
    found: list[Outcome] = []
    interrupted, quiet = False, output.quiet()

    def report(outcome: Outcome) -> None:
        found.append(outcome)
        if outcome.device is not None and not quiet:  # in a thread, which does not know what was asked for
            output.progress(f"{outcome.issue}: {outcome.status} ({outcome.detail})")

    try:
        check_here(preload, timeout=timeout, report=report)
    except KeyboardInterrupt:
        interrupted = True
    outcomes = {outcome.issue: outcome for outcome in list(found)}
    _print(outcomes, preloaded, interrupted, as_json)
    if interrupted:
        return INTERRUPTED
    return int(any(outcome.status == AFFECTED for outcome in outcomes.values()))


def _print(outcomes: dict[str, Outcome], preloaded: list[dict[str, str]], interrupted: bool, as_json: bool) -> None:
    from sdpa_repro.known_issues import KNOWN_ISSUES

    if as_json:
        body: dict[str, Any] = {"preloaded": preloaded, "environment": _environment(), "complete": not interrupted}
        output.document("known", {**body, "issues": _entries(KNOWN_ISSUES, outcomes)})
        return
    output.answer(_answer(outcomes, interrupted))
    output.line(_where())
    for record in preloaded:
        output.line(f"preloaded: {record['name']} (sha256 {record['sha256'][:12]}); what it plants counts as affected")
    rows, styles = [], []
    for known in sorted(KNOWN_ISSUES, key=lambda known: _order(outcomes.get(known.issue))):
        outcome = outcomes.get(known.issue)
        status = "not run (interrupted)" if outcome is None else _status(outcome)
        rows.append([known.issue, status, outcome.detail if outcome else "", known.fixed_in or "-", known.title])
        styles.append("red" if outcome is not None and outcome.status == "affected" else None)
    output.table(["issue", "here", "seen", "fixed in", "what"], rows, styles=styles)
    affected = any(outcome.status == "affected" for outcome in outcomes.values())
    output.next_command(f"sdpa-repro {'guard' if affected else 'diagnose'} -- YOUR_SCRIPT.py")


def _answer(outcomes: dict[str, Outcome], interrupted: bool) -> str:
    import torch

    affected = [outcome for outcome in outcomes.values() if outcome.status == "affected"]
    tested = [outcome for outcome in outcomes.values() if outcome.status != "not tested"]
    count = f"{len(affected)} of {len(tested)} known bugs that can be tested here are present"
    emulated = sum(outcome.emulated for outcome in affected)
    note = f" ({emulated} of them emulated by what was preloaded)" if emulated else ""
    return f"torch {torch.__version__}: {count}{note}" + (" (interrupted, not all were tried)" if interrupted else "")


def _status(outcome: Outcome) -> str:
    if outcome.status == "not tested":
        return "cannot be tested here"
    return outcome.status + (", as emulated on the CPU" if outcome.emulated and outcome.status == "affected" else "")


def _order(outcome: Outcome | None) -> int:
    """Affected first, then not affected, then what could not be tested."""
    return 3 if outcome is None else ("affected", "not affected", "not tested").index(outcome.status)


def _entries(issues: tuple[KnownIssue, ...], outcomes: dict[str, Outcome] | None = None) -> list[dict[str, Any]]:
    """The table as JSON; `here` only where triggers were run."""
    entries = []
    for known in issues:
        entry: dict[str, Any] = {
            "issue": known.issue,
            "title": known.title,
            "backends": list(known.backends),
            "device": known.device,
            "first": known.first,
            "last": known.last,
            "fixed_in": known.fixed_in,
            "effect": known.effect,
            "workaround": known.workaround,
        }
        if outcomes is not None:
            outcome = outcomes.get(known.issue)
            entry["here"] = None if outcome is None else {k: v for k, v in vars(outcome).items() if k != "issue"}
        entries.append(entry)
    return entries


def _environment() -> dict[str, Any]:
    from sdpa_repro.environment import software

    return software()


def _where() -> str:
    """Torch, its path and the device, in one line that can be shared."""
    from sdpa_repro.environment import torch_folder

    facts = _environment()
    device = facts.get("gpu") or f"CPU ({facts.get('cpu') or 'unknown'})"
    return f"torch {facts['torch']} at {torch_folder()}, {device}, {facts['platform']}"


def _short(backend: str) -> str:
    """Backend names without their common ending, to keep the table narrow."""
    return "any" if backend.count(",") == 4 else backend.replace("_ATTENTION", "")
