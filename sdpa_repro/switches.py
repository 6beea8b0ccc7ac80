"""The switches of PyTorch that change which attention kernel runs, or its bits: read them, set them again.

A context may come from a stranger's file, another torch version or another device: what exists is restored,
the rest is listed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.attention

from sdpa_repro.attention import AttentionCall, is_rule

KERNELS = {
    "FLASH_ATTENTION": "flash",
    "EFFICIENT_ATTENTION": "mem_efficient",
    "MATH": "math",
    "CUDNN_ATTENTION": "cudnn",
    "OVERRIDEABLE": "overrideable",
}
"""Name of each backend in `torch._C._get_<name>_sdp_enabled` (as in `torch.nn.attention`)."""

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
MOST_THREADS = 512
"""A larger recorded thread count is not believed: it would cost memory before it gains anything."""


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def read_switches(call: AttentionCall) -> dict[str, Any]:
    """The switches in force now, and each tensor's `requires_grad`, as plain JSON types.

    Reads only; creates no tensor, so that a recorder may ask from inside a model under any mode.
    """
    device = call.query.device
    precision = read_or_none(torch.get_float32_matmul_precision)
    return {
        "device": str(device),
        "backends": {name: read_or_none(_getter(short)) for name, short in KERNELS.items()},
        "priority": read_or_none(_priority),
        "flash_impl": read_or_none(_flash_impl),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "requires_grad": {name: not is_rule(tensor) and tensor.requires_grad for name, tensor in call.tensors.items()},
        "autocast": _autocast(device.type),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "deterministic_warn_only": read_or_none(torch.is_deterministic_algorithms_warn_only_enabled),
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "threads": torch.get_num_threads(),
        "matmul_precision": precision,
        "fp32_precision": read_or_none(_fp32_precision) if precision is None else None,
        "tf32": read_or_none(lambda: torch.backends.cuda.matmul.allow_tf32),
        "cudnn_tf32": read_or_none(lambda: torch.backends.cudnn.allow_tf32),
        "fp16_reduction": read_or_none(lambda: torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction),
        "bf16_reduction": read_or_none(lambda: torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction),
        "math_half_reduction": read_or_none(_math_half_reduction),
        "flush_denormal": _flushes_denormals(),
    }


@contextmanager
def restored(context: Mapping[str, Any], *, device_type: str | None = None) -> Iterator[list[str]]:
    """Set what `context` recorded for the block, and put everything back after it.

    Yields the plain names of what could not be restored (unknown here, wrong type, refused by this torch).
    `requires_grad` is not touched here: it belongs to tensors, see `replaying.worker`. Autocast applies to
    `device_type` (default: the recorded device's), so that a CUDA call's autocast also holds on a CPU.
    """
    skipped: list[str] = []
    with ExitStack() as stack:
        for switch in [*_switches(), _deterministic(context)]:
            if switch.name == "tf32" and context.get("matmul_precision") is not None:
                continue  # the same setting under another name
            _set_for_block(stack, skipped, switch, context.get(switch.name))
        _set_backends(stack, skipped, context)
        flash = Switch("flash_impl", _flash_impl, _set_flash_impl, lambda value: isinstance(value, str))
        _set_for_block(stack, skipped, flash, context.get(flash.name))
        autocast = context.get("autocast")
        if isinstance(autocast, Mapping) and autocast.get("enabled") is True:
            recorded = str(context.get("device", "cpu")).partition(":")[0]
            _enter_autocast(stack, skipped, autocast, device_type or recorded)
        if isinstance(context.get("grad"), bool):
            stack.enter_context(torch.set_grad_enabled(context["grad"]))
        if context.get("inference") is True:
            stack.enter_context(torch.inference_mode())
        yield skipped


def read_or_none(getter: Callable[[], Any]) -> Any:
    """A switch's value, or None where this torch has no such switch or refuses to tell."""
    try:
        return getter()
    except Exception:
        return None


def _getter(short: str) -> Callable[[], bool]:
    return lambda: bool(getattr(torch._C, f"_get_{short}_sdp_enabled")())


def _priority() -> list[str]:
    """Backend names, most preferred first (torch 2.6 and later; CPUs ignore it)."""
    order = torch._C._get_sdp_priority_order()
    names = {member.value: name for name, member in torch.nn.attention.SDPBackend.__members__.items()}
    return [names[int(number)] for number in order if int(number) in names]


def _flash_impl() -> str | None:
    """The activated flash-attention implementation (torch 2.13 and later), for example "FA3"."""
    name = torch.nn.attention.current_flash_attention_impl()
    return None if name is None else str(name)


def _autocast(device_type: str) -> dict[str, Any]:
    enabled = bool(read_or_none(lambda: torch.is_autocast_enabled(device_type)))
    dtype = read_or_none(lambda: torch.get_autocast_dtype(device_type))
    return {
        "enabled": enabled,
        "dtype": dtype_name(dtype) if dtype is not None else None,
        "cache": torch.is_autocast_cache_enabled(),
    }


def _fp32_precision() -> list[str]:
    """CUDA's and the CPU's precision of float32 products, for users of the names that torch 2.9 brought."""
    return [owner.matmul.fp32_precision for owner in _precision_owners()]


def _set_fp32_precision(values: list[str]) -> None:
    for owner, value in zip(_precision_owners(), values, strict=True):
        owner.matmul.fp32_precision = value


def _precision_owners() -> tuple[Any, Any]:
    return torch.backends.cuda, torch.backends.mkldnn


def _math_half_reduction() -> bool:
    """Whether MATH may keep its sums in the half types (torch 2.6 and later; off by default)."""
    return bool(torch._C._get_math_sdp_allow_fp16_bf16_reduction())


def _flushes_denormals() -> bool:
    """Whether this thread flushes denormals: there is no getter, but Python's floats obey the same register."""
    half = 0.5
    return sys.float_info.min * half == 0.0


@dataclass(frozen=True)
class Switch:
    """One global setting: its name in a context, how to read and set it, and which values are believed."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], Any]
    accepts: Callable[[Any], bool] = lambda value: isinstance(value, bool)


def _attribute(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


def _switches() -> list[Switch]:
    """Every setting that `restored` sets, in an order in which a later one does not undo an earlier one."""
    return [
        Switch(
            "threads",
            torch.get_num_threads,
            torch.set_num_threads,
            lambda value: type(value) is int and 1 <= value <= MOST_THREADS,
        ),
        Switch(
            "matmul_precision",
            torch.get_float32_matmul_precision,
            torch.set_float32_matmul_precision,
            lambda value: value in ("highest", "high", "medium"),
        ),
        Switch("fp32_precision", _fp32_precision, _set_fp32_precision, lambda value: isinstance(value, list)),
        Switch("tf32", *_attribute(torch.backends.cuda.matmul, "allow_tf32")),
        Switch("cudnn_tf32", *_attribute(torch.backends.cudnn, "allow_tf32")),
        Switch("fp16_reduction", *_attribute(torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction")),
        Switch("bf16_reduction", *_attribute(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction")),
        Switch("cudnn_deterministic", *_attribute(torch.backends.cudnn, "deterministic")),
        Switch("cudnn_benchmark", *_attribute(torch.backends.cudnn, "benchmark")),
        Switch(
            "math_half_reduction",
            _math_half_reduction,
            lambda value: torch._C._set_math_sdp_allow_fp16_bf16_reduction(value),
        ),
        Switch("flush_denormal", _flushes_denormals, torch.set_flush_denormal),
    ]


def _deterministic(context: Mapping[str, Any]) -> Switch:
    """Deterministic mode, whose two flags are set together."""
    warn_only = context.get("deterministic_warn_only") is True
    return Switch(
        "deterministic",
        torch.are_deterministic_algorithms_enabled,
        lambda value: torch.use_deterministic_algorithms(value, warn_only=warn_only),
    )


def _backend_switches() -> dict[str, Switch]:
    def setter(short: str) -> Callable[[Any], None]:
        return lambda value: getattr(torch._C, f"_set_sdp_use_{short}")(value)

    return {name: Switch(f"backend {name}", _getter(short), setter(short)) for name, short in KERNELS.items()}


def _set_for_block(stack: ExitStack, skipped: list[str], switch: Switch, value: Any) -> None:
    """Set one switch and plan to put it back; a recorded None says that it did not exist there."""
    if value is None:
        return
    try:
        before = switch.read()
        if before == value and type(before) is type(value):
            return
        if not switch.accepts(value):
            raise ValueError(value)
        switch.write(value)
    except Exception:
        skipped.append(switch.name)
    else:
        stack.callback(switch.write, before)


def _set_backends(stack: ExitStack, skipped: list[str], context: Mapping[str, Any]) -> None:
    recorded = context.get("backends")
    known = _backend_switches()
    for name, value in recorded.items() if isinstance(recorded, Mapping) else ():
        if name in known:
            _set_for_block(stack, skipped, known[name], value)
        else:
            skipped.append(f"backend {str(name)[:40]}")
    order = Switch("priority", _priority, _set_priority, lambda value: isinstance(value, list))
    _set_for_block(stack, skipped, order, context.get("priority"))


def _set_priority(names: list[str]) -> None:
    members = torch.nn.attention.SDPBackend.__members__
    torch._C._set_sdp_priority_order([members[name].value for name in names])


def _set_flash_impl(name: str | None) -> None:
    if name is None:
        torch.nn.attention.restore_flash_attention_impl()
    else:
        torch.nn.attention.activate_flash_attention_impl(name)


def _enter_autocast(stack: ExitStack, skipped: list[str], recorded: Mapping[str, Any], device_type: str) -> None:
    dtype = DTYPES.get(str(recorded.get("dtype")))
    try:
        cache = recorded.get("cache") is not False
        stack.enter_context(torch.autocast(device_type, dtype=dtype, enabled=True, cache_enabled=cache))
    except Exception:
        skipped.append("autocast")
