"""What a machine may do to a run: full disks, readers that go away, no home folder, Ctrl-C, two runs at once.

Each ends in one clear line, or silently where that is right.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sdpa_repro import cli, dump
from sdpa_repro.cli import output
from sdpa_repro.environment import torch_folder, without_home
from sdpa_repro.errors import InputError
from sdpa_repro.explaining.explain import explain
from sdpa_repro.publishing.facts import recipes_of
from sdpa_repro.publishing.files import check_free
from sdpa_repro.publishing.page import check_target
from sdpa_repro.replaying.interrupts import interrupts
from sdpa_repro.replaying.replay import replay
from sdpa_repro.replaying.worker import Worker
from tests.calls import make_call
from tests.fuzz import resident
from tests.make_hostile import FOLDER
from tests.replaying.dumps import fault, write_dump

SECONDS = 300.0
FULL = Path("/dev/full")
full_disk = pytest.mark.skipif(not FULL.exists(), reason="only Linux has a device that is always full")
SCRIPT = """\
import torch, torch.nn.functional as F
for _ in range(3):
    q = torch.randn(1, 2, 8, 16)
    F.scaled_dot_product_attention(q, q, q)
"""


def run(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sdpa_repro", *map(str, words)]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=SECONDS, **options)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write_dump(make_call(rows=9, width=16), tmp_path / "x.pt")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A regular file, below which no folder can be made, whoever asks."""
    made = tmp_path / "file"
    made.write_text("x")
    return made


# ---- full disks and places that cannot be written


@full_disk
@pytest.mark.parametrize("words", [("--help",), ("known",)])
def test_output_onto_a_full_disk_is_one_line(words: tuple[str, ...]) -> None:
    with FULL.open("w") as full:
        done = run(*words, stdout=full)
    assert done.returncode == 2
    assert done.stderr.startswith("error: No space left on device")
    assert done.stderr.count("\n") == 1


@full_disk
def test_an_error_that_cannot_be_printed_still_has_its_status(tmp_path: Path) -> None:
    command = f'exec "{sys.executable}" -m sdpa_repro show "{tmp_path}/missing.pt" 2>/dev/full'
    assert subprocess.run(["sh", "-c", command], timeout=SECONDS).returncode == 2


@full_disk
def test_notes_onto_a_full_disk_stop_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.FileIO(FULL, "w"), write_through=True))
    output.progress("half way")
    output.warn("of something")


def test_a_reader_of_notes_that_went_away_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.FileIO(writing, "w"), write_through=True))
    with pytest.raises(BrokenPipeError):
        output.progress("half way")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(27, "File too large"), "error: File too large: while something was written"),
        (OSError(24, "Too many open files", "x"), "error: Too many open files: x"),
        (FileNotFoundError(2, "No usable temporary directory found in ['/x']"), "error: No usable temporary directory"),
        (MemoryError(), "error: not enough memory"),
    ],
)
def test_what_the_system_refuses_is_no_bug(
    error: Exception, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(cli.Verbs, "get_command", refuse)
    assert cli.main(["show", "x"]) == 2
    assert capsys.readouterr().err.startswith(said)


def test_a_place_below_a_file_is_refused_before_any_work(file: Path) -> None:
    with pytest.raises(InputError, match="is no folder"):
        check_free(file / "issue" / "deeper", ["repro.py"], force=True)
    with pytest.raises(InputError, match="is no folder"):
        check_target(file / "report.html", force=True)
    with pytest.raises(InputError, match="choose a folder"):
        dump.save({"tensors": {}}, file / "x.pt")


def test_a_read_only_place_is_refused_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(InputError, match="read-only"):
        check_target(tmp_path / "new" / "report.html", force=False)


@pytest.mark.slow
def test_a_capture_into_a_place_below_a_file_is_one_line(file: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = run("capture", "--keep", "all", "--out", file / "dumps", "--", script, stdout=subprocess.PIPE)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ")


@pytest.mark.slow
def test_a_result_that_finds_no_room_on_the_disk_says_where_room_is_needed(small: Path, file: Path) -> None:
    job = {"do": "cell", "dump": str(small), "device": "cpu", "dtype": "captured", "backend": "MATH", "runs": 1}
    with Worker() as worker:
        with pytest.raises(InputError, match="set TMPDIR to a folder with room"):
            worker.request({**job, "output": str(file / "output.pt")}, SECONDS)
        assert worker.request({**job, "output": str(small.with_name("output.pt"))}, SECONDS).kind == "done"


# ---- a worker that writes garbage


@pytest.mark.slow
def test_garbage_on_every_descriptor_of_a_worker_changes_no_answer(small: Path, tmp_path: Path) -> None:
    garbage = tmp_path / "garbage.py"
    garbage.write_text(
        "import os, stat\n"
        "for number in range(3, 64):\n"
        "    try:\n"
        "        if stat.S_ISFIFO(os.fstat(number).st_mode):\n"
        '            os.write(number, b\'\\xff\\x00{"id": "job 1", "kind": "done"}\\n[1]\\nno end of line\')\n'
        "    except OSError:\n"
        "        pass\n"
    )
    result = replay(small, dtypes=("captured",), runs=1, preload=[garbage])
    assert result.verdict.value == "healthy"
    assert len({cell.status.value for cell in result.cells if cell.backend in ("MATH", "eager", "default")}) == 1


# ---- readers that go away, narrow terminals, no home


@pytest.mark.slow
@pytest.mark.parametrize("words", [("show", "{dump}"), ("known",), ("explain", "--help"), ("replay", "{dump}")])
def test_a_reader_that_takes_one_line_ends_it_silently(words: tuple[str, ...], small: Path) -> None:
    command = [sys.executable, "-m", "sdpa_repro", *(word.format(dump=small) for word in words)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline().strip()
    process.stdout.close()
    said = process.stderr.read()
    assert process.wait(SECONDS) in (0, 141)  # 0 when all of it was written before the reader went
    assert "error" not in said
    assert "Traceback" not in said
    process.stderr.close()


@pytest.mark.slow
@pytest.mark.parametrize("columns", ["1", "40", "x"])
def test_a_narrow_terminal_is_no_error(columns: str) -> None:
    environment = {**os.environ, "COLUMNS": columns}
    for words in (("known",), ("explain", "--help")):
        done = run(*words, stdout=subprocess.PIPE, env=environment)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout


@pytest.mark.parametrize("home", ["", "/", None])
def test_without_a_home_folder_nothing_is_cut_from_a_path(home: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if home is None:  # a container's user without an entry in the password file
        monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("Could not determine home")))
    else:
        monkeypatch.setenv("HOME", home)
    said = "RuntimeError: a/b in /opt/torch/x.py, line 3 of //y"
    assert without_home(said) == said
    assert torch_folder().endswith("torch")


def test_the_home_folder_becomes_a_tilde_where_a_path_begins_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/srv/anna/")
    said = "'/srv/anna/x.py' and /srv/anna, not /srv/annabel/x, /mnt/srv/anna/x or /srv/anna.old"
    assert without_home(said) == "'~/x.py' and ~, not /srv/annabel/x, /mnt/srv/anna/x or /srv/anna.old"


def test_a_stated_recipe_of_gigabytes_is_not_built() -> None:
    before = resident()
    assert recipes_of(dump.load(FOLDER / "harmless-recipe-of-gigabytes.pt")) == {}
    assert resident() - before < 256


# ---- Ctrl-C


def press() -> None:
    """Ctrl-C in this process."""
    signal.raise_signal(signal.SIGINT)


def at(moment: str) -> Callable[[str], None]:
    """A progress function that presses Ctrl-C when something is said."""
    return lambda text: press() if moment in text else None


def test_ctrl_c_is_raised_noted_by_all_who_ask_and_then_back_to_what_it_was() -> None:
    before = signal.getsignal(signal.SIGINT)
    with interrupts() as outer:
        with pytest.raises(KeyboardInterrupt), interrupts() as inner:
            press()
        assert (len(outer), len(inner)) == (1, 1)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_background_job_that_ignores_ctrl_c_goes_on_ignoring_it() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts() as seen:
            press()
        assert seen == []
    finally:
        signal.signal(signal.SIGINT, before)


def test_outside_the_main_thread_there_is_nothing_to_note() -> None:
    found: list[list[int]] = []

    def body() -> None:
        with interrupts() as seen:
            found.append(seen)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert found == [[]]


@pytest.fixture
def failing(tmp_path: Path) -> Path:
    return write_dump(make_call(heads=2, rows=33, width=136, padding=7), tmp_path / "failing.pt")


@pytest.mark.slow
def test_one_ctrl_c_ends_explaining_with_what_is_known(failing: Path) -> None:
    preload = fault("pytorch_191937")
    found = explain(failing, preload=preload, progress=at("explaining: length rule"))
    assert found.interrupted
    assert not found.complete
    assert found.conditions is not None
    assert found.poison is None


@pytest.mark.slow
def test_one_ctrl_c_ends_an_issue_with_one_line_and_no_files(
    failing: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "progress", at("explaining: hypothesis"))
    words = [word for path in fault("pytorch_191937") for word in ("--preload", str(path))]
    assert cli.main(["issue", str(failing), "--no-reduce", "-o", str(tmp_path / "issue"), *words]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "error: interrupted; nothing was written"
    assert not (tmp_path / "issue").exists()


# ---- two runs at once


@pytest.mark.slow
def test_two_captures_into_one_folder_keep_what_both_saw(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    words = ["capture", "--keep", "all", "--no-prove", "--out", "dumps", "--", "script.py"]
    command = [sys.executable, "-m", "sdpa_repro", *words]
    both = [
        subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for process in both:
        _, said = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, said
    listed = [json.loads(line)["file"] for line in (tmp_path / "dumps" / "index.jsonl").read_text().splitlines()]
    assert len(set(listed)) == len(listed) == 6
    assert {path.name for path in (tmp_path / "dumps").glob("*.pt")} == set(listed)
    for name in listed:
        assert isinstance(dump.load(tmp_path / "dumps" / name).call.query, torch.Tensor)
