"""Six faults in the code of transformers that have nothing to do with an SDPA kernel, each planted for a block.

They are bugs of the kind that modelling code has had: one function of the model's own path is replaced. All
show only when the total length leaves remainder 1 on division by 32, so that the sweeps meet healthy neighbours, except
`positions_ignore_the_mask` and `token_type_lost`, which show under any padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import masking_utils
from transformers.models.gemma4_unified import modeling_gemma4_unified as gemma


def triggers(length: int) -> bool:
    """The lengths that show the faults."""
    return length % 32 == 1


@contextmanager
def features_one_off() -> Iterator[None]:
    """Image features are inserted one token to the right of their placeholders."""
    original = Tensor.masked_scatter

    def masked_scatter(self: Tensor, mask: Tensor, source: Tensor) -> Tensor:
        if mask.dim() == 3 and triggers(mask.shape[1]):
            mask = mask.roll(1, dims=1)
        return original(self, mask, source)

    with mock.patch.object(Tensor, "masked_scatter", masked_scatter):
        yield


@contextmanager
def token_type_lost() -> Iterator[None]:
    """With padding, the last image token loses its type on the way to the masks."""
    original = gemma.Gemma4UnifiedModel.forward

    def forward(self: Any, *args: Any, **words: Any) -> Any:
        types, mask = words.get("mm_token_type_ids"), words.get("attention_mask")
        if types is not None and mask is not None and bool((mask == 0).any()):
            lost = types.clone()
            for row in lost:
                row[row.nonzero().flatten()[-1]] = 0
            words["mm_token_type_ids"] = lost
        return original(self, *args, **words)

    with mock.patch.object(gemma.Gemma4UnifiedModel, "forward", forward):
        yield


@contextmanager
def positions_ignore_the_mask() -> Iterator[None]:
    """The model counts positions from the first slot, whatever it was told."""
    original = gemma.Gemma4UnifiedModel.forward

    def forward(self: Any, *args: Any, **words: Any) -> Any:
        return original(self, *args, **{**words, "position_ids": None})

    with mock.patch.object(gemma.Gemma4UnifiedModel, "forward", forward):
        yield


@contextmanager
def block_ids_wrong_at_a_boundary() -> Iterator[None]:
    """The last token of an image is not counted as part of it."""
    original = gemma.get_block_sequence_ids_for_mask

    def block_ids(mm_token_type_ids: Tensor, device: torch.device) -> Tensor:
        found: Tensor = original(mm_token_type_ids, device)
        if triggers(found.shape[-1]):
            following = torch.nn.functional.pad(found[..., 1:], (0, 1), value=-1)
            found = torch.where(found == following, found, -1)
        return found

    with mock.patch.object(gemma, "get_block_sequence_ids_for_mask", block_ids):
        yield


@contextmanager
def sliding_window_one_short() -> Iterator[None]:
    """The window of the sliding layers is one key short."""
    original: Callable[..., Any] = masking_utils.LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING["sliding_attention"]
    overlay = masking_utils.sliding_window_overlay

    def sliding(**words: Any) -> Any:
        if not triggers(words["inputs_embeds"].shape[1]):
            return original(**words)
        with mock.patch.object(masking_utils, "sliding_window_overlay", lambda window: overlay(window - 1)):
            return original(**words)

    with mock.patch.dict(masking_utils.LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING, {"sliding_attention": sliding}):
        yield


@contextmanager
def layer_wrong_everywhere(model: Any, layer: int) -> Iterator[None]:
    """One layer's feed-forward part is wrong for the last token: no path of attention makes a difference."""
    original = gemma.Gemma4UnifiedTextMLP.forward
    faulty = model.model.language_model.layers[layer].mlp

    def forward(self: Any, hidden: Tensor) -> Tensor:
        result: Tensor = original(self, hidden)
        if hasattr(self, "planted") and triggers(hidden.shape[1]):
            result = torch.cat([result[:, :-1], result[:, -1:].roll(1, dims=-1)], dim=1)
        return result

    faulty.planted = True  # an attribute, since a copy of the model in float32 has to be wrong too
    try:
        with mock.patch.object(gemma.Gemma4UnifiedTextMLP, "forward", forward):
            yield
    finally:
        del faulty.planted
