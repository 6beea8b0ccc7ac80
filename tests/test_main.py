"""Ctrl-C from the first moment of the program to its last: one line, status 130, nothing swallowed."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from sdpa_repro import __main__ as program
from sdpa_repro import cli

SECONDS = 300
ROOT = Path(__file__).resolve().parent.parent
PRESS = "import signal; signal.raise_signal(signal.SIGINT)\n"
SWALLOWS = f"""\
try:
    {PRESS}except BaseException:
    pass
"""
"""A torch as it behaves now and then: Ctrl-C comes while it is imported, and is lost."""


def run(folder: Path, main: str = "", torch: str = "", *, ignored: bool = False) -> subprocess.CompletedProcess[str]:
    """Run the program with `torch` as the source of torch, and `main` as the body of `cli.main` where it is given."""
    (folder / "torch.py").write_text(torch)
    body = "".join(f"    {line}\n" for line in main.splitlines())
    replaced = f"from sdpa_repro import cli\ndef main():\n{body}cli.main = main\n" if main else ""
    (folder / "start.py").write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); sys.argv = ['sdpa-repro', 'show', 'x.pt']\n"
        f"{replaced}from sdpa_repro.__main__ import run\nsys.exit(run())\n"
    )
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if ignored else None
    try:
        return subprocess.run([sys.executable, "start.py"], cwd=folder, capture_output=True, text=True, timeout=SECONDS)
    finally:
        if ignored:
            signal.signal(signal.SIGINT, before)


def ended(done: subprocess.CompletedProcess[str]) -> tuple[int, str, str]:
    return done.returncode, done.stdout, done.stderr


def test_ctrl_c_while_torch_is_imported_ends_the_program_also_where_it_would_be_swallowed(tmp_path: Path) -> None:
    assert ended(run(tmp_path, torch=SWALLOWS)) == (130, "", "error: interrupted\n")


def test_ctrl_c_before_torch_is_asked_for_ends_the_program(tmp_path: Path) -> None:
    assert ended(run(tmp_path, SWALLOWS)) == (130, "", "error: interrupted\n")


def test_with_torch_ctrl_c_is_an_exception_that_a_verb_may_answer(tmp_path: Path) -> None:
    main = f"import torch\ntry:\n    {PRESS}except KeyboardInterrupt:\n    print('what is known')\n    return 130"
    assert ended(run(tmp_path, main)) == (130, "what is known\n", "")


def test_ctrl_c_that_was_swallowed_in_a_finalizer_comes_again(tmp_path: Path) -> None:
    main = (
        "import torch, time\n"
        "class Noisy:\n"
        f"    def __del__(self): {PRESS}"
        "try:\n"
        "    Noisy()\n"
        f"    time.sleep({SECONDS})\n"
        "except KeyboardInterrupt:\n"
        "    return 130"
    )
    assert ended(run(tmp_path, main)) == (130, "", "")


def test_what_else_goes_wrong_in_a_finalizer_is_still_shown(tmp_path: Path) -> None:
    done = run(tmp_path, "class Faulty:\n    def __del__(self): raise ValueError('seen')\nFaulty()\nreturn 0")
    assert done.returncode == 0
    assert "ValueError: seen" in done.stderr


def test_ctrl_c_through_generated_code_is_a_status_and_no_signal(tmp_path: Path) -> None:
    """Python ends itself by SIGINT when a KeyboardInterrupt has left the source of an `exec`, handled or not."""
    main = f"import torch\ntry:\n    exec({PRESS!r})\nexcept KeyboardInterrupt:\n    return 130"
    assert ended(run(tmp_path, main)) == (130, "", "")


def test_a_second_ctrl_c_while_the_first_is_told_ends_the_program_without_a_traceback(tmp_path: Path) -> None:
    assert ended(run(tmp_path, f"import torch\n{PRESS}return 0")) == (130, "", "")


def test_ctrl_c_after_the_answer_changes_neither_output_nor_status(tmp_path: Path) -> None:
    main = f"import atexit, torch\natexit.register(lambda: exec({PRESS!r}))\nprint('answer')\nreturn 3"
    assert ended(run(tmp_path, main)) == (3, "answer\n", "")


def test_a_program_started_to_ignore_ctrl_c_ignores_it(tmp_path: Path) -> None:
    assert ended(run(tmp_path, f"{PRESS}return 0", ignored=True)) == (0, "", "")


def in_a_thread(work: Callable[[], object]) -> list[object]:
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found


def test_in_another_thread_the_program_runs_and_leaves_ctrl_c_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "main", lambda: 3)
    before = signal.getsignal(signal.SIGINT), sys.unraisablehook
    assert in_a_thread(program.run) == [3]
    assert (signal.getsignal(signal.SIGINT), sys.unraisablehook) == before


def test_used_as_a_library_the_command_line_leaves_ctrl_c_alone(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT), sys.unraisablehook
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("sdpa-repro")
    assert (signal.getsignal(signal.SIGINT), sys.unraisablehook) == before
