"""The caller's name: the module that makes a call, or the line."""

from __future__ import annotations

import sys
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
