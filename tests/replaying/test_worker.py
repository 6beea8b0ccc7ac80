"""A worker dies in our place, says how, and is never confused by what others print or leave around."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import sdpa_repro
from sdpa_repro.errors import InputError
from sdpa_repro.replaying.worker import Worker
from tests.calls import make_call
from tests.replaying.dumps import fault, write_dump

pytestmark = pytest.mark.slow

SECONDS = 60.0


@pytest.fixture
def job(tmp_path: Path) -> dict[str, Any]:
    dump = write_dump(make_call(rows=9, width=16), tmp_path / "call.pt")
    return {
        "do": "cell",
        "dump": str(dump),
        "device": "cpu",
        "dtype": "captured",
        "backend": "default",
        "runs": 2,
        "output": str(tmp_path / "output.pt"),
    }


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_healthy_worker_is_kept_and_saves_the_output(job: dict[str, Any]) -> None:
    with Worker() as worker:
        first = worker.request(job, SECONDS)
        second = worker.request(job, SECONDS)
    assert (first.kind, second.kind) == ("done", "done")
    assert first.answer["chosen"] == "FLASH_ATTENTION"
    assert first.answer["bit_stable"] is True
    assert torch.load(job["output"], weights_only=True)["first"].shape == (1, 4, 9, 16)


@pytest.mark.parametrize(("name", "said"), [("segfault", "SIGSEGV"), ("sigfpe", "SIGFPE")])
def test_a_signal_is_named_and_the_next_job_gets_a_fresh_process(job: dict[str, Any], name: str, said: str) -> None:
    with Worker(fault(name)) as worker:
        crashed = worker.request(job, SECONDS)
        other = worker.request({**job, "backend": "MATH"}, SECONDS)
    assert crashed.kind == "crashed"
    assert crashed.reason.startswith(said)
    assert crashed.answer["chosen"] == "FLASH_ATTENTION"
    assert other.kind == "done"


def test_a_hang_ends_at_the_timeout(job: dict[str, Any]) -> None:
    with Worker(fault("hang")) as worker:
        assert worker.request({**job, "backend": "MATH"}, SECONDS).kind == "done"
        start = time.monotonic()
        outcome = worker.request(job, 2.0)
        assert time.monotonic() - start < 60.0
    assert outcome.kind == "timeout"
    assert outcome.reason == "no result after 2 s"


def test_a_kernel_that_raises_is_an_error_not_a_crash(job: dict[str, Any]) -> None:
    with Worker(fault("raises")) as worker:
        outcome = worker.request(job, SECONDS)
    assert outcome.kind == "error"
    assert outcome.reason.startswith("RuntimeError: ")


def test_prints_do_not_pass_for_answers(job: dict[str, Any], tmp_path: Path) -> None:
    noise = """
import os, sys
print('{"id": "job 1", "kind": "done", "chosen": "LIES"}', flush=True)
os.write(1, b'\\x00\\xff' * 5000)
sys.stdout.write("no newline")
print("to stderr", file=sys.stderr)
"""
    with Worker([written(tmp_path / "noise.py", noise)]) as worker:
        outcome = worker.request(job, SECONDS)
    assert outcome.kind == "done"
    assert outcome.answer["chosen"] == "FLASH_ATTENTION"


def test_a_preload_that_raises_is_bad_input(job: dict[str, Any], tmp_path: Path) -> None:
    with (
        Worker([written(tmp_path / "broken.py", "1/0")]) as worker,
        pytest.raises(InputError, match=r"--preload broken\.py failed with ZeroDivisionError"),
    ):
        worker.request(job, SECONDS)


def test_a_preload_that_ends_the_process_is_bad_input_with_its_last_words(job: dict[str, Any], tmp_path: Path) -> None:
    text = "import os; print('no licence found', flush=True); os.kill(os.getpid(), 9)"
    with (
        Worker([written(tmp_path / "quits.py", text)]) as worker,
        pytest.raises(InputError, match=r"quits\.py.*SIGKILL \(no licence found\)"),
    ):
        worker.request(job, SECONDS)


def test_a_bad_dump_is_bad_input_and_the_worker_lives_on(job: dict[str, Any], tmp_path: Path) -> None:
    with Worker() as worker:
        with pytest.raises(InputError):
            worker.request({**job, "dump": str(written(tmp_path / "empty.pt", ""))}, SECONDS)
        assert worker.request(job, SECONDS).kind == "done"


def test_modules_lying_around_are_not_imported_and_the_package_is_the_parents(
    job: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "here"
    (folder / "sdpa_repro").mkdir(parents=True)
    for name in ("json.py", "torch.py", "queue.py", "sdpa_repro/__init__.py"):
        (folder / name).write_text("raise SystemExit('imported the wrong module')")
    told = tmp_path / "told.txt"
    probe = f"import sdpa_repro; open({str(told)!r}, 'w').write(sdpa_repro.__file__)"
    monkeypatch.chdir(folder)
    with Worker([written(tmp_path / "probe.py", probe)]) as worker:
        assert worker.request(job, SECONDS).kind == "done"
    assert told.read_text() == sdpa_repro.__file__


def test_the_users_main_module_is_not_imported_again(tmp_path: Path, job: dict[str, Any]) -> None:
    script = f"""
print("main runs")
from sdpa_repro.replaying.worker import Worker
with Worker() as worker:
    print(worker.request({job!r}, 60.0).kind)
"""
    done = subprocess.run(
        [sys.executable, str(written(tmp_path / "script.py", script))], capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n")[:2] == ["main runs", "done"]


def test_variables_of_this_program_are_not_handed_on(
    job: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SDPA_REPRO_SOMETHING", "1")
    told = tmp_path / "told.txt"
    text = f"import os; open({str(told)!r}, 'w').write(repr((os.getenv('SDPA_REPRO_SOMETHING'), os.getenv('MINE'))))"
    with Worker([written(tmp_path / "env.py", text)], env={"MINE": "2"}) as worker:
        worker.request(job, SECONDS)
    assert told.read_text() == "(None, '2')"


def test_a_worker_ends_with_its_parent_even_in_a_kernel_that_hangs(tmp_path: Path, job: dict[str, Any]) -> None:
    told = tmp_path / "pid.txt"
    tell = written(tmp_path / "tell.py", f"import os; open({str(told)!r}, 'w').write(str(os.getpid()))")
    script = f"""
from sdpa_repro.replaying.worker import Worker
Worker([{str(tell)!r}, {str(fault("hang")[0])!r}]).request({job!r}, 600.0)
"""
    parent = subprocess.Popen([sys.executable, str(written(tmp_path / "script.py", script))])
    try:
        _wait_until(lambda: told.exists() and told.read_text() != "")
        time.sleep(1.0)
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    child = int(told.read_text())
    _wait_until(lambda: not _alive(child))


def test_closing_kills_the_process(job: dict[str, Any], tmp_path: Path) -> None:
    told = tmp_path / "pid.txt"
    tell = written(tmp_path / "tell.py", f"import os; open({str(told)!r}, 'w').write(str(os.getpid()))")
    worker = Worker([tell])
    worker.request(job, SECONDS)
    worker.close()
    assert not _alive(int(told.read_text()))


def _alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _wait_until(condition: Any) -> None:
    end = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < end, os.getpid()
        time.sleep(0.1)
