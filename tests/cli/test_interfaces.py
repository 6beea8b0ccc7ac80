"""What people expect of a command line: examples and statuses in every help, `--quiet`, completion in the shell."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.shell_completion import BashComplete, CompletionItem
from click.testing import CliRunner

from sdpa_repro import cli
from sdpa_repro.cli import output
from sdpa_repro.cli.epilog import epilog
from sdpa_repro.explaining import known_here

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = ROOT / "dumps" / "gemma4-global-33x33.sample.pt"
STATUSES = re.compile(r"^  Exit status:\n((?:    \d+ +\S.*\n?)+)", re.M)


def help_of(verb: str) -> str:
    return CliRunner().invoke(cli.group, [verb, "--help"], prog_name="sdpa-repro").output


def statuses(text: str) -> dict[int, str]:
    found = STATUSES.search(text)
    assert found, text
    return {int(line.split()[0]): " ".join(line.split()[1:]) for line in found[1].splitlines()}


@pytest.mark.parametrize("verb", list(cli.VERBS))
def test_every_help_has_examples_and_exit_statuses(verb: str) -> None:
    text = help_of(verb)
    assert re.search(rf"^  Examples?:\n    .*sdpa.repro {verb}\b", text, re.M), text
    assert {0, 2, 70, 130} <= set(statuses(text))


@pytest.mark.parametrize("verb", list(cli.VERBS))
def test_an_example_names_only_options_that_exist(verb: str) -> None:
    command = cli.Verbs().get_command(click.Context(cli.group), verb)
    assert command is not None
    options = {name for parameter in command.params for name in parameter.opts}
    examples = re.findall(rf"^    (?:torchrun .*)?sdpa.repro {verb}\b(.*)", help_of(verb), re.M)
    for words in (line.split(" -- ")[0].split() for line in examples):
        assert {word for word in words if word.startswith("-")} <= options, words


@pytest.mark.parametrize("verb", ["", *cli.VERBS])
def test_a_help_line_fits_a_terminal_of_100_columns(verb: str) -> None:
    text = CliRunner().invoke(cli.group, [*([verb] if verb else []), "--help"], prog_name="sdpa-repro").output
    assert max(map(len, text.splitlines())) <= 100


def test_a_verb_may_say_more_about_a_common_status() -> None:
    text = epilog({0: "fine", 130: "interrupted; the rest is kept"}, "sdpa-repro show x.pt")
    assert text.splitlines() == [
        "\b",
        "Example:",
        "  sdpa-repro show x.pt",
        "",
        "\b",
        "Exit status:",
        "  0    fine",
        "  2    bad usage or bad input",
        "  70   a bug in sdpa-repro",
        "  130  interrupted; the rest is kept",
    ]


@pytest.mark.parametrize("words", [("-q", "show"), ("--quiet", "show"), ("show", "-q"), ("show", "--quiet")])
def test_quiet_leaves_the_answer_alone(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    assert cli.main([*words, str(SAMPLE)]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("query (1, 2, 33, 512)")
    assert (captured.out.count("\n"), captured.err) == (1, "")


def test_quiet_is_over_with_the_command_that_asked_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["-q", "known"])
    assert capsys.readouterr().out.count("\n") == 1
    cli.main(["known"])
    assert capsys.readouterr().out.count("\n") > 10


def test_quiet_leaves_the_document_of_json_whole(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["known", "--json"])
    said = capsys.readouterr().out
    cli.main(["known", "--json", "-q"])
    assert json.loads(capsys.readouterr().out) == json.loads(said)


def test_quiet_keeps_warnings_and_errors_and_one_line_a_dump(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shutil.copy(SAMPLE, tmp_path / "a.pt")
    (tmp_path / "b.pt").write_bytes(b"")
    assert cli.main(["show", "-q", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 1
    assert captured.err.startswith("warning: ")
    assert cli.main(["show", "-q", str(tmp_path / "b.pt")]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_quiet_silences_progress_tables_and_the_next_command(capsys: pytest.CaptureFixture[str]) -> None:
    def body() -> None:
        output.progress("1 of 3")
        output.answer("MATH is wrong")
        output.line("more")
        output.table(["a"], [["b"]])
        output.warn("look out")
        output.next_command("sdpa-repro show x.pt")

    command = click.Command("x", callback=body, params=[cli.QUIET])
    command.main(["-q"], standalone_mode=False)
    assert capsys.readouterr() == ("MATH is wrong\n", "warning: look out\n")


def test_quiet_holds_for_what_a_verb_does_in_threads(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def tried(preload: object, *, timeout: float, report: Callable[[known_here.Outcome], None]) -> None:
        outcome = known_here.Outcome("pytorch#191937", "not affected", "row 32 is right", "cpu")
        thread = threading.Thread(target=report, args=(outcome,))
        thread.start()
        thread.join()

    monkeypatch.setattr(known_here, "check_here", tried)
    for words, said in ((["known", "--here"], "pytorch#191937"), (["known", "--here", "-q"], "")):
        assert cli.main(words) == 0
        assert said in (told := capsys.readouterr().err)
        assert bool(told) is bool(said)


@pytest.mark.parametrize("verb", list(cli.VERBS))
def test_every_verb_takes_quiet_once(verb: str) -> None:
    commands = [cli.Verbs().get_command(click.Context(cli.group), verb) for _ in range(2)]
    assert commands[1] is not None
    assert [parameter.name for parameter in commands[1].params].count("quiet") == 1


def completed(words: list[str], incomplete: str) -> list[CompletionItem]:
    return BashComplete(cli.group, {}, "sdpa-repro", cli.COMPLETION).get_completions(words, incomplete)


def test_verbs_and_options_are_completed() -> None:
    assert [item.value for item in completed([], "re")] == ["replay", "reduce", "report"]
    assert [item.value for item in completed(["replay"], "--exp")] == ["--expect"]
    assert [item.value for item in completed(["replay", "--expect"], "")] == ["diverges", "agrees"]
    assert {item.value for item in completed(["capture", "--phase"], "")} == {"prefill", "decode", "all"}


DUMP_VERBS = [verb for verb in cli.VERBS if re.match(r"Usage: .*\bDUMP", help_of(verb))]


@pytest.mark.parametrize("verb", DUMP_VERBS)
def test_dumps_are_completed_where_one_is_wanted(verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("L05.pt", "L06.pt", "index.jsonl", "L07.pt.tmp"):
        (tmp_path / name).touch()
    (tmp_path / "Lost").mkdir()
    (tmp_path / ".hidden").mkdir()
    monkeypatch.chdir(tmp_path)
    assert [item.value for item in completed([verb], "")] == ["L05.pt", "L06.pt", f"Lost{os.sep}"]
    assert [item.value for item in completed([verb], f"{tmp_path}{os.sep}L05")] == [str(tmp_path / "L05.pt")]


@pytest.mark.parametrize("verb", DUMP_VERBS)
def test_a_file_that_cannot_be_read_is_left_to_the_reader_whose_error_says_what_to_do(verb: str) -> None:
    command = cli.Verbs().get_command(click.Context(cli.group), verb)
    assert command is not None
    kinds = [each.type for each in command.params if isinstance(each.type, click.Path)]
    assert kinds
    assert not any(kind.readable for kind in kinds)


def test_where_no_dump_fits_the_shell_completes_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notes.txt").touch()
    monkeypatch.chdir(tmp_path)
    for incomplete in ("", "no", "absent/x"):
        assert [(item.type, item.value) for item in completed(["replay"], incomplete)] == [("file", incomplete)]
    assert [item.type for item in completed(["replay", "--preload"], "")] == ["file"]


@pytest.mark.skipif(shutil.which("bash") is None, reason="the completion of bash needs bash")
def test_bash_completes_verbs_and_dumps_with_what_the_program_prints(tmp_path: Path) -> None:
    program = tmp_path / "sdpa-repro"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m sdpa_repro "$@"\n')
    program.chmod(0o755)
    (tmp_path / "mine.pt").touch()
    lines = """
    eval "$(_SDPA_REPRO_COMPLETE=bash_source sdpa-repro)"
    complete -p sdpa-repro
    COMP_WORDS=(sdpa-repro expl) COMP_CWORD=1; _sdpa_repro_completion sdpa-repro; echo "${COMPREPLY[@]}"
    COMPREPLY=() COMP_WORDS=(sdpa-repro explain mi) COMP_CWORD=2; _sdpa_repro_completion sdpa-repro
    echo "${COMPREPLY[@]}"
    """
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", lines], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stderr == ""
    registered, verb, dump = done.stdout.splitlines()
    assert "_sdpa_repro_completion sdpa-repro" in registered
    assert (verb, dump) == ("explain", "mine.pt")
