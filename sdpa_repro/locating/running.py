"""The paths that a prefill can be computed on: as users run it, and three that a faulty kernel has no part in."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from sdpa_repro.capturing import load_errors
from sdpa_repro.capturing.prefill import Prefill
from sdpa_repro.capturing.prompts import to_device
from sdpa_repro.environment import free_memory
from sdpa_repro.errors import InputError
from sdpa_repro.replaying.check import full_precision

__all__ = ["Path", "running"]


class Path(Enum):
    """How a model computes its attention."""

    DEFAULT = "default"
    """As it is: what users run."""
    MATH = "MATH"
    """SDPA held to its MATH backend."""
    EAGER = "eager"
    """transformers' explicit matrix products and softmax."""
    FLOAT32 = "float32"
    """A copy of the model in float32, SDPA held to MATH, no TF32 products: the nearest to exact that is cheap."""


@contextmanager
def running(prefill: Prefill, path: Path) -> Iterator[Prefill]:
    """The prefill to call `forward` on so that it runs on `path`; the model is as before after the block.

    Pad the prefill that is given, not the one put in: with `FLOAT32` its model is a copy (made once, freed
    after the block) and its floating-point inputs are float32. Raises InputError, one line, when the model
    cannot take the path.
    """
    if path is Path.DEFAULT:
        yield prefill
    elif path is Path.MATH:
        with sdpa_kernel(SDPBackend.MATH):
            yield prefill
    elif path is Path.EAGER:
        with _eager(prefill):
            yield prefill
    else:
        with sdpa_kernel(SDPBackend.MATH), full_precision():
            yield _float32(prefill)


@contextmanager
def _eager(prefill: Prefill) -> Iterator[None]:
    """Every attention module of the model on transformers' eager path."""
    model = prefill.model
    if not hasattr(model, "set_attn_implementation"):
        raise InputError(f"{prefill.name} cannot be switched to eager attention")
    before = [(config, config._attn_implementation) for config in _configurations(model)]
    try:
        try:
            with _without_warnings():
                model.set_attn_implementation("eager")
        except Exception as error:
            raise InputError(f"{prefill.name} has no eager attention: {load_errors.first_line(error)}") from error
        kinds = {config._attn_implementation for config in _configurations(model)} - {"eager", None}
        if kinds:
            raise InputError(f"{prefill.name} cannot be switched to eager attention: part of it stays {min(kinds)}")
        yield
    finally:
        for config, kind in before:
            # the plain attribute: the property and `set_attn_implementation` hand the value on to inner configurations
            config._attn_implementation_internal = kind


@contextmanager
def _without_warnings() -> Iterator[None]:
    """transformers warns about configurations without a module of their own, which is nothing the user can mend."""
    logger = logging.getLogger("transformers.modeling_utils")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _configurations(model: Any) -> list[Any]:
    """The configurations that the model's parts read, and those inside them, each once."""
    waiting = [getattr(module, "config", None) for module in model.modules()]
    found: dict[int, Any] = {}
    while waiting:
        config = waiting.pop()
        if config is not None and hasattr(config, "_attn_implementation_internal") and id(config) not in found:
            found[id(config)] = config
            waiting += [getattr(config, name, None) for name in config.sub_configs]
    return list(found.values())


def _float32(prefill: Prefill) -> Prefill:
    """The prefill with a float32 copy of the model."""
    model = prefill.model
    if prefill.dtype.itemsize >= 4:
        raise InputError(f"{prefill.name} runs in {str(prefill.dtype).removeprefix('torch.')} already")
    if getattr(model.config, "quantization_config", None) is not None:
        raise InputError(f"{prefill.name} is quantised: there is no float32 copy of it")
    needed = sum(weight.numel() * max(4, weight.element_size()) for weight in model.parameters())
    if needed > free_memory(prefill.device):
        raise InputError(f"a float32 copy of {prefill.name} takes {needed / 1e9:.1f} GB: more than is free")
    try:
        whole = copy.deepcopy(model).float()
    except Exception as error:
        if load_errors.is_out_of_memory(error):
            raise load_errors.out_of_memory(prefill.device) from error
        raise InputError(f"{prefill.name} cannot be copied to float32: {load_errors.first_line(error)}") from error
    inputs = to_device(prefill.inputs, prefill.device, torch.float32)
    return replace(prefill, model=whole, inputs=inputs, dtype=torch.float32)
