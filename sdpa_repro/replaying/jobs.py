"""The worker's side of a replay: jobs as JSON lines in, one answer line each out.

The lines travel over the pipes that were stdin and stdout when the process started. Both are moved to private
descriptors before anything else runs, so whatever libraries, kernels or preloaded files print goes to the log.
"""

from __future__ import annotations

import ctypes
import json
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from sdpa_repro.attention import AttentionCall, is_rule, output_shape
from sdpa_repro.dump import Dump, load
from sdpa_repro.environment import free_memory, memory_layout, preload
from sdpa_repro.errors import InputError
from sdpa_repro.replaying.backends import (
    Backend,
    Declined,
    NoMemory,
    chosen,
    first_line,
    needed_bytes,
    run,
    run_in_blocks,
)
from sdpa_repro.replaying.eager import is_emulated
from sdpa_repro.replaying.variants import is_narrow, recast
from sdpa_repro.switches import DTYPES, restored

SLOW_SECONDS = 10.0
"""Runs of one cell stop being repeated once they have taken this long together."""

BLOCKS_SHARE = 0.7
"""Share of a cell's time that measuring noise on blocks may take; without it the cell would end as a timeout."""

CUDA_ERROR = re.compile(r"CUDA error|HIP error|CUBLAS_STATUS|CUDNN_STATUS_EXECUTION|device-side assert|illegal memory")
NO_NARROW_KERNEL = re.compile(r"Float8|not (implemented|supported)")
"""In an exception about a call in float8: the operation has no kernel for it on this device."""

CAN_BE_BLOCKED = (Backend.MATH, Backend.EAGER)


class ContextLost(Exception):  # noqa: N818 (what happened, not whose fault)
    """The accelerator reported an error after which this process can compute nothing."""


class KernelError(Exception):
    """A backend took the call and raised."""


Tell = Callable[[dict[str, Any]], None]
"""Sends the parent what must be known even if the process dies next."""


def main(token: str) -> None:
    """Serve jobs until stdin closes. Every answer line starts with `token`, so no print can pass for one."""
    lines, answers = _private_streams()

    def send(body: Mapping[str, Any]) -> None:
        answers.write(f"\n{token}{json.dumps(body)}\n")  # on a line of its own, whatever somebody wrote before
        answers.flush()

    jobs: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=_read_jobs, args=(lines, jobs), daemon=True).start()
    _no_core_files()
    while True:
        job = jobs.get()
        start = time.monotonic()
        answer = _answer(job, lambda note, job=job: send({"note": job["id"], **note}))  # type: ignore[misc]
        send({"id": job["id"], **answer, "took": time.monotonic() - start})
        if answer["kind"] == "crashed":
            os._exit(1)


def _private_streams() -> tuple[TextIO, TextIO]:
    """Take the pipes away from descriptors 0 and 1; printed text joins stderr, reads find nothing."""
    lines, answers = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return lines, answers


def _read_jobs(lines: TextIO, jobs: queue.Queue[dict[str, Any]]) -> None:
    """Queue the jobs; when the parent is gone, end the process even if a kernel hangs."""
    with suppress(Exception):
        for line in lines:
            jobs.put(json.loads(line))
    os._exit(0)


def _no_core_files() -> None:
    with suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def _answer(job: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    """Do one job. kind: done, declined, error, crashed (answered, but the process must end), input or failed."""
    try:
        if job["do"] == "preload":
            return {"kind": "done", "preloaded": preload(job["paths"])}
        dump = load(Path(job["dump"]), job["device"])
        if job["do"] == "layout":
            return {"kind": "done", "layout": memory_layout(dump.call)}
        return cell(dump, job, tell)
    except Declined as reason:
        return {"kind": "declined", "reason": str(reason)}
    except ContextLost as error:
        return {"kind": "crashed", "reason": str(error)}
    except InputError as error:
        return {"kind": "input", "reason": str(error)}
    except (MemoryError, torch.OutOfMemoryError) as error:
        return {"kind": "declined", "reason": f"out of memory: {first_line(error)}"}
    except KernelError as error:
        return {"kind": "error", "reason": str(error)}
    except Exception as error:
        if CUDA_ERROR.search(str(error)):
            return {"kind": "crashed", "reason": first_line(error)}
        return {"kind": "failed", "reason": f"{type(error).__name__}: {first_line(error)}"}


def cell(dump: Dump, job: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    """Run one backend in one dtype: `runs` times, the first output saved to `output`.

    Answers with `runs`, `bit_stable`, `chosen` (the default path's kernel), `seconds` (median of a run), and
    what of the recorded context does not exist here. A second output is saved when runs differ. A path that
    would not fit in memory is declined, and its output on blocks of rows saved instead (`noise_only`): on the query
    rows in the job's `rows`, [first, last) pairs, or on all; with an empty list not yet (`blocks`).
    So is one whose job says why in `blocks`.
    Dropout is left out: its result is random.
    """
    backend, captured = Backend(job["backend"]), job["dtype"] == "captured"
    call = prepared(dump, None if captured else DTYPES[job["dtype"]])
    context = dict(dump.context)
    if not captured:
        context.pop("autocast", None)
    with restored(context, device_type=call.query.device.type) as skipped:
        answer: dict[str, Any] = {"kind": "done", "not_restored": skipped, "chosen": None, "remark": ""}
        if not _has_output(call):  # no path takes it, and each says so in PyTorch's words
            return answer | _runs(call, backend, job)
        if backend is Backend.DEFAULT:
            answer["chosen"] = chosen(call)
            tell({"chosen": answer["chosen"]})
        elif backend is Backend.EAGER and is_emulated(call):
            answer["remark"] = "emulated: float32 products rounded to the dtype"
        need = needed_bytes(call, backend)
        free = memory_for(2 * need if backend in CAN_BE_BLOCKED else need, call.query.device)
        if backend in CAN_BE_BLOCKED and job.get("blocks"):
            return answer | _instead(call, backend, str(job["blocks"]), job)
        if need > (free // 2 if backend in CAN_BE_BLOCKED else free):
            half = "more than half of the " if need <= free else ""
            reason = f"needs {_gib(need)}, {half}{_gib(free)} {'that ' if half else ''}are free"
            return answer | _instead(call, backend, reason, job)
        try:
            return answer | _runs(call, backend, job)
        except NoMemory as error:
            return answer | _instead(call, backend, str(error), job)


def _has_output(call: AttentionCall) -> bool:
    """Whether the arguments have enough dimensions, and batches that broadcast: a file may hold any shapes."""
    try:
        return len(output_shape(call)) >= 2
    except (RuntimeError, IndexError):
        return False


def prepared(dump: Dump, dtype: torch.dtype | None) -> AttentionCall:
    """The dump's call, cast to `dtype` when one is given, with `requires_grad` as recorded.

    Made outside inference mode: there, tensors cannot require grad.
    """
    call = replace(dump.call, dropout_p=0.0)
    if dtype is not None:
        with torch.no_grad():
            call = recast(call, dtype)
    wants = dump.context.get("requires_grad")
    for name, tensor in call.tensors.items():
        if is_rule(tensor):  # up to torch 2.7 (at least) a `CausalBias` does not even tell its dtype
            continue
        if isinstance(wants, Mapping) and wants.get(name) is True and tensor.dtype.is_floating_point:
            tensor.requires_grad_(True)
    return call


def _runs(call: AttentionCall, backend: Backend, job: Mapping[str, Any]) -> dict[str, Any]:
    """Repeat the path; keep the first output and, when they differ, the one farthest from it."""
    limit = int(job["runs"])
    seconds: list[float] = []
    first: Tensor | None = None
    other: Tensor | None = None
    farthest = -1.0
    while first is None or len(seconds) < _runs_wanted(limit, seconds, float(job["timeout"])):
        start = time.perf_counter()
        output = _guarded(call, backend)
        seconds.append(time.perf_counter() - start)
        if first is None:
            first = output
        elif not same_bits(first, output):
            distance = float((first.double() - output.double()).abs().nan_to_num(torch.inf).max())
            if distance > farthest:
                other, farthest = output, distance
    _save(job["output"], first, other)
    return {
        "runs": len(seconds),
        "bit_stable": other is None if len(seconds) > 1 else None,
        "seconds": sorted(seconds)[len(seconds) // 2],
    }


def _runs_wanted(limit: int, seconds: list[float], timeout: float) -> int:
    """How many runs in all: the limit; two when runs are slow; no further one that could not end in time."""
    spent = sum(seconds)
    if spent + 1.5 * max(seconds) > 0.8 * timeout:
        return len(seconds)
    return limit if spent < SLOW_SECONDS else min(limit, 2)


def _guarded(call: AttentionCall, backend: Backend) -> Tensor:
    """One run, finished (not only queued). ContextLost after an accelerator's error, KernelError after any other."""
    try:
        output = run(call, backend)
        if call.query.device.type != "cpu":
            torch.accelerator.synchronize() if hasattr(torch, "accelerator") else torch.cuda.synchronize()
        return output.detach()
    except Declined:
        raise
    except Exception as error:
        _check_context(call)
        if CUDA_ERROR.search(str(error)) or type(error).__name__ == "AcceleratorError":
            raise ContextLost(first_line(error)) from error
        if is_narrow(call.query) and NO_NARROW_KERNEL.search(str(error)):
            raise Declined(first_line(error)) from error
        raise KernelError(f"{type(error).__name__}: {first_line(error)}") from error


def _check_context(call: AttentionCall) -> None:
    """Raise ContextLost when the GPU no longer answers."""
    if call.query.device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(call.query.device)
    except Exception as error:
        raise ContextLost(first_line(error)) from error


def memory_for(wanted: int, device: torch.device) -> int:
    """Free memory in bytes; where that is less than `wanted`, after this process has returned what it keeps unused."""
    free = free_memory(device)
    if free >= wanted or device.type != "cpu":
        return free
    with suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)
    return free_memory(device)


def _instead(call: AttentionCall, backend: Backend, reason: str, job: Mapping[str, Any]) -> dict[str, Any]:
    """Decline for want of memory, and measure the path's noise on blocks of rows where that can be done."""
    declined = {"kind": "declined", "reason": reason}
    if backend not in CAN_BE_BLOCKED:
        return declined
    wanted = job.get("rows")
    if wanted == []:
        return declined | {"blocks": True}
    with suppress(Declined), torch.no_grad():
        deadline = time.monotonic() + BLOCKS_SHARE * float(job["timeout"])
        _save(job["output"], run_in_blocks(call, backend, deadline, wanted), None)
        return declined | {"noise_only": True, "remark": "noise measured on blocks of rows"}
    return declined


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors of one dtype hold the same bits (NaN equals the same NaN, 0 does not equal -0)."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[left.element_size()]
    return torch.equal(left.contiguous().view(integers), right.contiguous().view(integers))


def _save(path: str, first: Tensor, other: Tensor | None) -> None:
    kept = {"first": first} if other is None else {"first": first, "other": other}
    tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in kept.items()}
    try:
        torch.save(tensors, path)
    except (OSError, RuntimeError) as error:  # torch tells of a full disk in words of its own
        folder, size = Path(path).parent.parent, sum(tensor.nbytes for tensor in tensors.values())
        raise InputError(
            f"cannot write a result of {_gib(size)} into {folder}: set TMPDIR to a folder with room"
        ) from error


def _gib(count: int) -> str:
    """Bytes as a person reads them: "25.8 GiB", "310 MiB"."""
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{max(1, count >> 20)} MiB"
