"""The table of versions and the sentence about it; foreign text adds nothing to an issue."""

from __future__ import annotations

import pytest
from markdown_it import MarkdownIt

from sdpa_repro.publishing.version_row import Outcome, Row
from sdpa_repro.publishing.version_table import cells, headers, issue_rows, merged, sentence
from sdpa_repro.publishing.versions import markdown, table
from tests.publishing.calls import HOSTILE

HERE = Row(
    "here",
    Outcome.FAILS,
    {"MATH": "ok", "FLASH_ATTENTION": "wrong", "CUDNN_ATTENTION": "declined", "default": "wrong"},
    {"torch": "2.13.0+cpu", "device": "cpu"},
    "wrong result from FLASH_ATTENTION",
)
FIXED = Row(
    "torch 2.14.1",
    Outcome.PASSES,
    {"MATH": "ok", "FLASH_ATTENTION": "ok", "default": "ok"},
    {"torch": "2.14.1", "device": "cuda", "gpu": "NVIDIA H200", "driver": "570.1", "cudnn": "91501"},
)
NONE = Row("torch 9.9.9", Outcome.MISSING, reason="no torch 9.9.9 for Python 3.11 on this platform")


def test_rows_are_environments_and_columns_the_backends_that_ran() -> None:
    rows = [HERE, FIXED, NONE]
    assert headers(rows) == ["environment", "torch", "where", "MATH", "FLASH_ATTENTION", "default", "result", "why"]
    assert cells(rows) == [
        ["here", "2.13.0+cpu", "cpu", "ok", "wrong", "wrong", "fails", "wrong result from FLASH_ATTENTION"],
        ["torch 2.14.1", "2.14.1", "NVIDIA H200, driver 570.1, cuDNN 9.15.1", "ok", "ok", "ok", "passes", ""],
        ["torch 9.9.9", "9.9.9", "", "", "", "", "not run", "no torch 9.9.9 for Python 3.11 on this platform"],
    ]


def test_the_sentence_says_where_it_fails_passes_and_was_not_tried() -> None:
    assert sentence([HERE, FIXED, NONE], "repro.py") == (
        "repro.py fails in 1 of 2 environments (torch 2.13.0+cpu), passes in 1 (torch 2.14.1 on NVIDIA H200); "
        "1 could not be tried (torch 9.9.9)"
    )
    assert sentence([FIXED], "repro.py") == "repro.py passes in 1 environment (torch 2.14.1 on NVIDIA H200)"
    assert sentence([NONE], "repro.py") == "repro.py could be run in none of 1 environment"
    many = [Row(f"{index}", Outcome.FAILS) for index in range(8)]
    assert sentence(many, "x") == "x fails in 8 of 8 environments (0, 1, 2, 3, 4, 5 and 2 more)"


def test_a_pass_in_which_the_guilty_backend_declined_the_call_is_told_from_a_fix() -> None:
    old = Row("torch 2.8.0", Outcome.PASSES, {"MATH": "ok", "FLASH_ATTENTION": "declined"}, {"torch": "2.8.0"})
    assert sentence([HERE, old, FIXED], "x") == (
        "x fails in 1 of 3 environments (torch 2.13.0+cpu), passes in 2 (torch 2.8.0, torch 2.14.1 on NVIDIA H200), "
        "in 1 of which FLASH_ATTENTION declined the call"
    )
    assert [row[-1] for row in cells([HERE, old, FIXED])][1:] == ["FLASH_ATTENTION declined the call", ""]


def test_what_was_planted_is_said() -> None:
    planted = Row("here", Outcome.FAILS, HERE.results, HERE.machine, "wrong", planted=("fault.py",))
    assert sentence([planted], "x").endswith("; planted: fault.py")
    assert cells([planted])[0][-1] == "wrong; planted: fault.py"
    assert issue_rows([planted])[0]["torch"] == "2.13.0+cpu (cpu), planted: fault.py"


def test_rows_from_files_that_say_the_same_again_are_left_out() -> None:
    again = Row("r.json", HERE.outcome, HERE.results, HERE.machine)
    other = Row("r.json", Outcome.PASSES, {"MATH": "ok"}, HERE.machine)
    assert merged([HERE], [again, other, FIXED]) == [HERE, other, FIXED]
    assert merged([NONE], [NONE]) == [NONE, NONE]


def test_the_table_for_an_issue_has_the_rows_that_ran() -> None:
    assert markdown(table(None, issue_rows([HERE, FIXED, NONE]))) == (
        "| torch | MATH | FLASH_ATTENTION | default |\n"
        "|---|---|---|---|\n"
        "| 2.13.0+cpu (cpu) | ok | wrong | wrong |\n"
        "| 2.14.1 (NVIDIA H200, driver 570.1, cuDNN 9.15.1) | ok | ok | ok |"
    )
    assert markdown([]) == ""
    assert issue_rows([NONE]) == []


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_foreign_text_in_a_row_stays_in_its_cell(text: str) -> None:
    row = Row("r.json", Outcome.PASSES, {"MATH": "ok"}, {"torch": text, "device": "cuda", "gpu": text}, planted=(text,))
    made = markdown(table(None, issue_rows([row])))
    assert len(made.splitlines()) == 3
    tokens = MarkdownIt("commonmark", {"html": True}).enable("table").parse(made)
    assert [token.type for token in tokens].count("td_open") == 2
    kinds = {child.type for token in tokens for child in token.children or ()}
    assert kinds <= {"text", "text_special"}
