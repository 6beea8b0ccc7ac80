"""Environments: built once with uv or with venv and pip, never half, and those that cannot be had say why.

Nothing is installed here: uv is a shell script, and so is the Python that `-m venv` would start.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sdpa_repro.errors import InputError
from sdpa_repro.publishing import environments
from sdpa_repro.publishing.environments import built, cache_folder, existing, here

PYTHON = "#!/bin/sh\nexec true\n"

UV = """\
#!/bin/sh
echo "$@" >> "$CALLS"
case "$1" in
venv) mkdir -p "$4/bin"; printf '#!/bin/sh\\n' > "$4/bin/python"; chmod +x "$4/bin/python";;
pip) {pip}
esac
"""

Install = Callable[[str], None]


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the fake programs write what they were called with; the cache is empty, and nothing else is on PATH."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'tools'}:/usr/bin:/bin")
    monkeypatch.setattr(environments.shutil, "which", which(tmp_path / "tools"))
    monkeypatch.setattr(environments, "BUILD_SECONDS", 60.0)
    (tmp_path / "tools").mkdir()
    (tmp_path / "calls").touch()
    return tmp_path / "calls"


def which(folder: Path) -> Callable[[str], str | None]:
    """`shutil.which` that finds what lies in the folder, so that a uv of this machine changes nothing."""
    return lambda name: str(folder / name) if (folder / name).exists() else None


@pytest.fixture
def uv(calls: Path, tmp_path: Path) -> Install:
    """Puts a uv on PATH whose `pip install` runs these shell commands."""
    return lambda pip: program(tmp_path / "tools" / "uv", UV.format(pip=f"{pip};;"))


def program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def lines(calls: Path) -> list[str]:
    return calls.read_text().splitlines()


def test_uv_builds_an_environment_once(uv: Install, calls: Path) -> None:
    uv("echo Installed 20 packages")
    said: list[str] = []
    first = built("2.14.1", progress=said.append)
    assert first.name == "torch 2.14.1"
    assert first.python is not None
    assert Path(first.python).is_relative_to(cache_folder())
    made, filled = lines(calls)
    assert made.startswith(f"venv --python {sys.executable} ")
    assert filled == f"pip install --python {first.python} torch==2.14.1 numpy"
    assert said[0].startswith("torch 2.14.1: building with uv in ")
    assert said[1:] == ["torch 2.14.1: Installed 20 packages"]
    assert built("2.14.1") == first
    assert len(lines(calls)) == 2


def test_without_uv_it_is_venv_and_pip(calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    pip = '#!/bin/sh\\necho pip "$@" >> "$CALLS"\\necho Downloading torch\\n'
    program(
        python,
        f'#!/bin/sh\necho "$@" >> "$CALLS"\nmkdir -p "$4/bin"\nprintf \'{pip}\' > "$4/bin/python"\n'
        'chmod +x "$4/bin/python"\n',
    )
    monkeypatch.setattr(environments.sys, "executable", str(python))
    said: list[str] = []
    found = built("2.8.0", index_url="https://example.org/whl/cpu", progress=said.append)
    assert found.python is not None, found.reason
    made, filled = lines(calls)
    assert made.startswith("-I -m venv ")
    assert filled.startswith("pip -I -m pip install --no-input ")
    assert filled.endswith(" --index-url https://example.org/whl/cpu torch==2.8.0 numpy")
    assert said == [said[0], "torch 2.8.0: Downloading torch"]
    assert "venv and pip" in said[0]


@pytest.mark.parametrize(("version", "numpy"), [("2.2.2", "numpy<2"), ("2.3.0+cpu", "numpy"), ("2.13.0", "numpy")])
def test_a_release_gets_a_numpy_that_it_can_use(uv: Install, calls: Path, version: str, numpy: str) -> None:
    uv("true")
    built(version)
    assert lines(calls)[-1].endswith(f" torch=={version} {numpy}")


def test_another_index_is_another_environment(uv: Install, calls: Path) -> None:
    uv("true")
    assert built("2.8.0").python != built("2.8.0", index_url="https://example.org/whl/cpu").python
    assert len(lines(calls)) == 4


@pytest.mark.parametrize(
    ("pip", "reason"),
    [
        ("echo 'error: No space left on device (os error 28)'; exit 2", "the disk is full"),
        ("echo 'Because there is no version of torch==2.99.0'; exit 1", "no torch 2.99.0 for Python"),
        ("echo 'error: dns error'; exit 2", "the package index was not reached"),
        ("kill -9 $$", "error: uv was ended by signal 9"),
    ],
)
def test_what_cannot_be_built_says_why_and_leaves_nothing(uv: Install, pip: str, reason: str) -> None:
    uv(pip)
    found = built("2.99.0")
    assert found.python is None
    assert found.reason.startswith(reason)
    assert [path.name for path in cache_folder().iterdir() if path.is_dir()] == []


def test_a_build_that_was_killed_is_not_taken_for_a_finished_one(uv: Install, calls: Path) -> None:
    uv("true")
    found = built("2.14.1")
    assert found.python is not None
    home = Path(found.python).parent.parent
    (home / environments.MARKER).unlink()
    (home / "half a package").touch()
    assert built("2.14.1") == found
    assert len(lines(calls)) == 4
    assert not (home / "half a package").exists()


def test_an_environment_whose_python_is_gone_is_built_again(uv: Install, calls: Path) -> None:
    uv("true")
    found = built("2.14.1")
    assert found.python is not None
    Path(found.python).unlink()
    assert built("2.14.1") == found
    assert len(lines(calls)) == 4


def test_ctrl_c_ends_the_build_and_leaves_nothing(
    uv: Install, calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uv('echo Downloading torch; echo $$ > "$CALLS"; exec sleep 60')

    def interrupt(text: str) -> None:
        if "Downloading" in text:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        built("2.14.1", progress=interrupt)
    assert [path.name for path in cache_folder().iterdir() if path.is_dir()] == []


def test_a_build_that_does_not_end_is_given_up_on(uv: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "BUILD_SECONDS", 0.5)
    uv("exec sleep 60")
    assert built("2.14.1").reason == "error: uv was ended by signal 9"


def builder(tools: Path) -> subprocess.Popen[str]:
    """Another process that builds 2.14.1 and prints its progress."""
    code = (
        "from sdpa_repro.publishing import environments as e\n"
        f"e.shutil.which = lambda name: {str(tools / 'uv')!r}\n"
        "print(e.built('2.14.1', progress=lambda text: print(text, flush=True)).python)\n"
    )
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def lock_file() -> Path:
    return cache_folder() / f"{environments._key('2.14.1', None)}.lock"


def test_two_processes_do_not_build_the_same_at_once(uv: Install, calls: Path, tmp_path: Path) -> None:
    uv("true")
    fcntl = pytest.importorskip("fcntl")
    cache_folder().mkdir(parents=True)
    with lock_file().open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        other = builder(tmp_path / "tools")
        assert other.stdout is not None
        assert other.stdout.readline() == "torch 2.14.1: waiting for another process that builds it\n"
        assert lines(calls) == []
    said = other.communicate(timeout=120)[0]
    assert said.splitlines()[-1].startswith(str(cache_folder()))
    assert len(lines(calls)) == 2


def test_what_outlives_a_killed_build_is_waited_for(uv: Install, calls: Path, tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    go = tmp_path / "go"
    uv(f'for i in $(seq 600); do [ -e "{go}" ] && break; sleep 0.1; done')
    other = builder(tmp_path / "tools")
    for _ in range(1200):
        if len(lines(calls)) == 2:
            break
        time.sleep(0.05)
    other.kill()
    other.communicate(timeout=120)
    with lock_file().open("wb") as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    go.touch()
    assert built("2.14.1").python is not None
    assert len(lines(calls)) == 4


def test_a_cache_that_cannot_be_written_to_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_text("")  # a file where a folder should be
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = built("2.14.1")
    assert found.python is None
    assert str(tmp_path / "cache") in found.reason


@pytest.mark.parametrize(
    "version", ["", "latest", "2.14.1; rm -r x", "-r file", "2.*", "git+https://x", "2.1 2.2", "٢.١"]
)
def test_what_is_no_release_is_refused(version: str) -> None:
    with pytest.raises(InputError, match="is no release"):
        built(version)


@pytest.mark.parametrize("version", ["2.14.1", "2.13.0+cpu", "2.15.0.dev20260101+cu130", "2.0", "2.9.0rc3"])
def test_releases_of_every_form_are_taken(version: str) -> None:
    environments.check_version(version)


@pytest.mark.parametrize("index", ["--trusted-host", "whl/cpu", "http://", "ftp://x"])
def test_what_is_no_address_is_refused(index: str) -> None:
    with pytest.raises(InputError, match="takes an address"):
        built("2.14.1", index_url=index)


def test_the_cache_follows_xdg_and_falls_back_to_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "sdpa-repro" / "environments"
    for text in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", text)
        assert cache_folder() == Path.home() / ".cache" / "sdpa-repro" / "environments"


def test_this_python_is_here() -> None:
    assert here().python == sys.executable


def test_a_python_is_found_by_path_name_and_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    program(tmp_path / "bin" / "real", PYTHON)
    (tmp_path / "bin" / "python").symlink_to(tmp_path / "bin" / "real")
    link = str(tmp_path / "bin" / "python")
    assert existing(link).python == link
    assert existing(tmp_path).python == link
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert existing("python").python == link
    monkeypatch.chdir(tmp_path)
    assert existing("bin/python").python == link
    monkeypatch.setenv("HOME", str(tmp_path))
    assert existing(link).name == "~/bin/python"


def test_a_python_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("")
    for path in ("/nowhere/python", "no-such-python", tmp_path, tmp_path / "text"):
        with pytest.raises(InputError, match="no such program"):
            existing(path)
