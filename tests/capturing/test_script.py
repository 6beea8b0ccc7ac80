"""A script under the recorder: it notices nothing, and every process and thread of it is seen."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sdpa_repro import dump
from sdpa_repro.capturing import report
from sdpa_repro.capturing.records import Options
from sdpa_repro.capturing.script import ScriptRun, Witness, command_of, run_command, run_script, signal_name
from sdpa_repro.errors import InputError

pytestmark = pytest.mark.slow
FAULTS = Path(__file__).resolve().parent.parent / "faults"

HEAD = """
import sys, os, threading, subprocess
import torch
import torch.nn.functional as F
torch.set_num_threads(1)
query = torch.randn(1, 2, 5, 8)
def attend(times=1):
    for _ in range(times):
        F.scaled_dot_product_attention(query, query, query)
"""


def script(folder: Path, body: str, name: str = "script.py") -> Path:
    path = folder / name
    path.write_text(HEAD + textwrap.dedent(body))
    return path


def run(folder: Path, words: Sequence[Any], **options: Any) -> tuple[ScriptRun, report.Report]:
    preload = options.pop("preload", ())
    chosen = Options(**options)
    done = run_script([str(word) for word in words], folder / "dumps", chosen, preload=preload)
    return done, report.of_script(done, folder / "dumps", chosen)


PROBE = """
import json, os, sys
state = {
    "argv": sys.argv, "orig_argv": sys.orig_argv[1:], "path": sys.path, "name": __name__, "file": __file__,
    "spec": repr(__spec__ and __spec__.name), "package": __package__, "cwd": os.getcwd(), "stdin": sys.stdin.read(),
    "flags": repr(sys.flags), "executable": sys.executable, "main": sorted(vars(sys.modules["__main__"])),
    "excepthook": repr(sys.excepthook is sys.__excepthook__),
    "torch": "torch" in sys.modules, "isatty": sys.stdout.isatty(),
}
print(json.dumps(state))
print("to stderr", file=sys.stderr)
sys.exit(7)
"""


@pytest.mark.parametrize("way", ["script", "module", "code", "folder"])
def test_the_script_finds_everything_as_with_plain_python(tmp_path: Path, way: str) -> None:
    (tmp_path / "probe.py").write_text(PROBE)
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "__main__.py").write_text(PROBE)
    words = {
        "script": ["probe.py", "a", "--b", "c d"],
        "module": ["-m", "probe", "--out", "x"],
        "code": ["-c", PROBE.replace("__file__", "''"), "--", "x"],
        "folder": ["bundle", "-x"],
    }[way]
    plain = subprocess.run(
        [sys.executable, *words], input="typed", capture_output=True, text=True, cwd=tmp_path, check=False
    )
    program = (
        "import sys; from sdpa_repro.capturing.script import run_script;"
        "from sdpa_repro.capturing.records import Options;"
        "sys.exit(run_script(sys.argv[1:], 'dumps', Options()).status)"
    )
    recorded = subprocess.run(
        [sys.executable, "-c", program, *words],
        input="typed",
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert json.loads(recorded.stdout) == json.loads(plain.stdout)
    assert recorded.stderr == plain.stderr
    assert recorded.returncode == plain.returncode == 7


def test_calls_of_all_threads_are_recorded(tmp_path: Path) -> None:
    body = """
    attend()
    other = threading.Thread(target=attend, args=(2,), name="other")
    other.start(); other.join()
    """
    done, found = run(tmp_path, [script(tmp_path, body)])
    assert done.status == 0
    assert [call["thread"] for call in found["calls"]] == ["MainThread", "other", "other"]
    assert found["calls"][0]["module"].startswith("script.py:")


def test_torch_may_be_imported_in_a_thread(tmp_path: Path) -> None:
    path = tmp_path / "late.py"
    path.write_text(
        "import threading\n"
        "def work():\n"
        "    import torch\n"
        "    query = torch.ones(1, 1, 3, 4)\n"
        "    torch.nn.functional.scaled_dot_product_attention(query, query, query)\n"
        "thread = threading.Thread(target=work); thread.start(); thread.join()\n"
    )
    _, found = run(tmp_path, [path])
    assert found["seen"] == 1


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_multiprocessing_children_are_recorded(tmp_path: Path, method: str) -> None:
    body = f"""
    if __name__ == "__main__":
        import multiprocessing
        child = multiprocessing.get_context("{method}").Process(target=attend, args=(3,))
        attend()
        child.start(); child.join()
        sys.exit(child.exitcode)
    """
    done, found = run(tmp_path, [script(tmp_path, body)], keep="all")
    assert done.status == 0
    assert found["seen"] == 4
    assert sorted(call["process"] for call in found["calls"]) == [0, 1, 1, 1]
    assert found["script"]["without_report"] == 0
    assert len(list((tmp_path / "dumps").glob("*.pt"))) == 4


def test_python_children_are_recorded_and_those_that_cannot_be_are_named(tmp_path: Path) -> None:
    child = "import torch; q = torch.ones(1, 1, 3, 4); torch.nn.functional.scaled_dot_product_attention(q, q, q)"
    body = f"""
    subprocess.run([sys.executable, "-c", {child!r}], check=True)
    subprocess.run([sys.executable, "-I", "-c", "pass"], check=True)
    subprocess.run([sys.executable, "-c", "pass"], env={{}}, check=True)
    """
    _, found = run(tmp_path, [script(tmp_path, body)])
    assert found["seen"] == 1
    assert len(found["script"]["not_recorded"]) == 2
    assert any("-I" in each for each in found["script"]["not_recorded"])
    assert any("an environment of its own" in each for each in found["script"]["not_recorded"])


def test_a_forked_child_that_computes_in_parallel_does_not_hang(tmp_path: Path) -> None:
    """GNU OpenMP hangs in the child when the forking thread has used it; the check must not be what used it."""
    path = tmp_path / "forks.py"
    path.write_text(
        "import os, torch, torch.nn.functional as F\n"
        "small, big = torch.randn(1, 1, 4, 8), torch.randn(4, 8, 200, 64)\n"
        "F.scaled_dot_product_attention(small, small, small)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    F.scaled_dot_product_attention(big, big, big)\n"
        "    os._exit(0)\n"
        "os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    done, _ = run(tmp_path, [path])
    assert done.status == 0


def test_a_script_that_fails_is_told_apart_and_its_dumps_survive(tmp_path: Path) -> None:
    done, found = run(tmp_path, [script(tmp_path, "attend()\nraise SystemExit(5)")])
    assert (done.status, done.end) == (5, "exit status 5")
    assert report.exit_status(found) == 5
    assert found["seen"] == 1
    assert dump.load(tmp_path / "dumps" / found["dumps"][0]["file"]).output is not None


def test_a_script_killed_by_a_signal_gives_its_number_and_keeps_wrong_calls(tmp_path: Path) -> None:
    body = """
    call = torch.load(sys.argv[1])
    with torch.no_grad():
        F.scaled_dot_product_attention(call["query"], call["key"], call["key"], attn_mask=call["mask"])
    os.kill(os.getpid(), 9)
    """
    import torch

    from tests.calls import make_call

    call = make_call(rows=33, width=136)
    torch.save({"query": call.query, "key": call.key, "mask": call.attn_mask}, tmp_path / "call.pt")
    done, found = run(tmp_path, [script(tmp_path, body), tmp_path / "call.pt"], preload=[FAULTS / "pytorch_191937.py"])
    assert (done.status, done.end) == (137, "killed by SIGKILL")
    assert found["script"]["without_report"] == 1
    assert [each["status"] for each in found["dumps"]] == ["diverges"]
    found_dump = dump.load(tmp_path / "dumps" / found["dumps"][0]["file"])
    assert [each["name"] for each in found_dump.preloaded] == ["pytorch_191937.py"]


def test_a_call_that_kills_the_process_is_named_and_its_inputs_can_be_had(tmp_path: Path) -> None:
    body = "attend()\nimport runpy\nrunpy.run_path(sys.argv[1])\nattend()"
    words = [script(tmp_path, body), FAULTS / "segfault.py"]
    done, found = run(tmp_path, words)
    assert done.end == "killed by SIGSEGV"
    (inside,) = found["script"]["inside"]
    assert inside.startswith("call 1 (")
    assert found["dumps"] == []
    _, found = run(tmp_path, words, call=1)
    (kept,) = found["dumps"]
    loaded = dump.load(tmp_path / "dumps" / kept["file"])
    assert loaded.output is None
    assert loaded.call.query.shape == (1, 2, 5, 8)


def test_a_script_that_ends_without_cleaning_up_is_named(tmp_path: Path) -> None:
    done, found = run(tmp_path, [script(tmp_path, "attend()\nos._exit(0)")])
    assert done.status == 0
    assert found["script"]["without_report"] == 1
    assert (found["checked"], found["dumps"]) == (1, [])
    assert report.answer(found).startswith("no wrong attention call: 1 attention call")


def test_calls_of_pool_workers_that_are_terminated_are_counted(tmp_path: Path) -> None:
    body = """
    import multiprocessing

    if __name__ == "__main__":
        with multiprocessing.get_context("fork").Pool(1) as pool:
            pool.apply(attend)
    """
    _, found = run(tmp_path, [script(tmp_path, body)])
    assert found["checked"] == 1
    assert report.answer(found).startswith("no wrong attention call: 1 attention call")


def test_a_script_without_torch_is_an_error_that_says_so(tmp_path: Path) -> None:
    path = tmp_path / "plain.py"
    path.write_text("print('hello')")
    _, found = run(tmp_path, [path])
    with pytest.raises(InputError, match="no Python process that it started imported torch"):
        report.answer(found)


def test_preloads_run_before_the_scripts_own_code(tmp_path: Path) -> None:
    preload = tmp_path / "first.py"
    preload.write_text("import torch\ntorch.preloaded = True\n")
    done, _ = run(tmp_path, [script(tmp_path, "attend()\nsys.exit(0 if torch.preloaded else 1)")], preload=[preload])
    assert done.status == 0


def test_a_preload_that_fails_ends_the_script_before_it_begins(tmp_path: Path) -> None:
    preload = tmp_path / "broken.py"
    preload.write_text("raise RuntimeError('no such kernel')")
    done, found = run(tmp_path, [script(tmp_path, "print('begun'); attend()")], preload=[preload])
    assert done.status == 2
    assert "no such kernel" in found["script"]["failed"][0]


def test_missing_scripts_and_preloads_are_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no script or program"):
        run_script([str(tmp_path / "missing.py")], tmp_path, Options())
    path = script(tmp_path, "")
    with pytest.raises(InputError, match="preload"):
        run_script([str(path)], tmp_path, Options(), preload=[tmp_path / "missing.py"])
    with pytest.raises(InputError, match="nothing to run"):
        run_script([], tmp_path, Options())
    with pytest.raises(InputError, match=r"folder without a __main__\.py"):
        run_script([str(tmp_path)], tmp_path, Options())
    with pytest.raises(InputError, match="name is empty"):
        run_script([""], tmp_path, Options())
    with pytest.raises(InputError, match="hook"):
        run_script(["-I", str(path)], tmp_path, Options())


def test_nothing_is_left_but_the_dumps(tmp_path: Path) -> None:
    _, found = run(tmp_path, [script(tmp_path, "attend()")])
    names = sorted(path.name for path in (tmp_path / "dumps").iterdir())
    assert names == sorted([found["dumps"][0]["file"], "index.jsonl"])


def test_the_users_own_sitecustomize_still_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("import sys\nsys.user_site_ran = True\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ["PYTHONPATH"]]))
    body = (
        "attend()\nimport sitecustomize\nsys.exit(0 if sys.user_site_ran and 'site' in sitecustomize.__file__ else 1)"
    )
    done, found = run(tmp_path, [script(tmp_path, body)])
    assert done.status == 0
    assert found["seen"] == 1


def test_stopping_at_the_first_wrong_call_ends_the_script_quietly(tmp_path: Path) -> None:
    body = """
    import runpy
    runpy.run_path(sys.argv[1])
    attend()
    print("after", flush=True)
    open(sys.argv[2], "w").close()
    """
    words = [script(tmp_path, body), FAULTS / "nan_live.py", tmp_path / "after"]
    done, found = run(tmp_path, words, stop_at_first=True)
    assert done.status == 0
    assert not (tmp_path / "after").exists()
    assert found["wrong"] == 1
    assert report.exit_status(found) == 1


def test_of_many_processes_the_worst_healthy_call_alone_is_kept(tmp_path: Path) -> None:
    body = """
    for _ in range(3):
        child = os.fork()
        if child == 0:
            attend(); sys.exit(0)
        os.waitpid(child, 0)
    attend()
    """
    _, found = run(tmp_path, [script(tmp_path, body)])
    assert found["seen"] == 4
    assert [each["status"] for each in found["dumps"]] == ["agrees"]
    assert [path.name for path in (tmp_path / "dumps").glob("*.pt")] == [found["dumps"][0]["file"]]


def test_ranks_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    _, found = run(tmp_path, [script(tmp_path, "attend()")])
    assert found["calls"][0]["rank"] == 3


def test_interrupting_keeps_what_there_is(tmp_path: Path) -> None:
    body = "attend()\nprint('ready', flush=True)\nimport time\ntime.sleep(60)"
    program = (
        "import sys; from sdpa_repro.capturing.script import run_script;"
        "from sdpa_repro.capturing.records import Options;"
        "done = run_script(sys.argv[1:], 'dumps', Options()); print(done.interrupted, len(done.reports))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(script(tmp_path, body))],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=tmp_path,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job may inherit "ignore"
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[0] == "True 1\n"
    assert len(list((tmp_path / "dumps").glob("*.pt"))) == 1


def test_programs_that_start_python_are_run_as_they_are(tmp_path: Path) -> None:
    start = tmp_path / "start.sh"
    start.write_text(f"#!/bin/sh\nexec {sys.executable} {script(tmp_path, 'attend()')}\n")
    start.chmod(0o755)
    assert command_of([str(start), "x"]) == [str(start), "x"]
    done, found = run(tmp_path, [start])
    assert done.status == 0
    assert found["seen"] == 1


def test_python_scripts_go_to_this_interpreter_even_when_executable(tmp_path: Path) -> None:
    path = script(tmp_path, "", name="tool")
    path.write_text("#!/usr/bin/env python3\n")
    path.chmod(0o755)
    assert command_of([str(path), "-x"]) == [sys.executable, str(path), "-x"]


def test_signals_have_names() -> None:
    assert signal_name(11) == "SIGSEGV"
    assert signal_name(99) == "signal 99"


def test_a_script_may_wait_for_all_threads_that_are_alive(tmp_path: Path) -> None:
    body = """
    attend()
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            thread.join(100)
            assert not thread.is_alive(), thread.name
    """
    done, found = run(tmp_path, [script(tmp_path, body)])
    assert done.status == 0
    assert found["seen"] == 1


COUNTING = """
import signal, sys, time
presses = []
signal.signal(signal.SIGINT, lambda *_: presses.append(1))
print("ready", flush=True)
for _ in range(600):
    time.sleep(0.05)
    if presses:
        break
time.sleep(0.5)
print("presses", len(presses), flush=True)
"""


RUN_COUNTING = """
from sdpa_repro.capturing import script
from sdpa_repro.capturing.records import Options
script.Witness.SECONDS = 60.0  # a busy machine may take its time
print(script.run_script(["counting.py"], "dumps", Options()).interrupted)
"""


def test_ctrl_c_to_the_whole_group_reaches_a_script_once(tmp_path: Path) -> None:
    """Without a terminal, as from a test runner or a notebook."""
    (tmp_path / "counting.py").write_text(COUNTING)
    process = subprocess.Popen(
        [sys.executable, "-c", RUN_COUNTING],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job may inherit "ignore"
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate(timeout=120)[0] == "presses 1\nTrue\n"


def test_each_signal_to_the_group_is_told_from_one_to_this_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with Witness() as witness:
        monkeypatch.setattr(Witness, "SECONDS", 0.05)
        assert not witness.has_ended()
        monkeypatch.setattr(Witness, "SECONDS", 60.0)
        for number in (signal.SIGINT, signal.SIGTERM):
            assert witness._process is not None
            witness._process.send_signal(number)
            assert witness.has_ended()
        last = witness._process
    assert last is not None
    assert last.returncode == 0


def test_ctrl_c_while_a_script_is_being_started_reaches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not run on while nobody waits for it."""
    start = subprocess.Popen

    def pressed(command: Any, **options: Any) -> subprocess.Popen[bytes]:
        process = start(command, **options)
        if command[-1] == "300":
            signal.raise_signal(signal.SIGINT)
        return process

    monkeypatch.setattr(subprocess, "Popen", pressed)
    monkeypatch.setattr(Witness, "SECONDS", 0.05)
    assert run_command(["sleep", "300"], dict(os.environ), None) == (128 + signal.SIGINT, True)


def test_without_a_witness_every_signal_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Witness, "COMMAND", ("/nowhere/python",))
    with Witness() as witness:
        assert not witness.has_ended()


def test_ctrl_c_reaches_a_script_once_also_when_its_input_is_a_file(tmp_path: Path) -> None:
    pty = pytest.importorskip("pty")
    (tmp_path / "counting.py").write_text(COUNTING)
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(tmp_path)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.execv(sys.executable, [sys.executable, "-c", RUN_COUNTING])
    text = b""
    with open(terminal, "r+b", buffering=0) as screen:
        while re.search(rb"presses \d", text) is None:
            try:
                read = screen.read(1000)
            except OSError:  # the terminal is closed
                break
            if not read:
                break
            text += read
            if b"ready" in text and b"^C" not in text:
                screen.write(b"\x03")
                text += b"^C"
    os.waitpid(child, 0)
    assert b"presses 1" in text


def test_a_script_may_ask_for_torch_before_it_imports_it(tmp_path: Path) -> None:
    """As transformers does."""
    path = tmp_path / "asks.py"
    path.write_text(
        "import importlib.util\n"
        "assert importlib.util.find_spec('torch')\n"
        "import torch\n"
        "query = torch.ones(1, 1, 3, 4)\n"
        "torch.nn.functional.scaled_dot_product_attention(query, query, query)\n"
    )
    _, found = run(tmp_path, [path])
    assert found["seen"] == 1
