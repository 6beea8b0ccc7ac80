"""Which module makes an attention call: read from the Python stack, without hooks on the model.

The innermost frame that belongs to an `nn.Module` (its `self`, or the first argument `module` of
transformers' attention functions) gives the module, the outermost one the root whose `named_modules`
gives the path. A call outside modules is named by the line that makes it, `file.py:123`.
"""

from __future__ import annotations

import inspect
import os
import sys
import weakref
from types import FrameType
from typing import Any

import torch
from torch import nn

from sdpa_repro.capturing.handlers import hand_on

FIRST_ARGUMENTS = ("self", "module")
WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Attributes that wrappers of torch put between a module and its parent."""

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep


class Callers:
    """Names callers; remembers the paths of modules for as long as the modules live."""

    def __init__(self) -> None:
        self._paths: dict[tuple[int, int], tuple[weakref.ref[nn.Module], weakref.ref[nn.Module], str]] = {}

    def name(self, frame: FrameType | None) -> str:
        """Path of the calling module, such as "model.layers.5.self_attn", or the calling line.

        `frame` is the one that makes the call. The root itself has an empty path and goes by its class name.
        """
        try:
            return self._module(frame) or calling_line(frame)
        except Exception as error:  # a user's module may do anything when it is asked for its children
            hand_on(error)
            return calling_line(frame)

    def _module(self, frame: FrameType | None) -> str | None:
        """Path of the innermost module on the stack that the outermost one knows; None without any module."""
        frames = []
        while frame is not None:
            code = frame.f_code
            if code.co_flags & inspect.CO_OPTIMIZED and code.co_argcount and code.co_varnames[0] in FIRST_ARGUMENTS:
                frames.append(frame)
            frame = frame.f_back
        root = next((found for each in reversed(frames) if (found := _first_argument(each)) is not None), None)
        if root is None:
            return None
        for each in frames:
            module = _first_argument(each)
            path = self._path(root, module) if module is not None else None
            if module is not None and path is not None:
                return path or type(module).__name__
        return type(root).__name__

    def _path(self, root: nn.Module, module: nn.Module) -> str | None:
        """Path of `module` below `root`, None when it is not there."""
        found = self._paths.get((id(root), id(module)))
        if found is None or found[0]() is not root or found[1]() is not module:
            fresh = {key: value for key, value in list(self._paths.items()) if value[0]() and value[1]()}
            here = weakref.ref(root)
            for path, child in root.named_modules():
                fresh[id(root), id(child)] = (here, weakref.ref(child), _without_wrappers(path))
            self._paths = fresh  # at once: other threads look modules up meanwhile
            found = fresh.get((id(root), id(module)))
        return found[2] if found is not None else None


def _without_wrappers(path: str) -> str:
    return ".".join(part for part in path.split(".") if part not in WRAPPERS)


def _first_argument(frame: FrameType) -> nn.Module | None:
    """The frame's first argument if it is a module.

    Before Python 3.13 `f_locals` of a function is a dict that the frame keeps, and with it every tensor in
    it; it is emptied again unless the function itself holds it (`locals()`).
    """
    names: Any = frame.f_locals
    value = names.get(frame.f_code.co_varnames[0])
    if sys.version_info < (3, 13) and sys.getrefcount(names) <= 3:  # the frame, `names`, and the argument
        names.clear()
    return value if issubclass(type(value), nn.Module) else None


def calling_line(frame: FrameType | None) -> str:
    """`file.py:123` of the innermost frame outside torch and this package; no folders."""
    first = frame
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, _HERE)):
        frame = frame.f_back
    frame = frame or first
    if frame is None:
        return "unknown"
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
