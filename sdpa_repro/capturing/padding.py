"""Padding of a prompt that is already tokens: every input that runs along the sequence, in lockstep."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

FILLS = {
    "attention_mask": 0,
    "token_type_ids": 0,
    "mm_token_type_ids": 0,
    "cross_attention_mask": 0,
    "global_attention_mask": 0,
    "images_seq_mask": 0,
    "special_tokens_mask": 1,
    "labels": -100,
    "bbox": 0,
}
"""Inputs that run along the sequence in dimension 1, and what a padding token has there."""

ELSEWHERE = ("pixel", "image", "video", "audio", "input_features", "grid", "decoder")
"""First words of inputs that belong to images, sounds or the decoder, whatever their shape."""


def sequence_aligned(inputs: Mapping[str, Tensor]) -> dict[str, int]:
    """Names of the inputs that run along the sequence, with the value that a padding token has.

    Those are input_ids (value 0 here, replaced by the pad token), the ones in `FILLS`, and any other
    integer or bool tensor of exactly the shape of input_ids that is not an image, sound or decoder input.
    """
    ids = inputs["input_ids"]
    found = {}
    for name, tensor in inputs.items():
        along = tensor.dim() >= 2 and tensor.shape[:2] == ids.shape[:2]
        if name in FILLS and along:
            found[name] = FILLS[name]
        elif (
            tensor.shape == ids.shape
            and not tensor.dtype.is_floating_point
            and name != "position_ids"
            and not name.startswith(ELSEWHERE)
        ):
            found[name] = 0
    return found


def pad_inputs(
    inputs: Mapping[str, Tensor], total: int, *, pad_token: int, side: str = "left", positions: bool = True
) -> dict[str, Tensor]:
    """The batch padded to `total` tokens on one side; inputs that do not run along the sequence untouched.

    inputs: input_ids (B, L) and what goes with it; a missing attention_mask counts as all ones. With
    `positions`, adds position_ids (B, total) counted from the mask as `generate` does; a position_ids that
    was there is dropped in any case, since padding makes it stale. Raises ValueError when L > total.
    """
    ids = inputs["input_ids"]
    batch = {name: tensor for name, tensor in inputs.items() if name != "position_ids"}
    if "attention_mask" not in batch:
        batch["attention_mask"] = torch.ones_like(ids)
    extra = total - ids.shape[1]
    if extra < 0:
        raise ValueError(f"the prompt has {ids.shape[1]} tokens, more than {total}")
    for name, fill in sequence_aligned(batch).items():
        tensor = batch[name]
        value = pad_token if name == "input_ids" else fill
        block = tensor.new_full((tensor.shape[0], extra, *tensor.shape[2:]), value)
        batch[name] = torch.cat([block, tensor] if side == "left" else [tensor, block], dim=1)
    if positions:
        batch["position_ids"] = positions_of(batch["attention_mask"])
    return batch


def positions_of(attention_mask: Tensor) -> Tensor:
    """position_ids (B, L) for a 0/1 mask (B, L): valid tokens counted from 0, padding before them at 0.

    The rule of transformers' `generate`; without it a left-padded prompt is a different computation.
    """
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)


def last_valid(attention_mask: Tensor) -> Tensor:
    """Index (B,) of the last token of each row that is not padding, 0 for a row without any."""
    steps = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    return (attention_mask.long().clamp(max=1) * steps).argmax(-1)
