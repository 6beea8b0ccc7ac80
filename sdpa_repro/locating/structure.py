"""The parts of a model, found by how it is built: decoder layers, rotary embeddings, embeddings, source files."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from sdpa_repro.capturing.layers import SENSES

ROTARY = ("rotary", "rope")
LEARNED = ("embed_positions", "wpe", "position_embedding", "position_embeddings")
"""Last parts of the paths of tables of learned positions."""
SLIDING, GLOBAL = "sliding", "global"


@dataclass(frozen=True)
class Stack:
    """A list of layers that a sequence of tokens runs through.

    owner: path of the module that has the list. layers: path to layer, in order. encoder: whether it is the
    encoder of an encoder-decoder model. kinds: for each layer "sliding", "global", or "" when all are alike.
    """

    owner: str
    layers: dict[str, nn.Module]
    encoder: bool
    kinds: dict[str, str]


def stacks(model: Any) -> list[Stack]:
    """The lists of text layers of a model, the encoder's first; towers of images and sounds are left out."""
    found: list[Stack] = []
    taken: list[str] = []
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or senses(path) or any(path.startswith(f"{one}.") for one in taken):
            continue
        layers = {f"{path}.{name}": child for name, child in module.named_children()}
        if not any(attends(layer) for layer in layers.values()):
            continue
        taken.append(path)
        owner = path.rpartition(".")[0]
        encoder = bool(getattr(model.config, "is_encoder_decoder", False)) and "encoder" in owner.split(".")
        found.append(Stack(owner, layers, encoder, _kinds(layers, model.get_submodule(owner))))
    return sorted(found, key=lambda stack: not stack.encoder)


def attends(layer: nn.Module) -> bool:
    """Whether a layer has an attention module inside, going by the names of classes and attributes."""
    return any("attention" in type(part).__name__.lower() or "attn" in path for path, part in layer.named_modules())


def senses(path: str) -> bool:
    """Whether a module belongs to a part of the model that turns images or sounds into embeddings."""
    return any(sense in path.lower() for sense in SENSES)


def rotary(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """Modules of the text side that turn position_ids into cosines and sines."""
    for path, module in model.named_modules():
        name = f"{path.rpartition('.')[2]} {type(module).__name__}".lower()
        if any(word in name for word in ROTARY) and not senses(path) and not list(module.children()):
            yield path, module


def position_tables(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """Tables of learned positions of the text side."""
    for path, module in model.named_modules():
        if path.rpartition(".")[2] in LEARNED and isinstance(module, nn.Embedding) and not senses(path):
            yield path, module


def parent(path: str) -> str:
    """Path of the module that holds another one."""
    return path.rpartition(".")[0]


def display(model: Any, path: str) -> str:
    """The path of a module, or its class for the model itself."""
    return path or type(model).__name__


def source_of(thing: Any) -> str:
    """The file of a class, module or function from its package on (`transformers/models/...`), "" if unknown.

    No folder above the package is named.
    """
    subject = type(thing) if isinstance(thing, nn.Module) else inspect.unwrap(thing) if callable(thing) else thing
    name = getattr(subject, "__module__", None) or ""
    file = getattr(sys.modules.get(name), "__file__", None)
    if not file:
        return ""
    depth = name.count(".") + (Path(file).name == "__init__.py")
    return "/".join(Path(file).parts[-depth - 1 :])


def modelling_modules(model: Any) -> list[Any]:
    """The Python modules that the model's transformers classes come from, and those of their masks."""
    names = {type(module).__module__ for module in model.modules()} | {"transformers.masking_utils"}
    names = {name for name in names if not name.startswith("torch.")}
    return [sys.modules[name] for name in sorted(names) if name in sys.modules]


def _kinds(layers: dict[str, nn.Module], owner: nn.Module) -> dict[str, str]:
    """Which layers see a sliding window and which everything, as the configuration says."""
    types = getattr(getattr(owner, "config", None), "layer_types", None) or []
    if len(set(types)) < 2 or len(types) < len(layers):
        return dict.fromkeys(layers, "")
    named = zip(layers, types, strict=False)
    return {path: SLIDING if "sliding" in kind else GLOBAL if "full" in kind else kind for path, kind in named}
