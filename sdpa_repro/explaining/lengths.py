"""The same kind of call at other lengths: L query rows and S keys, everything else as it was.

The layout family stays (expanded dimensions, dimension order, cache strides, alignment, a value that is a view
of the key), the mask keeps its structure (see `length_masks`), and what the original holds stays where it was;
only positions that did not exist are filled, with seeded normal values. Where nothing is left but keys of one and
the same value (padding, often zero), the values are drawn anew: with those every mask gives the same output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from sdpa_repro.attention import AttentionCall, memory_groups, viewed_once
from sdpa_repro.errors import InputError
from sdpa_repro.explaining.length_layout import Place, laid_out, moved, restride
from sdpa_repro.explaining.length_masks import mask_resizer

Resize = Callable[[int, int], AttentionCall]
"""From L and S to the call at these lengths."""

SAMPLED_ROWS = 256
"""Rows a head from which mean and standard deviation of a tensor are taken."""

SMALLEST_SAMPLE = 8
"""With fewer rows than this, one mean and deviation serve all channels."""

Statistics = tuple[Tensor, Tensor]
"""Mean and standard deviation of each channel (last dimension), float32 on the CPU."""


def with_lengths(
    call: AttentionCall, rows: int, keys: int, *, seed: int = 0, end: str = "tail", mask: str = "distinct"
) -> AttentionCall:
    """The same kind of call with L = `rows` and S = `keys`.

    end: where positions are cut off or added, "tail" (after the last one) or "head" (before the first one).
    mask: "distinct" keeps the structure and tells rows apart that see the same keys, so that no fault that confuses
    mask rows is invisible; "kept" keeps the structure alone; "random" draws every row anew.
    At the original lengths the values are the original's, and so is a mask whose rows all differ.
    Raises InputError for lengths below 1 and unknown words.
    """
    return resizer(call, seed=seed, end=end, mask=mask)(rows, keys)


def resizer(call: AttentionCall, *, seed: int = 0, end: str = "tail", mask: str = "distinct") -> Resize:
    """`with_lengths` for many lengths: the call is looked through once."""
    if end not in ("tail", "head"):
        raise InputError(f'end is "tail" or "head", not {end!r}')
    if mask not in ("distinct", "kept", "random"):
        raise InputError(f'mask is "distinct", "kept" or "random", not {mask!r}')
    sources = {name: call.tensors[name].detach() for name in ("query", "key", "value")}
    with torch.no_grad():
        statistics = {name: _statistics(tensor) for name, tensor in sources.items()}
        new_mask = mask_resizer(call, seed=seed, end=end, rows_as=mask)
    surplus = sources["value"].shape[-2] - sources["key"].shape[-2]

    def resized(rows: int, keys: int) -> AttentionCall:
        if rows < 1 or keys < 1:
            raise InputError(f"L and S must be at least 1, not {rows} and {keys}")
        sizes = {"query": rows, "key": keys, "value": max(1, keys + surplus)}
        tensors: dict[str, Tensor] = {}
        with torch.no_grad():
            for names in _groups(sources, sizes):
                views = _views({name: sources[name] for name in names}, sizes)
                for name, view in views.items():
                    _fill(sources[name], view, statistics[name], seed * 3 + "qkv".index(name[0]), end)
                if "value" in views and _all_alike(views["value"]) and keys < call.key.shape[-2]:
                    _draw(viewed_once(views["value"]), statistics["value"], seed * 3 + 2)
                tensors.update(views)
            if new_mask is not None:
                tensors["attn_mask"] = new_mask(rows, keys)
        return call.with_tensors(tensors)

    return resized


def _groups(sources: Mapping[str, Tensor], sizes: Mapping[str, int]) -> Iterable[list[str]]:
    """Tensors to lay out together: those that share memory, as long as they share the length too."""
    for names in memory_groups(sources):
        alike = {(sources[name].dtype, sources[name].shape[-2], sizes[name]) for name in names}
        if len(alike) == 1:
            yield names
            continue
        kinds = {(sources[name].dtype, name == "query") for name in names}
        for kind in sorted(kinds, key=str):
            yield [name for name in names if (sources[name].dtype, name == "query") == kind]


def _views(members: Mapping[str, Tensor], sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """Zeroed tensors of the new lengths over one piece of memory, laid out as `members` are."""
    first = min(members, key=lambda name: members[name].data_ptr())
    places: dict[str, Place] = {}
    for name in sorted(members, key=lambda name: name != first):
        member = members[name]
        shape = (*member.shape[:-2], sizes[name], member.shape[-1])
        stride, marks = restride(member.shape, member.stride(), shape)
        if name == first:
            first_marks = marks
        offset = (member.data_ptr() - members[first].data_ptr()) // member.element_size()
        places[name] = (shape, stride, moved(offset, first_marks))
    return laid_out(members, places)


def _fill(source: Tensor, target: Tensor, statistics: Statistics, seed: int, end: str) -> None:
    """Copy the positions both have; fill the others with normal values. Each element of memory is written once."""
    old, new = viewed_once(source), viewed_once(target)
    kept, added = min(old.shape[-2], new.shape[-2]), max(0, new.shape[-2] - old.shape[-2])
    first = {"tail": (0, 0, kept), "head": (old.shape[-2] - kept, added, 0)}[end]
    new.narrow(-2, first[1], kept).copy_(old.narrow(-2, first[0], kept))
    if not added:
        return
    _draw(new.narrow(-2, first[2], added), statistics, seed)


def _draw(room: Tensor, statistics: Statistics, seed: int) -> None:
    """Fill with normal values of each channel's mean and deviation."""
    generator = torch.Generator().manual_seed(seed)
    mean, deviation = (numbers[: room.shape[-1]] for numbers in statistics)
    room.copy_((torch.randn(room.shape, generator=generator) * deviation + mean).to(room.dtype))


def _all_alike(value: Tensor) -> bool:
    """Whether several keys are there and all have the same value."""
    once = viewed_once(value)
    return once.shape[-2] > 1 and bool((once[..., 1:, :] == once[..., :1, :]).all())


def _statistics(tensor: Tensor) -> Statistics:
    """Mean and standard deviation of the finite values, channel by channel when there are rows enough."""
    once = viewed_once(tensor)
    width = tensor.shape[-1]
    step = max(1, once.shape[-2] // SAMPLED_ROWS)
    sample = once[..., ::step, :].float().cpu().reshape(-1, once.shape[-1]).expand(-1, width)
    finite = sample.isfinite()
    if sample.shape[0] < SMALLEST_SAMPLE or not bool(finite.sum(0).ge(SMALLEST_SAMPLE).all()):
        values = sample[finite]
        mean = values.mean() if values.numel() else torch.tensor(0.0)
        deviation = values.std() if values.numel() > 1 else torch.tensor(1.0)
        mean, deviation = mean.expand(width), deviation.expand(width)
    else:
        count, values = finite.sum(0), sample.where(finite, torch.zeros(()))
        mean = values.sum(0) / count
        deviation = (((values - mean) ** 2).where(finite, torch.zeros(())).sum(0) / count).sqrt()
    if not bool((deviation > 0).any()):
        deviation = torch.ones(width)
    return mean, deviation
