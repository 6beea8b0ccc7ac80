"""Prompts turned into a batch of tensors by the model's own processor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sdpa_repro.capturing.load_errors import causes, first_line
from sdpa_repro.capturing.rows import Message, Row
from sdpa_repro.errors import InputError


def encode(processor: Any, rows: Sequence[Row], *, name: str, side: str) -> tuple[dict[str, Tensor], list[str]]:
    """The batch as the model takes it, padded to its longest row on `side`, and remarks for the user.

    Through the chat template when there is one, as plain text otherwise. input_ids and attention_mask are
    (B, L). Raises InputError when the processor takes no images or rejects a row.
    """
    tokenizer = getattr(processor, "tokenizer", processor)
    sees = hasattr(processor, "image_processor")
    if any(row.images for row in rows) and not sees:
        raise InputError(f"{name} takes text only: leave out the image, or add --text-only")
    notes = []
    if tokenizer.pad_token is None and len(rows) > 1:
        if tokenizer.eos_token is None:
            raise InputError(f"the tokenizer of {name} has no pad token: give one row at a time")
        tokenizer.pad_token = tokenizer.eos_token
        notes.append("the tokenizer has no pad token: the end-of-text token is used")
    tokenizer.padding_side = side
    template = getattr(processor, "chat_template", None) or getattr(tokenizer, "chat_template", None)
    try:
        batch = _from_template(processor, rows, sees=sees) if template else _from_text(processor, rows, sees=sees)
    except Exception as error:
        missing = any(isinstance(link, ImportError) for link in causes(error))
        what = "needs a package that is not installed" if missing else "rejects the prompt"
        raise InputError(f"the processor of {name} {what}: {first_line(error)}") from error
    if not template:
        notes.append("there is no chat template: the prompt goes in as plain text")
    return {key: value for key, value in batch.items() if isinstance(value, Tensor)}, notes


def _from_template(processor: Any, rows: Sequence[Row], *, sees: bool) -> Mapping[str, Any]:
    """Chat messages through the processor's own template."""
    if sees:
        conversations = [row.messages for row in rows]
        padding: dict[str, Any] = {"processor_kwargs": {"padding": len(rows) > 1}}
    else:
        conversations = [[_flat(message) for message in row.messages] for row in rows]
        padding = {"padding": len(rows) > 1}
    batch: Mapping[str, Any] = processor.apply_chat_template(
        conversations, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt", **padding
    )
    return batch


def _from_text(processor: Any, rows: Sequence[Row], *, sees: bool) -> Mapping[str, Any]:
    """Plain prompts; an image token is put in front for every image that the prompt does not place itself."""
    images = [row.images for row in rows]
    texts = [row.text for row in rows]
    keywords: dict[str, Any] = {"padding": len(rows) > 1, "return_tensors": "pt"}
    if not sees:
        batch: Mapping[str, Any] = processor(texts, **keywords)
        return batch
    mark = getattr(processor, "image_token", None)
    if mark:
        texts = [
            str(mark) * max(0, len(own) - text.count(str(mark))) + text for own, text in zip(images, texts, strict=True)
        ]
    batch = processor(text=texts, images=images if any(images) else None, **keywords)
    return batch


def _flat(message: Message) -> Message:
    """A message with its text as one string, as templates of text models want it."""
    return {**message, "content": "\n".join(str(part["text"]) for part in message["content"])}


def pad_token_of(processor: Any | None, config: Any) -> tuple[int, str | None]:
    """The token to pad with, and a remark when the model has none: the end-of-text token, or 0."""
    text = config.get_text_config()
    tokenizer = getattr(processor, "tokenizer", processor)

    def usable(name: str) -> int | None:
        for source in (tokenizer, text):
            token = getattr(source, name, None)
            token = token[0] if isinstance(token, (list, tuple)) and token else token
            if isinstance(token, int) and 0 <= token < text.vocab_size:
                return token
        return None

    pad, end = usable("pad_token_id"), usable("eos_token_id")
    if pad is not None:
        return pad, None
    if end is not None:
        return end, "the model has no pad token: the end-of-text token is used"
    return 0, "the model has no pad token: token 0 is used"


def to_device(inputs: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """The batch on a device, floating-point inputs (pixels) in the model's data type."""
    return {
        name: tensor.to(device, dtype) if tensor.is_floating_point() else tensor.to(device)
        for name, tensor in inputs.items()
    }
