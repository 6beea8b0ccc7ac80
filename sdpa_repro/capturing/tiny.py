"""The embedded model: Gemma 4 Unified with random weights, small enough to run anywhere in a second.

Its global layers call `scaled_dot_product_attention` exactly as the 12B model does: 16 query heads of
width 512, one key/value head repeated with stride 0, `scale=1.0` and a materialised bool mask. Only the
hidden size, the vocabulary and the number of layers are small.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

NAME = "tiny Gemma 4 Unified (embedded, random weights)"
LAYERS = 6
PROMPT_LENGTH = 282
"""Default prompt length; seven tokens of padding make it 289, a length that fails in pytorch#191937."""

VOCABULARY = 512
PAD, EOS, BOS = 0, 1, 2
IMAGE, IMAGE_BEGIN, IMAGE_END = 508, 509, 510
TEXT = range(8, 500)
"""Token ids that stand for words."""

PATCH, POOLING = 4, 2
GRID = 8
"""An image is GRID x GRID tokens, each one a patch of (PATCH * POOLING)^2 * 3 pixel values."""

FIRST_DRAW = 1
"""Added to every seed: with this draw, the fault of pytorch#191937 changes the next token of the default prompt."""

SCORE_SPREAD = 3.0
"""Standard deviation of query-key scores. With unit weights and `scale=1.0` it would be sqrt(head_dim) = 22,
and every row would attend to a single key."""


def tiny_gemma4(
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    *,
    device: torch.device | str = "cpu",
    layers: int = LAYERS,
    hidden: int = 64,
    intermediate: int = 128,
    heads: int = 16,
    window: int = 128,
) -> Any:
    """A `Gemma4UnifiedForConditionalGeneration` with random weights, the same for a seed in every dtype.

    Every sixth layer and the last are global (head_dim 512, one key/value head used as key and value), the
    others see a sliding `window` (head_dim 256, 8 key/value heads). Attention runs through SDPA. The
    generator state of torch is left as it was. Raises ImportError when transformers is not installed.
    """
    from transformers.models.gemma4_unified.modeling_gemma4_unified import Gemma4UnifiedForConditionalGeneration

    config = configuration(layers=layers, hidden=hidden, intermediate=intermediate, heads=heads, window=window)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed + FIRST_DRAW)
        model: Any = Gemma4UnifiedForConditionalGeneration(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("self_attn.q_norm.weight"):
                weight.fill_(SCORE_SPREAD / math.sqrt(weight.shape[0]))
    return model.to(device=device, dtype=dtype).eval()


def widened(seed: int = 0, dtype: torch.dtype = torch.bfloat16, *, device: torch.device | str = "cpu") -> Any:
    """The embedded model at about 100 million parameters, for benchmarks."""
    return tiny_gemma4(seed, dtype, device=device, hidden=768, intermediate=3072, window=1024)


def tiny_inputs(
    model: Any,
    length: int = PROMPT_LENGTH,
    *,
    images: int = 1,
    batch: int = 1,
    seed: int = 0,
) -> dict[str, Tensor]:
    """An unpadded prompt of `length` tokens with `images` images a row: what a processor would return.

    input_ids, attention_mask, mm_token_type_ids: int64 (batch, length), type 1 on image tokens;
    pixel_values: (batch * images, n, patch values) in the model's dtype; image_position_ids: int64
    (batch * images, n, 2). Images shrink when the prompt is short. Raises ValueError when it cannot hold
    begin, end and one token of each image.
    """
    room = (length - 2) // images - 2 if images else 0
    if images and room < 1:
        raise ValueError(f"a prompt of {length} tokens is too short for {images} images")
    side = min(GRID, math.isqrt(room)) if images else 0
    random = torch.Generator().manual_seed(seed + FIRST_DRAW)
    ids = torch.randint(TEXT.start, TEXT.stop, (batch, length), generator=random)
    ids[:, 0] = BOS
    block = torch.tensor([IMAGE_BEGIN, *[IMAGE] * side**2, IMAGE_END])
    for index in range(images):
        start = 1 + index * len(block)
        ids[:, start : start + len(block)] = block
    device = model.get_input_embeddings().weight.device
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == IMAGE).long(),
    }
    if images:
        values = (PATCH * POOLING) ** 2 * 3
        pixels = torch.rand(batch * images, side**2, values, generator=random)
        grid = torch.cartesian_prod(torch.arange(side), torch.arange(side)).flip(-1)
        inputs["pixel_values"] = pixels.to(model.dtype)
        inputs["image_position_ids"] = grid.expand(batch * images, -1, -1).contiguous()
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def configuration(
    *, layers: int = LAYERS, hidden: int = 64, intermediate: int = 128, heads: int = 16, window: int = 128
) -> Any:
    """Gemma 4 12B's configuration with the sizes that do not shape its attention calls made small."""
    from transformers.models.gemma4_unified import configuration_gemma4_unified as gemma

    kinds = ["full_attention" if (index + 1) % 6 == 0 else "sliding_attention" for index in range(layers)]
    kinds[-1] = "full_attention"
    text = gemma.Gemma4UnifiedTextConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        layer_types=kinds,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=256,
        global_head_dim=512,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        sliding_window=window,
        max_position_embeddings=131_072,
        initializer_range=0.1,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=BOS,
    )
    vision = gemma.Gemma4UnifiedVisionConfig(
        patch_size=PATCH,
        pooling_kernel_size=POOLING,
        mm_embed_dim=64,
        mm_posemb_size=64,
        output_proj_dims=64,
    )
    return gemma.Gemma4UnifiedConfig(
        text_config=text,
        vision_config=vision,
        audio_config=None,
        image_token_id=IMAGE,
        boi_token_id=IMAGE_BEGIN,
        eoi_token_id=IMAGE_END,
        video_token_id=507,
        audio_token_id=506,
        boa_token_id=505,
        eoa_token_index=504,
        attn_implementation="sdpa",
    )
