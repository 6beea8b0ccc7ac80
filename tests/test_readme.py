"""The README is true: its console blocks run, with the statuses and first lines it shows; its options exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import console

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_every_console_block_runs_as_shown(tmp_path: Path) -> None:
    assert console.run(README, console.checkout(tmp_path)) > 5


def test_every_option_the_readme_names_exists() -> None:
    console.check_options(README)


def test_every_make_target_the_readme_names_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = {word for line in re.findall(r"\bmake ([a-z -]+)", README) for word in line.split() if "-" in word}
    named |= set(re.findall(r"^\$? ?make ([a-z-]+)", README, re.M))
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_every_link_to_a_file_leads_somewhere() -> None:
    console.check_links(ROOT / "README.md")
