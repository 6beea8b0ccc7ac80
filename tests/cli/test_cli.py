"""The command line starts fast and ends every failure in one line and the right status."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from sdpa_repro import cli
from sdpa_repro.errors import InputError
from sdpa_repro.version import VERSION

Verb = Callable[[Callable[[], object]], None]


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> Verb:
    """Replaces the verb `show` by a function."""

    def define(body: Callable[[], object]) -> None:
        command = click.Command("show", callback=body)
        monkeypatch.setattr(cli.Verbs, "get_command", lambda self, ctx, name: command)

    return define


def raising(error: BaseException) -> Callable[[], object]:
    def body() -> object:
        raise error

    return body


def sdpa_repro(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sdpa_repro", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("arguments", [("--help",), ("-h",), ("--version",), ()])
def test_help_and_version_import_neither_torch_nor_transformers(arguments: tuple[str, ...]) -> None:
    code = (
        "import sys; from sdpa_repro.cli import main; main(sys.argv[1:]);"
        "print(sorted({'torch', 'transformers', 'numpy', 'rich'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("name", list(cli.VERBS))
def test_every_verb_has_a_module_with_a_command_and_its_own_help(name: str) -> None:
    done = sdpa_repro(name, "-h")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"Usage: sdpa-repro {name}")


@pytest.mark.parametrize("name", list(cli.VERBS))
def test_a_verbs_help_needs_neither_torch_nor_transformers(name: str) -> None:
    code = (
        f"import sys; from sdpa_repro.cli import main; main([{name!r}, '--help']);"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_help_lists_the_verbs_examples_and_statuses() -> None:
    text = sdpa_repro("--help").stdout
    for name in cli.VERBS:
        assert re.search(rf"^  {name} ", text, re.M)
    assert "Examples:" in text
    for status in (0, 1, 2, 3, 70, 130):
        assert re.search(rf"\b{status} +[a-z]", text)


def test_no_arguments_show_the_help_with_status_2() -> None:
    done = sdpa_repro()
    assert done.returncode == 2
    assert done.stdout.startswith("Usage:")


def test_version_is_printed() -> None:
    assert sdpa_repro("--version").stdout == f"sdpa-repro, version {VERSION}\n"


@pytest.mark.parametrize("arguments", [("nonsense",), ("--nonsense",), ("show", "--nonsense"), ("replay",)])
def test_bad_usage_is_one_line_and_status_2(arguments: tuple[str, ...]) -> None:
    done = sdpa_repro(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert re.fullmatch(r"error: .+\n", done.stderr)


@pytest.mark.parametrize(
    ("word", "said"), [("replya", "Did you mean 'replay'?"), ("diag", "Did you mean 'diagnose'?"), ("frobnicate", None)]
)
def test_a_mistyped_verb_is_told_which_one_is_like_it(
    word: str, said: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([word, "x.pt"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: No such command {word!r}. ")
    assert ("Did you mean" in error) is (said is not None)
    assert said is None or said in error


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (InputError("x.pt is empty: capture it again"), 2, "error: x.pt is empty: capture it again"),
        (InputError("a\x1b[31m b\nc"), 2, "error: a b c"),
        (ModuleNotFoundError("no", name="transformers.models"), 2, "error: transformers is not installed; install it"),
        (ModuleNotFoundError("no", name="sdpa_repro.gone"), 70, "error: this is a bug in sdpa-repro: ModuleNotFound"),
        (ZeroDivisionError("by zero"), 70, "error: this is a bug in sdpa-repro: ZeroDivisionError: by zero (set "),
        (OSError(28, "No space left on device", "dumps/x.pt"), 2, "error: No space left on device: dumps/x.pt"),
        (KeyboardInterrupt(), 130, "error: interrupted"),
        (SystemExit(3), 3, None),
        (SystemExit(None), 0, None),
        (SystemExit("stopped"), 1, "error: stopped"),
    ],
)
def test_every_error_is_one_line_and_a_status(
    verb: Verb, capsys: pytest.CaptureFixture[str], error: BaseException, status: int, line: str | None
) -> None:
    verb(raising(error))
    assert cli.main(["show"]) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    if line is None:
        assert captured.err == ""
    else:
        assert captured.err.startswith(line)
        assert captured.err.count("\n") == 1


@pytest.mark.parametrize("status", [None, 0, 1, 3])
def test_what_a_verb_returns_is_the_status(verb: Verb, status: int | None) -> None:
    verb(lambda: status)
    assert cli.main(["show"]) == (status or 0)


def test_a_verb_may_leave_through_click(verb: Verb) -> None:
    verb(lambda: click.get_current_context().exit(3))
    assert cli.main(["show"]) == 3


def test_the_traceback_of_a_bug_is_shown_on_request(
    verb: Verb, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SDPA_REPRO_TRACEBACK", "1")
    verb(raising(ZeroDivisionError("by zero")))
    assert cli.main(["show"]) == 70
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_a_reader_that_stops_early_is_no_error() -> None:
    code = (
        "import sys, click; from sdpa_repro import cli\n"
        "def body():\n    while True: print('x' * 100)\n"
        "cli.Verbs.get_command = lambda *_: click.Command('show', callback=body)\n"
        "sys.exit(cli.main(['show']))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(60) == 141
    process.stderr.close()


def test_a_name_that_the_terminal_cannot_show_is_no_error() -> None:
    code = (
        "import sys; from sdpa_repro import cli; cli.group.callback = lambda: print('a\\udcff'); sys.exit(cli.main([]))"
    )
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, b"a\\udcff"), done.stderr


@pytest.mark.skipif(os.name == "nt", reason="a POSIX shell closes it")
def test_a_closed_stdout_is_no_error() -> None:
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" -m sdpa_repro known >&-', sys.executable], stderr=subprocess.PIPE, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_short_answer_to_a_closed_reader_is_no_error(tmp_path: Path) -> None:
    command = f"{sys.executable} -m sdpa_repro --help | true"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, env=dict(os.environ))
    assert done.stderr == ""
