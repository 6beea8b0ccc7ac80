"""The stages on a terminal, and as plain lines where there is none."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from sdpa_repro.cli.live import Plain, Redrawn, watching


def terminal(**options: int) -> Console:
    """A terminal of 100 columns that keeps what is written."""
    return Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None, **options)


def drawn(view: Redrawn) -> list[list[str]]:
    """The words of each line of the list as it is now."""
    page = Console(file=io.StringIO(), width=100)
    page.print(view._drawn())
    return [line.split() for line in written(page).splitlines()]


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_without_a_terminal_lines_go_to_stderr_and_only_what_is_there_already_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with watching() as view:
        assert isinstance(view, Plain)
        view.begin("replay")
        view.say("bfloat16: MATH\x1b[31m")
        view.end("replay", "healthy")
        view.end("explain", "explained (from before)")
        with view.pause():
            pass
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "bfloat16: MATH\nexplain: explained (from before); --fresh starts over\n"


def test_on_a_terminal_each_stage_is_a_line_with_its_words() -> None:
    view = Redrawn(terminal())
    view.begin("replay")
    view.say("bfloat16: [bold]MATH[/bold]")
    running = drawn(view)
    view.end("replay", "backend_wrong")
    view.begin("explain")
    ended = drawn(view)
    view.stop()
    assert running[0][1] == "replay"
    assert running[0][-1] == "[bold]MATH[/bold]"
    assert (ended[0][:2], ended[0][-1]) == (["ok", "replay"], "backend_wrong")
    assert ended[1][1] == "explain"


def test_what_is_said_while_others_have_the_terminal_is_a_line_of_its_own() -> None:
    console = terminal()
    view = Redrawn(console)
    view.say("an earlier run did not end")
    view.begin("capture")
    with view.pause():
        before = len(written(console))
        view.say("call 3 is wrong")
        assert written(console)[before:] == "call 3 is wrong\n"
    view.stop()
    assert "an earlier run did not end\n" in written(console)


def test_a_text_longer_than_the_line_is_cut() -> None:
    view = Redrawn(terminal())
    view.begin("explain")
    view.say("x" * 500)
    lines = drawn(view)
    view.stop()
    assert len(lines) == 1
    assert len(lines[0][-1]) < 100
