"""The wheel and the sdist hold what they should and run; the Makefile picks its Python and quotes its variables."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from sdpa_repro.version import VERSION

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "build", "dist", "*.egg-info", "__pycache__", ".*_cache")

FAKE_PYTHON = """#!/bin/sh
[ "$1" = -c ] && exit "${FAKE_CHECK:-0}"
for word in "$@"; do printf '[%s]' "$word"; done
exit "${FAKE_STATUS:-0}"
"""
"""Takes the place of Python in `make`: passes every check, prints its arguments, exits as told."""


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    path = tmp_path / "fake python"
    path.write_text(FAKE_PYTHON)
    path.chmod(0o755)
    return path


def make(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run make in the project with only the variables given."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    command = ["make", "--no-print-directory", *arguments]
    return subprocess.run(command, cwd=ROOT, env=kept | environment, capture_output=True, text=True, timeout=60)


def build(source: Path, kind: str, target: Path) -> Path:
    """Build the wheel or the sdist of a source tree with the setuptools that is here."""
    target.mkdir(exist_ok=True)
    code = f"from setuptools import build_meta; build_meta.build_{kind}({str(target)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return next(target.glob("*.whl" if kind == "wheel" else "*.tar.gz"))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    shutil.copytree(ROOT, folder / "source", ignore=LEFT_OUT)
    return build(folder / "source", "sdist", folder / "dist")


@pytest.fixture(scope="module")
def unpacked(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return folder / sdist.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def wheel(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist, so that what the sdist lacks is missing here."""
    return build(unpacked, "wheel", tmp_path_factory.mktemp("wheel"))


def test_the_sdist_holds_the_tests_and_what_runs_them(unpacked: Path) -> None:
    for name in ("LICENSE", "README.md", "CHANGELOG.md", "Makefile", "constraints.txt", "setup.cfg", "pyproject.toml"):
        assert (unpacked / name).is_file(), name
    ours = {path.relative_to(ROOT) for folder in ("sdpa_repro", "tests") for path in (ROOT / folder).rglob("*.py")}
    theirs = {path.relative_to(unpacked) for path in unpacked.rglob("*.py")}
    assert ours <= theirs


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {str(path.relative_to(ROOT)) for path in (ROOT / "sdpa_repro").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == package
    assert "sdpa_repro/py.typed" in names
    assert {name.split("/")[0] for name in names} == {"sdpa_repro", f"sdpa_repro-{VERSION}.dist-info"}
    assert wheel.name == f"sdpa_repro-{VERSION}-py3-none-any.whl"


def test_the_wheel_says_what_it_needs(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    metadata = archive.read(f"sdpa_repro-{VERSION}.dist-info/METADATA").decode()
    needs = re.findall(r"^Requires-Dist: ([\w-]+)(?!.*extra)", metadata, re.M)
    assert sorted(needs) == ["click", "numpy", "torch", "transformers"]
    assert "Requires-Python: >=3.10" in metadata
    assert "Apache-2.0" in metadata
    for extra in ("models", "plots", "test"):
        assert f"Provides-Extra: {extra}" in metadata


def test_the_installed_wheel_runs_as_a_command_and_as_a_module(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    entry = "from importlib.metadata import entry_points as e; e(group='console_scripts')['sdpa-repro'].load()()"
    for command in (["-m", "sdpa_repro", "--version"], ["-c", f"import sys; sys.argv[1:] = ['--version']; {entry}"]):
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
        )
        assert done.stdout == f"sdpa-repro, version {VERSION}\n", done.stderr


def test_help_lists_every_target_without_looking_for_a_python() -> None:
    done = make("help", PATH=f"/nowhere:{os.environ['PATH']}")
    phony = re.search(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.M)
    assert phony is not None
    for target in phony[1].split():
        assert target == "given" or f"make {target}" in done.stdout
    assert done.stdout == make().stdout


def test_capture_hands_each_variable_over_as_one_unchanged_word(fake: Path) -> None:
    prompt = """it's "$5" $(shell echo no) $HOME; `id` \\ # % é"""
    done = make("capture", f"PYTHON={fake}", f"PROMPT={prompt}", "IMAGE=a b.png", "PAD=7", "TOTAL_LENGTH=289")
    words = ["--image", "a b.png", "--prompt", prompt, "--pad", "7", "--total-length", "289"]
    assert done.stdout == "".join(f"[{word}]" for word in ["-m", "sdpa_repro", "capture", *words])


def test_capture_takes_its_variables_from_the_environment_too(fake: Path) -> None:
    done = make("capture", PYTHON=str(fake), MODEL="org/model", DTYPE="float16", PROMPT="$HOME")
    expected = ["-m", "sdpa_repro", "capture", "--model", "org/model", "--prompt", "$HOME", "--dtype", "float16"]
    assert done.stdout == "".join(f"[{word}]" for word in expected)


@pytest.mark.parametrize(("value", "given"), [("1", True), ("yes", True), ("", False), ("0", False), ("no", False)])
def test_random_weights_is_a_switch(fake: Path, value: str, given: bool) -> None:
    done = make("capture", f"PYTHON={fake}", f"RANDOM_WEIGHTS={value}", "ARGS=--call 3 --keep 'worst'")
    assert done.stdout.endswith(f"[capture]{'[--random-weights]' if given else ''}[--call][3][--keep][worst]")


@pytest.mark.parametrize(("status", "succeeds"), [("0", True), ("1", True), ("2", False), ("3", False), ("70", False)])
def test_capture_succeeds_with_a_finding_and_without_one(fake: Path, status: str, succeeds: bool) -> None:
    done = make("capture", f"PYTHON={fake}", FAKE_STATUS=status)
    assert (done.returncode == 0) == succeeds
    if succeeds:
        assert f"status {status}" in done.stderr


@pytest.mark.parametrize("status", ["0", "1", "2"])
def test_demo_succeeds_exactly_when_the_program_says_so(fake: Path, status: str) -> None:
    done = make("demo", f"PYTHON={fake}", FAKE_STATUS=status)
    assert (done.returncode == 0) == (status == "0")
    assert done.stdout.startswith("[-m][sdpa_repro][diagnose][--demo]")


def test_an_environment_that_has_torch_is_used_and_nothing_is_installed(tmp_path: Path, fake: Path) -> None:
    (tmp_path / "env" / "bin").mkdir(parents=True)
    shutil.copy(fake, tmp_path / "env" / "bin" / "python")
    done = make("demo", VIRTUAL_ENV=str(tmp_path / "env"))
    assert done.stdout == "[-m][sdpa_repro][diagnose][--demo]"
    assert "pip" not in make("-n", "demo", VIRTUAL_ENV=str(tmp_path / "env")).stdout.replace('pip install "', "")


def test_without_torch_anywhere_the_own_environment_is_made_from_python3(tmp_path: Path) -> None:
    bare = tmp_path / "python3"
    bare.write_text("#!/bin/sh\nexit 1\n")
    bare.chmod(0o755)
    done = make("-n", "-W", "setup.cfg", "demo", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert "-m venv .venv" in done.stdout
    assert "-c constraints.txt -e '.[test,models]'" in done.stdout
    assert '".venv/bin/python" -m sdpa_repro diagnose --demo' in done.stdout


def test_a_base_python_that_is_too_old_is_named(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    done = make("-W", "setup.cfg", "demo", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode != 0
    assert "error: python3 is not Python 3.10 or later; name one: make demo BASE=" in done.stderr


def test_a_python_without_the_requirements_is_told_what_to_install(tmp_path: Path) -> None:
    bare = tmp_path / "python3"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    bare.chmod(0o755)
    done = make("demo", f"PYTHON={bare}")
    assert done.returncode != 0
    assert done.stdout == ""
    assert "lacks: pip install 'torch' 'transformers>=5.13' 'click>=8.1' 'numpy'" in done.stderr


def test_ci_runs_the_whole_test_target() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert script.rstrip().endswith("exec make --no-print-directory test")
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
