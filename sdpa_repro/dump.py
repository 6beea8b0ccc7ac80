"""One attention call on disk: take a snapshot of a call, write it, read it back with the layout it had.

The file is `torch.save` of plain data and tensors. A tensor lies in a *buffer*, memory that it may share with
others: tensors that overlap or are within 64 MiB of each other keep their distance. Only viewed elements are
stored, each once: expanded dimensions are cut, the gaps between views are left out, bool masks take a bit an entry.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sdpa_repro.attention import AttentionCall
from sdpa_repro.dumping import NoDump, Refused, archive, schema
from sdpa_repro.dumping.layout import causal_rule, layout, layout_differences, neighbours, stored_tensors
from sdpa_repro.dumping.plain import plain
from sdpa_repro.dumping.tensors import build, check_storable, store
from sdpa_repro.errors import InputError

__all__ = ["Dump", "layout", "layout_differences", "load", "save", "snapshot", "stored_bytes"]


@dataclass(frozen=True)
class Dump:
    """A call read from a file, and what was recorded with it (plain dicts, untrusted text)."""

    call: AttentionCall
    output: Tensor | None
    context: dict[str, Any]
    origin: dict[str, Any]
    environment: dict[str, Any]
    live: dict[str, Any] | None
    recipe: dict[str, Any] | None
    preloaded: list[dict[str, str]]
    path: Path | None


def snapshot(
    call: AttentionCall,
    output: Tensor | None = None,
    *,
    context: Mapping[str, Any] | None = None,
    origin: Mapping[str, Any] | None = None,
    environment: Mapping[str, Any] | None = None,
    live: Mapping[str, Any] | None = None,
    recipe: Mapping[str, Any] | None = None,
    preloaded: Iterable[Mapping[str, str]] = (),
    mask_rule: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The document of a dump file: every viewed byte of the call and its output copied to host memory, detached.

    A `CausalBias` mask is stored as its rule, with no memory; `mask_rule` gives that rule for a call whose
    `attn_mask` was left out. The other arguments are plain data (dict, list, str, int, float, bool, None; torch
    dtypes and devices become their names). Later changes to the live tensors do not reach the document.
    Raises InputError for what a dump cannot hold: meta, sparse, quantized, complex tensors, other objects.
    """
    rule = mask_rule if mask_rule is not None else causal_rule(call.attn_mask)
    tensors = stored_tensors(call)
    try:
        document: dict[str, Any] = {
            "format": schema.FORMAT,
            "version": schema.VERSION,
            "buffers": [],
            "tensors": {},
            "call": {
                "is_causal": bool(call.is_causal),
                "scale": None if call.scale is None else float(call.scale),
                "enable_gqa": bool(call.enable_gqa),
                "dropout_p": float(call.dropout_p),
                "mask_rule": None if rule is None else plain(rule, "mask_rule"),
            },
            "context": plain(context or {}, "context"),
            "origin": plain(origin or {}, "origin"),
            "environment": plain(environment or {}, "environment"),
            "live": None if live is None else plain(live, "live"),
            "recipe": None if recipe is None else plain(recipe, "recipe"),
            "preloaded": plain(list(preloaded), "preloaded"),
        }
        check_storable({**tensors, **({} if output is None else {"output": output})})
        for names in neighbours(tensors):
            store(document, {name: tensors[name] for name in tensors if name in names})
        if output is not None:
            store(document, {"output": output})
        schema.parse(document)
    except Refused as error:
        raise _input_error(f"this call cannot be dumped: {error}") from error
    return document


def stored_bytes(document: Mapping[str, Any]) -> int:
    """Bytes of tensor data that the document's file holds."""
    data = [entry["data"] for entry in document["tensors"].values() if "data" in entry]
    return sum(tensor.numel() * tensor.element_size() for tensor in data)


def save(document: dict[str, Any], path: Path | str, *, synced: bool = True) -> int:
    """Write a document from `snapshot` to `path`, whole or not at all; returns the file's size in bytes.

    synced: return when the disk has it, so that not even a power cut loses it; else when the system has taken it.
    Raises InputError when the folder is missing or read-only, the disk full, or the like.
    """
    try:
        return archive.write(document, Path(path), synced=synced)
    except OSError as error:
        reason, needed = error.strerror or error, _mebibytes(stored_bytes(document))
        raise _input_error(
            f"cannot write {path}: {reason}: choose a folder that is there, writable and has {needed} free"
        ) from error


def load(path: Path | str, device: torch.device | str = "cpu") -> Dump:
    """Read a dump and rebuild its tensors on `device` with the strides, distances and alignment they had.

    Nothing is built before everything has been checked. Raises InputError, in one line, for a file that is missing,
    unreadable, damaged, no dump, from a newer format or made to harm, and for a device that is not there or too small.
    """
    path = Path(path)
    try:
        contents = _read(path)
    except OSError as error:
        reason = error.strerror or error
        raise _input_error(f"cannot read {path}: {reason}: check the path and its access rights") from error
    except ValueError as error:  # Refused, or a path with a null byte
        raise _input_error(f"cannot use {path} as a dump: {error}: {_mend(path, error)}") from error
    try:
        tensors = build(contents, torch.device(device))
    except (RuntimeError, AssertionError, MemoryError) as error:
        room = _mebibytes(sum(buffer.nbytes for buffer in contents.buffers))
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise _input_error(f"cannot put {path} on {device} ({room}): {reason}: choose another device") from error
    return _dump(contents, tensors, path)


def _read(path: Path) -> schema.Contents:
    """The checked document, its tensors still mapped from the file."""
    document = archive.read(path)
    version = schema.version(document)
    if version > schema.VERSION:
        raise _input_error(
            f"{path} has dump format version {version}, this sdpa-repro reads {schema.VERSION}: upgrade sdpa-repro"
        )
    contents = schema.parse(document)
    archive.verify(path)
    return contents


def _dump(contents: schema.Contents, tensors: dict[str, Tensor], path: Path) -> Dump:
    mask = tensors.get("attn_mask") if contents.mask_rule is None else _causal_bias(contents.mask_rule)
    call = AttentionCall(
        tensors["query"],
        tensors["key"],
        tensors["value"],
        mask,
        dropout_p=contents.dropout_p,
        is_causal=contents.is_causal,
        scale=contents.scale,
        enable_gqa=contents.enable_gqa,
    )
    told = contents.metadata
    return Dump(
        call=call,
        output=tensors.get("output"),
        context=told["context"] or {},
        origin=told["origin"] or {},
        environment=told["environment"] or {},
        live=told["live"],
        recipe=told["recipe"],
        preloaded=told["preloaded"],
        path=path,
    )


def _causal_bias(rule: Mapping[str, Any]) -> Tensor:
    """The `CausalBias` of a rule. Its constructor would allocate memory that nothing reads; this one takes none."""
    from torch.nn.attention.bias import CausalBias, CausalVariant

    variant = CausalVariant[rule["variant"]]
    rows, keys = rule["shape"]
    bias = torch.empty(1, device="cpu").expand(int(variant), rows, keys).as_subclass(CausalBias)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        CausalBias.__init__(bias, variant, rows, keys)
    return bias


def _mend(path: Path, error: ValueError) -> str:
    """What to do about a file that is refused."""
    if path.is_dir():
        return "give one of the dumps in it"
    if isinstance(error, NoDump):
        return "give a .pt file that capture wrote"
    return "capture the call again or get a fresh copy"


def _mebibytes(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"


def _input_error(message: str) -> InputError:
    """An error of one line: paths and files may bring control characters along."""
    return InputError("".join(c if c.isprintable() else repr(c)[1:-1] for c in message))
