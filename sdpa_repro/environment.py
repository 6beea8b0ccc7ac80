"""What surrounds a call: its context, versions and GPU, preloaded files, free memory."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import re
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch

from sdpa_repro.attention import ALIGNMENT, AttentionCall, span
from sdpa_repro.errors import InputError
from sdpa_repro.switches import dtype_name, read_or_none, read_switches, restored

__all__ = [
    "capture_context",
    "dtype_name",
    "free_memory",
    "memory_layout",
    "preload",
    "preload_records",
    "restored",
    "software",
    "torch_folder",
]

NEAR = 64 << 20
"""Tensors with no more than this many bytes between them keep their distance in a dump."""


def capture_context(call: AttentionCall) -> dict[str, Any]:
    """The switches in force now and the tensors' layout, as plain JSON types; `restored` takes it back.

    Reads only; creates no tensor, so that a recorder may ask from inside a model under any mode.
    """
    return {**read_switches(call), "layout": memory_layout(call)}


def memory_layout(call: AttentionCall) -> dict[str, Any]:
    """Layout of each tensor that has memory: `dtype`, `shape`, `stride`, `align` (data_ptr % 256), `near`.

    `near` says how many bytes after this tensor's first element each other one begins, for those at most 64 MiB
    away. A `CausalBias` has no memory of its own and is left out.
    """
    spans = {
        name: span(tensor)
        for name, tensor in call.tensors.items()
        if getattr(tensor, "variant", None) is None and tensor.device == call.query.device
    }
    found: dict[str, Any] = {}
    for name, here in spans.items():
        tensor = call.tensors[name]
        near = {
            other: there.start - here.start
            for other, there in spans.items()
            if other != name
            and here.nbytes
            and there.nbytes
            and max(here.start, there.start) - min(here.stop, there.stop) <= NEAR
        }
        found[name] = {
            "dtype": dtype_name(tensor.dtype),
            "shape": list(tensor.shape),
            "stride": list(tensor.stride()),
            "align": here.start % ALIGNMENT if here.nbytes else None,
            "near": near,
        }
    return found


def software(device: torch.device | str | None = None) -> dict[str, Any]:
    """Versions that a bug report needs, and the GPU's name when `device` is one (default: the current GPU).

    Nothing that names the machine, the user or a project: no host name and no path. It goes into dumps and reports.
    """
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(terse=True),
        "torch": torch.__version__,
        "torch_git": getattr(torch.version, "git_version", None),
        "cuda": torch.version.cuda,
        "hip": getattr(torch.version, "hip", None),
        "transformers": _version("transformers"),
        "cpu": read_or_none(lambda: torch.backends.cpu.get_cpu_capability()),
    }
    place = torch.device(device) if device is not None else torch.device("cuda" if _cuda_works() else "cpu")
    if place.type == "cuda" and _cuda_works():
        found["cudnn"] = read_or_none(lambda: torch.backends.cudnn.version())
        found["gpu"] = read_or_none(lambda: torch.cuda.get_device_name(place))
        capability = read_or_none(lambda: torch.cuda.get_device_capability(place))
        found["capability"] = ".".join(map(str, capability)) if capability else None
        found["driver"] = _driver()
    return found


def torch_folder() -> str:
    """Where the torch in use lies, the home folder written as `~`: for the terminal: a path may name a project."""
    return without_home(str(Path(torch.__file__).parent))


def preload(paths: Sequence[str | Path]) -> list[dict[str, str]]:
    """Run Python files in this process, in order, and say which: `name` (no folder) and `sha256` of each.

    The files' modules stay alive, so a `torch.library.Library` they hold stays registered.
    Raises InputError when one is missing or raises.
    """
    records = preload_records(paths)
    for index, path in enumerate(map(Path, paths)):
        module = types.ModuleType(f"_sdpa_repro_preload_{index}_{path.stem}")
        module.__file__ = str(path.resolve())
        sys.modules[module.__name__] = module
        try:
            with _no_exit():
                exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise InputError(f"--preload {path.name} failed with {reason}; fix the file or leave it out") from error
    return records


@contextmanager
def _no_exit() -> Iterator[None]:
    """Turn `os._exit`, which would end the process without a word, into an exception."""

    def refused(status: int) -> NoReturn:
        raise SystemExit(f"os._exit({status})")

    real, os._exit = os._exit, refused
    try:
        yield
    finally:
        os._exit = real


def preload_records(paths: Sequence[str | Path]) -> list[dict[str, str]]:
    """`name` and `sha256` of each file, without running any. Raises InputError for one that cannot be read."""
    records = []
    for path in map(Path, paths):
        try:
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError as error:
            raise InputError(f"--preload {path}: {error.strerror or error}; give a Python file") from error
        records.append({"name": path.name, "sha256": digest})
    return records


def free_memory(device: torch.device | str) -> int:
    """Bytes that can be allocated now: on CUDA the driver's answer plus torch's unused cache, else host memory."""
    place = torch.device(device)
    if place.type == "cuda":
        free, _ = torch.cuda.mem_get_info(place)
        return free + torch.cuda.memory_reserved(place) - torch.cuda.memory_allocated(place)
    limits = [_available_in_meminfo(), _free_in_cgroup()]
    known = [limit for limit in limits if limit is not None]
    return min(known) if known else 8 << 30


def _available_in_meminfo() -> int | None:
    """MemAvailable of /proc/meminfo in bytes; None where there is no such file."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _free_in_cgroup() -> int | None:
    """Room under the container's limit (cgroup 2, then 1); page cache that can be dropped counts as free."""
    for limit, usage, stat in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
            "/sys/fs/cgroup/memory/memory.stat",
        ),
    ):
        try:
            most, used = int(Path(limit).read_text()), int(Path(usage).read_text())
            fields = dict(line.split() for line in Path(stat).read_text().splitlines())
        except (OSError, ValueError):
            continue
        return max(0, most - used + int(fields.get("inactive_file", fields.get("total_inactive_file", 0))))
    return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def without_home(text: str) -> str:
    """The text with the home folder written as `~`, in every path that begins with it.

    Unchanged where there is no home folder (a container's nameless user) or it is `/`, which no path should lose.
    """
    try:
        home = str(Path.home())
    except RuntimeError:
        return text
    return re.sub(rf"(?<![\w.~-]){re.escape(home)}(?![\w.-])", "~", text) if len(home) > 1 else text


def _cuda_works() -> bool:
    return bool(read_or_none(torch.cuda.is_available))


def _driver() -> str | None:
    """The NVIDIA driver's version, for example "570.86.15"."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text().split()
    except OSError:
        return None
    return next((word for word in words if word[0].isdigit() and word.count(".") >= 1), None)
