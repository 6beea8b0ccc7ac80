"""The result of a capture as one plain dict, whichever way the calls came in: sessions merged, dumps proven.

Keys: `out`, `options`, `seen` (SDPA calls), `checked` (those the options want), `calls` (as `CallRecord`,
plus `process`, numbered by start), `dumps` (`file`, `call_index`, `process`, `status`, `ratio`, and after
`prove` `fidelity`), `ranks` (`world`, and which of them are `wrong`), `passed`, `elsewhere`, `hints`, `problems`,
`preloaded`, `environment`, `failed` (how a run of several ranks broke off) and `script`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sdpa_repro.capturing import folder
from sdpa_repro.capturing.records import WRONG, CallRecord, Options, nothing_seen
from sdpa_repro.capturing.script import ScriptRun
from sdpa_repro.errors import INTERRUPTED, InputError
from sdpa_repro.replaying.replay import prove as prove_dump
from sdpa_repro.visibility import ranges, ranges_text

Report = dict[str, Any]


def of_session(summary: Mapping[str, Any], out: Path, preloaded: Sequence[Mapping[str, str]] = ()) -> Report:
    """Report of one session in this process, from `Session.summary`."""
    return _merged([summary], out, preloaded, summary["options"])


def of_script(run: ScriptRun, out: Path, options: Options, preloaded: Sequence[Mapping[str, str]] = ()) -> Report:
    """Report of all processes of a script; keeps as many of their dumps as one process may write."""
    from dataclasses import asdict

    told = [report["summary"] for report in run.reports if "summary" in report]
    merged = _merged(told, out, preloaded, asdict(options))
    merged["dumps"] = [dump for dump in merged["dumps"] if (out / dump["file"]).is_file()]
    lost = [report for report in run.reports if report["state"] == "running"]
    known = {dump["file"] for dump in merged["dumps"]}
    if lost:  # else a new line of the index is of another capture into the same folder
        merged["dumps"] += [of_entry(entry) for entry in run.new if entry["file"] not in known]
    merged["script"] = {
        "status": run.status,
        "end": run.end,
        "interrupted": run.interrupted,
        "processes": len(run.reports),
        "without_report": len(lost),
        "inside": [] if stopped_by_user(run.status, run.interrupted) else _inside(run),
        "failed": [report["error"] for report in run.reports if report["state"] == "failed"],
        "not_recorded": sorted({each for report in run.reports for each in report.get("unrecorded", ())}),
    }
    prune(merged, out, options)
    return merged


def stopped_by_user(status: int, interrupted: bool) -> bool:
    """Whether Ctrl-C ended the script: then neither that nor the call it was in is a finding."""
    return interrupted and status == INTERRUPTED


def _inside(run: ScriptRun) -> list[str]:
    """The calls in which processes ended."""
    return [report["inside"] for report in run.reports if report["state"] == "running" and report["inside"]]


def of_entry(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A dump as in a report, from its line in the index."""
    return {
        "file": entry["file"],
        "module": entry.get("module"),
        "call_index": entry.get("call_index"),
        "process": None,
        "status": entry.get("status"),
        "ratio": _number(entry.get("live_ratio")),
        "rank": entry.get("rank"),
        "world": entry.get("world"),
    }


def _merged(
    summaries: Sequence[Mapping[str, Any]],
    out: Path,
    preloaded: Sequence[Mapping[str, str]],
    options: Mapping[str, Any],
) -> Report:
    """Several sessions' summaries in one."""
    calls, dumps = [], []
    for number, summary in enumerate(summaries):
        records = {record["kept"]: record for record in summary["calls"] if record["kept"]}
        calls += [{**record, "process": number} for record in summary["calls"]]
        dumps += [_dump(records.get(file, {}), file, number) for file in summary["dumps"]]
    return {
        "out": str(out),
        "options": dict(options),
        "seen": sum(summary["seen"] for summary in summaries),
        "checked": sum(summary["checked"] for summary in summaries),
        "wrong": sum(summary["wrong"] for summary in summaries),
        "raised": sum(summary["raised"] for summary in summaries),
        "modules": list(dict.fromkeys(module for summary in summaries for module in summary["modules"])),
        "ranks": {"world": max((record["world"] or 1 for record in calls), default=1), "wrong": wrong_ranks(calls)},
        "calls": calls,
        "dumps": sorted(dumps, key=severity, reverse=True),
        "passed": dict(sum((Counter(summary["passed"]) for summary in summaries), Counter())),
        "elsewhere": dict(sum((Counter(summary["elsewhere"]) for summary in summaries), Counter())),
        "hints": list(dict.fromkeys(hint for summary in summaries for hint in summary["hints"])),
        "stopped": any(summary["stopped"] for summary in summaries),
        "problems": [problem for summary in summaries for problem in summary["problems"]],
        "preloaded": [dict(each) for each in preloaded],
        "failed": None,
        "script": None,
    }


def _dump(record: Mapping[str, Any], file: str, process: int) -> dict[str, Any]:
    return {
        "file": file,
        "module": record.get("module"),
        "call_index": record.get("index"),
        "process": process,
        "status": record.get("status"),
        "ratio": record.get("ratio"),
        "rank": record.get("rank"),
        "world": record.get("world"),
    }


def severity(dump: Mapping[str, Any]) -> tuple[int, float]:
    """Orders dumps: wrong ones by error over threshold, then calls that raised, then healthy ones."""
    order = {"agrees": 1, "raised": 2, "diverges": 3, "nonfinite": 3}
    ratio = dump.get("ratio")
    return order.get(str(dump.get("status")), 0), ratio if isinstance(ratio, float) else 0.0


def _number(value: object) -> float | None:
    """A number of the index, where infinities are texts."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None


def prune(merged: Report, out: Path, options: Options) -> None:
    """Each process keeps its own worst call: of all together only as many stay as the options say."""
    if options.everything or not merged["dumps"]:
        return
    merged["dumps"].sort(key=severity, reverse=True)
    urgent = [dump for dump in merged["dumps"] if severity(dump)[0] > 1]
    kept = urgent[: int(options.slots)] if urgent else merged["dumps"][:1]
    for each in merged["dumps"][len(kept) :]:
        folder.remove(out, each["file"])
    gone = {each["file"] for each in merged["dumps"][len(kept) :]}
    merged["dumps"] = kept
    for record in merged["calls"]:
        if record["kept"] in gone:
            record["kept"] = None


def prove(report: Report, preload: Sequence[str | Path] = (), progress: Callable[[str], None] | None = None) -> None:
    """Replay each dump of the report in a fresh process and note in it whether layout and output are the same."""
    for each in report["dumps"]:
        if each["status"] == "raised":
            each["fidelity"] = {"bit_equal": None, "layout_equal": None, "reason": "the call raised: no output"}
            continue
        if progress is not None:
            progress(f"proving {each['file']}")
        try:
            found = prove_dump(Path(report["out"]) / each["file"], preload)
        except InputError as error:
            each["fidelity"] = {"bit_equal": None, "layout_equal": None, "reason": str(error)}
        else:
            each["fidelity"] = {
                "bit_equal": found.bit_equal,
                "layout_equal": found.layout_equal,
                "reason": found.reason,
            }


def worst(report: Report) -> dict[str, Any] | None:
    """The worst recorded call."""
    calls = report["calls"]
    return max(calls, key=lambda call: _record(call).severity) if calls else None


def answer(report: Report) -> str:
    """The result in one sentence. Raises InputError, with what was seen instead, when no call was recorded.

    A script that failed before any call, or Ctrl-C, is no error: its own end is the result.
    """
    if not was_interrupted(report):
        return _finding(report)
    if not report["calls"]:
        return "interrupted: no attention call was recorded" + ("; what was dumped is kept" if report["dumps"] else "")
    return f"interrupted: {_finding(report)}"


def was_interrupted(report: Report) -> bool:
    """Whether Ctrl-C came before the end of the run, or of the proofs."""
    script = report["script"]
    return bool(report.get("interrupted") or (script is not None and script["interrupted"]))


def _finding(report: Report) -> str:
    """What was seen, in one sentence."""
    planted = ", ".join(each["name"] for each in report["preloaded"])
    suffix = f" (preloaded: {planted})" if planted else ""
    top, script = worst(report), report["script"]
    if script is not None and script["inside"] and script["status"] > 128:
        return f"the script was {script['end']} inside {script['inside'][0]}{suffix}"
    if top is None and script is not None and script["status"]:
        return f"no attention call was recorded before the script ended: {script['end']}{suffix}"
    if top is None and report.get("failed") and not report["dumps"]:
        raise InputError(f"the run broke off before any attention call: {report['failed']}{suffix}")
    if top is None:
        raise InputError(_nothing(report) + suffix)
    count = f"{report['checked']} attention call{'s' if report['checked'] != 1 else ''}"
    suffix = (f"; the run broke off: {report['failed']}" if report.get("failed") else "") + suffix
    if report["wrong"]:
        return f"{report['wrong']} of {count} wrong{_on_ranks(report)}; the worst: {_record(top).sentence()}{suffix}"
    unheard = [dump["file"] for dump in report["dumps"] if dump["status"] in WRONG]
    if unheard:
        return f"a process that left no report had a wrong call{_on_ranks(report)}: {unheard[0]}{suffix}"
    if top["status"] == "raised":
        return f"{report['raised']} of {count} raised; {_record(top).sentence()}{suffix}"
    if top["status"] == "unchecked":
        return f"{count} recorded, none of them checked ({top['reason']}){suffix}"
    unchecked = sum(call["status"] == "unchecked" for call in report["calls"])
    count += f", {unchecked} of them not checked" if unchecked else ""
    return f"no wrong attention call: {count}, the worst at {top['ratio']:.2g} x its threshold{suffix}"


def wrong_ranks(parts: Sequence[Mapping[str, Any]]) -> list[int]:
    """The ranks, in order, of those calls or dumps that are wrong."""
    return sorted({part["rank"] for part in parts if part["status"] in WRONG and isinstance(part.get("rank"), int)})


def _on_ranks(report: Report) -> str:
    """Which ranks are wrong: " on ranks 0, 3 of 4"; nothing in a run of one process."""
    world, wrong = report["ranks"]["world"], report["ranks"]["wrong"]
    if world == 1 or not wrong:
        return ""
    if len(wrong) == world:
        return f" on all {world} ranks" if world > 2 else " on both ranks, 0 and 1"
    names = ranges_text(ranges(wrong), limit=8)
    return f" on rank{'s' * (len(wrong) > 1)} {names} of {world} (counted from 0)"


def exit_status(report: Report) -> int:
    """The script's own status if it is not 0, else 1 when a call is wrong, 2 when the run broke off, else 0."""
    script = report["script"]
    found = report["wrong"] or any(dump["status"] in WRONG for dump in report["dumps"])
    if report.get("failed"):
        return 1 if found else 2
    if was_interrupted(report):
        return INTERRUPTED
    if script is not None and script["status"]:
        return int(script["status"])
    return 1 if found else 0


def _record(call: Mapping[str, Any]) -> CallRecord:
    fields = {name: value for name, value in call.items() if name in CallRecord.__dataclass_fields__}
    return CallRecord(**fields)


def _nothing(report: Report) -> str:
    """Why nothing was recorded; of a script also which of its processes could not be seen."""
    script = report["script"]
    if script is None:
        return nothing_seen(report)
    causes = [f"not recorded: {each}" for each in script["not_recorded"]] + script["failed"]
    if script["without_report"]:
        causes.append(f"{script['without_report']} of its processes ended without a report (os._exit, or killed)")
    if script["processes"] == 0:
        causes.append("no Python process that it started imported torch")
    return nothing_seen({**report, "hints": report["hints"] + causes})
