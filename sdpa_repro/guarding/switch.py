"""The function that stands in for `scaled_dot_product_attention` while a guard is open, and where it is active.

Guards belong to the context that opened them (a `ContextVar`) and to the threads that are started in it, or to
the whole process. The stand-in lies below the recorder's, so that guard and capture may open and close in any order.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

from sdpa_repro.attention import AttentionCall
from sdpa_repro.capturing import recorder
from sdpa_repro.capturing.patching import Patch, Replacement, untouched
from sdpa_repro.guarding.cures import attend, combined
from sdpa_repro.guarding.remedies import Look, Remedy

Found = tuple[AttentionCall, Look, tuple[Remedy, ...]]
"""A call that is to be changed: as it came, as its kernel gets it, and why."""


class GuardWarning(UserWarning):
    """The guard changed a call, or saw one that it could not change."""


class Guarding(Protocol):
    """What a guard answers."""

    depth: int
    """How often it is open."""

    @property
    def see(self) -> Callable[[], Any]:
        """Count a call."""

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Found | None:
        """The call with the reasons to change it; None for none. Never raises."""

    def changed(self, remedies: tuple[Remedy, ...]) -> None:
        """Count a call that is changed."""

    def missed(self, thread: str) -> None:
        """Count a call outside the guard's context that should have been changed."""


@dataclass
class Switch:
    """Which guards are open in this process; the patches are in place while any is."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    patch: Patch | None = None
    start: Callable[[threading.Thread], None] | None = None
    """`threading.Thread.start` as it was."""
    covering: Callable[[threading.Thread], None] | None = None
    """What stands in for it."""
    open: tuple[Guarding, ...] = ()
    everywhere: tuple[Guarding, ...] = ()
    told: frozenset[str] = frozenset()
    """What has been warned about since the first of the open guards was opened."""


_SWITCH = Switch()
_HERE: ContextVar[tuple[Guarding, ...]] = ContextVar("sdpa_repro_guards", default=())


def enter(guard: Guarding, *, everywhere: bool) -> None:
    """Make the guard active in this context or everywhere; the first one puts the patches in place."""
    with _SWITCH.lock:
        if _SWITCH.patch is None:
            recorder.SDPA.original = SDPA
            _SWITCH.patch = Patch([SDPA])
            _SWITCH.start = threading.Thread.start
            _SWITCH.covering = _covering(_SWITCH.start)
            _set_start(_SWITCH.covering)
        guard.depth += 1
        _SWITCH.open = (*_SWITCH.open, guard)
        if everywhere:
            _SWITCH.everywhere = (*_SWITCH.everywhere, guard)
    if not everywhere:
        _HERE.set((*_HERE.get(), guard))


def leave(guard: Guarding, *, everywhere: bool) -> None:
    """Undo one `enter`; the last one takes the patches away."""
    if not everywhere:
        _HERE.set(_without(_HERE.get(), guard))
    with _SWITCH.lock:
        guard.depth -= 1
        _SWITCH.open = _without(_SWITCH.open, guard)
        if everywhere:
            _SWITCH.everywhere = _without(_SWITCH.everywhere, guard)
        patch = _SWITCH.patch
        if not _SWITCH.open and patch is not None:
            _SWITCH.patch, _SWITCH.told = None, frozenset()  # first: after Ctrl-C the next guard then puts all in place
            recorder.SDPA.original = SDPA.original
            try:
                patch.restore()
            finally:
                if threading.Thread.start is _SWITCH.covering and _SWITCH.start is not None:
                    _set_start(_SWITCH.start)  # else somebody has replaced it since, and keeps what does nothing


def forget() -> None:
    """In a forked child: the guards are copies of the parent's, and the lock may be held; the patches stay."""
    _SWITCH.lock = threading.RLock()
    _SWITCH.open = _SWITCH.everywhere = ()
    _HERE.set(())


def tell(key: str, text: str, stacklevel: int, category: type[Warning] = GuardWarning) -> None:
    """Warn, once for each key while guards are open."""
    with _SWITCH.lock:
        if key in _SWITCH.told:
            return
        _SWITCH.told |= {key}
    warnings.warn(text, category, stacklevel=stacklevel + 1)


def _without(guards: tuple[Guarding, ...], guard: Guarding) -> tuple[Guarding, ...]:
    """The guards less the last one that is `guard`."""
    index = next((i for i in reversed(range(len(guards))) if guards[i] is guard), None)
    return guards if index is None else (*guards[:index], *guards[index + 1 :])


def _set_start(start: Callable[[threading.Thread], None]) -> None:
    thread: Any = threading.Thread
    thread.start = start


def _covering(start: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    """`Thread.start` that hands this context's guards, and nothing else of it, to the new thread."""

    @functools.wraps(start)
    def covered(thread: threading.Thread) -> None:
        guards = tuple(guard for guard in _HERE.get() if guard.depth)
        if not guards or thread.ident is not None:
            return start(thread)
        run, own = thread.run, dict(vars(thread))

        def as_it_was() -> None:
            if "run" in own:
                vars(thread)["run"] = own["run"]
            else:
                vars(thread).pop("run", None)

        def guarded() -> None:
            as_it_was()
            _HERE.set(guards)
            run()

        vars(thread)["run"] = guarded
        try:
            return start(thread)
        except BaseException:
            as_it_was()
            raise

    return covered


def _attention(original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What runs instead of `scaled_dot_product_attention`."""
    here, everywhere = _HERE.get(), _SWITCH.everywhere
    if everywhere:
        here = everywhere + here
    if not here:
        return untouched(original, args, kwargs) if not _SWITCH.open else _elsewhere(original, args, kwargs)
    found: tuple[Found, ...] = ()
    for guard in here if len(here) == 1 else dict.fromkeys(here):
        if guard.depth:
            guard.see()
            match = guard.find(args, kwargs)
            if match is not None:
                guard.changed(match[2])
                found = (*found, match)
    if not found:
        return untouched(original, args, kwargs)
    call, look, _ = found[0]
    remedies = {remedy.name: remedy for _, _, each in found for remedy in each}
    for remedy in remedies.values():
        tell(remedy.name, _changed(remedy, look), stacklevel=3)
    return attend(original, call, combined(remedy.cure for remedy in remedies.values()))


def _elsewhere(original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call outside every guard's context: left as it is, and told of when it should not be."""
    for guard in dict.fromkeys(_SWITCH.open):
        found = guard.find(args, kwargs)
        if found is not None:
            name = threading.current_thread().name
            guard.missed(name)
            about = found[2][0].about(found[1])
            tell(
                f"elsewhere {found[2][0].name}",
                f"a call that meets {about} was made outside the guard, in thread {name}, and left as it is; "
                "open the guard there, or with all_threads=True",
                stacklevel=4,
            )
    return untouched(original, args, kwargs)


def _changed(remedy: Remedy, look: Look) -> str:
    rows, keys = look.call.query.shape[-2], look.call.key.shape[-2]
    return (
        f"a call with L = {rows}, S = {keys} on {look.backend} meets {remedy.about(look)}; "
        f"the guard gives such calls {remedy.cure.words}"
    )


SDPA = Replacement(recorder.SDPA.original, _attention, "torch.nn.functional", "scaled_dot_product_attention")
"""One object for the life of the process: compiled code may keep it."""
