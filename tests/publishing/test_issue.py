"""The issue: what it says, from which documents, and that foreign text adds no markup."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from markdown_it import MarkdownIt

from sdpa_repro.errors import InputError
from sdpa_repro.explaining.factors import FACTORS
from sdpa_repro.publishing import versions, wording
from sdpa_repro.publishing.issue import Report, check_template, fields, issue
from sdpa_repro.publishing.running import ScriptRun
from sdpa_repro.publishing.script import script
from sdpa_repro.publishing.story import Story
from tests.publishing.calls import HOSTILE, closed, tail

hostile = pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)

OUTPUT = """\
torch 2.13.0+cpu on cpu; largest error against float64, at most 0.25 is rounding
MATH                  3.553e-15
FLASH_ATTENTION              16  wrong in query rows 32
EFFICIENT_ATTENTION  declined: No viable backend for scaled_dot_product_attention was found
CUDNN_ATTENTION      declined: No viable backend for scaled_dot_product_attention was found
default                      16  wrong in query rows 32
Traceback (most recent call last):
  File "repro.py", line 33, in <module>
    assert not wrong, f"wrong result from {', '.join(wrong)}"
AssertionError: wrong result from FLASH_ATTENTION, default
"""

EXPLANATION: dict[str, Any] = {
    "sentence": "FLASH_ATTENTION: the last query row (32) was computed with mask row 0, when L % 32 == 1 and L > 1",
    "needed": ["attn_mask", "key_value_head_stride_0", "no_grad", "length_L"],
    "not_needed": ["values", "dtype", "batch", "length_S"],
    "not_tested": ["alignment"],
    "why": {
        "values": "these values (other values: fails)",
        "dtype": "this dtype (float16: fails; float32: fails)",
        "batch": "several batch rows (there is one)",
        "length_S": "the key length S (S = 34: fails)",
    },
    "length_rule": {
        "rule": "L % 32 == 1 and L > 1",
        "over": "L",
        "fails": 11,
        "passes": 310,
        "held_out": 40,
        "words": ["fails when L % 32 == 1", "S = L, 1…353: all 11 lengths with L % 32 == 1 fail, all 310 others pass"],
    },
    "hypothesis": {"id": "mask_row", "sentence": "the last query row (32) was computed with mask row 0"},
    "poison": {"reads_outside": False, "words": "nothing read outside"},
    "workarounds": [
        {"words": "upgrade", "line": "pip install 'torch>=2.14.0'", "verified": False},
        {"words": "dense", "line": "key, value = key.contiguous(), value.contiguous()", "verified": True},
    ],
    "known": [{"issue": "pytorch#191937", "match": "exact", "fixed_in": "2.14.0"}],
}

REPLAY: dict[str, Any] = {
    "dtype": "bfloat16",
    "sentence": "FLASH_ATTENTION is wrong in query row 32 of 2 heads",
    "cells": [
        {
            "backend": "FLASH_ATTENTION",
            "dtype": "bfloat16",
            "status": "diverges",
            "bad": {"batches": [0], "heads": [0, 1], "rows": [32]},
            "runs": 20,
            "bit_stable": True,
        }
    ],
}


def report(**changes: Any) -> Report:
    call, recipes = tail()
    story = Story("FLASH_ATTENTION", limit=0.25, limit_reason="twice bfloat16's rounding of values up to 32")
    story = replace(
        story,
        cause=wording.cause(story, EXPLANATION, REPLAY),
        needs=tuple(wording.needed(EXPLANATION, call)),
        remarks=wording.remarks(EXPLANATION),
    )
    made = Report(
        call=call,
        story=story,
        script=script(call, recipes, story),
        run=ScriptRun(1, OUTPUT, 2.0, "python -I in an empty folder, torch 2.13.0+cpu"),
        explanation=EXPLANATION,
        replay=REPLAY,
        origin={"model": "google/gemma", "module": "model.layers.5.self_attn", "phase": "prefill", "padding": 7},
        environment={"torch": torch.__version__},
        machine="PyTorch version: 2.13.0",
        command="sdpa-repro issue x.pt",
    )
    return replace(made, **changes)


def unfenced(text: str) -> str:
    """The Markdown without its code blocks and code spans."""
    kept, fence = [], ""
    for line in text.splitlines():
        opening = re.match("`{3,}", line)
        if fence:
            fence = "" if line == fence else fence
        elif opening:
            fence = opening[0]
        else:
            kept.append(line)
    return re.sub(r"(?<!`)(`+)(?!`).+?(?<!`)\1(?!`)", "", "\n".join(kept))


def test_it_has_the_two_fields_of_the_form_and_a_title() -> None:
    text = issue(report())
    headings = [line for line in unfenced(text).splitlines() if line.startswith("#")]
    assert headings == ["### 🐛 Describe the bug", "### Versions"]
    title = next(line for line in text.splitlines() if line.startswith("**Title:**"))
    assert title == (
        "**Title:** SDPA FLASH_ATTENTION (CPU): the last query row was computed with mask row 0 when L % 32 == 1 and "
        "L > 1, with key and value expanded from one head (head stride 0)"
    )


def test_it_answers_what_maintainers_ask_first() -> None:
    text = issue(report())
    for said in (
        "| needed | an attn_mask · key and value expanded from one head (head stride 0) · no grad · L % 32 == 1",
        "| also fails | with other values · in float16 and float32 · at other S |",
        "| lengths tried | S = L, 1…353: all 11 lengths with L % 32 == 1 fail, all 310 others pass |",
        "| what it computes | what the sentence above says, to rounding, in every wrong row |",
        "| wrong rows | query row 32 of 0…32 in every head; every other row is within rounding of float64 |",
        "Mask: causal mask (bool); no row is fully masked.",
        "Largest magnitudes: 0 in query, 0 in key, 32 in value; nothing is NaN or infinite.",
        "In 20 runs it gives the same bits every time.",
        "MATH agrees with it (largest error 3.55e-15); FLASH_ATTENTION is off by 16.",
        "| torch | MATH | FLASH_ATTENTION | default |",
        "| 2.13.0+cpu (cpu) | ok | wrong | wrong |",
        "Found in the prefill of `google/gemma`, module `model.layers.5.self_attn`, 7 tokens of padding.",
        "`sdpa-repro issue x.pt`",
        "`module: correctness (silent)`",
        "which parts AI tools wrote or ran",
    ):
        assert said in text, said


def test_the_known_issue_comes_first_and_says_to_upgrade() -> None:
    first = issue(report()).splitlines()[0]
    assert first == (
        "> This is pytorch/pytorch#191937, fixed in 2.14.0: upgrade to torch 2.14.0 or later. "
        "A new issue would be a duplicate."
    )
    assert not issue(report(explanation={})).startswith(">")


def test_the_script_and_the_output_are_those_of_the_run() -> None:
    made = report()
    text = issue(made)
    assert f"```python\n{made.script.rstrip()}\n```" in text
    shown = text[text.index("Output (") : text.index("Expected:")]
    assert "default                      16  wrong in query rows 32\nAssertionError: wrong result" in shown
    assert "Traceback" not in shown


def test_a_workaround_that_was_tried_comes_before_one_that_was_not() -> None:
    lines = [line for line in issue(report()).splitlines() if line.startswith("- ")]
    assert lines == [
        "- dense: `key, value = key.contiguous(), value.contiguous()`",
        "- upgrade: `pip install 'torch>=2.14.0'` (not tried here)",
    ]


def test_what_holds_for_the_reduced_call_alone_is_marked_and_the_captured_one_described() -> None:
    call, _ = closed()
    words = [
        "fails when x",
        "S = L, 1…353: " + ", ".join(map(str, range(80))),
        "two",
        "nearest passing: L = 32, S = 32",
    ]
    told = {
        **EXPLANATION,
        "length_rule": {**EXPLANATION["length_rule"], "words": words},
        "workarounds": [{"words": "flag", "line": "attn_mask, is_causal = None, True", "verified": True}],
    }
    text = issue(report(explanation=told, captured=call))
    assert "- flag: `attn_mask, is_causal = None, True` (for this reduced call)\n" in text
    assert f" The captured call: bfloat16; query {tuple(call.query.shape)} stride " in text
    assert "held out of the fit); nearest passing: L = 32, S = 32 |\n" in text
    assert "<details><summary>All lengths tried</summary>\n\n- S = L, 1…353: 0, 1, " in text


def test_the_worst_element_of_the_recorded_output_is_told() -> None:
    call, _ = tail()
    output = torch.nn.functional.scaled_dot_product_attention(
        call.query.float(), call.key.float(), call.value.float(), call.attn_mask
    )
    output[0, 1, 32, 5] += 16
    assert "The worst of its output is element [0, 1, 32, 5]: expected " in issue(report(result=output))
    assert "The worst" not in issue(report())


def test_what_is_not_known_is_not_said() -> None:
    bare = issue(report(explanation={}, replay={}, origin={}, environment={}, command="", run=None, machine=""))
    for absent in ("needed", "lengths tried", "Workaround", "Found in", "Output", "| torch", "runs it gives", "None"):
        assert absent not in unfenced(bare), absent


def test_an_emulated_fault_cannot_pass_for_a_real_one() -> None:
    records = [{"name": "pytorch_191937.py", "sha256": "ab" * 32}]
    for text in (issue(report(preloaded=records)), issue(report(captured_with=records))):
        assert "`pytorch_191937.py` (sha256 `abababababab`)" in text
        assert "do not post it" in text
        assert "with files preloaded" in text
    assert "do not post" not in issue(report())


def test_fully_masked_rows_are_counted_and_left_out() -> None:
    call, recipes = closed(padding=3)
    text = issue(report(call=call, script=script(call, recipes, Story("MATH"))))
    assert "3 of 33 query rows are fully masked and left out of the comparison." in text


def test_extreme_values_are_owned_up_to() -> None:
    call, _ = closed()
    value = call.value.clone()
    value[0, 0, 0, 0] = float("inf")
    assert "value holds NaN or infinity" in issue(report(call=replace(call, value=value)))


def test_a_crash_is_told_as_one() -> None:
    story = Story("FLASH_ATTENTION", "crashed", "FLASH_ATTENTION crashes: SIGSEGV.", device="cuda")
    run = ScriptRun(1, "torch 2.13.0 on cuda; x\nMATH                 ok\nFLASH_ATTENTION      died with 11\n", 9.0, "")
    text = issue(report(story=story, run=run, explanation={}, replay={}))
    assert "`module: crash`, `module: cuda`" in text
    assert "The arguments are valid, and MATH computes them; " in text
    assert "a kernel must not end the process" in text
    assert "| 2.13.0 (cuda) | ok | crashed |" in text


def test_values_that_are_not_in_closed_form_are_explained() -> None:
    assert "reads the values from `call.pt` with `weights_only=True`" in issue(report(stored=("key",)))
    assert "holds the values as integers" in issue(report(inline=("key", "value")))


def test_results_of_other_releases_make_the_table() -> None:
    rows = [
        {"torch": "2.13.0", "results": {"MATH": "ok", "FLASH_ATTENTION": "wrong", "CUDNN_ATTENTION": "declined"}},
        {"torch": "2.14.1", "results": {"MATH": "ok", "FLASH_ATTENTION": "ok"}},
    ]
    text = issue(report(versions=rows))
    assert "| torch | MATH | FLASH_ATTENTION |\n|---|---|---|\n| 2.13.0 | ok | wrong |\n| 2.14.1 | ok | ok |\n" in text


def hostile_report(text: str) -> Report:
    """A report in which every foreign text is `text`."""
    records = [{"name": text, "sha256": text}]
    explained = {
        **EXPLANATION,
        "sentence": text,
        "hypothesis": {"id": text, "sentence": text},
        "not_tested": [text],
        "workarounds": [{"words": text, "line": text, "verified": True}],
        "known": [{"issue": text, "match": "exact", "fixed_in": text}],
        "length_rule": {"rule": text, "words": [text], "fails": text},
        "poison": {"reads_outside": True, "words": text},
    }
    cause = wording.cause(Story("FLASH_ATTENTION"), explained, {})
    return report(
        origin={"model": text, "module": text, "phase": text, "padding": text, "command": text},
        environment={"torch": text, "gpu": text},
        explanation=explained,
        story=replace(report().story, cause=cause, limit_reason=text),
        preloaded=records,
        captured_with=records,
        command=text,
        machine=text,
        run=ScriptRun(1, f"{OUTPUT}{text}\n```\n# heading\n", 2.0, text),
    )


@hostile
def test_foreign_text_adds_no_markup(text: str) -> None:
    """Held against a CommonMark parser with GitHub's tables and bare links."""
    parser, written = MarkdownIt("commonmark").enable("table"), issue(hostile_report(text))
    assert "$" not in unfenced(written)
    tokens = parser.parse(written)
    inner = [child for token in tokens for child in token.children or ()]
    kinds = {token.type for token in (*tokens, *inner)}
    assert not kinds & {"html_block", "html_inline", "link_open", "image", "code_block", "hr", "em_open"}
    headings = [tokens[at + 1].content for at, token in enumerate(tokens) if token.type == "heading_open"]
    assert headings == ["🐛 Describe the bug", "Versions"]
    assert [token.type for token in tokens].count("table_open") == 2
    shown = [child.content for child in inner if child.type == "text"]
    for piece in shown:
        assert not re.search(r"@\w|://|\bwww\.\w|#\d", piece)
        assert "49" not in piece
    fenced = [token.info for token in tokens if token.type == "fence"]
    assert fenced == ["python", "", ""]


def test_a_local_model_is_named_by_its_last_folder() -> None:
    for path in ("/srv/me/models/gemma", "~/models/gemma/", "C:\\models\\gemma", "./gemma"):
        assert "of `gemma`" in issue(report(origin={"model": path, "phase": "prefill"}))


def test_a_template_of_ones_own_gets_the_same_fields(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("h1. {{ title }}\n{% for name, text in rows %}* {{ name }}: {{ text }}\n{% endfor %}")
    text = issue(report(), path)
    assert text.startswith("h1. SDPA FLASH_ATTENTION (CPU): the last query row")
    assert "* needed: an attn_mask" in text
    every = tmp_path / "all.txt"
    every.write_text("\n".join("{{ " + name + " }}" for name in fields(report())))
    assert issue(report(), every)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{% if %}", "malformed in line 1"),
        ("a\n{{ missing }}", "does not work: 'missing' is undefined"),
        ("{{ title.__class__.__mro__ }}", "does not work"),
        ("{{ title + 1 }}", "does not work"),
        (None, "cannot read the template"),
    ],
)
def test_a_bad_template_is_bad_input_in_one_line(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "mine.txt"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError, match=message) as error:
        issue(report(), path)
    assert "\n" not in str(error.value)


def test_a_malformed_template_is_found_before_any_work_is_done(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("{% for %}")
    with pytest.raises(InputError, match="malformed in line 1"):
        check_template(path)
    check_template(None)


def test_a_title_without_a_cause_reads_as_a_sentence() -> None:
    story = Story("MATH", cause="MATH is wrong in query row 0.")
    assert wording.title(story, story.cause, (), emulated=False) == "SDPA MATH (CPU) is wrong in query row 0"


def test_what_fails_whatever_is_changed_says_so() -> None:
    told = {**EXPLANATION, "needed": [], "length_rule": None}
    assert "| needed | nothing that was tried |" in issue(report(explanation=told))


def test_what_fails_now_and_then_says_so_and_does_not_call_the_suspect_right() -> None:
    story = Story("FLASH_ATTENTION", limit=20.0, runs=20)
    story = replace(story, cause=wording.cause(story, {}, REPLAY))
    assert story.cause == "FLASH_ATTENTION is wrong in query row 32 of 2 heads, but not in every run."
    text = issue(report(story=story))
    assert "MATH agrees with it (largest error 3.55e-15); FLASH_ATTENTION was right in this run" in text


def test_a_backend_that_raises_is_told_as_one() -> None:
    story = Story("FLASH_ATTENTION", "error", "FLASH_ATTENTION raises x.", limit=0.25)
    run = ScriptRun(1, OUTPUT.replace("     16  wrong in query rows 32", "raised: x"), 2.0, "")
    text = issue(report(story=story, run=run))
    assert "MATH agrees with it (largest error 3.55e-15); FLASH_ATTENTION raises an error." in text
    assert "Expected: FLASH_ATTENTION returns, or declines before it begins" in text
    assert "| 2.13.0+cpu (cpu) | ok | error | error |" in text


@pytest.mark.parametrize("padding", [7, {"tokens": 7, "side": "left"}])
def test_padding_is_told_as_a_capture_records_it(padding: object) -> None:
    assert "7 tokens of padding" in issue(report(origin={"model": "a/b", "phase": "prefill", "padding": padding}))


def test_lengths_are_told_once() -> None:
    told = {**EXPLANATION, "length_rule": {"rule": None, "words": ["every length tried fails", "x" * 150, "y" * 150]}}
    assert issue(report(explanation=told)).count("every length tried fails") == 1


def test_rounding_is_that_of_the_dtype_that_autocast_computes_in() -> None:
    text = issue(report(story=Story("MATH", limit=0.1, autocast="float16")))
    assert "Expected: every backend within float16 rounding" in text


def test_the_log_of_a_cudnn_suspect_and_the_sanitizers_of_a_crash_are_asked_for() -> None:
    assert "`CUDNN_LOGLEVEL_DBG=3 " in issue(report(story=Story("CUDNN_ATTENTION", limit=0.1, device="cuda")))
    crash = issue(report(story=Story("FLASH_ATTENTION", "crashed", device="cuda")))
    assert "Attach what `compute-sanitizer python repro.py` prints." in crash
    assert "Attach" not in issue(report())


def test_eager_is_written_out_for_people_who_mean_something_else_by_it() -> None:
    told = {"workarounds": [{"words": "eager is right on this call", "line": "x", "verified": True}]}
    assert wording.workarounds(told) == [
        "matmul, softmax, matmul written out (transformers' eager) is right on this call: `x`"
    ]


def test_rows_are_counted_as_people_do() -> None:
    def cell(*rows: int) -> dict[str, Any]:
        return {"bad": {"batches": [0], "heads": [0], "rows": list(rows)}}

    assert wording.wrong_rows(cell(0), 1, 1) == "the one query row in the one head"
    assert wording.wrong_rows(cell(0, 1), 2, 1) == "every query row, 0…1, in the one head"


LAST_KEY: dict[str, Any] = {
    "sentence": "FLASH_ATTENTION: the last query row was computed without the last key (32): S = 33, "
    "the last key tile of 8 or 32 left out",
    "needed": ["length_S"],
    "not_needed": ["no_grad"],
    "length_rule": {
        "rule": None,
        "words": ["no simple rule over residues and bounds of L and S"],
        "sweeps": [{"fixed": {"L": 33}, "failing": [[33, 33], [65, 65]], "passing": [[2, 32], [34, 64], [66, 98]]}],
    },
}
TOLD: dict[str, Any] = {
    "length_rule": {
        "rule": "S % 32 == 1",
        "held_out": 4,
        "held_out_right": 4,
        "sweeps": [{"fixed": {"L": 97}, "failing": [[33, 33], [65, 65], [97, 97]], "passing": [[2, 32], [34, 64]]}],
        "words": ["fails when S % 32 == 1"],
    }
}


def test_the_rule_of_the_captured_call_is_stated_where_the_reduced_call_shows_none() -> None:
    call, recipes = tail()
    rule = "S % 32 == 1 (found on the captured call: head_dim 64, L = 97, S = 97)"
    story = Story("FLASH_ATTENTION", limit=0.25)
    story = replace(
        story,
        cause=wording.cause(story, LAST_KEY, REPLAY, rule),
        needs=tuple(wording.needed(LAST_KEY, call, None, "S % 32 == 1")),
    )
    captured, _ = closed(rows=97, width=64)
    made = report(
        story=story,
        script=script(call, recipes, story),
        explanation=LAST_KEY,
        captured=captured,
        captured_explanation=TOLD,
    )
    text = issue(made)
    assert (
        "\nFLASH_ATTENTION: the last query row was computed without the last key (32): S = 33, the last key tile of "
        f"8 or 32 left out when {rule}.\n"
    ) in text
    assert made.title == (
        "SDPA FLASH_ATTENTION (CPU): the last query row was computed without the last key when S % 32 == 1"
    )
    assert "| needed | S % 32 == 1 |\n" in text
    assert (
        "| captured call: 3 pairs (L, S) fail and 62 pass, all as the rule says (4 of them held out of the fit); "
        "reduced call: at its values 1 of the 3 pairs that the rule names do not show it |\n"
    ) in text
    assert "S = 33." not in made.script
    assert "no simple rule" not in text[: text.index("<details>")]


def test_a_length_without_a_rule_is_not_told_to_be_the_only_one() -> None:
    call, _ = tail()
    assert wording.needed(LAST_KEY, call) == ["some lengths S, such as 33"]
    assert wording.needed({**LAST_KEY, "length_rule": None}, call) == ["S = 33"]


def test_the_wrong_rows_of_the_captured_call_are_told_beside_those_of_the_reduced_one() -> None:
    captured, _ = closed(rows=200, heads=4)
    bad = {"batches": [0], "heads": [0, 1, 2, 3], "rows": list(range(16, 32))}
    seen = {"dtype": "bfloat16", "cells": [{**REPLAY["cells"][0], "bad": bad}]}
    line = "| wrong rows of the captured call | query rows 16…31 of 0…199 in every head |\n"
    assert line in issue(report(captured=captured, captured_replay=seen))
    assert line in issue(report(captured=captured, captured_explanation={"replay": seen}))
    assert "of the captured call" not in issue(report(captured_replay=seen))


def test_heads_that_the_reduction_needs_are_not_among_what_also_fails() -> None:
    told = {
        "not_needed": ["heads", "batch"],
        "why": {"heads": "x (query head 0 alone: fails)", "batch": "x (a: fails)"},
    }
    assert wording.also_fails(told, {}) == ["with one head", "with one batch row"]
    assert wording.also_fails(told, {"needed": ["H"]}) == ["with one batch row"]
    plain, still = "head 0 alone, contiguous key: passes", "head 0 alone, key still with head stride 0: fails"
    limited = {"not_needed": ["heads"], "why": {"heads": f"several query heads ({plain}; {still})"}}
    assert wording.also_fails(limited, {}) == ["with one head whose stride stays 0"]
    call, _ = tail()
    assert wording.needed({}, call, {"needed": ["H"]}) == ["more than one head"]
    repeated = {"needed": ["key_value_head_stride_0"]}
    assert wording.needed(repeated, call, {"needed": ["H"]}) == wording.needed(repeated, call)


def test_what_also_fails_names_what_was_tried() -> None:
    why = {
        "dtype": "this dtype (float32: fails; float16: passes)",
        "head_dim": "a head_dim of this class (head_dim 64: fails; head_dim 128: fails)",
        "heads": "several query heads (two query heads: fails)",
        "no_mask": "the absence of a mask (a bool mask that hides nothing: fails)",
    }
    assert wording.also_fails({"not_needed": list(why), "why": why}, {"not_needed": ["values", "E", "B"]}) == [
        "in float32",
        "at head_dim 64 and 128",
        "with fewer heads",
        "with a mask that hides nothing",
        "with other values",
    ]


def test_every_factor_has_words_for_what_also_fails() -> None:
    assert set(wording.ALSO) == {factor.id for factor in FACTORS}


def test_a_cause_has_no_comma_before_when() -> None:
    story = Story("MATH")
    assert wording.cause(story, {"sentence": "MATH is wrong, when L > 16"}, {}) == "MATH is wrong when L > 16."


def test_the_script_does_not_say_the_rule_twice() -> None:
    text = report().script
    assert text.count("L % 32 == 1 and L > 1") == 1
    assert "\n# Needs: an attn_mask; key and value expanded from one head (head stride 0); no grad.\n" in text


def test_nan_is_not_told_to_be_so_to_rounding() -> None:
    told = {"hypothesis": {"sentence": "the query row is NaN"}}
    assert wording.computes(told) == "the query row is NaN"


def test_lines_of_a_script_that_name_no_backend_are_no_results() -> None:
    said = versions.results_in("MATH                  0\nWARNING something happened\n")
    assert said == {"MATH": "ok"}


def test_values_that_were_not_searched_for_are_told_to_be_captured() -> None:
    text = issue(report(stored=("key",), story=Story("MATH", limit=0.1, searched=False)))
    assert "key as captured: the script reads the values from `call.pt`" in text


def test_what_a_kernel_reads_outside_is_said() -> None:
    told = {**EXPLANATION, "poison": {"reads_outside": True, "words": "NaN after key moves the output"}}
    assert "it reads memory outside its inputs: NaN after key moves the output" in wording.computes(told)


def test_remarks_come_from_workarounds_that_were_tried() -> None:
    assert wording.remarks(EXPLANATION) == {"key": ".contiguous() on key and value hides the bug"}
    one = {"workarounds": [{"line": "query = query.contiguous()", "verified": True}]}
    assert wording.remarks(one) == {"query": ".contiguous() hides the bug"}
    assert wording.remarks({"workarounds": [{"line": "query = query.contiguous()", "verified": False}]}) == {}
    assert wording.remarks({"workarounds": [{"line": "import os  # key.contiguous()", "verified": True}]}) == {}


@pytest.mark.parametrize(
    ("known", "start"),
    [
        ({"issue": "pytorch#1", "match": "exact", "fixed_in": None}, "This is pytorch/pytorch#1, for which no fixed"),
        (
            {"issue": "pytorch#1", "match": "emulated", "fixed_in": "2.14.0"},
            "This is pytorch/pytorch#1, as emulated here",
        ),
        ({"issue": "pytorch#1", "match": "possible", "fixed_in": "2.14.0"}, "This may be pytorch/pytorch#1"),
        ({"issue": "ROCm/pytorch#3230", "match": "exact"}, "This is ROCm/pytorch#3230"),
        ({"issue": "evil#1\n# x", "match": "exact"}, ""),
    ],
)
def test_a_known_issue_is_named_as_well_as_it_fits(known: dict[str, Any], start: str) -> None:
    note = wording.known_note([known])
    assert note.startswith(start)
    assert bool(note) == bool(start)


def test_versions_are_collected_in_a_process_or_told_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions.sys, "executable", "/nowhere/python")
    text = versions.collect_env()
    assert f"torch: {torch.__version__}" in text.splitlines()
    assert str(Path.home()) + "/" not in text


@pytest.mark.slow
def test_collect_env_is_torchs_own() -> None:
    assert f"PyTorch version: {torch.__version__}" in versions.collect_env()
