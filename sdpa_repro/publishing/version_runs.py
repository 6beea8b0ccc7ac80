"""Run a script or a dump with one Python, and read what every backend gave there."""

from __future__ import annotations

import hashlib
import json
import re
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import sdpa_repro
from sdpa_repro.errors import InputError
from sdpa_repro.publishing.environments import Interpreter
from sdpa_repro.publishing.escaping import one_line
from sdpa_repro.publishing.running import ScriptRun, check_imports, run_script
from sdpa_repro.publishing.version_row import BAD_WORDS, COLUMNS, Outcome, Row, machine_of
from sdpa_repro.publishing.versions import results_in

STARTUP_SECONDS = 300.0
"""For importing torch, from a slow disk too."""

PROBE_SECONDS = 60.0
NO_PYTHON = "not a Python"
RUNS = 3
BOOTSTRAP = """\
import importlib.util, sys
spec = importlib.util.spec_from_file_location("sdpa_repro", sys.argv[1])
package = importlib.util.module_from_spec(spec)
sys.modules["sdpa_repro"] = package
spec.loader.exec_module(package)
from sdpa_repro.publishing.version_child import main
main(sys.argv[2:])
"""
"""Takes this very copy of the package; `-I` keeps everything else from around here out."""

WORD = {
    "agrees": "ok",
    "diverges": "wrong",
    "nonfinite": "wrong",
    "declined": "declined",
    "crashed": "crashed",
    "timeout": "no answer",
    "unstable": "unstable",
    "not_comparable": "not comparable",
}
"""A replay's status of a cell in the words of a table of versions."""

_HEAD = re.compile(r"^torch (\S{1,60}) on (\w{1,20})", re.MULTILINE)
_ORDER = re.compile(r"^ *for name in \(([^)]*)\):$", re.MULTILINE)
_PYTHONS_WORDS = re.compile(r"^\w+(Error|Exception)\b|is not installed there")
_BESIDE = re.compile(r"with_name\(([\"'])([^\"'/\\]+)\1\)")


@dataclass(frozen=True)
class Subject:
    """What is run: a script's text, with the files that it reads from beside it; or a dump (`text` is None)."""

    path: Path
    sha256: str
    text: str | None = None
    beside: Mapping[str, Path] = field(default_factory=dict)

    def document(self) -> dict[str, str]:
        """As plain JSON types; the name without its folder."""
        kind = "dump" if self.text is None else "script"
        return {"name": self.path.name, "kind": kind, "sha256": self.sha256}


def subject(path: str | Path) -> Subject:
    """A script that imports torch alone, or a dump. Raises InputError, in one line, for anything else."""
    path = Path(path)
    try:
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{path}: {reason}; give a script such as repro.py, or a dump") from error
    digest = hashlib.sha256(data).hexdigest()
    if data[:2] == b"PK":
        from sdpa_repro.dump import load

        load(path)
        return Subject(path, digest)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is neither a Python script nor a dump: give one of them") from error
    check_imports(text)
    beside = {name: path.with_name(name) for _, name in _BESIDE.findall(text)}
    missing = [name for name, file in beside.items() if not file.is_file()]
    if missing:
        raise InputError(f"{path.name} reads {missing[0]}, which is not beside it: put it there")
    return Subject(path, digest, text, beside)


def run_in(
    interpreter: Interpreter,
    what: Subject,
    *,
    preload: Sequence[str | Path] = (),
    timeout: float = 300.0,
    device: str | None = None,
) -> Row:
    """Run the script or replay the dump with that Python; a Python that cannot be had is a row that says so.

    timeout: seconds for a script, for each backend of a dump. device: for a dump only. Never raises for what the
    other Python does; InputError for a preload that cannot be read here.
    """
    planted = tuple(one_line(Path(path).name) for path in preload)
    if interpreter.python is None:
        return Row(interpreter.name, Outcome.MISSING, reason=interpreter.reason)
    files = [str(Path(path).resolve()) for path in preload]
    if what.text is None:
        row = _replayed(interpreter.python, what.path, files, timeout, device)
    else:
        try:
            run = run_script(what.text, preload=files, timeout=timeout, beside=what.beside, python=interpreter.python)
        except OSError as error:  # no such file, not executable, another processor's
            return Row(interpreter.name, Outcome.ERROR, reason=one_line(error.strerror or error), planted=planted)
        row = row_of(run, what.text)
        facts, _ = _child(interpreter.python, {"dump": None}, STARTUP_SECONDS)
        row = replace(row, machine={**machine_of(facts), **row.machine})
    silent = not row.results and not row.machine and not _PYTHONS_WORDS.search(row.reason)
    if silent and not is_python(interpreter.python):
        row = Row("", Outcome.ERROR, reason=NO_PYTHON)
    return replace(row, name=interpreter.name, planted=planted)


def is_python(program: str) -> bool:
    """Whether a program does what Python does with `-I -c`."""
    try:
        done = subprocess.run(
            [program, "-I", "-c", "import sys; print(sys.version_info[0] == 3)"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PROBE_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.stdout.strip() == b"True"


def row_of(run: ScriptRun, text: str) -> Row:
    """The row that a run of a script makes; the name is left to the caller.

    A process that ended early leaves the backend that it was at without a line: the one after the last that has one,
    in the order of the script's own loop.
    """
    found = {name: word for name, word in results_in(run.output).items() if name in COLUMNS}
    head = _HEAD.search(run.output)
    machine = {"torch": head[1], "device": head[2]} if head else {}
    outcome, reason = _ending(run)
    if outcome in (Outcome.CRASHED, Outcome.TIMEOUT):
        found = _cut_short(found, text, outcome.value)
    elif outcome is Outcome.PASSES and any(word in BAD_WORDS for word in found.values()):
        outcome, reason = Outcome.FAILS, "a backend fails, but the script ends with 0"
    elif outcome is Outcome.PASSES and found and "ok" not in found.values():
        outcome, reason = Outcome.ERROR, "no backend took the call"
    return Row("", outcome, found, machine, reason, run.seconds)


def _ending(run: ScriptRun) -> tuple[Outcome, str]:
    """How the script ended, and the words where that needs some."""
    if run.passes:
        return Outcome.PASSES, ""
    if run.fails:
        return Outcome.FAILS, one_line(run.last_line.partition(": ")[2])
    if run.status is None:
        return Outcome.TIMEOUT, f"stopped after {run.seconds:.0f} s"
    if run.status < 0:
        return Outcome.CRASHED, f"ended by {_signal(-run.status)}"
    return Outcome.ERROR, one_line(run.last_line) or f"exit status {run.status}"


def _signal(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def _cut_short(found: Mapping[str, str], text: str, word: str) -> dict[str, str]:
    """The words so far, and for the rest of the script's own order: `word` for the first, "not run" for the others."""
    order = _ORDER.search(text)
    names = [name for name in re.findall(r"\"(\w+)\"", order[1]) if name in COLUMNS] if order else []
    rest = [name for name in names if name not in found]
    return {**found, **dict.fromkeys(rest, "not run"), **dict.fromkeys(rest[:1], word)}


def _replayed(python: str, path: Path, preload: Sequence[str], timeout: float, device: str | None) -> Row:
    """The row of a dump: a replay by this package's source in the other Python."""
    job = {"dump": str(path.resolve()), "device": device, "timeout": timeout, "preload": list(preload), "runs": RUNS}
    seconds = STARTUP_SECONDS + timeout * len(COLUMNS) * RUNS
    found, reason = _child(python, job, seconds)
    if reason:
        return Row("", Outcome.ERROR, reason=reason)
    cells = [cell for cell in found["cells"] if cell["dtype"] == found["dtype"] and cell["backend"] in COLUMNS]
    results = {cell["backend"]: WORD.get(cell["status"], "error") for cell in cells}
    machine = machine_of(found["environment"], found["device"])
    sentence = one_line(found["sentence"])
    if found["verdict"] in ("backend_wrong", "eager_wrong"):
        return Row("", Outcome.FAILS, results, machine, sentence)
    if found["verdict"] == "invalid_call" or "ok" not in results.values():
        return Row("", Outcome.ERROR, results, machine, sentence)
    return Row("", Outcome.PASSES, results, machine, "" if found["verdict"] == "healthy" else sentence)


def _child(python: str, job: Mapping[str, Any], seconds: float) -> tuple[dict[str, Any], str]:
    """The answer of `version_child` in the other Python; what it said last, where there is none."""
    with tempfile.TemporaryDirectory(prefix="sdpa-repro-") as folder:
        answer, log = Path(folder) / "answer.json", Path(folder) / "log.txt"
        command = [python, "-I", "-c", BOOTSTRAP, str(sdpa_repro.__file__), json.dumps(job), str(answer)]
        try:
            with log.open("wb") as said:
                status = _ended(command, folder, said.fileno(), seconds)
        except OSError as error:
            return {}, one_line(error.strerror or error)
        if status is None:
            return {}, f"no answer after {seconds:.0f} s"
        try:
            found = json.loads(answer.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
            last = next((line for line in reversed(lines) if line.strip()), "")
            return {}, _missing(last, python) or one_line(last) or f"exit status {status}"
    return found, one_line(found.get("input_error") or "")


def _missing(line: str, python: str) -> str:
    """What to install, where torch or numpy is missing there."""
    name = re.match(r"ModuleNotFoundError: No module named '(torch|numpy)'", line)
    return f"{name[1]} is not installed there: {one_line(python)} -m pip install {name[1]}" if name else ""


def _ended(command: Sequence[str], folder: str, target: int, seconds: float) -> int | None:
    """Run a command; when the time is up, or on Ctrl-C, let it end in order (its worker with it), then kill it."""
    process = subprocess.Popen(
        command, cwd=folder, stdin=subprocess.DEVNULL, stdout=target, stderr=target, start_new_session=True
    )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()
