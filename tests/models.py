"""Folders with tiny random-weight models of several families, as `save_pretrained` writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

TEXT = "the a cat sat on mat and saw one two three four five six seven eight user assistant : describe this image"
WORDS = TEXT.split()
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<image>"]
CHAT = (
    "{% for message in messages %}<s> {{ message['role'] }} : "
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image> {% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %} assistant :{% endif %}"
)
VOCABULARY = len(SPECIAL) + len(WORDS)


def tokenizer(*, chat: bool = False, pad: bool = True) -> Any:
    """A word-level tokenizer over `WORDS`: one token a word, unknown words one token too."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(SPECIAL + WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    built = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>" if pad else None,
        extra_special_tokens={"image_token": "<image>"},
    )
    built.chat_template = CHAT if chat else None
    return built


def save_llama(
    folder: Path, *, chat: bool = False, pad: bool = True, layers: int = 2, heads: int = 4, with_tokenizer: bool = True
) -> Path:
    """A Llama decoder with grouped key/value heads: 2 of them, of width 8, for all query heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=8 * heads,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=2,
        pad_token_id=0 if pad else None,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.3,
    )
    _save(LlamaForCausalLM, config, folder)
    if with_tokenizer:
        tokenizer(chat=chat, pad=pad).save_pretrained(folder)
    return folder


def save_llava(folder: Path, *, chat: bool = True) -> Path:
    """LLaVA: a CLIP tower (4 x 4 patches) whose features replace <image> tokens of a Llama."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    text = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        initializer_range=0.3,
    )
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=8
    )
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=SPECIAL.index("<image>"))
    _save(LlavaForConditionalGeneration, config, folder)
    words = tokenizer(chat=chat)
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}),
        tokenizer=words,
        patch_size=8,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
        chat_template=words.chat_template,
    )
    processor.save_pretrained(folder)
    return folder


def save_bart(folder: Path) -> Path:
    """BART: an encoder-decoder with learned positions."""
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(
        vocab_size=VOCABULARY,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=2,
        forced_eos_token_id=2,
        init_std=0.3,
    )
    _save(BartForConditionalGeneration, config, folder)
    tokenizer().save_pretrained(folder)
    return folder


def save_t5(folder: Path) -> Path:
    """T5: an encoder-decoder with relative position biases, which reach the attention calls as an additive mask."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        pad_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=0,
    )
    _save(T5ForConditionalGeneration, config, folder)
    tokenizer().save_pretrained(folder)
    return folder


def save_gemma3_config(folder: Path) -> Path:
    """Only the config.json of a Gemma 3 (sliding and global layers, images that see themselves), to be built from."""
    from transformers import Gemma3Config

    config = Gemma3Config(
        text_config={
            "vocab_size": 128,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"],
            "initializer_range": 0.3,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        },
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 32,
            "patch_size": 8,
        },
        mm_tokens_per_image=4,
        image_token_index=120,
        boi_token_index=121,
        eoi_token_index=122,
    )
    config.architectures = ["Gemma3ForConditionalGeneration"]
    config.save_pretrained(folder)
    return folder


def save_qwen2_vl_config(folder: Path) -> Path:
    """Only the config.json of a Qwen2-VL (M-RoPE, an image grid), for models built from their configuration."""
    from transformers import Qwen2VLConfig

    config = Qwen2VLConfig(
        text_config={
            "vocab_size": 128,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
            "max_position_embeddings": 4096,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        },
        vision_config={
            "depth": 2,
            "embed_dim": 32,
            "hidden_size": 32,
            "num_heads": 2,
            "mlp_ratio": 2,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        image_token_id=120,
        video_token_id=121,
        vision_start_token_id=122,
        vision_end_token_id=123,
    )
    config.architectures = ["Qwen2VLForConditionalGeneration"]
    config.save_pretrained(folder)
    return folder


def save_gemma4_config(folder: Path, *, layers: int = 12) -> Path:
    """Only the config.json of the embedded Gemma 4 Unified, with more layers."""
    from sdpa_repro.capturing import tiny

    config = tiny.configuration(layers=layers)
    config.architectures = ["Gemma4UnifiedForConditionalGeneration"]
    config.save_pretrained(folder)
    return folder


def _save(model_class: Any, config: Any, folder: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model_class(config).save_pretrained(folder)
