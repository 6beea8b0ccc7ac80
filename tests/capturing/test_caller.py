"""The caller's name: the module that makes a call, or the line."""

from __future__ import annotations

import sys
import threading
from typing import Any

import torch
from torch import nn

from sdpa_repro.capturing.caller import Callers


class Named(nn.Module):
    """Names its own caller when it is run."""

    def forward(self, callers: Callers) -> str:
        return callers.name(sys._getframe())


def attention_function(module: nn.Module, callers: Callers) -> str:
    return callers.name(sys._getframe())


class Delegating(nn.Module):
    """Hands itself to a function, as transformers' attention modules do."""

    def forward(self, callers: Callers) -> str:
        return attention_function(self, callers)


class Processor:
    """A plain object between module and call, as in diffusers."""

    def __call__(self, attention: nn.Module, callers: Callers) -> str:
        return callers.name(sys._getframe())


class Processed(nn.Module):
    def forward(self, callers: Callers) -> str:
        return Processor()(self, callers)


class Root(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleDict({"self_attn": inner})])

    def forward(self, callers: Callers) -> Any:
        return self.layers[0]["self_attn"](callers)  # type: ignore[index]


class Raising(nn.Module):
    def named_modules(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("not now")

    def forward(self, callers: Callers) -> str:
        return callers.name(sys._getframe())


def test_the_innermost_module_is_named_by_its_path_in_the_outermost() -> None:
    for inner in (Named(), Delegating(), Processed()):
        assert Root(inner)(Callers()) == "layers.0.self_attn"


def test_a_root_that_calls_by_itself_is_named_by_its_class() -> None:
    assert Named()(Callers()) == "Named"


def test_a_module_that_is_not_part_of_the_root_is_named_by_the_next_one_that_is() -> None:
    stranger = Named()

    class Holder(nn.Module):
        def forward(self, callers: Callers) -> Any:
            return stranger(callers)

    assert Root(Holder())(Callers()) == "layers.0.self_attn"


def test_a_call_outside_modules_is_named_by_its_line_without_folders() -> None:
    name, line = Callers().name(sys._getframe()), sys._getframe().f_lineno
    assert name == f"test_caller.py:{line}"


def test_a_module_that_cannot_be_asked_is_named_by_the_line() -> None:
    assert Raising()(Callers()).startswith("test_caller.py:")


def test_wrappers_of_torch_do_not_show() -> None:
    root = Root(Named())
    compiled = torch.compile(root, backend="eager", disable=True)
    assert compiled(Callers()) == "layers.0.self_attn"


def test_modules_that_are_gone_are_forgotten() -> None:
    callers = Callers()
    for _ in range(50):
        assert Root(Named())(callers) == "layers.0.self_attn"
    assert len(callers._paths) < 20


def test_a_module_keeps_its_path_while_another_thread_looks_one_up() -> None:
    """The other thread begins first, and goes on when this one has listed its model but not looked into the list."""
    callers, listing, listed, told = Callers(), threading.Event(), threading.Event(), threading.Event()

    class Gate:
        """Stands for a module that is remembered, and stops the other thread when it asks whether that is alive."""

        def __call__(self) -> bool:
            if threading.current_thread() is other:
                listing.set()
                listed.wait(60)
            return True

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Named()

        def named_modules(self, *arguments: Any, **words: Any) -> Any:
            yield from super().named_modules(*arguments, **words)
            listed.set()
            told.wait(60)

        def forward(self) -> str:
            name: str = self.inner(callers)
            return name

    def look_up() -> None:
        nn.Sequential(Named())(callers)
        told.set()

    gate: Any = Gate()
    callers._paths[0, 0] = (gate, gate, "a module")
    other = threading.Thread(target=look_up)
    other.start()
    assert listing.wait(60)
    assert Outer()() == "inner"
    other.join(60)
