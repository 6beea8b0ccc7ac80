"""One environment: what a script printed there becomes a row, however it ended; a dump is replayed there."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from sdpa_repro.errors import InputError
from sdpa_repro.publishing.environments import Interpreter, existing, here
from sdpa_repro.publishing.running import ScriptRun
from sdpa_repro.publishing.script import script
from sdpa_repro.publishing.story import Story
from sdpa_repro.publishing.version_row import Outcome
from sdpa_repro.publishing.version_runs import row_of, run_in, subject
from tests.publishing.calls import FAULTS, tail
from tests.publishing.interpreters import FAILED, OUTPUT, RIGHT, SCRIPT, WRONG, failing, interpreter, passing
from tests.publishing.test_publish import closed_dump

FAULT = FAULTS / "pytorch_191937.py"
DECLINED = {"EFFICIENT_ATTENTION": "declined", "CUDNN_ATTENTION": "declined"}
FAILS = OUTPUT.format(torch="2.13.0", flash=WRONG) + f"Traceback (most recent call last):\n{FAILED}\n"
PASSES = OUTPUT.format(torch="2.13.0", flash=RIGHT)
UP_TO_FLASH = "".join(PASSES.splitlines(keepends=True)[:2])
CHILDREN = """\
torch 2.13.0 on cpu; every backend in a process of its own
MATH                 ok
default              died with <Signals.SIGSEGV: 11>.
FLASH_ATTENTION      timed out after 30 seconds
AssertionError: the process ended in default, FLASH_ATTENTION
"""


def run(output: str, status: int | None) -> ScriptRun:
    return ScriptRun(status, output, 3.0, "somewhere")


@pytest.mark.parametrize(
    ("output", "status", "outcome", "results"),
    [
        (FAILS, 1, Outcome.FAILS, {"MATH": "ok", "FLASH_ATTENTION": "wrong", **DECLINED, "default": "wrong"}),
        (PASSES, 0, Outcome.PASSES, {"MATH": "ok", "FLASH_ATTENTION": "ok", **DECLINED, "default": "ok"}),
        (CHILDREN, 1, Outcome.FAILS, {"MATH": "ok", "default": "crashed", "FLASH_ATTENTION": "no answer"}),
        (
            UP_TO_FLASH,
            -11,
            Outcome.CRASHED,
            {"MATH": "ok", "FLASH_ATTENTION": "crashed", **dict.fromkeys((*DECLINED, "default"), "not run")},
        ),
        (
            UP_TO_FLASH,
            None,
            Outcome.TIMEOUT,
            {"MATH": "ok", "FLASH_ATTENTION": "no answer", **dict.fromkeys((*DECLINED, "default"), "not run")},
        ),
        ("ModuleNotFoundError: No module named 'torch'\n", 1, Outcome.ERROR, {}),
        ("", 3, Outcome.ERROR, {}),
        ("MATH  declined: no\n", 0, Outcome.ERROR, {"MATH": "declined"}),
        ("MATH  declined: CUDA error: an illegal memory access\n", 0, Outcome.FAILS, {"MATH": "crashed"}),
        ("MATH  declined: HIP error: an illegal memory access\n", 0, Outcome.FAILS, {"MATH": "crashed"}),
        ("", 0, Outcome.PASSES, {}),
    ],
)
def test_the_end_and_the_table_of_a_run_become_a_row(
    output: str, status: int | None, outcome: Outcome, results: dict[str, str]
) -> None:
    row = row_of(run(output, status), SCRIPT)
    assert row.outcome is outcome
    assert dict(row.results) == results


def test_lines_that_are_no_backend_are_no_column() -> None:
    noise = (
        "CUDA error: something\nUSERNAME   ok\n\x1b[31mMATH ok\nX | Y  ok\nWARNING     16  wrong in query rows [1]\n"
    )
    row = row_of(run(noise + PASSES, 0), SCRIPT)
    assert set(row.results) == {"MATH", "FLASH_ATTENTION", *DECLINED, "default"}


def test_a_row_names_torch_device_and_what_went_wrong() -> None:
    row = row_of(run(FAILS, 1), SCRIPT)
    assert row.machine == {"torch": "2.13.0", "device": "cpu"}
    assert row.reason == "wrong result from FLASH_ATTENTION, default"
    assert row.seconds == 3.0
    assert row_of(run("", -11), "").reason == "ended by SIGSEGV"
    assert row_of(run("", 7), "").reason == "exit status 7"
    assert row_of(run("ImportError: no\n", 1), "").reason == "ImportError: no"


def test_another_python_is_run_and_asked_for_its_versions(tmp_path: Path) -> None:
    (tmp_path / "repro.py").write_text(SCRIPT)
    what = subject(tmp_path / "repro.py")
    row = run_in(existing(failing(tmp_path / "a")), what)
    assert (row.name, row.outcome, row.torch) == (str(tmp_path / "a"), Outcome.FAILS, "2.13.0")
    assert row.machine["python"] == "3.12.1"
    assert "platform" not in row.machine
    assert run_in(existing(passing(tmp_path / "b")), what).outcome is Outcome.PASSES


def test_a_python_that_was_not_to_be_had_is_a_row(tmp_path: Path) -> None:
    (tmp_path / "repro.py").write_text(SCRIPT)
    row = run_in(Interpreter("torch 9.9.9", None, "no network"), subject(tmp_path / "repro.py"), preload=[FAULT])
    assert (row.outcome, row.reason, row.torch, row.planted) == (Outcome.MISSING, "no network", "9.9.9", ())


@pytest.mark.parametrize("content", [b"\x7fELF nothing", b"#!/nowhere/sh\n"])
def test_a_program_that_cannot_be_started_is_a_row(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "repro.py").write_text(SCRIPT)
    (tmp_path / "python").write_bytes(content)
    (tmp_path / "python").chmod(0o755)
    row = run_in(existing(tmp_path / "python"), subject(tmp_path / "repro.py"))
    assert row.outcome is Outcome.ERROR
    assert row.reason


@pytest.mark.slow
def test_a_program_that_does_not_come_back_is_given_up_on(tmp_path: Path) -> None:
    (tmp_path / "repro.py").write_text(SCRIPT)
    python = interpreter(tmp_path / "python", UP_TO_FLASH, then="exec sleep 60")
    row = run_in(existing(python), subject(tmp_path / "repro.py"), timeout=4)
    assert row.outcome is Outcome.TIMEOUT
    assert row.results["FLASH_ATTENTION"] == "no answer"


def test_versions_that_cannot_be_told_do_not_spoil_a_row(tmp_path: Path) -> None:
    (tmp_path / "repro.py").write_text(SCRIPT)
    python = interpreter(tmp_path / "python", PASSES, facts="no JSON")
    row = run_in(existing(python), subject(tmp_path / "repro.py"))
    assert row.outcome is Outcome.PASSES
    assert row.machine == {"torch": "2.13.0", "device": "cpu"}


def test_a_dump_where_torch_or_numpy_is_missing_says_what_to_install(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'numpy'\" >&2\nexit 1\n")
    python.chmod(0o755)
    row = run_in(existing(python), subject(closed_dump(tmp_path / "x.pt")))
    assert row.outcome is Outcome.ERROR
    assert row.reason == f"numpy is not installed there: {python} -m pip install numpy"


def test_what_is_run_is_told_from_its_content(tmp_path: Path) -> None:
    path = closed_dump(tmp_path / "x.bin")
    assert subject(path).document()["kind"] == "dump"
    (tmp_path / "x.txt").write_text(SCRIPT)
    assert subject(tmp_path / "x.txt").document()["kind"] == "script"
    (tmp_path / "bytes").write_bytes(b"\xff\x00")
    (tmp_path / "zip.pt").write_bytes(b"PK\x03\x04 and no more")
    (tmp_path / "other.py").write_text("import transformers\n")
    for name in ("bytes", "zip.pt", "other.py", "none.py", "."):
        with pytest.raises(InputError):
            subject(tmp_path / name)


def test_the_dump_that_a_script_reads_goes_with_it(tmp_path: Path) -> None:
    text = 'import torch\nfrom pathlib import Path\nstored = torch.load(Path(__file__).with_name("call.pt"))\n'
    (tmp_path / "repro.py").write_text(text)
    with pytest.raises(InputError, match=r"reads call\.pt, which is not beside it"):
        subject(tmp_path / "repro.py")
    (tmp_path / "call.pt").touch()
    assert subject(tmp_path / "repro.py").beside == {"call.pt": tmp_path / "call.pt"}


@pytest.mark.slow
def test_a_script_fails_here_under_the_fault(tmp_path: Path) -> None:
    (tmp_path / "repro.py").write_text(script(*tail(), Story("FLASH_ATTENTION")))
    what = subject(tmp_path / "repro.py")
    failed = run_in(here(), what, preload=[FAULT])
    assert failed.outcome is Outcome.FAILS
    assert failed.results["FLASH_ATTENTION"] == "wrong"
    assert failed.planted == ("pytorch_191937.py",)
    assert failed.machine["torch"] == torch.__version__
    assert failed.where == "cpu"


@pytest.mark.slow
def test_a_dump_is_replayed_by_a_python_that_has_torch_and_numpy_alone(tmp_path: Path) -> None:
    path = closed_dump(tmp_path / "x.pt")
    packages = {name: str(Path(sys.modules[name].__file__ or "").parents[1]) for name in ("torch", "numpy")}
    (tmp_path / "blocked").mkdir()
    for name in ("click", "transformers", "jinja2", "rich"):
        (tmp_path / "blocked" / f"{name}.py").write_text(f"raise ImportError('{name} was imported')\n")
    (tmp_path / "start.py").write_text(
        "import sys\nwords = sys.argv[2:]\n"  # after -I
        f"sys.path[:0] = {[str(tmp_path / 'blocked'), *packages.values()]!r}\n"
        "sys.argv = ['-c', *words[2:]]\nexec(words[1])\n"
    )
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I {tmp_path / "start.py"} "$@"\n')
    python.chmod(0o755)
    row = run_in(existing(python), subject(path), preload=[FAULT], device="cpu", timeout=120)
    assert row.outcome is Outcome.FAILS, row.reason
    assert row.results["FLASH_ATTENTION"] == "wrong"
    assert row.results["MATH"] == "ok"
    assert row.torch == torch.__version__
    assert json.loads(json.dumps(row.document())) == row.document()


def test_a_program_that_is_no_python_is_called_that(tmp_path: Path) -> None:
    (tmp_path / "repro.py").write_text(SCRIPT)
    for ending in (0, 2):
        other = tmp_path / f"other{ending}"
        other.write_text(f"#!/bin/sh\necho invalid option\nexit {ending}\n")
        other.chmod(0o755)
        for path in (tmp_path / "repro.py", closed_dump(tmp_path / "x.pt")):
            row = run_in(existing(other), subject(path))
            assert (row.outcome, row.reason) == (Outcome.ERROR, "not a Python")
