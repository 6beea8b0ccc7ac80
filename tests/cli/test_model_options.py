"""The model options become one PrefillOptions, or one line about what contradicts what."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import click
import pytest
from click.testing import CliRunner

from sdpa_repro.capturing.options import PrefillOptions
from sdpa_repro.cli.model_options import NAMES, build_options, given, model_options, model_words
from sdpa_repro.errors import InputError


def parse(*words: str) -> dict[str, Any]:
    """The parameters a command with the model options gets for these words."""
    seen: dict[str, Any] = {}

    @click.command()
    @model_options
    def command(**values: Any) -> None:
        seen.update(values)

    result = CliRunner().invoke(command, list(words))
    assert result.exit_code == 0, result.output
    return seen


def test_every_option_reaches_the_prefill() -> None:
    words = "--model a/b --image x.png --image y.png --prompt hi --pad 7 --padding-side right --dtype float16 "
    words += "--device cuda:1 --layers 2 --random-weights --trust-remote-code --revision main"
    assert build_options(**parse(*words.split())) == PrefillOptions(
        model="a/b",
        images=("x.png", "y.png"),
        prompt="hi",
        pad=7,
        padding_side="right",
        dtype="float16",
        device="cuda:1",
        layers=2,
        random_weights=True,
        trust_remote_code=True,
        revision="main",
    )
    rows = build_options(**parse(*["--model", "a/b", "--input", "r.jsonl", "--total-length", "289", "--text-only"]))
    assert rows == PrefillOptions(model="a/b", input="r.jsonl", total_length=289, text_only=True)


def test_without_options_it_is_the_embedded_model() -> None:
    assert build_options(**parse()) == PrefillOptions()
    assert build_options() == PrefillOptions()


def test_the_names_are_those_of_the_parameters() -> None:
    assert sorted(parse()) == sorted(NAMES)


def test_what_was_given_is_known_by_name() -> None:
    assert given(**parse("--pad", "0", "--random-weights")) == ["pad", "random_weights"]
    assert given(**parse()) == []


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--pad 1 --total-length 2", "--pad and --total-length say the same thing"),
        ("--pad -1", "--pad -1 is too small"),
        ("--total-length 0", "--total-length 0 is too small"),
        ("--layers 0", "--layers 0 is too small"),
        ("--prompt hi", "--prompt needs --model"),
        ("--image a.png", "--image needs --model"),
        ("--input r.jsonl", "--input needs --model"),
        ("--revision main", "--revision needs --model"),
        ("--model m --input r.jsonl --prompt hi", "--input holds the prompts"),
        ("--model m --text-only --image a.png", "--text-only leaves images out"),
    ],
)
def test_options_that_contradict_each_other_are_one_line(words: str, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        build_options(**parse(*words.split()))


def test_what_was_given_can_be_given_again() -> None:
    words = ("--model", "x", "--image", "a.png", "--image", "b.png", "--pad", "0", "--random-weights")
    assert model_words(parse(*words)) == ["--model", "x", "--image", "a.png", "--image", "b.png", "--pad", 0, words[-1]]
    assert model_words({}) == []


def test_importing_the_options_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, sdpa_repro.cli.model_options; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
