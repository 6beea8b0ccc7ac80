"""`sdpa-repro replay`: the answer first, the next command last, and exit statuses that scripts can rely on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sdpa_repro.cli import main
from sdpa_repro.cli.replay import BACKENDS, DTYPES, _files, _index
from sdpa_repro.errors import InputError
from sdpa_repro.replaying.backends import Backend
from sdpa_repro.replaying.replay import ALL_DTYPES
from tests.calls import make_call
from tests.replaying.dumps import FAULTS, write_dump

FAULT = str(FAULTS / "pytorch_191937.py")
QUICK = ("--dtype", "captured", "--runs", "1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two dumps: one at a length where the planted fault shows and one where it does not."""
    place = tmp_path_factory.mktemp("dumps")
    write_dump(make_call(rows=33, padding=3), place / "failing.pt")
    write_dump(make_call(rows=32, padding=3), place / "passing.pt")
    (place / "index.jsonl").write_text('{"file": "passing.pt"}\n{"file": "../../etc/x.pt"}\nnonsense\n')
    return place


def test_names_here_are_those_of_the_library() -> None:
    assert list(BACKENDS) == [backend.value for backend in Backend]
    assert set(DTYPES) == {*ALL_DTYPES, "all"}


def test_a_folder_is_read_in_the_order_of_its_index_and_an_index_leads_nowhere_else(folder: Path) -> None:
    assert [path.name for path in _files([folder])] == ["passing.pt", "failing.pt"]
    assert list(_index(folder / "index.jsonl")) == ["passing.pt"]


def test_a_folder_without_dumps_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no dumps"):
        list(_files([tmp_path]))


@pytest.mark.slow
def test_the_answer_is_first_and_the_next_command_last(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["replay", str(folder / "failing.pt"), *QUICK, "--preload", FAULT])
    lines = capsys.readouterr().out.splitlines()
    assert status == 1
    assert lines[0] == (
        "FLASH_ATTENTION is wrong in query row 32 of 4 heads; "
        "known: pytorch#191937 (emulated by pytorch_191937.py), fixed in 2.14.0"
    )
    assert lines[-1].startswith("next: ")
    assert any(line.startswith("EFFICIENT_ATTENTION") and "does not exist on cpu" in line for line in lines)
    assert "note: preloaded here: pytorch_191937.py" in lines
    assert "verdict: backend_wrong (FLASH_ATTENTION)" in lines


@pytest.mark.slow
def test_json_is_one_document_and_progress_goes_to_stderr(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["replay", str(folder / "passing.pt"), *QUICK, "--json"])
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert status == 0
    assert document["schema"]["name"] == "replay"
    assert document["verdict"] == "healthy"
    assert document["fidelity"]["bit_equal"] is True
    assert "MATH" in printed.err


@pytest.mark.slow
def test_several_files_get_a_line_each_and_the_worst_status(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = folder.parent / "broken.pt"
    broken.write_bytes(b"PK")
    status = main(["replay", str(folder), str(broken), *QUICK, "--preload", FAULT])
    lines = capsys.readouterr().out.splitlines()
    assert status == 1
    assert len(lines) == 5
    assert "passing.pt: clean on this cpu" in lines[0]
    assert "failing.pt: FLASH_ATTENTION is wrong" in lines[1]
    assert "broken.pt: error: " in lines[2]
    assert lines[3] == "3 dumps: 1 healthy, 1 backend_wrong, 1 unreadable"
    assert "failing.pt" in lines[4]
    assert FAULT in lines[4]


@pytest.mark.slow
def test_a_broken_file_among_healthy_ones_is_status_2(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["replay", str(folder / "passing.pt"), str(folder / "nowhere.pt"), *QUICK, "--json"])
    document = json.loads(capsys.readouterr().out)
    assert status == 2
    assert len(document["replays"]) == len(document["errors"]) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "expect", "status"),
    [
        ("failing.pt", "diverges", 0),
        ("failing.pt", "agrees", 1),
        ("passing.pt", "agrees", 0),
        ("passing.pt", "diverges", 1),
    ],
)
def test_expectations_turn_dumps_into_tests(folder: Path, name: str, expect: str, status: int) -> None:
    assert main(["replay", str(folder / name), *QUICK, "--preload", FAULT, "--expect", expect]) == status


@pytest.mark.slow
@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"not a dump"])
def test_a_bad_file_is_one_line_and_status_2(
    tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.pt").write_bytes(content)
    assert main(["replay", str(tmp_path / "bad.pt")]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1


def test_a_missing_preload_is_status_2(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(folder / "passing.pt"), "--preload", "nowhere.py"]) == 2
    assert "nowhere.py" in capsys.readouterr().err


@pytest.mark.slow
def test_replay_imports_no_transformers(folder: Path) -> None:
    script = (
        "import sys\n"
        "from sdpa_repro.cli import main\n"
        f"assert main(['replay', {str(folder / 'passing.pt')!r}, '--dtype', 'captured', '--runs', '1']) == 0\n"
        "assert 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


def test_help_needs_no_torch() -> None:
    script = (
        "import sys\n"
        "from sdpa_repro.cli import main\n"
        "assert main(['replay', '--help']) == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


@pytest.mark.slow
def test_a_dump_in_which_nothing_can_be_compared_does_not_agree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_dump(make_call(rows=5, padding=5), tmp_path / "call.pt")
    assert main(["replay", str(path), *QUICK, "--expect", "agrees"]) == 1
    said = "NOT as expected (agrees): nothing to compare: every query row is fully masked"
    assert capsys.readouterr().out.splitlines()[0] == said
