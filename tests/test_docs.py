"""The pages in docs/ are true: console blocks run as shown, and the options and links they name exist.

Blocks in the language `text` show real output too, of commands that take too long to be run here once more: `make demo`
and the verbs on the planted fault are run from the README (test_readme.py), and each of the others by the tests of its
verb in tests/cli. That their verbs and options exist is checked here.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from sdpa_repro import cli
from tests import console

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs").glob("**/*.md"))
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
WITH_COMMANDS = [name for name in NAMES if console.blocks((ROOT / name).read_text(encoding="utf-8"), "console")]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return console.checkout(tmp_path_factory.mktemp("docs"))


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_COMMANDS)
def test_every_console_block_runs_as_shown(checkout: Path, name: str) -> None:
    assert console.run((ROOT / name).read_text(encoding="utf-8"), checkout) > 0


@pytest.mark.parametrize("name", NAMES)
def test_every_option_exists(name: str) -> None:
    console.check_options((ROOT / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", NAMES)
def test_every_link_leads_somewhere(name: str) -> None:
    console.check_links(ROOT / name)


def test_the_guide_has_a_section_and_a_command_for_each_verb() -> None:
    guide = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
    sections = {part.split("\n")[0].strip("`"): part for part in guide.split("\n## ")[1:]}
    for verb in cli.VERBS:
        assert any(words[0] == verb for words in console.lines_of_commands(sections[verb])), verb


def test_the_index_links_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    for page in PAGES:
        assert page.name == "README.md" or f"]({page.relative_to(ROOT / 'docs')})" in index, page
