"""What the page's template uses of a section: texts, numbers as people read them, and lists of both.

Texts that come from a dump are cut and cleaned here; the template escapes every text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sdpa_repro.attention import is_rule
from sdpa_repro.explaining.answers import Answer, Conditions
from sdpa_repro.known_issues import Match
from sdpa_repro.publishing.figures import heat_view, mask_view, strip_view, times
from sdpa_repro.publishing.html import plain
from sdpa_repro.publishing.section import Section
from sdpa_repro.replaying.cells import Cell
from sdpa_repro.replaying.conclusion import short_place
from sdpa_repro.replaying.verdict import Status, Verdict
from sdpa_repro.switches import dtype_name

VERDICTS = {
    Verdict.BACKEND_WRONG: ("wrong", "Wrong result"),
    Verdict.EAGER_WRONG: ("wrong", "The explicit formula is wrong"),
    Verdict.HEALTHY: ("healthy", "Nothing wrong found"),
    Verdict.UNREPRODUCIBLE: ("unknown", "Seen live, not reproduced here"),
    Verdict.INVALID_CALL: ("unknown", "Not a valid call"),
}
"""Tone and words of each verdict."""

FAILURES = {
    Status.CRASHED: "Ends the process",
    Status.TIMEOUT: "Does not return",
    Status.NONFINITE: "NaN or infinity",
    Status.UNSTABLE: "Differs from run to run",
    Status.ERROR: "Raises an error",
}
"""Words for a wrong backend that does not give plain wrong numbers."""

TONES = {"agrees": "healthy", "declined": "quiet", "not_comparable": "quiet"}

ORIGIN = ("model", "module", "call_index", "calls", "phase", "total_length", "padding", "rank", "command")
"""Facts about where a call came from, in this order; others follow."""

MOST_FACTS = 30

_ISSUE = re.compile(r"^(ROCm/)?pytorch#(\d+)$")


def view(section: Section, index: int) -> dict[str, Any]:
    """One section for the template. `index` counts the sections of the page, from 1."""
    replayed, explanation, cell = section.replay, section.explanation, section.cell
    tone, words = VERDICTS[replayed.verdict]
    if replayed.verdict is Verdict.BACKEND_WRONG and cell is not None:
        words = FAILURES.get(cell.status, words)
    if replayed.verdict is Verdict.HEALTHY and not section.heat.judged:
        tone, words = "unknown", "Nothing to compare"
    return {
        "id": f"dump-{index}",
        "file": plain(explanation.path.name, 120),
        "status": tone,
        "verdict": words,
        "planted": [{"name": plain(name, 80), "sha256": sha[:12]} for name, sha in section.preloaded.items()],
        "cause": plain(explanation.cause, 500),
        "seen": plain(replayed.sentence, 500) if explanation.cause != replayed.sentence else "",
        "known": [_known(match) for match in explanation.known],
        "facts": _facts(section),
        "cells": [_cell(one, explanation.backend) for one in replayed.cells],
        "heat": heat_view(section),
        "mask": mask_view(section),
        "strips": [strip_view(strip) for strip in section.strips],
        "lengths": _lengths(section),
        "conditions": _conditions(explanation.conditions),
        "computed": _computed(section),
        "tensors": _tensors(section),
        "call": _call(section),
        "script": section.script,
        "script_run": plain(section.script_run),
        "script_fails": section.script_fails,
        "closed": section.closed,
        "notes": [plain(note) for note in section.notes],
        "remarks": [plain(note) for note in replayed.notes],
        "fidelity": plain(replayed.fidelity.sentence()),
        "here": _table(replayed.environment),
        "there": _table(section.dump.environment) if section.dump.environment != replayed.environment else [],
        "origin": _table(_ordered(section.dump.origin)),
        "complete": explanation.complete,
        "explained": explanation.conditions is not None or explanation.length_rule is not None,
    }


def _facts(section: Section) -> list[dict[str, str]]:
    """The figures at the top: a name, a value, and what to read it against."""
    cell, heat, replayed = section.cell, section.heat, section.replay
    facts = [
        {"name": "backend", "value": cell.kernel if cell else "none", "note": f"{replayed.dtype} on {replayed.device}"}
    ]
    if cell is not None and cell.max_abs is not None and cell.threshold is not None:
        ratio = f"{times(cell.ratio or 0.0)} the threshold of {cell.threshold:.2g}"
        facts.append({"name": "largest error", "value": f"{cell.max_abs:.3g}", "note": ratio})
    if heat.codes is not None and heat.judged:
        facts.append({"name": "wrong rows", "value": f"{heat.wrong:,}", "note": f"of {heat.judged:,} that decide"})
    rule = section.explanation.length_rule
    if rule is not None and rule.rule:
        note = f"{rule.fails} lengths fail, {rule.passes} pass"
        facts.append({"name": "fails when", "value": plain(rule.rule, 120), "note": note})
    right = [one.backend for one in replayed.cells if one.status is Status.AGREES and one.backend != "default"]
    if right and cell is not None and cell.wrong:
        facts.append(
            {"name": "right on this call", "value": ", ".join(dict.fromkeys(right)), "note": "against float64"}
        )
    return facts


def _known(match: Match) -> dict[str, str]:
    """An upstream issue with a link that is made of its number alone."""
    found = _ISSUE.match(match.issue)
    how = {"exact": "", "possible": "possibly", "emulated": "as emulated here"}
    owner = "ROCm" if found and found[1] else "pytorch"
    return {
        "issue": match.issue,
        "url": f"https://github.com/{owner}/pytorch/issues/{found[2]}" if found else "",
        "how": how.get(match.match, ""),
        "title": match.title,
        "fixed": f"fixed in torch {match.fixed_in}" if match.fixed_in else "no release with a fix is known",
    }


def _cell(cell: Cell, guilty: str | None) -> dict[str, Any]:
    """A row of the replay table."""
    stable = {True: ", same bits", False: ", bits differ", None: ""}
    return {
        "backend": cell.backend,
        "chosen": plain(cell.chosen, 60) if cell.chosen else "",
        "dtype": cell.dtype,
        "status": cell.status.value.replace("_", " "),
        "tone": TONES.get(cell.status.value, "wrong"),
        "guilty": cell.backend == guilty,
        "error": _number(cell.max_abs),
        "threshold": _number(cell.threshold),
        "ratio": "" if cell.ratio is None else times(cell.ratio),
        "where": short_place(cell.bad) if cell.bad is not None else "",
        "masked": cell.fully_masked or "",
        "runs": f"{cell.runs}{stable[cell.bit_stable]}" if cell.runs else "",
        "reason": plain("; ".join(filter(None, (cell.reason, cell.remark)))),
    }


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"


def _lengths(section: Section) -> dict[str, Any] | None:
    """The length rule and what is left to say beside the strips."""
    rule = section.explanation.length_rule
    if rule is None:
        return None
    shown = {strip.words for strip in section.strips}
    more = [plain(text) for text in rule.words()[1:] if text not in shown]
    return {"rule": plain(rule.rule or "", 200), "why": plain(rule.why), "more": more}


def _conditions(found: Conditions | None) -> dict[str, Any] | None:
    """Factors by their answer, each with what was tried."""
    if found is None or not found.fails:
        return None
    return {
        "needed": [_answer(answer) for answer in found.needed],
        "either": [" or ".join(plain(name, 60) for name in pair) for pair in found.alternatives],
        "not_needed": [_answer(answer) for answer in found.not_needed if answer.tried],
        "not_tested": [_answer(answer) for answer in found.not_tested],
        "flaky": found.flaky,
        "workarounds": [
            {"words": plain(one.words), "line": plain(one.line, 400), "verified": one.verified}
            for one in found.workarounds
        ],
    }


def _answer(answer: Answer) -> dict[str, str]:
    why = answer.why or "; ".join(tried.text() for tried in answer.tried)
    return {"words": plain(answer.words), "why": plain(why)}


def _computed(section: Section) -> list[str]:
    """What the kernel did instead, and whether it leaves its memory."""
    found, outside = section.explanation.hypothesis, section.explanation.poison
    said = []
    if found is not None and found.sentence:
        said.append(f"{found.sentence[:1].upper()}{found.sentence[1:]}, to rounding, in every wrong row")
    elif found is not None:
        said.append("None of the known kinds of mistake predicts every wrong row")
    if outside is not None:
        said.append(f"Memory: {outside.words}")
    return [plain(text) for text in said]


def _tensors(section: Section) -> list[dict[str, Any]]:
    """Shape and layout of the arguments. A stride of 0 over several entries is what many kernels treat apart."""
    rows: list[dict[str, Any]] = []
    for name, tensor in section.dump.call.tensors.items():
        rule = is_rule(tensor)
        pairs = () if rule else zip(tensor.shape, tensor.stride(), strict=True)
        rows.append(
            {
                "name": name,
                "dtype": "CausalBias" if rule else dtype_name(tensor.dtype),
                "shape": " × ".join(map(str, tensor.shape)),
                "stride": [{"text": stride, "zero": size > 1 and stride == 0} for size, stride in pairs],
            }
        )
    return rows


def _call(section: Section) -> str:
    """The other arguments."""
    call = section.dump.call
    words = [f"scale = {call.scale:.6g}" if call.scale is not None else "scale = None (1/√E)"]
    words += [f"is_causal = {call.is_causal}", f"enable_gqa = {call.enable_gqa}", f"dropout_p = {call.dropout_p:g}"]
    return ", ".join(words)


def _ordered(origin: Mapping[str, Any]) -> dict[str, Any]:
    """The facts people look for first."""
    known = [name for name in ORIGIN if name in origin]
    return {name: origin[name] for name in [*known, *(name for name in origin if name not in known)]}


def _table(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names and values; what is not known is left out."""
    told = [(plain(name, 60), plain(value)) for name, value in found.items() if value not in (None, "", [], {})]
    return told[:MOST_FACTS]
