"""A prompt made of random tokens, for a model of which only the configuration is at hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LENGTH = 282
"""Tokens of text and image together, or more when the image alone needs more."""


@dataclass(frozen=True)
class Picture:
    """What one random image is for a model: its tokens in the prompt, their type, and the inputs beside it."""

    tokens: list[int]
    placeholder: int
    inputs: dict[str, Tensor]
    type_name: str | None = None


def synthetic_inputs(config: Any, *, seed: int = 0, text_only: bool = False) -> tuple[dict[str, Tensor], list[str]]:
    """An unpadded prompt for a model of this configuration, and remarks that say what it is.

    input_ids, attention_mask: int64 (1, L), L >= 282, with one image when the family is known (see
    `PICTURES`) and `text_only` is off. The same for a seed.
    """
    random = torch.Generator().manual_seed(seed)
    build = None if text_only else PICTURES.get(config.model_type)
    picture = build(config, random) if build is not None else None
    text = config.get_text_config()
    image = picture.tokens if picture else []
    ids = _words(config, text.vocab_size, max(LENGTH - len(image), 16), random)
    ids = torch.cat([ids[:2], torch.tensor(image, dtype=torch.long), ids[2:]])[None]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if picture is None:
        senses = [name for name in ("vision_config", "audio_config") if getattr(config, name, None) is not None]
        why = ", text only although the model takes more" if senses and not text_only else ""
        return inputs, [f"no tokenizer: {ids.shape[1]} random tokens{why}"]
    if picture.type_name:
        inputs[picture.type_name] = (ids == picture.placeholder).long()
    return inputs | picture.inputs, [f"no processor: {ids.shape[1]} random tokens with one random image"]


def _words(config: Any, vocabulary: int, count: int, random: torch.Generator) -> Tensor:
    """Random token ids (count,) that are none of the special ones a configuration names."""
    special: set[int] = set()
    for section in (config, config.get_text_config()):
        for name, value in section.to_dict().items():
            if name.endswith(("token_id", "token_index")):
                special.update(value if isinstance(value, list) else [value] if isinstance(value, int) else [])
    plain = [token for token in range(min(vocabulary, 4096)) if token not in special]
    return torch.tensor(plain)[torch.randint(len(plain), (count,), generator=random)]


def _grid(height: int, width: int) -> Tensor:
    """(x, y) of every cell of a grid, row by row: int64 (1, height * width, 2)."""
    return torch.cartesian_prod(torch.arange(height), torch.arange(width)).flip(-1)[None]


def _framed(config: Any, token: int, count: int, *frame: str) -> list[int]:
    """`count` image tokens between the configuration's begin and end tokens, if it has them."""
    begin, end = (getattr(config, name, None) for name in frame)
    inner = [token] * count
    return [begin, *inner, end] if isinstance(begin, int) and isinstance(end, int) else inner


def _gemma4(config: Any, random: torch.Generator) -> Picture:
    """Patches with their places; a unified model takes merged patches, the others pool them after a tower."""
    vision, side = config.vision_config, 12
    pool = vision.pooling_kernel_size
    unified = config.model_type == "gemma4_unified"
    cells = side if unified else side * pool
    edge = vision.patch_size * (pool if unified else 1)
    pixels = torch.rand(1, cells**2, 3 * edge**2, generator=random)
    token = config.image_token_id
    return Picture(
        _framed(config, token, side**2, "boi_token_id", "eoi_token_id"),
        token,
        {"pixel_values": pixels, "image_position_ids": _grid(cells, cells)},
        "mm_token_type_ids",
    )


def _gemma3(config: Any, random: torch.Generator) -> Picture:
    token = config.image_token_id
    tokens = _framed(config, token, config.mm_tokens_per_image, "boi_token_index", "eoi_token_index")
    return Picture(tokens, token, {"pixel_values": _square(config, random)}, "token_type_ids")


def _llava(config: Any, random: torch.Generator) -> Picture:
    """One token a patch; the class token of the tower is dropped by the default feature strategy."""
    vision, token = config.vision_config, config.image_token_id
    count = (vision.image_size // vision.patch_size) ** 2
    count += getattr(config, "vision_feature_select_strategy", "default") == "full"
    return Picture([token] * count, token, {"pixel_values": _square(config, random)})


def _qwen_vl(config: Any, random: torch.Generator) -> Picture:
    """A 24 x 24 grid of flattened patches, merged spatially before they become tokens."""
    vision, side = config.vision_config, 24
    merge = vision.spatial_merge_size
    channels = getattr(vision, "in_channels", None) or getattr(vision, "in_chans", 3)
    side = math.ceil(side / merge) * merge
    pixels = torch.randn(side**2, channels * vision.temporal_patch_size * vision.patch_size**2, generator=random)
    token = config.image_token_id
    return Picture(
        _framed(config, token, (side // merge) ** 2, "vision_start_token_id", "vision_end_token_id"),
        token,
        {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, side, side]])},
        "mm_token_type_ids",
    )


def _square(config: Any, random: torch.Generator) -> Tensor:
    size = config.vision_config.image_size
    return torch.randn(1, 3, size, size, generator=random)


PICTURES: dict[str, Callable[[Any, torch.Generator], Picture]] = {
    "gemma4_unified": _gemma4,
    "gemma4": _gemma4,
    "gemma3": _gemma3,
    "llava": _llava,
    "qwen2_vl": _qwen_vl,
    "qwen2_5_vl": _qwen_vl,
    "qwen3_vl": _qwen_vl,
}
"""Families for which a random image can be made from the configuration, by `model_type`."""
