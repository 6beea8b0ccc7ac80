"""Python environments to try something in: this one, those that exist, and isolated ones with a release of torch.

An environment is built once and kept in the user's cache folder. It counts as finished only when a marker lies in
it that is written last, so that one whose building was killed is built again.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from sdpa_repro.environment import without_home
from sdpa_repro.errors import InputError
from sdpa_repro.publishing.build_failure import failure
from sdpa_repro.publishing.escaping import one_line

BUILD_SECONDS = 3600.0
MARKER = "finished.txt"
SHOWN = ("Downloading ", "Installing collected", "Resolved ", "Prepared ", "Installed ")
"""Beginnings of the lines of pip and uv that are passed on as progress."""

KEPT = 20_000
"""Characters kept of what a command printed, from its end."""

LEFT_OUT = ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "PIP_USER", "PIP_REQUIREMENT")
"""Environment variables that would send packages elsewhere."""

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Interpreter:
    """A Python to run things with. python: its path, None where it cannot be had; `reason` then says why."""

    name: str
    python: str | None
    reason: str = ""


class _Failed(Exception):  # noqa: N818 (what happened)
    """A command of a build failed; the text is what it printed."""


def here() -> Interpreter:
    """The Python that runs this."""
    return Interpreter("here", sys.executable)


def existing(path: str | Path) -> Interpreter:
    """A Python that exists, by its path, by its name on PATH, or by the folder of its environment.

    Links are kept as they are: those of a virtual environment lead to a Python without its packages.
    Raises InputError where there is none.
    """
    given = Path(path).expanduser()
    if given.is_dir():
        given = _python_in(given)
    found = shutil.which(str(given) if given.parent != Path() or given.exists() else str(path))
    if found is None:
        raise InputError(f"--python {path}: no such program; give the path of a Python that has torch")
    absolute = os.path.abspath(found)
    return Interpreter(without_home(absolute), absolute)


def cache_folder() -> Path:
    """Where environments are kept: below XDG_CACHE_HOME, by default `~/.cache`. Raises InputError without a home."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    try:
        base = Path(given) if os.path.isabs(given) else Path.home() / ".cache"
    except RuntimeError as error:  # a user without a name and without HOME
        raise InputError("there is no home folder to keep environments in: set XDG_CACHE_HOME to a folder") from error
    return base / "sdpa-repro" / "environments"


def check_version(version: str) -> None:
    """Raise InputError unless the text is one release of torch, such as 2.14.1, 2.13.0+cpu or 2.15.0.dev20260101."""
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)*((a|b|rc|\.dev|\.post)[0-9]+)*(\+[a-z0-9.]+)?", version):
        raise InputError(f"--torch {one_line(version, 60)!r} is no release: give a number such as 2.14.1")


def check_index(index_url: str | None) -> None:
    """Raise InputError for an index that pip would take for an option, or that is no address."""
    if index_url is not None and not re.match(r"(https?|file)://\S", index_url):
        raise InputError("--index-url takes an address such as https://download.pytorch.org/whl/cpu")


def built(version: str, *, index_url: str | None = None, progress: Progress | None = None) -> Interpreter:
    """An isolated environment with this release of torch and numpy: from the cache, else built with uv or pip.

    Never fails for want of a release, a network or a disk: the result then has no Python but a reason.
    Raises InputError for a malformed version or index.
    """
    check_version(version)
    check_index(index_url)
    say, name = progress or (lambda text: None), f"torch {version}"
    try:
        parent = cache_folder()
        parent.mkdir(parents=True, exist_ok=True)
        home = parent / _key(version, index_url)
        if not _finished(home):
            with _alone(home, lambda: say(f"{name}: waiting for another process that builds it")) as lock:
                if not _finished(home):
                    _build(home, version, index_url, say, lock)
        return Interpreter(name, str(_python_in(home)))
    except _Failed as failed:
        python = ".".join(platform.python_version_tuple()[:2])
        said = str(failed).replace(str(Path.home()) + os.sep, f"~{os.sep}")
        return Interpreter(name, None, failure(said, version, python, without_home(str(parent))))
    except OSError as error:
        where = without_home(str(error.filename or "its folder"))
        return Interpreter(name, None, failure(f"{where}: {error.strerror or error}", version, "", where))


def _key(version: str, index_url: str | None) -> str:
    """A folder name for what decides the content: release, Python, processor, index."""
    python = "".join(platform.python_version_tuple()[:2])
    index = f"-{hashlib.sha256(index_url.encode()).hexdigest()[:8]}" if index_url else ""
    return f"torch-{version}-py{python}-{platform.machine()}{index}"


def _python_in(home: Path) -> Path:
    """The interpreter of an environment."""
    return home / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def _finished(home: Path) -> bool:
    """Whether the environment was built to its end, and its Python (a link) is still there."""
    return (home / MARKER).is_file() and _python_in(home).exists()


@contextmanager
def _alone(home: Path, waiting: Callable[[], None]) -> Iterator[tuple[int, ...]]:
    """One process at a time; the lock goes with the processes that hold its descriptor, however they end."""
    try:
        import fcntl
    except ModuleNotFoundError:  # Windows: two builds at the same time spoil each other
        yield ()
        return
    with home.with_name(f"{home.name}.lock").open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield (lock.fileno(),)


def _build(home: Path, version: str, index_url: str | None, say: Progress, lock: tuple[int, ...]) -> None:
    """Build it where it will stay; whatever goes wrong, Ctrl-C too, nothing unfinished is left on the disk.

    lock: a descriptor that the commands hold, too, so that nobody builds over one that outlives this process.
    """
    uv = shutil.which("uv")
    say(f"torch {version}: building with {'uv' if uv else 'venv and pip'} in {without_home(str(home))} (once)")
    _remove(home)
    try:
        for command in _commands(home, version, index_url, uv):
            _run(command, home.parent, lambda line: say(f"torch {version}: {line}"), lock)
        temporary = home / f"{MARKER}.tmp"
        temporary.write_text(f"torch=={version}\n", encoding="utf-8")
        os.replace(temporary, home / MARKER)
    finally:
        if not _finished(home):
            _remove(home)


def _commands(home: Path, version: str, index_url: str | None, uv: str | None) -> list[list[str]]:
    """What makes the environment and what fills it. numpy is what reading a dump takes."""
    numbers = tuple(int(part) for part in re.findall("[0-9]+", version.partition("+")[0])[:2])
    numpy = "numpy<2" if numbers < (2, 3) else "numpy"  # torch 2.3 is the first that was built against numpy 2
    python, wanted = str(_python_in(home)), [f"torch=={version}", numpy]
    index = ["--index-url", index_url] if index_url else []
    if uv:
        return [
            [uv, "venv", "--python", sys.executable, str(home)],
            [uv, "pip", "install", "--python", python, *index, *wanted],
        ]
    pip = [python, "-I", "-m", "pip", "install", "--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    return [[sys.executable, "-I", "-m", "venv", str(home)], [*pip, *index, *wanted]]


def _run(command: list[str], folder: Path, say: Progress, lock: tuple[int, ...]) -> None:
    """Run a command to its end and pass on what it says. Raises _Failed with its output."""
    variables = {name: text for name, text in os.environ.items() if name not in LEFT_OUT}
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
        pass_fds=lock,
    )
    assert process.stdout is not None
    clock = threading.Timer(BUILD_SECONDS, _kill, [process])
    clock.daemon = True
    clock.start()
    said = ""
    try:
        for line in process.stdout:
            said = (said + line)[-KEPT:]
            if line.strip().startswith(SHOWN):
                say(one_line(line, 100))
        status = process.wait()
    finally:
        clock.cancel()
        if process.poll() is None:
            _kill(process)
            process.wait()
        process.stdout.close()
    if status:
        ended = f"\nerror: {Path(command[0]).name} was ended by signal {-status}" if status < 0 else ""
        raise _Failed(said + ended)


def _kill(process: subprocess.Popen[str]) -> None:
    """End a process and all that it started."""
    with suppress(OSError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()


def _remove(home: Path) -> None:
    """Take the folder away, marker first: what is left of an interrupted removal is not finished either."""
    with suppress(OSError):
        (home / MARKER).unlink()
    shutil.rmtree(home, ignore_errors=True)
