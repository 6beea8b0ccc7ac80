"""Processors and tokenizers, loaded the way transformers documents."""

from __future__ import annotations

from typing import Any

from sdpa_repro.capturing.loading import display_name, existing, load_part
from sdpa_repro.capturing.options import PrefillOptions
from sdpa_repro.errors import InputError


def load_processor(config: Any, options: PrefillOptions, *, images: bool) -> tuple[Any | None, list[str]]:
    """The processor, or the tokenizer of a text-only model, and remarks for the user.

    images: whether the prompt has any; without, a processor that cannot be loaded is replaced by its
    tokenizer. None when there is nothing to load and weights are random: synthetic tokens do then. Raises
    InputError.
    """
    name = existing(str(options.model))
    processor, reason = load_part("AutoProcessor", name, options)
    blind = not hasattr(processor, "image_processor") and getattr(config, "vision_config", None) is not None
    if images and blind:
        reason = load_part("AutoImageProcessor", name, options)[1] or reason
        sentence = f"the image processor of {display_name(name)} cannot be loaded: {reason}"
        if not options.random_weights:
            raise InputError(sentence)
        return None, [sentence]
    if processor is not None and _has_words(processor):
        return processor, []
    tokenizer, reason = load_part("AutoTokenizer", name, options)
    if tokenizer is not None and _has_words(tokenizer):
        return tokenizer, []
    if options.random_weights:
        return None, []
    raise InputError(
        f"{display_name(name)} has no tokenizer that transformers can load ({reason or 'it has no words'}): "
        "add --random-weights for synthetic tokens"
    )


def _has_words(processor: Any) -> bool:
    """Whether a processor has a tokenizer with a vocabulary.

    Without files, transformers makes one up for some families: special tokens and next to nothing else.
    """
    tokenizer = getattr(processor, "tokenizer", processor)
    return hasattr(tokenizer, "pad_token") and len(tokenizer) >= len(tokenizer.all_special_ids) + 8
