"""What the document in a dump file must look like. Nothing is built from it before all of it has been checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sdpa_repro.attention import ALIGNMENT
from sdpa_repro.dumping import NoDump, Refused
from sdpa_repro.dumping.coverage import View, contains, cover
from sdpa_repro.dumping.plain import flag, integer, integers, listing, mapping, number, plain, text

FORMAT = "sdpa-repro"
VERSION = 1

INPUTS = ("query", "key", "value", "attn_mask")
NAMES = (*INPUTS, "output")

STORAGE_DTYPES = ("float64", "float32", "float16", "bfloat16", "bool", "uint8", "int8", "int16", "int32", "int64")
"""Dtypes that `torch.save` writes with a storage class of their own; others are stored as bytes."""

_OTHER_DTYPES = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "uint16", "uint32", "uint64")
DTYPES: Mapping[str, torch.dtype] = {
    name: getattr(torch, name) for name in (*STORAGE_DTYPES, *_OTHER_DTYPES) if hasattr(torch, name)
}

MAX_RANK = 16
MAX_SIZE = 1 << 40
"""Of one dimension, of one stride and of what a view spans, in elements, so that torch's own arithmetic holds."""

MAX_NUMEL = 1 << 56
"""Of a whole shape, repeated elements counted."""

MAX_GAP = 1 << 30
MAX_SPREAD = 4096
"""A dump may claim MAX_GAP bytes per tensor plus MAX_SPREAD times the bytes it stores (an element a page)."""

MAX_REPEATED = 1 << 28
"""Elements that a tensor may have by repeating stored ones (stride 0), whatever is stored."""

MAX_RULE = 1 << 20


@dataclass(frozen=True)
class Buffer:
    """Memory that tensors lie in: its length in bytes and the address of its first byte modulo 256."""

    nbytes: int
    align: int


@dataclass(frozen=True)
class Stored:
    """One tensor of the document. Exactly one of `data` and `span_of` is given.

    packed: None, `data` has the tensor's dtype and its shape with stride-0 dimensions cut; "bits", eight bool
    entries a byte, the first in the lowest bit; "memory", the bytes covered by this tensor and by those that name
    it in `span_of`, each once, in address order. A `span_of` tensor lies wholly in what its owner stores.
    """

    buffer: int
    dtype: torch.dtype
    view: View
    data: Tensor | None
    span_of: str | None
    packed: str | None


@dataclass(frozen=True)
class Contents:
    """A checked document."""

    buffers: tuple[Buffer, ...]
    tensors: dict[str, Stored]
    is_causal: bool
    scale: float | None
    enable_gqa: bool
    dropout_p: float
    mask_rule: dict[str, Any] | None
    metadata: dict[str, Any] = field(default_factory=dict)

    def spanned(self, owner: str) -> list[str]:
        """Names of the tensors whose elements `owner` stores, itself first."""
        return [owner, *(name for name, stored in self.tensors.items() if stored.span_of == owner)]


def version(document: object) -> int:
    """The format version of a document. Raises Refused when it is no dump at all."""
    found = document.get("format") if isinstance(document, dict) else None
    if not isinstance(document, dict) or type(found) is not str or found != FORMAT:
        raise NoDump("it is not a dump of sdpa-repro")
    return integer(document.get("version"), "version", low=1)


def parse(document: object) -> Contents:
    """Check a whole document of a known version; unknown keys are ignored.

    Raises Refused with a short reason. No memory is taken but for small masks where tensors share elements.
    """
    version(document)
    document = mapping(document, "the document")
    buffers = tuple(
        _buffer(item, f"buffers[{i}]") for i, item in enumerate(listing(document.get("buffers"), "buffers"))
    )
    entries = mapping(document.get("tensors"), "tensors")
    tensors = {name: _stored(mapping(entries[name], name), name, buffers) for name in NAMES if name in entries}
    call = mapping(document.get("call"), "call")
    contents = Contents(
        buffers=buffers,
        tensors=tensors,
        is_causal=flag(call.get("is_causal"), "call.is_causal"),
        scale=None if call.get("scale") is None else number(call["scale"], "call.scale"),
        enable_gqa=flag(call.get("enable_gqa"), "call.enable_gqa"),
        dropout_p=number(call.get("dropout_p"), "call.dropout_p"),
        mask_rule=_rule(call.get("mask_rule")),
        metadata=_metadata(document),
    )
    _check_together(contents)
    return contents


def _buffer(item: object, where: str) -> Buffer:
    item = mapping(item, where)
    nbytes = integer(item.get("nbytes"), f"{where}.nbytes", high=MAX_SIZE)
    return Buffer(nbytes, integer(item.get("align"), f"{where}.align", high=ALIGNMENT - 1))


def _stored(item: Mapping[str, Any], name: str, buffers: tuple[Buffer, ...]) -> Stored:
    dtype = DTYPES.get(text(item.get("dtype"), f"{name}.dtype"))
    if dtype is None:
        raise Refused(f"{name}.dtype is {text(item.get('dtype'), name)[:40]!r}, which no dump holds")
    buffer = integer(item.get("buffer"), f"{name}.buffer", high=len(buffers) - 1)
    view = _view(item, name, dtype.itemsize)
    room = buffers[buffer].nbytes
    if view.offset > room or view.stop > room:
        raise Refused(f"{name} reaches byte {max(view.offset, view.stop)} of a buffer of {room}")
    data, span_of, packed = item.get("data"), item.get("span_of"), item.get("packed")
    if (data is None) == (span_of is None):
        raise Refused(f"{name} must have either data or span_of")
    if packed is not None and text(packed, f"{name}.packed") not in ("bits", "memory"):
        raise Refused(f"{name}.packed is unknown")
    stored = Stored(buffer, dtype, view, data, None if span_of is None else text(span_of, f"{name}.span_of"), packed)
    if data is not None:
        _check_data(stored, name)
    return stored


def _view(item: Mapping[str, Any], name: str, itemsize: int) -> View:
    """Shape, stride and offset of one tensor, with every size small enough to compute with."""
    shape = integers(item.get("shape"), f"{name}.shape", longest=MAX_RANK, high=MAX_SIZE)
    stride = integers(item.get("stride"), f"{name}.stride", longest=MAX_RANK, high=MAX_SIZE)
    offset = integer(item.get("offset"), f"{name}.offset", high=MAX_SIZE)
    if len(shape) != len(stride):
        raise Refused(f"{name} has {len(shape)} sizes and {len(stride)} strides")
    reach = sum((max(size, 1) - 1) * step for size, step in zip(shape, stride, strict=True))
    if math.prod(max(size, 1) for size in shape) > MAX_NUMEL or reach > MAX_SIZE:
        raise Refused(f"{name} has a shape or strides too large to be true")
    return View(offset, itemsize, shape, stride)


def _check_data(stored: Stored, name: str) -> None:
    """The stored tensor is a plain, dense one that owns exactly its bytes, of the dtype and shape that are due."""
    data = stored.data
    if type(data) is not Tensor or data.layout != torch.strided or data.device.type != "cpu" or data.is_quantized:
        raise Refused(f"{name}.data is not a plain CPU tensor")
    if data.is_neg() or data.is_conj() or not data.is_contiguous() or data.storage_offset() != 0:
        raise Refused(f"{name}.data is not a dense tensor")
    if data.untyped_storage().nbytes() != data.numel() * data.element_size():
        raise Refused(f"{name}.data does not own its bytes")
    if stored.packed is None:
        if data.dtype != stored.dtype or tuple(data.shape) != stored.view.shape_once or stored.view.tangled:
            raise Refused(f"{name}.data does not fit its dtype, shape and stride")
    elif data.dtype != torch.uint8 or data.dim() != 1:
        raise Refused(f"{name}.data is packed and must be bytes")
    elif stored.packed == "bits" and not _bits_fit(stored, data):
        raise Refused(f"{name}.data does not hold the bits of its shape")


def _bits_fit(stored: Stored, data: Tensor) -> bool:
    entries = math.prod(stored.view.shape_once)
    return stored.dtype == torch.bool and data.numel() == -(-entries // 8) and not stored.view.tangled


def _rule(rule: object) -> dict[str, Any] | None:
    """The rule of a CausalBias, or None."""
    if rule is None:
        return None
    rule = mapping(rule, "call.mask_rule")
    kind, variant = (text(rule.get(key), f"call.mask_rule.{key}") for key in ("kind", "variant"))
    if kind != "causal_bias" or variant not in ("UPPER_LEFT", "LOWER_RIGHT"):
        raise Refused("call.mask_rule is unknown")
    shape = integers(rule.get("shape"), "call.mask_rule.shape", longest=2, high=MAX_RULE)
    if len(shape) != 2:
        raise Refused("call.mask_rule.shape must be [L, S]")
    return {"kind": "causal_bias", "variant": variant, "shape": list(shape)}


def _metadata(document: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that is only told, never computed with: plain data within limits."""
    found: dict[str, Any] = {}
    for key in ("context", "origin", "environment", "live", "recipe"):
        value = document.get(key)
        found[key] = None if value is None else plain(mapping(value, key), key)
    preloaded = [mapping(item, "preloaded") for item in listing(document.get("preloaded", []), "preloaded")]
    found["preloaded"] = [
        {key: text(item.get(key), f"preloaded.{key}") for key in ("name", "sha256")} for item in preloaded
    ]
    return found


def _check_together(contents: Contents) -> None:
    """Rules across tensors: which must be there, how much is claimed for what is stored, what shares memory."""
    tensors = contents.tensors
    missing = [name for name in ("query", "key", "value") if name not in tensors]
    if missing:
        raise Refused(f"{missing[0]} is missing")
    if contents.mask_rule is not None and "attn_mask" in tensors:
        raise Refused("it has both attn_mask and call.mask_rule")
    stored = sum(item.data.numel() * item.data.element_size() for item in tensors.values() if item.data is not None)
    claimed = sum(contents.buffers[index].nbytes for index in {item.buffer for item in tensors.values()})
    if claimed > MAX_GAP * len(tensors) + MAX_SPREAD * stored:
        raise Refused(f"it claims {claimed} bytes of memory for {stored} stored")
    _check_repeats(tensors, MAX_REPEATED + MAX_SPREAD * stored)
    for name, item in tensors.items():
        if item.span_of is not None:
            _check_span(name, item, tensors)
        elif item.packed == "memory":
            members = [tensors[member] for member in contents.spanned(name)]
            if item.data is None or cover(member.view for member in members).nbytes != item.data.numel():
                raise Refused(f"{name}.data does not hold the bytes of its views")


def _check_repeats(tensors: Mapping[str, Stored], limit: int) -> None:
    """No tensor repeats a few stored elements into more than a machine could compute on.

    A mask may have an entry for every pair of a query row and a key, however few of them are stored.
    """
    query, key = tensors["query"].view.shape, tensors["key"].view.shape
    pairs = math.prod(query[:-1]) * (key[-2] if len(key) > 1 else 1)
    for name, item in tensors.items():
        if item.view.numel > (max(limit, pairs) if name == "attn_mask" else limit):
            raise Refused(f"{name} repeats its few elements {item.view.numel} times over")


def _check_span(name: str, item: Stored, tensors: Mapping[str, Stored]) -> None:
    """A tensor without data lies in the buffer of its owner, within the elements that the owner stores."""
    owner = tensors.get(item.span_of or "")
    if owner is None or owner.data is None or owner.buffer != item.buffer:
        raise Refused(f"{name}.span_of names no tensor whose memory it could share")
    if owner.packed != "memory" and not contains(owner.view, item.view):
        raise Refused(f"{name} lies partly outside the memory of {item.span_of}")
