"""The same prompt at another length: text after the image is repeated or left out, and rows are put into batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sdpa_repro.capturing import padding
from sdpa_repro.capturing.prefill import Prefill, padded

__all__ = ["batched", "companions", "lengthened", "shortest"]

KEPT = 2
"""Tokens at the end that stay in place: chat templates end in the words after which the answer begins."""

SENSES = ("image", "video", "audio", "vision", "boi", "eoi", "boa", "eoa")
"""First words of the names of tokens that stand for an image, a video or a sound, or for its begin and end."""


def lengthened(prefill: Prefill, length: int) -> Prefill | None:
    """The prompt with `length` tokens; None when its images leave no room for so few.

    Tokens are added or left out just before the last ones, after the last image. Added ones repeat the text that is
    there. Batches of several rows stay as they are: None for any other length.
    """
    if length == prefill.length:
        return prefill
    if length < shortest(prefill) or prefill.inputs["input_ids"].shape[0] > 1:
        return None
    first, last = _text(prefill)
    source = torch.arange(last)
    extra = length - prefill.length
    if extra > 0:
        filler = torch.arange(first, last).repeat(extra // (last - first) + 1)[:extra]
        source = torch.cat([source, filler])
    else:
        source = source[: last + extra]
    source = torch.cat([source, torch.arange(last, prefill.length)])
    inputs = dict(prefill.inputs)
    for name in padding.sequence_aligned(inputs):
        inputs[name] = inputs[name].index_select(1, source.to(inputs[name].device))
    inputs.pop("position_ids", None)  # stale, and counted again from the mask
    return replace(prefill, inputs=inputs, length=length)


def shortest(prefill: Prefill) -> int:
    """The fewest tokens that `lengthened` can make of a prompt: what lies before the text, one token of it, the end."""
    first, last = _text(prefill)
    return first + 1 + prefill.length - last


def companions(prefill: Prefill, pad: int, count: int) -> list[Prefill] | None:
    """The rows beside a prompt with `pad` tokens of padding in a batch of `count` (2 or 3).

    The first fills the batch's length, the second lies between. None when the prompt cannot be made longer.
    """
    longer = [lengthened(prefill, prefill.length + extra) for extra in (pad, (pad + 1) // 2)[: count - 1]]
    others = [each for each in longer if each is not None]
    return others if len(others) == count - 1 else None


def batched(prefills: Sequence[Prefill], total: int) -> dict[str, Tensor]:
    """Rows of one model in a batch (len(prefills), total), each padded by itself; images follow each other."""
    rows = [padded(each, total) for each in prefills]
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


def _text(prefill: Prefill) -> tuple[int, int]:
    """[first, last) of the text that may be repeated or left out, in the first row; at least one token."""
    length = prefill.length
    last = max(1, length - min(KEPT, length // 4))
    special = torch.tensor(sorted(_special(prefill)), dtype=torch.long)
    taken = torch.isin(prefill.inputs["input_ids"][0].cpu(), special)
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in prefill.inputs:
            taken |= prefill.inputs[name][0].cpu() != 0
    after = int(taken[:last].nonzero().max()) + 1 if bool(taken[:last].any()) else min(1, last - 1)
    return min(after, last - 1), last


def _special(prefill: Prefill) -> set[int]:
    """Ids of tokens that stand for something other than text, as the configuration names them."""
    found = set()
    for name, value in prefill.model.config.to_dict().items():
        if name.startswith(SENSES) and name.endswith(("token_id", "token_index")) and isinstance(value, int):
            found.add(value)
    return found
