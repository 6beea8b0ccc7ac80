"""`sdpa-repro reduce`: the answer first, the table, the next command last; exit statuses; JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from sdpa_repro.cli.reduce import command
from sdpa_repro.dump import load, save, snapshot
from sdpa_repro.errors import InputError
from tests.calls import make_call

FAULT = Path(__file__).resolve().parents[1] / "faults" / "pytorch_191937.py"


@pytest.fixture(autouse=True)
def real_kernels_afterwards() -> Iterator[None]:
    yield
    if "emulation" in sys.modules:
        sys.modules["emulation"].restore()


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    call = make_call(heads=2, rows=65, width=16, padding=2)
    save(snapshot(call, context={"grad": False, "device": "cpu"}), tmp_path / "x.pt")
    return tmp_path / "x.pt"


def run(*words: object) -> Result:
    return CliRunner().invoke(command, [str(word) for word in words])


@pytest.mark.slow
def test_the_answer_comes_first_and_the_next_command_last(dump: Path) -> None:
    result = run(dump, "--preload", FAULT)
    lines = result.stdout.splitlines()
    assert result.exit_code == 1
    assert lines[0].startswith("still fails at 1×2×65×8: FLASH_ATTENTION is off by 32 ")
    assert "x.min.pt" in lines[-1]
    assert lines[-1].startswith("next: ")
    assert str(FAULT) in lines[-1]
    assert "dense key and value pass" in result.stdout
    assert "query = torch.zeros((1, 2, 65, 8), dtype=torch.bfloat16)" in result.stdout
    assert "with no captured values" in result.stdout
    assert "preloaded: pytorch_191937.py" in result.stdout
    assert "calls: fails at 1×2×65×8" in result.stderr
    assert load(dump.with_name("x.min.pt")).recipe is not None


@pytest.mark.slow
def test_json_is_one_document_with_the_promised_keys(dump: Path, tmp_path: Path) -> None:
    target = tmp_path / "small.pt"
    result = run(dump, "--preload", FAULT, "--json", "-o", target, "--freeze", "values,mask")
    told = json.loads(result.stdout)
    assert result.exit_code == 1
    assert told["schema"]["name"] == "reduce"
    assert {"from", "to", "needed", "neighbour", "calls", "seconds", "output", "preloaded", "environment"} <= set(told)
    sizes = ("B", "H", "Hkv", "L", "S", "E", "Ev", "dtype", "mask", "values", "layout")
    assert set(sizes) <= set(told["from"])
    assert [told["to"][name] for name in sizes[:8]] == [1, 2, 2, 65, 65, 8, 8, "bfloat16"]
    assert told["output"] == str(target)
    assert told["to"]["values"] == "query captured; key captured; value captured"


@pytest.mark.slow
def test_a_dump_that_does_not_fail_exits_with_0_and_says_so(dump: Path) -> None:
    result = run(dump)
    assert result.exit_code == 0
    assert result.stdout.startswith("there is nothing to reduce: ")
    assert not dump.with_name("x.min.pt").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--freeze", "L,colour"], "cannot freeze 'colour'"),
        (["-o", "x.pt"], "the dump itself"),
        (["-o", "no/such/folder/y.pt"], "folder that exists"),
    ],
    ids=str,
)
def test_bad_options_are_found_before_anything_runs(dump: Path, words: list[str], said: str) -> None:
    words = [str(dump) if word == "x.pt" else word for word in words]
    result = run(dump, *words)
    assert isinstance(result.exception, InputError)
    assert said in str(result.exception)


def refusal(*words: object) -> str:
    result = run(*words)
    assert isinstance(result.exception, InputError)
    assert result.stdout == result.stderr == ""
    return str(result.exception)


def test_a_file_that_is_there_is_replaced_only_when_told(dump: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.txt"
    mine.write_text("years of work")
    assert refusal(dump, "-o", mine).endswith("is there already: give another name with -o, or --force to replace it")
    assert mine.read_text() == "years of work"


@pytest.mark.parametrize("force", [(), ("--force",)])
def test_the_dump_itself_is_never_replaced_not_even_under_another_name(dump: Path, force: tuple[str, ...]) -> None:
    other = dump.with_name("x.min.pt")
    other.hardlink_to(dump)
    assert "is the dump itself" in refusal(dump, *force)
    assert "is the dump itself" in refusal(dump, "-o", dump, *force)


@pytest.mark.slow
def test_the_default_name_and_with_force_any_may_be_there(dump: Path, tmp_path: Path) -> None:
    small = ["--freeze", "L,S,E,mask,values,layout,flags", "--preload", FAULT]
    for words in ([], ["-o", tmp_path / "y.pt", "--force"]):
        target = Path(str(words[1])) if words else dump.with_name("x.min.pt")
        target.write_text("of an earlier run")
        assert run(dump, *small, *words).exit_code == 1
        assert load(target).recipe is not None


def test_a_folder_that_cannot_be_written_into_is_said_before_anything_runs(
    dump: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)  # root may write anywhere
    assert refusal(dump).endswith("it is read-only; name a file elsewhere with -o")


@pytest.mark.parametrize("words", [["--budget", "0"], ["--seed", "-1"], []], ids=str)
def test_bad_usage_exits_with_2(words: list[str]) -> None:
    assert run(*words).exit_code == 2
