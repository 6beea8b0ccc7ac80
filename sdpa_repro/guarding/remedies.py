"""Which calls the guard changes, and how: one remedy for each known issue that an exact change of the call avoids.

Issues without one have no remedy: calls that are invalid (pytorch#193728, #187801), and bugs that show without a
call of `scaled_dot_product_attention` (the TransformerEncoder fast path, inductor, aten ops called directly).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from sdpa_repro.attention import AttentionCall
from sdpa_repro.guarding.cures import Cure
from sdpa_repro.known_issues import KNOWN_ISSUES, KnownIssue, Match, may_be_emulated, sentence, where
from sdpa_repro.situation import Answer, Situation

Quick = Callable[[Tensor, Tensor, Tensor, "Tensor | None", bool, int, int], bool]
"""Asked about every call with query, key, value, attn_mask, is_causal, L and S: False when the call cannot match.
Looks at shapes, strides and dtypes alone, the cheapest first."""


Capability = tuple[int, int] | None


@dataclass(frozen=True)
class Look:
    """A call as its kernel gets it, and what surrounds it. backend: as in `SDPBackend`, or "unknown"."""

    call: AttentionCall
    backend: str
    device_type: str
    grad: bool
    capability: Capability


@dataclass(frozen=True)
class Remedy:
    """One reason to change calls. `quick` is asked first, `applies` only where it says True.

    name: the issue, or the file of a rule. about: the issue and the release that fixes it, in words. on: whether a
    GPU of this compute capability can have it; asked with None where there is no GPU.
    """

    name: str
    about: Callable[[Look], str]
    fixed_in: str | None
    cure: Cure
    devices: tuple[str, ...]
    quick: Quick
    applies: Callable[[Look], bool]
    on: Callable[[Capability], bool] = lambda capability: True


DEVICES = ("cpu", "cuda", "mps")


def devices_here() -> tuple[str, ...]:
    """Device types that this build of torch has; looks for no driver, which would spoil a later fork."""
    gpu = torch.version.cuda is not None or getattr(torch.version, "hip", None) is not None
    mps = getattr(torch.backends, "mps", None)
    found = {"cpu": True, "cuda": gpu, "mps": mps is not None and mps.is_built()}
    return tuple(device for device in DEVICES if found[device])


def known_remedies(
    torch_version: str | None = None, devices: tuple[str, ...] | None = None, *, emulated: bool = False
) -> tuple[Remedy, ...]:
    """Remedies for the known issues that this torch (default: the installed one) may have on its devices.

    With `emulated` (something was preloaded) device, kernel and version are not compared, as in a replay: a bug of
    a CUDA kernel may be planted on a CPU. What other devices need (a transposed tensor) is too common to tell.
    """
    version = torch.__version__ if torch_version is None else torch_version
    places = devices_here() if devices is None else devices
    return tuple(_remedies(version, places, emulated))


def _remedies(version: str, places: tuple[str, ...], emulated: bool) -> list[Remedy]:
    found = []
    for known in KNOWN_ISSUES:
        if known.issue not in _CURES:
            continue
        cure, quick = _CURES[known.issue]
        at = places if emulated else tuple(place for place in places if _affected(known, place, version))
        if at and (not emulated or (known.device == "cuda" and may_be_emulated(known, "default"))):
            applies = partial(_applies, known, version, emulated)
            about = partial(_about, known, emulated)
            on = _ONLY_ON.get(known.issue, _any_gpu)
            found.append(Remedy(known.issue, about, known.fixed_in, cure, at, quick, applies, on))
    return found


def _affected(known: KnownIssue, device: str, version: str) -> bool:
    return any(where(known, backend, device, version) is not Answer.NO for backend in known.backends)


def _applies(known: KnownIssue, version: str, emulated: bool, look: Look) -> bool:
    """Whether the call matches, or may where a condition cannot be told; an emulated bug must match."""
    situation = Situation(
        look.call, look.backend, look.device_type, version, look.grad, look.capability, emulated=emulated
    )
    if emulated:
        return look.backend != "MATH" and known.trigger(situation) is Answer.YES
    kernel = look.backend in known.backends or look.backend == "unknown" or look.device_type == "mps"
    return kernel and known.trigger(situation) is not Answer.NO


def _about(known: KnownIssue, emulated: bool, look: Look) -> str:
    match = "emulated" if emulated else "exact"
    return sentence(
        Match(known.issue, match, known.title, known.fixed_in, known.workaround), look.backend, look.device_type
    )


# The quick looks: what the triggers need and a glance can tell. Issues that share one are asked about once.


def _lone_row(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, rows: int, keys: int) -> bool:
    if rows % 32 != 1 or k.dim() != 4 or k.stride(1) != 0:
        return False
    return (rows > 1 if mask is not None else causal and keys > rows) or q.size(1) > 32


def _wraps(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, rows: int, keys: int) -> bool:
    return rows * keys > 1 << 32 and mask is not None


def _half_tile(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, rows: int, keys: int) -> bool:
    return keys % 128 == 64 and mask is not None and torch.is_grad_enabled()


def _wide_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, rows: int, keys: int) -> bool:
    return mask is not None and mask.dtype is torch.float32 and q.dtype is not torch.float32


def _grouped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, rows: int, keys: int) -> bool:
    return q.dim() > 2 and k.size(-3) != q.size(-3)


def _few_rows(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, rows: int, keys: int) -> bool:
    return rows <= 8


def _strided_value(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, rows: int, keys: int) -> bool:
    return not v.is_contiguous()


_DENSE_KV, _MATH = Cure(dense=("key", "value")), Cure(math=True)
_CURES: Mapping[str, tuple[Cure, Quick]] = MappingProxyType(
    {
        "pytorch#191937": (_DENSE_KV, _lone_row),
        "pytorch#192138": (_DENSE_KV, _lone_row),
        "pytorch#187227": (Cure(blocks=True), _wraps),
        "pytorch#196678": (_MATH, _half_tile),
        "pytorch#191612": (_MATH, _wide_mask),
        "pytorch#193893": (_MATH, _grouped),
        "pytorch#163597": (Cure(dense=("query",)), _few_rows),
        "pytorch#181133": (Cure(dense=("query", "key", "value")), _few_rows),
        "pytorch#169222": (_MATH, _few_rows),
        "ROCm/pytorch#3230": (Cure(dense=("value",)), _strided_value),
    }
)

_ONLY_ON: Mapping[str, Callable[[Capability], bool]] = MappingProxyType(
    {
        "pytorch#196678": lambda capability: capability in (None, (9, 0)),
        "pytorch#191612": lambda capability: capability is None or capability[0] in (9, 10),
        "pytorch#193893": lambda capability: capability in (None, (10, 0)),
    }
)


def _any_gpu(capability: Capability) -> bool:
    return True
