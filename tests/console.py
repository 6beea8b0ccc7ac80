"""Runs the console blocks of a Markdown page and checks what the page promises: first lines, statuses, options, links.

A block in the language `console` is run, in order, in a copy of the project: each command starts with "$ ", the line
after it is part of what it prints, and "$ echo $?" shows its status where that is not 0. What else it shows ("..." or
further lines) is for the reader. Decimal numbers may differ: another machine rounds otherwise.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from click.testing import CliRunner

from sdpa_repro import cli

ROOT = Path(__file__).resolve().parent.parent
DECIMAL = re.compile(r"(?<![\w.])\d+\.\d+(?![\w.])")
"""A measured number, which another machine may give differently; versions have more points."""

LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "build", "dist", "*.egg-info", "__pycache__", ".*_cache")
SECONDS = 400
"""For one command on a busy machine."""


@dataclass(frozen=True)
class Command:
    """One command of a console block with the first line it shows and the status it ends with."""

    text: str
    shown: str
    status: int


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of a language, without the indent of a list they are in."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^\1```", page, re.M | re.S)
    return [textwrap.dedent(block) for _, block in found]


def commands(block: str) -> Iterator[Command]:
    """Commands start with "$ "; a here-document belongs to its command; "$ echo $?" shows the status before it."""
    parts = [part.rstrip("\n") for part in re.split(r"^\$ ", block, flags=re.M) if part]
    for part, after in zip(parts, [*parts[1:], ""], strict=True):
        if part.startswith("echo $?"):
            continue
        text, _, shown = part.partition("\n")
        if "<<'END'" in text:
            body, _, shown = shown.partition("\nEND")
            text = f"{text}\n{body}\nEND"
        status = int(after.split("\n")[1]) if after.startswith("echo $?") else 0
        yield Command(text, shown.strip().split("\n")[0].strip(), status)


def checkout(folder: Path) -> Path:
    """A copy of the project in `folder`, with a `sdpa-repro` command in `bin` that runs it."""
    project = folder / "sdpa-repro"
    shutil.copytree(ROOT, project, ignore=LEFT_OUT)
    (project / "bin").mkdir()
    script = project / "bin" / "sdpa-repro"
    script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m sdpa_repro "$@"\n')
    script.chmod(0o755)
    return project


def run(page: str, project: Path) -> int:
    """Run every console block of a page in a checkout, check what it shows, and return how many commands ran."""
    environment = {
        **os.environ,
        "PATH": f"{project / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(project),
        "PYTHON": sys.executable,
    }
    ran = 0
    for command in (command for block in blocks(page, "console") for command in commands(block)):
        done = subprocess.run(
            ["bash", "-c", command.text], cwd=project, env=environment, capture_output=True, text=True, timeout=SECONDS
        )
        assert done.returncode == command.status, f"{command.text}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr
        if command.shown not in ("", "...", "…"):
            said = DECIMAL.sub("N", done.stdout + done.stderr)
            assert DECIMAL.sub("N", command.shown) in said, f"{command.text}\n{done.stdout}\n{done.stderr}"
        ran += 1
    return ran


def lines_of_commands(page: str) -> Iterator[list[str]]:
    """The words of each `sdpa-repro` command line in the page's blocks, the program left out."""
    text = "\n".join(block for language in ("console", "sh", "text") for block in blocks(page, language))
    for line in text.splitlines():
        words = line.removeprefix("$ ").split()
        if words[:1] == ["sdpa-repro"] and len(words) > 1:
            yield words[1:]


def check_options(page: str) -> None:
    """Every verb and option that the page's blocks name exists."""
    for verb, *words in lines_of_commands(page):
        if verb.startswith("-"):
            verb, words = words[0], words[1:]
        assert verb in cli.VERBS, verb
        before_script = words[: words.index("--")] if "--" in words else words
        for option in (word for word in before_script if word.startswith("--")):
            assert re.search(rf"{re.escape(option)}\b", _help(verb)), f"{verb} has no {option}"


def check_links(page: Path) -> None:
    """Every relative link of the page leads to a file, and to a heading in it."""
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text(encoding="utf-8")):
        path, _, heading = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), f"{page.name}: {target}"
        if heading:
            assert heading in _anchors(linked), f"{page.name}: {target}"


def _anchors(page: Path) -> set[str]:
    """Headings as GitHub's links name them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@functools.cache
def _help(verb: str) -> str:
    return CliRunner().invoke(cli.group, [verb, "--help"], prog_name="sdpa-repro").output
