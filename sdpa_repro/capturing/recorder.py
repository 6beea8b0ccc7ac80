"""The function that stands in for `scaled_dot_product_attention`, and what it sees of a call.

Sessions belong to the context that opened them (a `ContextVar`: threads and tasks started elsewhere do not
see them) or, with `everywhere`, to the process. The call itself runs exactly as without the recorder, its
result is handed on untouched; sessions look at it right afterwards, on the live tensors.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property
from types import FrameType
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
import torch.nn.functional
from torch import Tensor
from torch.utils import _python_dispatch

from sdpa_repro.attention import AttentionCall
from sdpa_repro.capturing.aside import Aside, apart, undisturbed
from sdpa_repro.capturing.caller import Callers
from sdpa_repro.capturing.handlers import hand_on
from sdpa_repro.capturing.passing import COMPILED, NOT_TENSORS, RECOMPUTED, bind, ends_early, local, reason_to_pass
from sdpa_repro.capturing.patching import Patch, Replacement, untouched
from sdpa_repro.replaying.backends import dispatched
from sdpa_repro.replaying.check import LiveCheck

Result = TypeVar("Result")
Judge = Callable[[AttentionCall, Tensor, bool], LiveCheck]
"""The live check of a call and its output; whether the caller's own thread may compute it."""

FAST_PATHS = ("_transformer_encoder_layer_fwd", "_native_multi_head_attention")
"""Functions of torch that compute attention without an SDPA call, for modules in eval mode."""


class Stopped(SystemExit):
    """Ends the recorded code after the first divergence (`stop_at_first`): caught by `capture`, silent in a script."""

    def __init__(self, session: Listener) -> None:
        super().__init__(0)
        self.session = session


@dataclass(frozen=True)
class Seen:
    """One call as it was seen, before and after it ran: its tensors are live and belong to the model."""

    call: AttentionCall
    output: Tensor | None
    error: str | None
    """Type and text of the exception that the call raised."""
    module: str
    phase: str
    original: Any
    """The function that was called."""
    thread: str
    direct: bool = False
    """Whether nothing stood between the call and the kernel: no mode, no subclass of Tensor."""

    @cached_property
    def kernel(self) -> str:
        """Name of the kernel that ran, as the dispatcher chooses it, or of the function that replaced SDPA."""
        if self.original is not SDPA.original:
            return f"{getattr(self.original, '__module__', '?')}.{getattr(self.original, '__name__', '?')}"
        if self.error is not None:
            return "none (raised)"
        return dispatched(self.call)

    @cached_property
    def here(self) -> bool:
        """Whether the thread that made the call may compute for us: it has its OpenMP pool, and no mode is on."""
        query = self.call.query
        if self.output is None or query.device.type != "cpu":
            return False
        alone = torch.get_num_threads() == 1
        flash = self.direct and self.kernel == "FLASH_ATTENTION"
        if flash and not alone and query.numel() and query.shape[0] * query.shape[1] > 1:
            _RECORDER.pools.started = True  # each of its threads got heads of this call
        return (alone or _RECORDER.pools.started) and undisturbed(query.device)

    def judged(self, judge: Judge) -> LiveCheck:
        """The live check, done once for all sessions that ask."""
        if "live" not in self.__dict__ and self.output is not None:
            self.__dict__["live"] = judge(self.call, self.output, self.here)
        live: LiveCheck = self.__dict__["live"]
        return live

    def again(self, call: AttentionCall) -> Tensor:
        """The same function on other arguments, in the model's grad mode and autocast, unseen by its other modes.

        What autograd saves is not shown to hooks of the model: `torch.utils.checkpoint` counts it.
        """
        own = torch.autograd.graph.saved_tensors_hooks(_itself, _itself) if torch.is_grad_enabled() else nullcontext()
        with own:
            output: Tensor = self.original(call.query, call.key, call.value, **call.keywords)
        return output


class Listener(Protocol):
    """What a session answers to the recorder; none of these may raise anything but `Stopped`."""

    def expect(self, module: str, phase: str) -> int | None:
        """Count a call that begins; its index, or None when the session does not want it."""

    def enter(self, index: int, seen: Seen) -> None:
        """Look at a call that is about to run: no output, no error yet."""

    def take(self, index: int, seen: Seen) -> None:
        """Look at a call that has returned or raised."""

    def passed(self, reason: str) -> None:
        """Count a call that could not be looked at."""

    def elsewhere(self, thread: str) -> None:
        """Count a call made outside the session's context."""


@runtime_checkable
class Forks(Protocol):
    """A session that has something to put right in a forked child."""

    def forked(self) -> None:
        """This is a child's copy: other threads are gone, with whatever they were doing or holding."""


@dataclass(frozen=True)
class Begun:
    """A call that is about to run: the sessions that want it with its index in each, and what they see."""

    takers: tuple[tuple[Listener, int], ...]
    call: AttentionCall | None
    """The arguments as they came; those of `seen` are plain tensors."""
    seen: Seen | None
    inside: bool
    """Whether calls made by this call are part of it."""


NOT_SEEN = Begun((), None, None, inside=True)


class Pools(threading.local):
    """Whether this thread is known to have an OpenMP pool."""

    started = False


@dataclass
class Recorder:
    """Which sessions are open in this process; the patch is in place while any is."""

    lock: threading.RLock
    callers: Callers
    aside: Aside
    pools: Pools
    patch: Patch | None = None
    open: tuple[Listener, ...] = ()
    everywhere: tuple[Listener, ...] = ()


_HERE: ContextVar[tuple[Listener, ...]] = ContextVar("sdpa_repro_sessions", default=())
_INSIDE: ContextVar[bool] = ContextVar("sdpa_repro_inside", default=False)
"""Whether this context is within a recorded call or the recorder's own work: calls are then not seen."""
_RECORDER = Recorder(threading.RLock(), Callers(), Aside(lambda: _INSIDE.set(True)), Pools())


@contextmanager
def listening(session: Listener, *, everywhere: bool = False) -> Iterator[None]:
    """Let `session` see the calls of this context, or of the whole process, during the block."""
    open_session(session, everywhere=everywhere)
    before = _HERE.get()
    if not everywhere:
        _HERE.set((*before, session))
    try:
        yield
    finally:
        _HERE.set(tuple(each for each in _HERE.get() if each is not session))
        close_session(session)


def open_session(session: Listener, *, everywhere: bool) -> None:
    """Put the patch in place if it is not; `everywhere` makes the session see every call of the process."""
    with _RECORDER.lock:
        if _RECORDER.patch is None:
            _RECORDER.patch = Patch(_replacements())
        _RECORDER.open = (*_RECORDER.open, session)
        if everywhere:
            _RECORDER.everywhere = (*_RECORDER.everywhere, session)


def close_session(session: Listener) -> None:
    """Forget the session; the last one takes the patch away."""
    with _RECORDER.lock:
        _RECORDER.open = tuple(each for each in _RECORDER.open if each is not session)
        _RECORDER.everywhere = tuple(each for each in _RECORDER.everywhere if each is not session)
        if not _RECORDER.open and _RECORDER.patch is not None:
            patch, _RECORDER.patch = _RECORDER.patch, None  # Ctrl-C may come at any of these lines
            patch.restore()


def forget_sessions() -> None:
    """In a forked child: the sessions are copies of the parent's; the patch stays."""
    _RECORDER.open = _RECORDER.everywhere = ()
    _HERE.set(())


def _forked() -> None:
    """In a forked child, where locks that other threads held are never released."""
    _RECORDER.lock = threading.RLock()
    _RECORDER.aside.forked()
    _RECORDER.pools = Pools()
    for session in _RECORDER.open:
        if isinstance(session, Forks):
            session.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def _attention(original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What runs instead of `scaled_dot_product_attention`."""
    if _INSIDE.get():
        return untouched(original, args, kwargs)
    sessions = _RECORDER.everywhere + _HERE.get()
    if not sessions:
        for session in _RECORDER.open:
            session.elsewhere(threading.current_thread().name)
        return untouched(original, args, kwargs)
    frame = sys._getframe(2)
    begun = _guarded(sessions, lambda: _begin(sessions, original, args, kwargs, frame)) or NOT_SEEN
    token = _INSIDE.set(begun.inside)
    try:
        output = untouched(original, args, kwargs)
    except Exception as error:
        text = RECOMPUTED if ends_early(error) else f"{type(error).__name__}: {error}"
        _guarded(sessions, lambda: _failed(begun, text))
        raise
    else:
        _guarded(sessions, lambda: _end(begun, output))
    finally:
        _INSIDE.reset(token)
    return output


def _guarded(sessions: tuple[Listener, ...], look: Callable[[], Result]) -> Result | None:
    """`look()`; what goes wrong in it is the recorder's own fault, counted and never the model's to meet."""
    try:
        return look()
    except RecursionError:  # so near the limit nothing can be done
        return None
    except Exception as error:
        hand_on(error)
        for session in sessions:
            session.passed(f"the recorder could not look at it ({type(error).__name__}: {error})"[:200])
        return None


def _begin(sessions: tuple[Listener, ...], original: Any, args: Any, kwargs: Any, frame: FrameType) -> Begun:
    """Decide what becomes of a call, and tell the sessions that it begins."""
    direct = not (torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack())
    with unseen():
        call = bind(args, kwargs)
        reason = NOT_TENSORS if call is None else reason_to_pass(call)
        if call is None or reason is not None:
            for session in sessions:
                session.passed(reason or "")
            return Begun((), call, None, inside=reason == COMPILED)  # tracing comes back for the same call
        module, phase = _RECORDER.callers.name(frame), phase_of(call)
        expected = [(session, session.expect(module, phase)) for session in sessions]
        takers = tuple((session, index) for session, index in expected if index is not None)
        if not takers:
            return Begun((), call, None, inside=True)
        here = local(call, call.query)
        if isinstance(here, str):
            for session, _ in takers:
                session.passed(here)
            return Begun((), call, None, inside=True)
        direct &= all(type(tensor) in (Tensor, torch.nn.Parameter) for tensor in call.tensors.values())
        seen = Seen(here[0], None, None, module, phase, original, threading.current_thread().name, direct)
        for session, index in takers:
            session.enter(index, seen)
        return Begun(takers, call, seen, inside=True)


def _end(begun: Begun, output: Any) -> None:
    """Show a call that has returned to the sessions that want it."""
    if begun.seen is None or begun.call is None:
        return
    with unseen():
        here = local(begun.call, output)
        if isinstance(here, str):
            for session, _ in begun.takers:
                session.passed(here)
        else:
            _show(begun.takers, replace(begun.seen, output=here[1]))


def _failed(begun: Begun, error: str) -> None:
    """Show a call that has raised to the sessions that want it."""
    if begun.seen is None:
        return
    with unseen():
        if error == RECOMPUTED:
            for session, _ in begun.takers:
                session.passed(RECOMPUTED)
        else:
            _show(begun.takers, replace(begun.seen, error=error))


def _show(takers: tuple[tuple[Listener, int], ...], seen: Seen) -> None:
    """Let every session look, also when one of them ends the run. Raises `Stopped`."""
    stops = []
    for session, index in takers:
        try:
            session.take(index, seen)
        except Stopped as stop:
            stops.append(stop)
    if stops:
        raise stops[0]


def _fast_path(original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What runs instead of a fused function that computes attention by itself: it is only counted."""
    for session in _RECORDER.everywhere + _HERE.get():
        session.passed(f"fused torch.{original.__name__} (no scaled_dot_product_attention call)")
    return untouched(original, args, kwargs)


def phase_of(call: AttentionCall) -> str:
    """ "prefill" for L > 1 and S >= L, "decode" for L = 1 and S > 1, else "unknown" (such as cross attention)."""
    rows, keys = call.query.shape[-2], call.key.shape[-2]
    if rows == 1:
        return "decode" if keys > 1 else "unknown"
    return "prefill" if keys >= rows > 1 else "unknown"


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def unseen() -> AbstractContextManager[Any]:
    """Work in a block unseen by the model's function and dispatch modes; even reading a shape would be seen."""
    if not torch._C._len_torch_dispatch_stack():
        return torch._C.DisableTorchFunction()
    stack = ExitStack()
    stack.enter_context(torch._C.DisableTorchFunction())
    stack.enter_context(_python_dispatch._disable_current_modes())
    return stack


def beside(call: AttentionCall, function: Callable[[], Result], here: bool = False) -> Result:
    """`function()` computed beside the model, without gradients and under none of its modes.

    In another thread, unless this one is known to do as well (`Seen.here`).
    """
    if here:
        return apart(function)
    return _RECORDER.aside.run(function, call.query.device)


def _replacements() -> list[Replacement]:
    """One for each function to replace: whatever now stands under the two names of SDPA, and the fast paths."""
    found = [SDPA]
    for home in (torch.nn.functional, torch._C._nn):
        current = home.scaled_dot_product_attention
        if all(current is not each.original and current is not each for each in found):
            found.append(Replacement(current, _attention, home.__name__, "scaled_dot_product_attention"))
    return found + FAST


SDPA = Replacement(
    torch._C._nn.scaled_dot_product_attention, _attention, "torch.nn.functional", "scaled_dot_product_attention"
)
FAST = [Replacement(getattr(torch, name), _fast_path, "torch", name) for name in FAST_PATHS if hasattr(torch, name)]
"""One object a function for the life of the process: compiled code may keep it."""
