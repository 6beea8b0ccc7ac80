"""Live tensors into the entries of a document, and back into memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sdpa_repro.attention import ALIGNMENT, span, viewed_once
from sdpa_repro.dumping import Refused, packing
from sdpa_repro.dumping.coverage import View, components, contains
from sdpa_repro.dumping.schema import DTYPES, STORAGE_DTYPES, Contents


def check_storable(tensors: Mapping[str, Tensor]) -> None:
    """Refuse all but tensors with strided memory of their own and a known dtype."""
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized or not _has_memory(tensor):
            raise Refused(f"{name} is not a tensor with strides and memory")
        if tensor.dtype not in DTYPES.values():
            raise Refused(f"{name} has dtype {tensor.dtype}, which no dump holds")


def _has_memory(tensor: Tensor) -> bool:
    """Whether there are bytes behind the tensor: not for meta and fake tensors and wrappers around other tensors."""
    try:
        return tensor.device.type != "meta" and (tensor.numel() == 0 or tensor.data_ptr() != 0)
    except RuntimeError:
        return False


def store(document: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Add copies of the tensors to the document, in a buffer of their own."""
    spans = [span(tensor) for tensor in tensors.values() if tensor.numel()]
    start = min((here.start for here in spans), default=0)
    stop = max((here.stop for here in spans), default=0)
    index = len(document["buffers"])
    document["buffers"].append({"nbytes": stop - start, "align": start % ALIGNMENT})
    views = {name: View.of(tensor, start) for name, tensor in tensors.items()}
    for names in components(views):
        owner, packed, data = _compact(names, tensors, views)
        for name in names:
            entry: dict[str, Any] = {
                "buffer": index,
                "dtype": str(tensors[name].dtype).removeprefix("torch."),
                "shape": list(views[name].shape),
                "stride": list(views[name].stride),
                "offset": views[name].offset,
            }
            entry |= {"data": data, "packed": packed} if name == owner else {"span_of": owner, "packed": None}
            document["tensors"][name] = entry


def _compact(
    names: list[str], tensors: Mapping[str, Tensor], views: Mapping[str, View]
) -> tuple[str, str | None, Tensor]:
    """Tensors that share elements as one stored tensor: its owner, how it is packed (see `schema.Stored`), the data.

    The owner is a tensor in which the others lie and that is storable densely; without one, the covered bytes of
    all of them are stored.
    """
    for owner in names:
        dtype = str(tensors[owner].dtype).removeprefix("torch.")
        if dtype not in STORAGE_DTYPES or views[owner].tangled:
            continue
        if all(contains(views[owner], views[name]) for name in names if name != owner):
            bits = packing.pack_bits(tensors[owner]) if dtype == "bool" else None
            if bits is not None:
                return owner, "bits", bits
            return owner, None, packing.to_host(tensors[owner])
    return names[0], "memory", packing.gather([tensors[name] for name in names], [views[name] for name in names])


def build(contents: Contents, device: torch.device) -> dict[str, Tensor]:
    """Fresh buffers on the device with the stored elements in place; bytes outside the views are uninitialised."""
    used = {stored.buffer for stored in contents.tensors.values()}
    memories = {
        index: packing.memory(contents.buffers[index].nbytes, contents.buffers[index].align, device) for index in used
    }
    tensors = {
        name: packing.place(memories[stored.buffer], stored.view, stored.dtype)
        for name, stored in contents.tensors.items()
    }
    for name, stored in contents.tensors.items():
        if stored.data is None or not stored.data.numel():
            continue
        if stored.packed == "memory":
            views = [contents.tensors[member].view for member in contents.spanned(name)]
            packing.scatter(stored.data, memories[stored.buffer], views)
        elif stored.packed == "bits":
            packing.unpack_bits(stored.data, viewed_once(tensors[name]))
        else:
            viewed_once(packing.words(tensors[name])).copy_(packing.words(stored.data))
    return tensors
