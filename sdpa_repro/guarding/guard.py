"""`guard()`: keep attention right on a torch that has a known bug, at the price of the calls that would meet it."""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor

from sdpa_repro.attention import AttentionCall, is_rule
from sdpa_repro.capturing.passing import COMPILED, GRAPH, NOT_TENSORS, bind, reason_to_pass
from sdpa_repro.guarding import switch
from sdpa_repro.guarding.cures import as_cast
from sdpa_repro.guarding.remedies import Look, Quick, Remedy, devices_here, known_remedies
from sdpa_repro.guarding.rule_file import read_rule
from sdpa_repro.guarding.switch import Found, GuardWarning
from sdpa_repro.replaying.backends import dispatched

Function = TypeVar("Function", bound=Callable[..., Any])

CAUSAL_BIAS = "a CausalBias (torch turns it into a call of its own)"
NOT_IN_COMPILED = (
    "torch.compile has traced an attention call: compiled code is not guarded (inductor copies key and value, which "
    "avoids some bugs); leave attention out of it, or use backend='eager'"
)
NO_BUG = "none of the bugs that an exact change avoids"


class GuardNotNeeded(GuardWarning):
    """The installed torch does not need this guard, which does nothing."""


@dataclass(frozen=True)
class _Place:
    """A device: what there is to look for on it, and how to tell at a glance."""

    device: str
    capability: tuple[int, int] | None
    remedies: tuple[Remedy, ...]
    quick: tuple[Quick, ...]


class Guard:
    """A context manager and decorator; made by `guard`. May be open several times, in several threads.

    unneeded: why the installed torch does not need it, "" when it does. An unneeded guard changes nothing at all.
    """

    def __init__(
        self,
        remedies: Sequence[Remedy],
        *,
        unneeded: str = "",
        all_threads: bool = False,
        on_change: Callable[[], None] | None = None,
    ) -> None:
        """`on_change` is called after a call to be changed was counted."""
        self.remedies = tuple(remedies)
        self.unneeded = unneeded
        self.depth = 0
        self._everywhere = all_threads
        self._on_change = on_change or (lambda: None)
        self._places: dict[int, _Place] = {}
        self._local = threading.local()
        self._lock = threading.Lock()
        self._calls, self._reads = itertools.count(), 0
        self.see = functools.partial(next, self._calls)
        """Count a call: needs no lock, which a fork could leave held."""
        self._changed: Counter[str] = Counter()
        self._missed: Counter[str] = Counter()
        self._passed: Counter[str] = Counter()

    def __enter__(self) -> Guard:
        if torch.compiler.is_dynamo_compiling():
            torch._dynamo.graph_break()  # traced, the switch would be set after the calls that it is for
        if self.unneeded:
            warnings.warn(f"the guard is not needed and does nothing: {self.unneeded}", GuardNotNeeded, stacklevel=2)
        else:
            callback = _suspend_compiler()
            try:
                switch.enter(self, everywhere=self._everywhere)
            except BaseException:  # Ctrl-C too
                _resume_compiler(callback)
                raise
            self._local.suspended = [*getattr(self._local, "suspended", []), callback]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.unneeded:
            return
        try:
            switch.leave(self, everywhere=self._everywhere)
        finally:
            suspended = getattr(self._local, "suspended", [])
            _resume_compiler(suspended.pop() if suspended else None)

    def __call__(self, function: Function) -> Function:
        """Guard each call of a function or coroutine function. Raises TypeError for a generator function."""
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError("a guard cannot be put around a generator, whose caller runs in between: use a with block")
        wrapped: Any
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def wrapped(*args: Any, **kwargs: Any) -> Any:
                with self:
                    return await function(*args, **kwargs)

        else:

            @functools.wraps(function)
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                with self:
                    return function(*args, **kwargs)

        return wrapped  # type: ignore[no-any-return]

    def report(self) -> dict[str, Any]:
        """What the guard has done so far, as plain dicts, lists, strings and numbers.

        needed, why: whether the installed torch needs it. calls: SDPA calls seen in its context. changed: issue ->
        calls changed. issues: what it looks for. threads_not_covered: thread -> calls that should have been changed
        and were made outside its context. passed: reason -> calls that could not be looked at.
        """
        with self._lock:
            calls = next(self._calls) - self._reads
            self._reads += 1
            return {
                "torch": torch.__version__,
                "needed": not self.unneeded,
                "why": self.unneeded,
                "issues": [
                    {"issue": each.name, "fixed_in": each.fixed_in, "cure": each.cure.words} for each in self.remedies
                ],
                "calls": calls,
                "changed": dict(self._changed),
                "threads_not_covered": dict(self._missed),
                "passed": dict(self._passed),
            }

    # What the switch calls:

    def changed(self, remedies: tuple[Remedy, ...]) -> None:
        """Count a call that is changed."""
        with self._lock:
            self._changed.update(remedy.name for remedy in remedies)
        self._on_change()

    def missed(self, thread: str) -> None:
        """Count a call outside the guard's context that should have been changed."""
        with self._lock:
            self._missed[thread] += 1

    def find(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Found | None:
        """The call with the reasons to change it; None for none, and for one that cannot be looked at."""
        try:
            if _function_modes():
                with torch._C.DisableTorchFunction():  # a mode would see the shapes being read
                    return self._find(args, kwargs)
            return self._find(args, kwargs)
        except Exception as error:
            self._pass(f"the guard could not look at it ({type(error).__name__}: {error})"[:200])
            return None

    def _find(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Found | None:
        """First at a glance, which is all that most calls cost (so no call is bound here), then at everything."""
        given = len(args)
        if given >= 3:
            query, key, value = args[:3]
        else:
            query, key, value = (args[i] if i < given else kwargs[name] for i, name in enumerate(_NAMES))
        if type(query) is not Tensor or type(key) is not Tensor or _tracing_state() is not None:
            return self._odd(args, kwargs)
        index = query.get_device()
        place = self._places.get(index) or self._place(index, query)
        if not place.quick:
            return None
        mask = args[3] if given > 3 else kwargs.get("attn_mask")
        causal = args[5] if given > 5 else kwargs.get("is_causal", False)
        rows, keys = query.size(-2), key.size(-2)
        for quick in place.quick:
            if quick(query, key, value, mask, causal, rows, keys):
                return self._thorough(args, kwargs)
        return None

    def _place(self, index: int, query: Tensor) -> _Place:
        """What there is to look for on a device, worked out once. index: its number, -1 for the CPU (and meta)."""
        device = query.device.type if index >= 0 else "cpu"
        capability = torch.cuda.get_device_capability(index) if device == "cuda" else None
        remedies = tuple(each for each in self.remedies if device in each.devices and each.on(capability))
        quick = tuple(dict.fromkeys(remedy.quick for remedy in remedies))
        self._places[index] = place = _Place(device, capability, remedies, quick)
        return place

    def _odd(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Found | None:
        """Tensors that are not plain: subclasses that have memory are looked at, others counted."""
        call = bind(args, dict(kwargs))
        reason = NOT_TENSORS if call is None else reason_to_pass(call)
        if call is None or reason not in (None, GRAPH):
            self._pass(reason or NOT_TENSORS)
            if reason == COMPILED and call is not None and self._enters_code(call):
                switch.tell(COMPILED, NOT_IN_COMPILED, stacklevel=6)
            return None
        return self._thorough(args, kwargs)

    def _enters_code(self, call: AttentionCall) -> bool:
        """Whether a traced call becomes part of compiled code; the first, fake pass of torch.compile only measures."""
        device = call.query.device.type
        return type(call.query).__name__ == "FunctionalTensor" and any(device in each.devices for each in self.remedies)

    def _thorough(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Found | None:
        call = bind(args, dict(kwargs))
        if call is None:
            return None  # torch says itself what is wrong
        reason = CAUSAL_BIAS if is_rule(call.attn_mask) else reason_to_pass(call)
        if reason is not None and reason != GRAPH:
            self._pass(reason)
            return None
        index = call.query.get_device()
        place = self._places.get(index) or self._place(index, call.query)
        cast = as_cast(call)
        glance = (cast.query, cast.key, cast.value, cast.attn_mask, cast.is_causal)
        lengths = cast.query.size(-2), cast.key.size(-2)
        asked = [remedy for remedy in place.remedies if remedy.quick(*glance, *lengths)]
        if not asked:
            return None
        look = Look(cast, dispatched(cast), place.device, _records_gradient(call), place.capability)
        remedies = tuple(remedy for remedy in asked if remedy.applies(look))
        return (call, look, remedies) if remedies else None

    def _pass(self, reason: str) -> None:
        with self._lock:
            self._passed[reason] += 1


_NAMES = ("query", "key", "value")
_function_modes, _tracing_state = torch._C._len_torch_function_stack, torch._C._get_tracing_state


def _records_gradient(call: AttentionCall) -> bool:
    inputs = (call.query, call.key, call.value)
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)


def guard(
    rule: str | os.PathLike[str] | None = None,
    *,
    all_threads: bool = False,
    preloaded: Sequence[Mapping[str, str]] = (),
) -> Guard:
    """Keep attention right on this torch: change the calls that meet a known bug, exactly, and leave all others alone.

    A call is changed when it matches a known issue on the kernel that PyTorch would choose for it, its device,
    dtype, layout and lengths; it then gets contiguous key and value, or MATH, whichever is the least that avoids the
    bug. The first such call of each issue gives a `GuardWarning` that names it and the release that fixes it.

    rule: a result of `sdpa-repro explain --json`, whose conditions and lengths then decide instead. all_threads:
    guard every thread of the process; otherwise this context and the threads started in it. preloaded: what
    `environment.preload` ran, with which bugs of other devices may have been planted here. Raises InputError for a
    rule that cannot be used. A torch that does not need it gives a `GuardNotNeeded` and is not touched.

    Not seen: compiled code that inductor made, TorchScript, and aten ops called directly.

        with sdpa_repro.guard() as guard:
            model.generate(**inputs)
        print(guard.report())
    """
    return make_guard(rule, all_threads=all_threads, preloaded=preloaded)


def make_guard(
    rule: str | os.PathLike[str] | None,
    *,
    all_threads: bool,
    preloaded: Sequence[Mapping[str, str]],
    on_change: Callable[[], None] | None = None,
) -> Guard:
    """`guard` with something to call after each change (see `Guard`)."""
    devices = devices_here()
    if rule is not None:
        found = read_rule(rule, devices)
        return Guard([found.remedy], unneeded=found.unneeded, all_threads=all_threads, on_change=on_change)
    remedies = known_remedies(devices=devices, emulated=bool(preloaded))
    unneeded = "" if remedies else f"torch {torch.__version__} ({', '.join(devices)}) has {NO_BUG}"
    return Guard(remedies, unneeded=unneeded, all_threads=all_threads, on_change=on_change)


def _suspend_compiler() -> Any:
    """In code that torch.compile is running, interpret what follows: calls that are traced cannot be guarded.

    Returns what `_resume_compiler` takes; None outside such code.
    """
    if "torch._dynamo" not in sys.modules:
        return None
    frames: Any = torch._C._dynamo.eval_frame
    return frames.set_eval_frame(None)


def _resume_compiler(callback: Any) -> None:
    if callback is not None:
        frames: Any = torch._C._dynamo.eval_frame
        frames.set_eval_frame(callback)
