"""Signs of attention that no recorder of `scaled_dot_product_attention` can see: other kernels, other processes."""

from __future__ import annotations

import gc
import sys
from typing import Any

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
    return found + _other_implementations()


def compiled_regions() -> int:
    """How many pieces of code `torch.compile` has made that are still alive, before the session or during it."""
    dynamo: Any = sys.modules.get("torch._dynamo.convert_frame")
    try:
        return sum(code() is not None for code in dynamo.output_codes.seen) if dynamo is not None else 0
    except Exception:  # not a public interface: other releases may not have it
        return 0


def _children_alive() -> int:
    multiprocessing: Any = sys.modules.get("multiprocessing.process")
    return len(multiprocessing.active_children()) if multiprocessing is not None else 0


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
