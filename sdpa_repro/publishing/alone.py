"""Runs one script as `python -I` does, without this package, after files that plant faults or register kernels.

Started by path in a process of its own, never imported: `python -I alone.py [--preload FILE]... SCRIPT [ARG]...`.
It imports nothing but the standard library, and `sdpa_repro` cannot be imported in its process. Processes that the
script starts with `sys.executable` come through here again, so that the preloaded files count there too.
"""

from __future__ import annotations

import os
import shlex
import stat
import sys
import types
from pathlib import Path

PACKAGE = "sdpa_repro"


def main(words: list[str]) -> None:
    """Run the script that the words name."""
    preloads: list[str] = []
    while words[:1] == ["--preload"]:
        preloads.append(words[1])
        words = words[2:]
    words = words[1:] if words[:1] == ["-I"] else words  # how the script calls what it takes for Python
    script, *arguments = words
    sys.modules[PACKAGE] = None  # type: ignore[assignment]  # import sdpa_repro raises ModuleNotFoundError
    if preloads:
        sys.executable = _interpreter(Path(script).resolve().parent, preloads)
    for index, path in enumerate(preloads):
        module = types.ModuleType(f"_preloaded_{index}")
        module.__file__ = path
        sys.modules[module.__name__] = module
        exec(compile(Path(path).read_bytes(), path, "exec"), module.__dict__)
    _run(Path(script).resolve(), arguments)


def _interpreter(folder: Path, preloads: list[str]) -> str:
    """An executable that does what this file does, to stand for Python in the script's own children."""
    path = folder / ".python"
    if not path.exists():
        words = [sys.executable, "-I", os.path.abspath(__file__)]
        words += [word for preload in preloads for word in ("--preload", preload)]
        path.write_text(f'#!/bin/sh\nexec {" ".join(map(shlex.quote, words))} "$@"\n')
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def _run(script: Path, arguments: list[str]) -> None:
    """The script as `__main__`; an exception is reported as Python would, without the frames of this file."""
    main_module = types.ModuleType("__main__")
    main_module.__file__ = str(script)
    sys.modules["__main__"] = main_module
    sys.argv = [str(script), *arguments]
    try:
        exec(compile(script.read_text(encoding="utf-8"), str(script), "exec"), main_module.__dict__)
    except Exception as error:
        sys.stdout.flush()
        frames = error.__traceback__
        error = error.with_traceback(frames.tb_next if frames else None)
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
