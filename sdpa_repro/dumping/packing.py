"""Bytes of tensors into compact host tensors and back: dense copies, packed bits, memory in address order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from sdpa_repro.attention import copy_view, empty_aligned, viewed_once
from sdpa_repro.dumping.coverage import Coverage, View, cover

CHUNK = 1 << 20
"""Entries handled at a time where a temporary as large or larger is needed."""

PIECE = 64 << 20
"""Bytes copied at a time from another device, so that a strided tensor needs no second copy there."""


def memory(nbytes: int, align: int, device: torch.device | str) -> torch.UntypedStorage:
    """Uninitialised storage of exactly `nbytes` whose first byte has an address of `align` modulo 256."""
    block = empty_aligned(nbytes, align, device)
    first = block.storage_offset()
    storage: torch.UntypedStorage = block.untyped_storage()[first : first + nbytes]
    return storage


def place(storage: torch.UntypedStorage, view: View, dtype: torch.dtype) -> Tensor:
    """The tensor that a view and a dtype make of a buffer; also at addresses that are no multiple of its itemsize."""
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    offset, rest = divmod(view.offset, view.itemsize)
    if rest:
        storage, offset = storage[view.offset :], 0
    return empty.set_(storage, offset, view.shape, view.stride)


def words(tensor: Tensor) -> Tensor:
    """The memory of a strided tensor as integers of its itemsize, in the same layout.

    Copying those keeps every bit; copying bool makes 1 of any byte that is not 0.
    """
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.detach().resolve_neg().view(whole)


def to_host(tensor: Tensor) -> Tensor:
    """A contiguous copy in host memory, stride-0 dimensions cut to length 1."""
    source = viewed_once(words(tensor))
    host = torch.empty(source.shape, dtype=source.dtype, device="cpu")
    if source.device.type == "cpu" or source.is_contiguous():
        return host.copy_(source).view(tensor.dtype)
    dim = max(range(source.dim()), key=lambda dim: source.shape[dim])
    pieces = 1 + source.numel() * source.element_size() // PIECE
    for here, there in zip(host.tensor_split(pieces, dim), source.tensor_split(pieces, dim), strict=True):
        here.copy_(there)
    return host.view(tensor.dtype)


def pack_bits(flags: Tensor) -> Tensor | None:
    """A bool tensor, stride-0 dimensions cut, as uint8 with eight entries a byte, the first in the lowest bit.

    None when a byte of it is neither 0 nor 1 (a reinterpreted uint8): such memory is kept as it is.
    """
    flat = viewed_once(words(flags)).reshape(-1).cpu()
    if flat.numel() and int(flat.max()) > 1:
        return None
    return torch.from_numpy(np.packbits(flat.numpy(), bitorder="little"))


def unpack_bits(packed: Tensor, target: Tensor) -> None:
    """Write packed bits into a bool view without stride-0 dimensions, of `target.numel()` entries."""
    room = words(target)
    direct = room.is_contiguous() and room.device.type == "cpu"
    flat = room.view(-1) if direct else torch.empty(room.numel(), dtype=torch.uint8, device="cpu")
    entries, packs = flat.numpy(), packed.numpy()
    for first in range(0, len(entries), CHUNK):
        stop = min(first + CHUNK, len(entries))
        entries[first:stop] = np.unpackbits(packs[first // 8 : -(-stop // 8)], count=stop - first, bitorder="little")
    if not direct:
        room.copy_(flat.view(room.shape))


def gather(tensors: Sequence[Tensor], views: Sequence[View]) -> Tensor:
    """The bytes that the views cover, each once, in address order, as uint8 in host memory.

    The tensors are copied into a scratch buffer of the same layout first: they may belong to different storages.
    """
    coverage = cover(views)
    scratch = memory(coverage.stop - coverage.start, 0, "cpu")
    for tensor, view in zip(tensors, views, strict=True):
        if view.numel:
            moved = View(view.offset - coverage.start, view.itemsize, view.shape, view.stride)
            source = words(tensor)
            copy_view(source, place(scratch, moved, source.dtype))
    units = _units(scratch, coverage, 0)
    if bool(coverage.mask.all()):
        return units.view(-1)
    parts = [part[chosen] for part, chosen in _parts(units, coverage)]
    return torch.cat(parts).view(-1)


def scatter(data: Tensor, storage: torch.UntypedStorage, views: Sequence[View]) -> None:
    """Put what `gather` returned back under the views in a buffer; the bytes between them are left alone."""
    coverage = cover(views)
    units = _units(storage, coverage, coverage.start)
    rows = data.view(-1, coverage.unit)
    first = 0
    for part, chosen in _parts(units, coverage):
        count = int(chosen.count_nonzero())
        part[chosen.to(part.device)] = rows[first : first + count].to(part.device)
        first += count


def _units(storage: torch.UntypedStorage, coverage: Coverage, start: int) -> Tensor:
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
    count = coverage.mask.numel()
    return flat.set_(storage, start, (count, coverage.unit), (coverage.unit, 1))


def _parts(units: Tensor, coverage: Coverage) -> Iterator[tuple[Tensor, Tensor]]:
    """Units and their mask a few at a time: indexing by a mask takes eight bytes a unit."""
    for first in range(0, len(units), CHUNK):
        yield units[first : first + CHUNK], coverage.mask[first : first + CHUNK]
