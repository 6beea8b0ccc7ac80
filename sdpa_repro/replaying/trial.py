"""One call, one backend, one answer: does it fail? The question that explaining and reducing ask all day.

`in_process` asks here, at the speed of the kernel plus its check. `isolated` asks a worker process and
survives crashes and hangs. Both restore the recorded context and judge with `check.check`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sdpa_repro.attention import AttentionCall, is_rule
from sdpa_repro.dump import save, snapshot
from sdpa_repro.replaying.backends import Backend, Declined, first_line, run
from sdpa_repro.replaying.check import LiveCheck, check
from sdpa_repro.replaying.variants import autocast_dtype
from sdpa_repro.replaying.verdict import Status
from sdpa_repro.replaying.worker import Worker
from sdpa_repro.switches import restored


@dataclass(frozen=True)
class Result:
    """What became of one trial.

    `checked` holds the wrong rows and the largest error over threshold when there was an output to judge.
    """

    status: Status
    checked: LiveCheck | None = None
    output: Tensor | None = None
    reason: str = ""

    @property
    def fails(self) -> bool:
        """Whether this is a failure of the backend (a decline or an argument error is not)."""
        return self.status in (Status.DIVERGES, Status.NONFINITE, Status.CRASHED, Status.TIMEOUT)

    @property
    def ratio(self) -> float:
        """Largest error over threshold; 0 when nothing was judged."""
        return self.checked.ratio if self.checked else 0.0


Trial = Callable[[AttentionCall], Result]


def in_process(backend: Backend, context: Mapping[str, Any] | None = None) -> Trial:
    """Trials in this process under `context` (as recorded in a dump; None: as it is now, without grad)."""
    context = {"grad": False} if context is None else context

    def trial(call: AttentionCall) -> Result:
        call = with_recorded_grad(call, context)
        with restored(context, device_type=call.query.device.type):
            try:
                output = run(call, backend).detach()
            except Declined as reason:
                return Result(Status.DECLINED, reason=str(reason))
            except (RuntimeError, ValueError, IndexError, NotImplementedError) as error:
                return Result(Status.ERROR, reason=first_line(error))
            return judged(call, output)

    return trial


def judged(call: AttentionCall, output: Tensor) -> Result:
    """Check an output on the call's own values and turn the answer into a `Result`."""
    checked = check(call, output, dtype=autocast_dtype(call))
    if checked.status == "unchecked":
        return Result(Status.ERROR, checked, output, checked.reason)
    return Result(Status(checked.status), checked, output)


def with_recorded_grad(call: AttentionCall, context: Mapping[str, Any]) -> AttentionCall:
    """The call with `requires_grad` on the tensors that had it; others detached."""
    wants = context.get("requires_grad")
    if not isinstance(wants, Mapping) or not any(value is True for value in wants.values()):
        return call
    tensors = {}
    for name, tensor in call.tensors.items():
        if is_rule(tensor):  # a copy of a `CausalBias` has lost its rule
            continue
        wanted = wants.get(name) is True and tensor.dtype.is_floating_point
        tensors[name] = tensor.detach().requires_grad_(wanted)
    return call.with_tensors(tensors)


@contextmanager
def isolated(
    backend: Backend,
    context: Mapping[str, Any] | None = None,
    *,
    preload: Sequence[str | Path] = (),
    timeout: float = 30.0,
) -> Iterator[Trial]:
    """Trials in a worker process, for backends that crash or hang. Use as a context manager."""
    context = {"grad": False} if context is None else context
    with tempfile.TemporaryDirectory(prefix="sdpa-repro-") as folder, Worker(preload) as worker:
        numbers, result = count(), Path(folder) / "output.pt"

        def trial(call: AttentionCall) -> Result:
            path = Path(folder) / f"trial{next(numbers)}.pt"  # a worker keeps the last dump by its name
            save(snapshot(call, context=dict(context)), path)
            job = {
                "do": "cell",
                "dump": str(path),
                "device": str(call.query.device),
                "dtype": "captured",
                "backend": backend.value,
                "runs": 1,
                "output": str(result),
            }
            outcome = worker.request(job, timeout)
            path.unlink()
            if outcome.kind in ("crashed", "timeout"):
                return Result(Status(outcome.kind), reason=outcome.reason)
            if outcome.kind != "done":
                status = Status.DECLINED if outcome.kind in ("declined", "memory") else Status.ERROR
                return Result(status, reason=outcome.reason)
            output = torch.load(result, weights_only=True)["first"].to(call.query.device)
            with restored({**context, "inference": False}, device_type=call.query.device.type):
                return judged(call, output)

        yield trial


def same_failure(result: Result, first: Result) -> bool:
    """Whether a trial fails in the way the first one did: wrong numbers, NaN, a crash or a hang."""
    return result.fails and result.status == first.status


def without_output(result: Result) -> Result:
    """The result without its tensor, to keep many of them."""
    return replace(result, output=None)
