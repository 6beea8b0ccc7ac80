"""What is printed is readable, complete in a file, plain without a terminal, and harmless."""

from __future__ import annotations

import io
import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from sdpa_repro.cli import output
from sdpa_repro.version import VERSION


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """From now on stdout is a terminal of 80 columns."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return stream


HEADERS = ["backend", "status", "ratio"]
ROWS = [["FLASH_ATTENTION", "diverges", "41.2"], ["MATH", "agrees", "0.2"]]


def test_a_piped_table_is_aligned_text(capsys: pytest.CaptureFixture[str]) -> None:
    output.table(HEADERS, ROWS, styles=["red", None])
    assert capsys.readouterr().out.splitlines() == [
        "backend          status    ratio",
        "---------------  --------  -----",
        "FLASH_ATTENTION  diverges   41.2",
        "MATH             agrees      0.2",
    ]


def test_a_piped_table_loses_nothing_however_long(capsys: pytest.CaptureFixture[str]) -> None:
    reason = "Both fused kernels require the last dimension " * 10
    output.table(["reason"], [[reason]])
    assert reason.strip() in capsys.readouterr().out


def test_a_terminal_table_keeps_every_word_within_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = terminal(monkeypatch)
    monkeypatch.setenv("NO_COLOR", "1")
    output.table(["backend", "reason"], [["CUDNN_ATTENTION", "No viable backend found for this device " * 4]])
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert " ".join(lines).count("viable") == 4
    assert "\x1b" not in stream.getvalue()


def test_a_terminal_gets_colour_and_no_color_takes_it_away(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = terminal(monkeypatch)
    output.table(HEADERS, ROWS, styles=["red", None])
    assert "\x1b[31m" in stream.getvalue()
    assert "FLASH_ATTENTION" in stream.getvalue()
    stream.truncate(0)
    monkeypatch.setenv("NO_COLOR", "1")
    output.answer("FLASH_ATTENTION is wrong")
    output.table(HEADERS, ROWS, styles=["red", None])
    assert "\x1b" not in stream.getvalue()


def test_a_table_works_without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = terminal(monkeypatch)
    monkeypatch.setitem(sys.modules, "rich", None)
    output.table(HEADERS, ROWS)
    assert stream.getvalue().splitlines()[2] == "FLASH_ATTENTION  diverges   41.2"


@pytest.mark.parametrize("width", [20, 31, 40, 80])
def test_wrapping_keeps_the_letters_of_every_cell(width: int) -> None:
    cell = "rows 0-6, 288; heads 0-15 model.layers.5.self_attn " + "x" * 50
    lines = output.aligned(["index", "where"], [["1", cell]], width)
    assert max(map(len, lines)) <= width
    body = "".join(line[len("index") + 2 :] for line in lines[2:])
    assert body.replace(" ", "") == cell.replace(" ", "")


@pytest.mark.parametrize("colour", [True, False])
def test_words_stay_whole_while_a_wider_column_can_give(monkeypatch: pytest.MonkeyPatch, colour: bool) -> None:
    stream = terminal(monkeypatch)
    if not colour:
        monkeypatch.setenv("NO_COLOR", "1")
    output.table(["backend", "status", "reason"], [["FLASH_ATTENTION", "agrees", "it takes no mask of this kind " * 5]])
    assert "FLASH_ATTENTION" in stream.getvalue()
    assert max(len(re.sub(r"\x1b\[[0-9;]*m", "", text)) for text in stream.getvalue().splitlines()) <= 80


def test_a_table_that_is_too_wide_for_its_words_becomes_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = terminal(monkeypatch)
    headers = ["module", "query", "kernel", "threshold", "file"]
    row = ["model.layers.5.self_attn", "1x4x65x64", "FLASH_ATTENTION", "2.4e-06", "L05-self_attn-call5-289x289.pt"]
    output.table(headers, [row, ["", *row[1:]]])
    assert stream.getvalue().splitlines() == [
        "module model.layers.5.self_attn  query 1x4x65x64  kernel FLASH_ATTENTION",
        "  threshold 2.4e-06  file L05-self_attn-call5-289x289.pt",
        "query 1x4x65x64  kernel FLASH_ATTENTION  threshold 2.4e-06",
        "  file L05-self_attn-call5-289x289.pt",
    ]


def test_rows_shorter_than_the_header_and_no_rows_are_fine() -> None:
    assert output.aligned(["a", "b"], [["x"]])[2] == "x"
    assert output.aligned(["a", "b"], []) == ["a  b", "-  -"]


def test_wide_letters_count_as_two_columns() -> None:
    assert output.aligned(["a", "b"], [["漢字", "x"], ["ab", "y"]])[2:] == ["漢字  x", "ab    y"]


@pytest.mark.parametrize(
    ("text", "harmless"),
    [
        ("model.layers.5", "model.layers.5"),
        ("\x1b[31mred\x1b[0m\x1b]0;title\x07", "red]0;title"),
        ("two\nlines\r\ttab", "two lines tab"),
        ("a\u202eb\u200bc\x00d\x9b", "abcd"),
        ("  é 漢 ✓ ", "é 漢 ✓"),
    ],
)
def test_clean_makes_one_harmless_line(text: str, harmless: str) -> None:
    assert output.clean(text) == harmless


def test_table_cells_are_cleaned(capsys: pytest.CaptureFixture[str]) -> None:
    output.table(["module"], [["evil\x1b[2J\nname"]])
    assert capsys.readouterr().out.splitlines()[2] == "evil name"


def test_notes_go_to_stderr_and_answers_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    output.answer("MATH is wrong")
    output.progress("call 3 of 9")
    output.warn("no GPU")
    output.line()
    captured = capsys.readouterr()
    assert captured.out == "MATH is wrong\n\n"
    assert captured.err == "call 3 of 9\nwarning: no GPU\n"


def test_a_document_names_its_schema_and_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    output.document("replay", {"verdict": "healthy", "cells": ({"max_abs": float("nan"), "ratio": float("inf")},)})
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {
        "schema": {"name": "replay", "version": 1},
        "sdpa_repro": VERSION,
        "verdict": "healthy",
        "cells": [{"max_abs": "nan", "ratio": "inf"}],
    }


def test_shell_words_survive_a_shell() -> None:
    words = ["sdpa-repro", "show", "a b'c$d.pt", ""]
    assert shlex.split(output.shell(*words)) == words


def test_a_path_is_never_taken_for_an_option() -> None:
    assert output.shell("show", "--json", Path("-a.pt"), Path("b.pt")) == "show --json ./-a.pt b.pt"


def test_the_next_command_starts_the_way_that_works_here(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    binaries = tmp_path / "env" / "bin"
    binaries.mkdir(parents=True)
    monkeypatch.setattr(sys, "executable", str(binaries / "python"))
    monkeypatch.setenv("PATH", "")
    output.next_command("sdpa-repro show x.pt")
    (binaries / "sdpa-repro").touch(0o755)
    output.next_command("sdpa-repro show x.pt")
    monkeypatch.setenv("PATH", str(binaries))
    output.next_command("sdpa-repro show x.pt")
    output.next_command("pip install torch")
    assert capsys.readouterr().out.splitlines() == [
        "next: env/bin/python -m sdpa_repro show x.pt",
        "next: env/bin/sdpa-repro show x.pt",
        "next: sdpa-repro show x.pt",
        "next: pip install torch",
    ]


def test_a_script_is_started_with_the_python_that_has_torch(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("own", "other"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "python").touch(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "own" / "python"))
    for path in ("other", "own"):
        monkeypatch.setenv("PATH", str(tmp_path / path))
        output.next_command("python -I repro.py")
    monkeypatch.setenv("PATH", "")
    monkeypatch.chdir(tmp_path / "own")
    output.next_command("python -I repro.py")
    assert capsys.readouterr().out.splitlines() == [
        "next: own/python -I repro.py",
        "next: python -I repro.py",
        "next: ./python -I repro.py",
    ]
