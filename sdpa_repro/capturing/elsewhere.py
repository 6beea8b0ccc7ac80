"""Signs of attention that no recorder of `scaled_dot_product_attention` can see: other kernels, other processes."""

from __future__ import annotations

import functools
import gc
import sys
from types import CellType
from typing import Any

import torch
from torch import nn

OTHER_KERNELS = (
    "flash_attn",
    "flash_attn_interface",
    "flash_attn_3",
    "xformers.ops",
    "vllm",
    "sglang",
    "sageattention",
    "tensorrt_llm",
    "flashinfer",
    "torch.nn.attention.varlen",
)
"""Packages that compute attention with kernels of their own."""


def child_seconds() -> float:
    """CPU seconds of child processes that have ended so far; 0 where the system does not tell."""
    try:
        import resource
    except ImportError:
        return 0.0
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def hints(children_before: float, *, thorough: bool) -> list[str]:
    """What else was noticed, a phrase each; `thorough` also looks at the models alive (takes a moment)."""
    found = [f"{name} is loaded (its kernels bypass SDPA)" for name in OTHER_KERNELS if name in sys.modules]
    seconds = child_seconds() - children_before
    alive = _children_alive()
    if alive or seconds > 0.01:
        found.append(f"child processes ({alive} running, {seconds:.1f} s of CPU time in ended ones)")
    compiled = compiled_regions()
    if compiled:
        found.append(
            f"{compiled} region{'s' if compiled != 1 else ''} compiled by torch.compile (attention that runs inside "
            "is not seen, unless compiled with backend='eager')"
        )
    if not thorough:
        return found
    if "torch.nn.attention.flex_attention" in sys.modules and "transformers" not in sys.modules:
        found.append("flex_attention is loaded (it compiles kernels of its own)")
    return found + _held() + _lowered() + _other_implementations()


def compiled_regions() -> int:
    """How many pieces of code `torch.compile` has made that are still alive, before the session or during it."""
    dynamo: Any = sys.modules.get("torch._dynamo.convert_frame")
    try:
        return sum(code() is not None for code in dynamo.output_codes.seen) if dynamo is not None else 0
    except Exception:  # not a public interface: other releases may not have it
        return 0


def _children_alive() -> int:
    """Children of `multiprocessing` that nobody has waited for; unlike `active_children()` this does not either."""
    multiprocessing: Any = sys.modules.get("multiprocessing.process")
    try:
        children = list(multiprocessing._children) if multiprocessing is not None else []
        return sum(child._popen is not None and child._popen.returncode is None for child in children)
    except Exception:  # not a public interface
        return 0


def _held() -> list[str]:
    """Objects outside modules that have the function itself: a replacement in the modules does not reach them."""
    current: Any = torch._C._nn.scaled_dot_product_attention
    count = sum(_calls_it(holder) for holder in gc.get_referrers(getattr(current, "original", current)))
    if not count:
        return []
    return [
        f"{count} object{'s' * (count != 1)} made before the capture that hold{'s' * (count == 1)} the function itself "
        "(a partial, a closure, an attribute; calls through it are not seen)"
    ]


def _calls_it(holder: Any) -> bool:
    """Whether it is a partial, a closure, or the attributes of a module or class, and none of torch's own tables."""
    if type(holder) is dict:
        return "__module__" in holder or "_parameters" in holder
    return isinstance(holder, (functools.partial, CellType, nn.Module))


def _lowered() -> list[str]:
    """Code that calls SDPA below Python's functions: TorchScript, and graphs as `torch.export` writes them."""
    scripted = exported = False
    for thing in gc.get_objects():
        kind = type(thing)
        if issubclass(kind, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
            scripted = True
        elif issubclass(kind, torch.fx.GraphModule):
            exported |= any("aten.scaled_dot_product" in str(node.target) for node in thing.graph.nodes)
    found = ["TorchScript is loaded (attention that runs inside is not seen)"] if scripted else []
    return found + (["torch.export graphs with attention (calls that run inside are not seen)"] if exported else [])


def _other_implementations() -> list[str]:
    """Models of transformers that were told to use another attention function than SDPA."""
    found = set()
    for thing in gc.get_objects():
        if not issubclass(type(thing), nn.Module) or not hasattr(type(thing), "from_pretrained"):
            continue
        name = getattr(getattr(thing, "config", None), "_attn_implementation", None)
        if isinstance(name, str) and name != "sdpa":
            found.add(f"{type(thing).__name__} uses attn_implementation={name!r}")
    return sorted(found)
