"""The reports of all ranks in one: rank 0 gets what each rank saw, and what the index says of ranks that died."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sdpa_repro import ranks
from sdpa_repro.capturing import folder
from sdpa_repro.capturing.records import Options
from sdpa_repro.capturing.report import Report, of_entry, prune, severity, wrong_ranks


def of_ranks(own: Report, out: Path, options: Options, before: Sequence[str] = ()) -> Report:
    """On rank 0 the report of the whole run; every rank has to call it with its own report.

    A rank that broke off (`failed`) says so by not joining, and whoever waits for it is told by the closed
    connection. Dumps of ranks that were not heard are found in the index of `out`: those that are not `before`. As
    many dumps stay as one process may write. Other ranks get their own report back.
    """
    try:
        reports = [own] if own.get("failed") else ranks.of_all(own)
    except (RuntimeError, KeyboardInterrupt):
        reports = [own]
    if not ranks.is_first():
        return own
    merged = _joined(reports)
    if len(reports) < ranks.world():
        missing = ranks.world() - len(reports)
        merged["problems"].append(f"{missing} of {ranks.world()} ranks left no report: their dumps so far are kept")
        merged["failed"] = merged["failed"] or f"{missing} of {ranks.world()} ranks ended early"
    merged["dumps"] = list({dump["file"]: dump for dump in reversed(merged["dumps"])}.values())
    if merged["script"] is not None:  # each rank has looked through the folder, and left as many as one may write
        merged["dumps"] = [dump for dump in merged["dumps"] if (out / dump["file"]).is_file()]
    if len(reports) < ranks.world():  # else what is new is of another capture into the same folder
        known = {dump["file"] for dump in merged["dumps"]} | set(before)
        merged["dumps"] += [of_entry(entry) for entry in folder.entries(out) if entry["file"] not in known]
    merged["dumps"].sort(key=severity, reverse=True)
    merged["ranks"] = {"world": ranks.world(), "wrong": wrong_ranks([*merged["calls"], *merged["dumps"]])}
    prune(merged, out, options)
    return merged


def _joined(reports: Sequence[Report]) -> Report:
    """Reports side by side: counts added, lists one after the other, processes numbered through."""
    merged = dict(reports[0])
    merged.update({name: sum(each[name] for each in reports) for name in ("seen", "checked", "wrong", "raised")})
    for name in ("passed", "elsewhere"):
        merged[name] = dict(sum((Counter(each[name]) for each in reports), Counter()))
    for name in ("modules", "hints", "problems"):
        merged[name] = list(dict.fromkeys(text for each in reports for text in each[name]))
    for name in ("stopped", "interrupted"):
        merged[name] = any(each.get(name) for each in reports)
    merged["failed"] = next((each["failed"] for each in reports if each.get("failed")), None)
    merged["calls"], merged["dumps"], first = [], [], 0
    for each in reports:
        for name in ("calls", "dumps"):
            merged[name] += [_renumbered(part, first) for part in each[name]]
        first = 1 + max((part["process"] for part in merged["calls"]), default=first - 1)
    scripts = [each["script"] for each in reports if each["script"] is not None]
    merged["script"] = _joined_scripts(scripts) if scripts else None
    return merged


def _renumbered(part: dict[str, Any], first: int) -> dict[str, Any]:
    return {**part, "process": None if part["process"] is None else part["process"] + first}


def _joined_scripts(scripts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How the ranks' scripts ended: the worst status, and everything that any of them says."""
    worst = max(scripts, key=lambda script: int(script["status"]))
    joined = {
        **worst,
        "interrupted": any(script["interrupted"] for script in scripts),
    }
    for name in ("processes", "without_report"):
        joined[name] = sum(script[name] for script in scripts)
    for name in ("inside", "failed", "not_recorded"):
        joined[name] = [text for script in scripts for text in script[name]]
    return joined
