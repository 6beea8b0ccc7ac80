"""The table in an issue that was written before: replaced when it is about this script, refused otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from sdpa_repro.errors import InputError
from sdpa_repro.publishing.issue import issue
from sdpa_repro.publishing.issue_table import check_issue, issue_beside, update_issue, with_rows
from tests.publishing.test_issue import report
from tests.publishing.test_version_table import FIXED, HERE, NONE

TABLE = """\
| torch | MATH | FLASH_ATTENTION | default |
|---|---|---|---|
| 2.13.0+cpu (cpu) | ok | wrong | wrong |
| 2.14.1 (NVIDIA H200, driver 570.1, cuDNN 9.15.1) | ok | ok | ok |
"""


def test_the_table_of_an_issue_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    made = report()
    before = issue(made)
    (tmp_path / "issue.md").write_text(before, encoding="utf-8")
    update_issue(tmp_path / "issue.md", made.script, [HERE, FIXED, NONE])
    after = (tmp_path / "issue.md").read_text(encoding="utf-8")
    old = "| torch | MATH | FLASH_ATTENTION | default |\n|---|---|---|---|\n| 2.13.0+cpu (cpu) | ok | wrong | wrong |\n"
    assert after == before.replace(old, TABLE)
    update_issue(tmp_path / "issue.md", made.script, [HERE, FIXED, NONE])
    assert (tmp_path / "issue.md").read_text(encoding="utf-8") == after


def test_an_issue_without_a_table_gets_one_below_what_was_expected() -> None:
    text = issue(report(run=None))
    assert "| torch |" not in text
    after = with_rows(text, [HERE, FIXED])
    expected = next(line for line in text.splitlines() if line.startswith("Expected: "))
    assert after == text.replace(f"{expected}\n", f"{expected}\n\n{TABLE}")


def test_rows_that_say_nothing_leave_the_issue_as_it_is() -> None:
    text = issue(report())
    assert with_rows(text, [NONE]) == text


def test_a_table_inside_a_code_block_is_not_one() -> None:
    text = "```\n| torch | MATH |\n|---|---|\n```\nExpected: x\n"
    assert with_rows(text, [HERE, FIXED]) == f"{text}\n{TABLE}"


def test_what_is_no_issue_about_the_script_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "issue.md"
    for content, said in (
        (b"Expected: x\nanother script\n", "does not hold this script"),
        (b"import torch\n", "has no table of versions"),
        (b"\xff\xfe", "no text"),
    ):
        path.write_bytes(content)
        with pytest.raises(InputError, match=said):
            check_issue(path, "import torch\n")
    with pytest.raises(InputError, match=r"give issue\.md"):
        check_issue(tmp_path / "none.md", "x")


def test_the_issue_is_the_file_named_the_one_in_the_folder_or_the_one_beside(tmp_path: Path) -> None:
    script = tmp_path / "repro.py"
    assert issue_beside(script) is None
    assert issue_beside(script, tmp_path) == tmp_path / "issue.md"
    (tmp_path / "issue.md").write_text("")
    assert issue_beside(script) == tmp_path / "issue.md"
    assert issue_beside(script, tmp_path / "other.md") == tmp_path / "other.md"
