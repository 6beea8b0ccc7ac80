"""Run an action right after a module has been imported, without importing it.

Needs the standard library alone: the hook of `capture -- script.py` loads it at interpreter start.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


class AfterImport:
    """A finder on `sys.meta_path` that finds nothing itself: it lets the others find `name` and adds `action`."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self.name = name
        self.action = action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Spec of the module as the finders after this one give it, its loader's `exec_module` followed by the action.

        Not every spec is imported: `importlib.util.find_spec("torch")` is how packages ask whether torch is there.
        """
        if fullname != self.name or self not in sys.meta_path:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(fullname, path, target) if find is not None else None
            if spec is not None:
                self._follow(spec)
                return spec
        return None

    def _follow(self, spec: ModuleSpec) -> None:
        """Shadow `exec_module` on this one loader object; the shadow goes before the module runs."""
        loader = spec.loader
        if loader is None:
            return
        run, shadowed = loader.exec_module, "exec_module" in vars(loader)

        def exec_module(module: ModuleType) -> None:
            if shadowed:  # by another one that waits for this module
                loader.exec_module = run  # type: ignore[method-assign]
            else:
                del loader.exec_module
            run(module)
            if self in sys.meta_path:
                forget(self)
                self.action()

        loader.exec_module = exec_module  # type: ignore[method-assign]


def after_import(name: str, action: Callable[[], None]) -> AfterImport | None:
    """Call `action` once when `name` has been imported: now if it has been, else at the end of its import.

    Returns the pending finder (see `forget`), or None when the action has run.
    """
    if name in sys.modules:
        action()
        return None
    finder = AfterImport(name, action)
    sys.meta_path.insert(0, finder)
    return finder


def forget(finder: AfterImport | None) -> None:
    """Take a pending finder off `sys.meta_path`; nothing happens when it is not there."""
    if finder in sys.meta_path:
        sys.meta_path.remove(finder)
