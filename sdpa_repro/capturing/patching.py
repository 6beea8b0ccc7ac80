"""Replace functions of torch wherever a loaded module refers to them, and put them back.

A replacement has to pass for the function it replaces: torch hands the object it finds under
`torch._C._nn` to `__torch_function__`, and users compare it or look it up in tables; Dynamo keeps such a
table too, and TorchScript one by `id`. Hence a callable object that equals and hashes like the original,
and not a Python function (which, as a class attribute, would also bind `self`).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from sdpa_repro.capturing.after_import import AfterImport, after_import, forget

Observer = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Called as (original function, args, kwargs); does the call and returns its result."""


class _Suspended(threading.local):
    """What looked at the functions that this thread called, until an observer began its work."""

    compiler: Any = None


_SUSPENDED = _Suspended()


def untouched(original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An observer's call of the original function: `torch.compile` sees of it what it would without the observer."""
    compiler = _SUSPENDED.compiler
    if compiler is None:
        return original(*args, **kwargs)
    frames: Any = torch._C._dynamo.eval_frame
    _SUSPENDED.compiler = None
    frames.set_eval_frame(compiler)
    try:
        return original(*args, **kwargs)
    finally:
        frames.set_eval_frame(None)
        _SUSPENDED.compiler = compiler


class Replacement:
    """Stands in for `original`, which lives as `name` in `module`; every call goes to `observer`."""

    def __init__(self, original: Any, observer: Observer, module: str, name: str) -> None:
        self.original = original
        self.observer = observer
        self._home = (_ByName(module), name)
        for attribute in ("__name__", "__qualname__", "__module__", "__doc__"):
            setattr(self, attribute, getattr(original, attribute, None))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the observer, unseen by `torch.compile`, which may look at what is called from a frame it gave up."""
        if "torch._dynamo" not in sys.modules:
            return self.observer(self.original, args, kwargs)
        frames: Any = torch._C._dynamo.eval_frame
        compiler, before = frames.set_eval_frame(None), _SUSPENDED.compiler
        if compiler is None and before is None:
            return self.observer(self.original, args, kwargs)
        _SUSPENDED.compiler = compiler
        try:
            return self.observer(self.original, args, kwargs)
        finally:
            _SUSPENDED.compiler = before
            if compiler is not None:
                frames.set_eval_frame(compiler)

    def __eq__(self, other: object) -> bool:
        below = self.original
        return other is self or other is below or (isinstance(below, Replacement) and below == other)

    def __hash__(self) -> int:
        return hash(self.original)

    def __repr__(self) -> str:
        return repr(self.original)

    def __copy__(self) -> Replacement:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Replacement:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled by name, so that what is saved under the recorder loads without it."""
        return getattr, self._home


@dataclass(frozen=True)
class _ByName:
    """Pickles as a module."""

    module: str

    def __reduce__(self) -> tuple[Any, ...]:
        return import_module, (self.module,)


class Patch:
    """Replacements in place from construction to `restore`."""

    def __init__(self, replacements: Iterable[Replacement]) -> None:
        self.replacements = tuple(replacements)
        self._swap({id(each.original): each for each in self.replacements})
        self._tell_torchscript()
        self._pending: AfterImport | None = after_import("torch._dynamo", self._tell_dynamo)

    def restore(self) -> None:
        """Put the originals back, also where a module imported meanwhile took a replacement."""
        forget(self._pending)
        self._swap({id(each): each.original for each in self.replacements})
        self._tell_torchscript()

    def _swap(self, new: dict[int, Any]) -> None:
        for names in namespaces():
            if new.keys().isdisjoint(map(id, list(names.values()))):
                continue
            for name, value in list(names.items()):
                if id(value) in new and new[id(value)] is not value:
                    names[name] = new[id(value)]

    def _tell_torchscript(self) -> None:
        """Its table goes by `id` and may have been built before or while the replacements were in place."""
        builtins: Any = sys.modules.get("torch.jit._builtins")
        table = getattr(builtins, "_builtin_table", None)
        if table is None:
            return
        for each in self.replacements:
            known = table.get(id(each.original)) or table.get(id(each))
            if known is not None:
                table[id(each.original)] = table[id(each)] = known

    def _tell_dynamo(self) -> None:
        """Let `torch.compile` write calls of the replacements into its graph, as it does for the originals."""
        from torch._dynamo.decorators import skip
        from torch.compiler import allow_in_graph

        skip(Replacement.__call__)  # called from a frame that could not be compiled
        for each in self.replacements:
            allow_in_graph(each)


def namespaces() -> Iterator[dict[str, Any]]:
    """The attributes of every loaded module; its `__dict__`, so that no lazy module is woken up."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None) if isinstance(module, ModuleType) else None
        if names is None or module.__name__.startswith(("sdpa_repro.capturing", "sdpa_repro.guarding")):
            continue
        yield names
