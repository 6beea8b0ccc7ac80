"""The README is true: its console blocks run, with the statuses and first lines it shows; its options exist."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

DECIMAL = re.compile(r"(?<![\w.])\d+\.\d+(?![\w.])")
"""A measured number, which another machine may give differently; versions have more points."""

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "build", "dist", "*.egg-info", "__pycache__", ".*_cache")


@dataclass(frozen=True)
class Command:
    """One command of a console block with the first line it shows and the status it ends with."""

    text: str
    shown: str
    status: int


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.M | re.S)


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


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project, with a `sdpa-repro` command that runs it."""
    folder = tmp_path_factory.mktemp("readme") / "sdpa-repro"
    shutil.copytree(ROOT, folder, ignore=LEFT_OUT)
    (folder / "bin").mkdir()
    script = folder / "bin" / "sdpa-repro"
    script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m sdpa_repro "$@"\n')
    script.chmod(0o755)
    return folder


@pytest.mark.slow
def test_every_console_block_runs_as_shown(checkout: Path) -> None:
    environment = {
        **os.environ,
        "PATH": f"{checkout / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(checkout),
        "PYTHON": sys.executable,
    }
    ran = 0
    for command in (command for block in blocks("console") for command in commands(block)):
        done = subprocess.run(
            ["bash", "-c", command.text], cwd=checkout, env=environment, capture_output=True, text=True, timeout=400
        )
        assert done.returncode == command.status, f"{command.text}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr
        if command.shown not in ("", "...", "…"):
            said = DECIMAL.sub("N", done.stdout + done.stderr)
            assert DECIMAL.sub("N", command.shown) in said, f"{command.text}\n{done.stdout}\n{done.stderr}"
        ran += 1
    assert ran > 5


def test_every_option_the_readme_names_exists() -> None:
    helps: dict[str, str] = {}
    for line in "\n".join(blocks("console") + blocks("sh")).splitlines():
        words = line.removeprefix("$ ").split()
        if words[:1] != ["sdpa-repro"]:
            continue
        verb = words[1]
        if verb not in helps:
            command = [sys.executable, "-m", "sdpa_repro", verb, "--help"]
            helps[verb] = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
        before_script = words[2 : words.index("--")] if "--" in words else words[2:]
        for option in (word for word in before_script if word.startswith("--")):
            assert option in helps[verb], f"{verb} has no {option}"


def test_every_make_target_the_readme_names_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = {word for line in re.findall(r"\bmake ([a-z -]+)", README) for word in line.split() if "-" in word}
    named |= set(re.findall(r"^\$? ?make ([a-z-]+)", README, re.M))
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_every_link_to_a_file_leads_somewhere() -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
