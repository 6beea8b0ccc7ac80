"""A configuration with fewer layers: enough for the attention calls, small enough for any machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DEPTHS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "encoder_layers",
    "decoder_layers",
    "num_encoder_layers",
    "num_decoder_layers",
)
"""Names under which configurations keep their depth; the first one found counts for per-layer lists."""

SENSES = ("vision", "visual", "image", "audio", "speech", "video", "vq", "qformer", "talker", "token2wav")
"""Parts of a model that are left whole: they turn an image or a sound into embeddings."""

FULL = ("full_attention", "attention", "global_attention", "global")
"""Layer types that attend to the whole sequence."""


def depth(section: Mapping[str, Any]) -> int | None:
    """Number of layers of one section of a configuration, None when it does not say."""
    for name in DEPTHS:
        if isinstance(section.get(name), int):
            return int(section[name])
    return None


def kept(section: Mapping[str, Any], layers: int, *, prefix: bool = False) -> list[int]:
    """Indices of the layers to keep: the first ones, the last of them replaced by the next full-attention layer.

    Some families (Gemma 4) insist that the last layer attends to everything, and a model without such a
    layer would not show what is looked for. With `prefix` the first `layers` are kept whatever they are,
    since stored weights belong to their layer.
    """
    count = depth(section) or 0
    first = list(range(min(layers, count)))
    later = [index for index in _full(section) if index >= len(first) - 1]
    return first if prefix or not later or not first else [*first[:-1], later[0]]


def shortened(config: Mapping[str, Any], layers: int, *, prefix: bool = False) -> dict[str, Any]:
    """A configuration dictionary cut to `layers` layers, the parts of it that hold text included.

    Every per-layer list (`layer_types`, sizes, ...) is cut to the same layers; key/value sharing between
    layers is kept for as many of the last ones as are left. See `kept` for which layers stay.
    """
    short: dict[str, Any] = {}
    for name, value in config.items():
        nested = isinstance(value, Mapping) and not any(sense in name for sense in SENSES)
        short[name] = shortened(value, layers, prefix=prefix) if nested and "model_type" in value else value
    count = depth(config)
    if count is None or count <= layers:
        return short
    indices = kept(config, layers, prefix=prefix)
    for name, value in config.items():
        if name in DEPTHS and isinstance(value, int):
            short[name] = min(layers, value)
        elif name == "num_kv_shared_layers" and isinstance(value, int):
            short[name] = max(0, layers - (count - value))
        elif name == "per_layer_config" and isinstance(value, Mapping):
            short[name] = _renumbered(value, indices)
        elif name == "cross_attention_layers" and isinstance(value, list):
            short[name] = [indices.index(layer) for layer in value if layer in indices]
        elif isinstance(value, list) and len(value) == count:
            short[name] = [value[index] for index in indices]
    return short


def enough(config: Mapping[str, Any], layers: int) -> int:
    """The smallest number of first layers, at least `layers`, that is a model of the same kind.

    That is one that reaches a full-attention layer, and ends in one if the whole model does.
    """
    for section in (config, *config.values()):
        full = _full(section) if isinstance(section, Mapping) else []
        if not full:
            continue
        ends = full[-1] == len(section["layer_types"]) - 1
        later = [index for index in full if index >= layers - 1]
        if later and (ends or full[0] >= layers):
            return later[0] + 1
    return layers


def _full(section: Mapping[str, Any]) -> list[int]:
    """Indices of the layers that attend to the whole sequence; empty when the layers are all alike."""
    return [index for index, kind in enumerate(section.get("layer_types") or ()) if kind in FULL]


def _renumbered(table: Mapping[str, Any], indices: list[int]) -> dict[str, Any]:
    """Overrides by layer number ("05": {...}) for the layers that stay, under their new numbers."""
    by_layer = {int(layer): value for layer, value in table.items()}
    return {str(new): by_layer[old] for new, old in enumerate(indices) if old in by_layer}
