"""A model's configuration with its sizes made small, for tests that run in seconds on any machine.

What shapes the attention calls stays: the kinds of layers, head_dim, how many query heads share a key/value head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sdpa_repro.capturing.layers import DEPTHS, SENSES, shortened

__all__ = ["shrunk"]

LAYERS, HEADS = 2, 4
WIDTH, INNER, VOCABULARY, WINDOW = 64, 128, 512, 16

SIZES = {
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "moe_intermediate_size": INNER,
    "shared_expert_intermediate_size": INNER,
    "expert_intermediate_size": INNER,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "top_k_experts": 2,
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 16,
    "sliding_window": WINDOW,
}
"""The most that a text section has of each."""

SHARED = ("num_key_value_heads", "num_global_key_value_heads")
"""Numbers of heads that keep their share of the query heads."""

SPREAD = 0.1
"""Standard deviation of the weights: with the usual 0.02 a small model's logits would be nearly all alike."""

TOKENS = ("token_id", "token_index", "token_ids")
FORGOTTEN = ("transformers_version", "_name_or_path", "architectures", "dtype", "torch_dtype", "quantization_config")


def shrunk(config: Any) -> Any:
    """The configuration with two layers and small sizes, special tokens moved into the small vocabulary.

    Parts for images and sounds keep their sizes, two layers of them. Raises what the configuration's class raises when
    it does not take the sizes.
    """
    stored = {name: value for name, value in config.to_dict().items() if name not in FORGOTTEN}
    ids = _moved(stored)
    small = _renamed(_sections(shortened(stored, LAYERS)), ids)
    return type(config).from_dict(small)


def _sections(section: Mapping[str, Any]) -> dict[str, Any]:
    """A section and the ones inside it, text made small, images and sounds cut to few layers."""
    small = dict(section)
    for name, value in section.items():
        if not isinstance(value, Mapping) or "model_type" not in value:
            continue
        if any(sense in str(name) for sense in SENSES):
            small[name] = _shallow(value, _width(section))
        else:
            small[name] = _sections(value)
    return _text(small) if isinstance(section.get("num_attention_heads"), int) else small


def _text(section: Mapping[str, Any]) -> dict[str, Any]:
    """One text section: heads, widths, vocabulary."""
    small = dict(section)
    for name, most in SIZES.items():
        if isinstance(section.get(name), int):
            small[name] = min(most, section[name])
    heads = section["num_attention_heads"]
    fewer = min(HEADS, heads)
    small["num_attention_heads"] = fewer
    for name in SHARED:
        if isinstance(section.get(name), int):
            small[name] = max(1, section[name] * fewer // heads)
    if isinstance(section.get("per_layer_config"), Mapping):
        changes = section["per_layer_config"]
        small["per_layer_config"] = {layer: _override(changes[layer], fewer, heads) for layer in changes}
    if not isinstance(section.get("head_dim"), int) and isinstance(section.get("hidden_size"), int):
        small["hidden_size"] = section["hidden_size"] // heads * fewer
    if "initializer_range" in section:
        small["initializer_range"] = SPREAD
    return small


def _override(changed: Mapping[str, Any], fewer: int, heads: int) -> dict[str, Any]:
    """What one layer has otherwise than the others, with `fewer` query heads instead of `heads`."""
    small = dict(changed)
    for name, value in changed.items():
        if name in SHARED and isinstance(value, int):
            small[name] = max(1, value * fewer // heads)
        elif name in SIZES and isinstance(value, int):
            small[name] = min(value, SIZES[name])
    return small


def _shallow(section: Mapping[str, Any], width: int | None) -> dict[str, Any]:
    """A tower of few layers that ends in the small width of the text where it says so."""
    small = dict(section)
    for name in (*DEPTHS, "depth"):
        if isinstance(section.get(name), int):
            small[name] = min(LAYERS, section[name])
    ends = "out_hidden_size" if "out_hidden_size" in section else "hidden_size" if "embed_dim" in section else None
    if ends is not None and section[ends] == width:
        small[ends] = min(WIDTH, width or WIDTH)
    if isinstance(section.get("fullatt_block_indexes"), list):
        small["fullatt_block_indexes"] = [LAYERS - 1]
    if isinstance(section.get("deepstack_visual_indexes"), list):
        small["deepstack_visual_indexes"] = [0]
    return small


def _width(section: Mapping[str, Any]) -> int | None:
    """The width of the text beside a tower."""
    text = section.get("text_config")
    found = text.get("hidden_size") if isinstance(text, Mapping) else section.get("hidden_size")
    return found if isinstance(found, int) else None


def _moved(section: Mapping[str, Any]) -> dict[int, int]:
    """New ids for special tokens beyond the small vocabulary, from its end down, none of them given twice."""
    special = set(_tokens(section))
    free = (number for number in range(VOCABULARY - 1, -1, -1) if number not in special)
    return {token: next(free) for token in sorted(special, reverse=True) if token >= VOCABULARY}


def _tokens(section: Mapping[str, Any]) -> Iterator[int]:
    """The special tokens that a configuration names."""
    for name, value in section.items():
        if isinstance(value, Mapping):
            yield from _tokens(value)
        elif str(name).endswith(TOKENS):
            yield from (each for each in (value if isinstance(value, list) else [value]) if isinstance(each, int))


def _renamed(section: Mapping[str, Any], ids: Mapping[int, int]) -> dict[str, Any]:
    """The section with its special tokens renamed."""
    small: dict[str, Any] = {}
    for name, value in section.items():
        if isinstance(value, Mapping):
            small[name] = _renamed(value, ids)
        elif str(name).endswith(TOKENS) and isinstance(value, list):
            small[name] = [ids.get(each, each) for each in value]
        else:
            small[name] = ids.get(value, value) if str(name).endswith(TOKENS) and isinstance(value, int) else value
    return small
