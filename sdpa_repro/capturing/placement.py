"""Where a model goes and in which data type, and whether it fits there."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import torch

from sdpa_repro import ranks
from sdpa_repro.capturing.options import DTYPES
from sdpa_repro.environment import free_memory
from sdpa_repro.errors import InputError


def target_device(asked: str | None) -> torch.device:
    """The device asked for, or the first accelerator, or the CPU. InputError when it is not there.

    Each of torchrun's ranks gets a GPU of its own as long as there are enough.
    """
    if asked is None:
        kinds = [kind for kind in ("cuda", "xpu", "mps") if _is_available(kind)]
        if kinds[:1] == ["cuda"] and ranks.world() > 1:
            return torch.device("cuda", ranks.local_rank() % torch.cuda.device_count())
        return torch.device(kinds[0] if kinds else "cpu")
    try:
        device = torch.device(asked)
    except RuntimeError:
        raise InputError(f"{asked!r} is not a device: use cpu, cuda or cuda:N") from None
    if device.type != "cpu" and not _is_available(device.type):
        raise InputError(f"there is no {device.type} device for this torch ({torch.__version__}): use --device cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(f"there are only {torch.cuda.device_count()} GPUs, from cuda:0 on: {asked} is none of them")
    return device


def target_dtype(asked: str | None) -> torch.dtype | None:
    """The data type by its name; None for "auto" and when none was asked for. Raises InputError."""
    if asked is not None and asked not in DTYPES:
        raise InputError(f"{asked!r} is not a data type for a model: use one of {', '.join(DTYPES)}")
    dtype: torch.dtype | None = None if asked in (None, "auto") else getattr(torch, str(asked))
    return dtype


def has_accelerate() -> bool:
    """Whether accelerate is installed; only then transformers can spread a model over devices."""
    return importlib.util.find_spec("accelerate") is not None


def stored_dtype(config: Any) -> torch.dtype:
    """The data type a configuration says its weights have; bfloat16 when it does not say."""
    for section in (config.get_text_config(), config):
        dtype = getattr(section, "dtype", None)
        if isinstance(dtype, torch.dtype):
            return dtype
    return torch.bfloat16


def check_fits(auto: Any, config: Any, dtype: torch.dtype | None, device: torch.device, name: str) -> None:
    """InputError when the weights alone need more memory than the device has free.

    Counted on a copy of the model without storage, so nothing is downloaded or allocated in vain; on Linux
    a process that takes too much host memory is killed without a word. Quantised weights are not judged.
    """
    if getattr(config, "quantization_config", None) is not None:
        return
    dtype = dtype or stored_dtype(config)
    try:
        with torch.device("meta"):
            skeleton = auto.from_config(copy.deepcopy(config), dtype=dtype)
    except Exception:
        return
    needed = sum(weight.numel() * weight.element_size() for weight in skeleton.parameters())
    free = free_memory(device)
    if needed > free:
        raise InputError(
            f"{name} takes {needed / 1e9:.1f} GB in {dtype}, but {device} has {free / 1e9:.1f} GB free: "
            "keep fewer layers (--layers N --random-weights), use --dtype bfloat16, or another --device"
        )


def _is_available(kind: str) -> bool:
    """Whether torch has a device of this kind here."""
    backend = torch.backends.mps if kind == "mps" else getattr(torch, kind, None)
    return bool(backend is not None and hasattr(backend, "is_available") and backend.is_available())
