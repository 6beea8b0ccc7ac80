"""Sections for the tests of pages, put together by hand: nothing is run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sdpa_repro.attention import AttentionCall
from sdpa_repro.dump import Dump
from sdpa_repro.explaining.answers import Answer, Conditions, Outcome, Tried, Workaround
from sdpa_repro.explaining.explain import Explanation
from sdpa_repro.explaining.hypotheses import Hypothesis
from sdpa_repro.explaining.length_probe import Axis
from sdpa_repro.explaining.length_result import LengthRule, Sweep
from sdpa_repro.explaining.poison import Poison
from sdpa_repro.explaining.rules import Clause, Rule
from sdpa_repro.known_issues import Match
from sdpa_repro.mask import describe
from sdpa_repro.publishing.heat import Heat, packed
from sdpa_repro.publishing.mask_grid import mask_grid
from sdpa_repro.publishing.section import Section
from sdpa_repro.replaying.cells import Cell
from sdpa_repro.replaying.fidelity import Fidelity
from sdpa_repro.replaying.replay import Replay
from sdpa_repro.replaying.verdict import Bad, Status, Verdict
from tests.calls import make_call

ATTACK = "</script><img src=x onerror=\"window.pwned='text'\"><script>window.pwned='script'</script>"
"""What a stranger may write into a dump; run anywhere, it leaves a trace."""

FAULT = {"name": "pytorch_191937.py", "sha256": "a" * 64}


def last_row_wrong(heads: int = 4, rows: int = 65, masked: int = 3, batches: int = 1) -> Heat:
    """Every row at a tenth of its threshold, the last at 49 times it, the first `masked` fully masked."""
    ratio = torch.full((batches, heads, rows), 0.1, dtype=torch.float64)
    ratio[..., -1] = 49.0
    live = torch.ones_like(ratio, dtype=torch.bool)
    live[..., :masked] = False
    return packed("FLASH_ATTENTION", ratio, ratio * 0.03, live=live, decides=live)


def replayed(path: Path, verdict: Verdict, cells: Sequence[Cell], **more: Any) -> Replay:
    """A replay of a bfloat16 call on the CPU."""
    wrong = verdict is Verdict.BACKEND_WRONG
    values: dict[str, Any] = {
        "path": path,
        "verdict": verdict,
        "ran": "FLASH_ATTENTION",
        "guilty": ("FLASH_ATTENTION",) if wrong else (),
        "sentence": "FLASH_ATTENTION is wrong in query row 64 of 4 heads" if wrong else "clean on this cpu",
        "known": (),
        "fidelity": Fidelity(True, True),
        "cells": tuple(cells),
        "device": "cpu",
        "dtype": "bfloat16",
        "notes": ("12 of 260 rows are fully masked and do not decide",),
        "preloaded": (),
        "captured_with": (),
        "exit_status": int(wrong),
        "environment": {"torch": "2.13.0", "cuda": None},
    }
    return Replay(**{**values, **more})


def cells(status: Status = Status.DIVERGES, rows: int = 65, heads: int = 4) -> list[Cell]:
    """The table of a call on which FLASH_ATTENTION, which the default path takes, ends as `status`."""
    wrong = status in (Status.DIVERGES, Status.NONFINITE)
    bad = Bad((0,), tuple(range(heads)), (rows - 1,), heads, (0, 0, rows - 1)) if wrong else None
    numbers = {"max_abs": 1.47, "threshold": 0.03, "ratio": 49.0, "bad": bad} if wrong else {}
    if status is Status.NONFINITE:
        numbers = {**numbers, "max_abs": math.nan, "ratio": math.inf}
    flash = Cell("FLASH_ATTENTION", "bfloat16", status, runs=1, fully_masked="0", **numbers)
    right = {"max_abs": 0.0078, "threshold": 0.042, "ratio": 0.18, "runs": 1}
    return [
        replace(flash, backend="default", chosen="FLASH_ATTENTION"),
        Cell("MATH", "bfloat16", Status.AGREES, bit_stable=True, **right),
        flash,
        Cell("CUDNN_ATTENTION", "bfloat16", Status.DECLINED, "does not exist on cpu"),
    ]


def length_rule(rows: int = 65) -> LengthRule:
    """L % 32 == 1 from 2 to 128, all of them tried."""
    rule = Rule((Clause("L", "==", (1,), 32),))
    numbers = range(2, 129)
    fails = tuple(number for number in numbers if number % 32 == 1)
    passes = tuple(number for number in numbers if number % 32 != 1)
    sweep = Sweep(Axis("L and S", rows, rows), fails, passes, ())
    return LengthRule("L % 32 == 1", "L", 4, 123, 9, 9, (64, 64), (66, 66), (sweep,), fitted=rule)


def conditions() -> Conditions:
    """Two needed factors, one that is not needed, one not tested, two workarounds."""
    passes, fails = Tried("no mask", Outcome.PASSES), Tried("batch entry 0 alone", Outcome.FAILS)
    return Conditions(
        fails=True,
        needed=(Answer("attn_mask", "a mask", (passes,)), Answer("no_grad", "the absence of a gradient", (passes,))),
        not_needed=(Answer("values", "these values", (fails,)),),
        not_tested=(Answer("dtype", "this dtype", (), "no other dtype runs here"),),
        workarounds=(
            Workaround("cured by dense key and value", "key, value = key.contiguous(), value.contiguous()", True),
            Workaround("fixed in torch 2.14.0", "pip install 'torch>=2.14.0'", False),
        ),
    )


def failing(path: Path = Path("L05-self_attn-call11-65x65.pt"), **more: Any) -> Section:
    """An explained failure: the last of 65 query rows, in 4 heads, as pytorch#191937 makes it."""
    call = make_call(rows=65, heads=4, padding=3)
    match = Match("pytorch#191937", "exact", "The last query row uses mask row 0", "2.14.0", "")
    planted = more.pop("preloaded", ())
    result = replayed(path, Verdict.BACKEND_WRONG, cells(), known=(match,), preloaded=planted)
    explanation = Explanation(
        path,
        "FLASH_ATTENTION",
        result,
        conditions=conditions(),
        hypothesis=Hypothesis("mask_row", "the last query row (64) was computed with mask row 0"),
        length_rule=length_rule(),
        poison=Poison(False, "nothing outside the inputs moves the output"),
    )
    origin = {"model": "a/model", "module": "layers.5.self_attn", "phase": "prefill"}
    plain = section(call, explanation, last_row_wrong(), origin=origin)
    script = 'import torch\n\n# a comment\nassert not torch.ones(1).all(), "x < y"\n'
    return replace(plain, script=script, script_run="exit status 1", script_fails=True, **more)


def section(call: AttentionCall, explanation: Explanation, heat: Heat, **recorded: Any) -> Section:
    """A section around a call. recorded: parts of its dump."""
    told = describe(call)
    values: dict[str, Any] = {"context": {}, "origin": {}, "environment": {}, "live": None, "recipe": None}
    dump = Dump(call=call, output=None, preloaded=[], path=explanation.path, **{**values, **recorded})
    return Section(dump, explanation, told, heat, mask_grid(call))


def healthy(path: Path = Path("L06-healthy.pt")) -> Section:
    """A call on which every backend is right."""
    call = make_call(rows=40, heads=2, mask="flag")
    ratio = torch.full((1, 2, 40), 0.2, dtype=torch.float64)
    live = torch.ones_like(ratio, dtype=torch.bool)
    heat = packed("default", ratio, ratio, live=live, decides=live)
    result = replayed(path, Verdict.HEALTHY, cells(Status.AGREES), notes=())
    return section(call, Explanation(path, None, result), heat)


def crashing(path: Path = Path("crash.pt")) -> Section:
    """A call on which the kernel ends the process: there is no output to draw."""
    heat = Heat("FLASH_ATTENTION", missing="FLASH_ATTENTION ends the process (SIGSEGV): there is no output to draw")
    result = replayed(path, Verdict.BACKEND_WRONG, cells(Status.CRASHED), sentence="FLASH_ATTENTION crashes: SIGSEGV")
    return section(make_call(rows=40, heads=2, mask=None), Explanation(path, "FLASH_ATTENTION", result), heat)


def hostile() -> Section:
    """A failure whose every foreign text tries to become markup, in a dump with an evil name."""
    path = Path("<img src=x onerror=window.pwned=1>.pt")
    base = failing(path, preloaded=({"name": ATTACK, "sha256": ATTACK},))
    evil: Mapping[str, Any] = {"model": ATTACK, ATTACK: ATTACK, "module": [ATTACK], "command": "\u2028</style><b>"}
    result = replace(base.replay, notes=(ATTACK,), environment={"torch": ATTACK}, sentence=ATTACK)
    cell = replace(base.replay.cells[0], reason=ATTACK, remark=ATTACK, chosen=ATTACK)
    result = replace(result, cells=(cell, *base.replay.cells[1:]))
    answers = replace(conditions(), needed=(Answer("x", ATTACK, (), ATTACK),))
    explanation = replace(base.explanation, replay=result, conditions=answers)
    dump = replace(base.dump, origin=dict(evil), environment={"torch": ATTACK, "gpu": "{{ 7 * 7 }}"})
    script = f"# {ATTACK}\nprint('{ATTACK}')\n"
    return replace(base, dump=dump, explanation=explanation, script=script, notes=(ATTACK,), script_run=ATTACK)
