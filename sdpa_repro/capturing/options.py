"""What a prefill is made from: the model, the prompt and the padding, as the user asked for them."""

from __future__ import annotations

from dataclasses import dataclass

DTYPES = ("auto", "bfloat16", "float16", "float32")
"""Data types a model can be loaded in; "auto" is the one its weights are stored in."""

SIDES = ("left", "right")


@dataclass(frozen=True)
class PrefillOptions:
    """Options of one prefill, all optional: without any, the embedded model with its default prompt.

    model: folder or hub id; None is the embedded Gemma 4. images: paths or URLs that go with `prompt`.
    input: a JSON-lines file with a prompt a row, instead of `prompt` and `images`. pad: tokens of padding
    to add; total_length: the length to pad to. padding_side: None takes the model's convention, left for
    decoders and right for encoders. layers: keep so many layers. random_weights: build from the
    configuration alone. text_only: leave images out. tp_plan: "auto" splits the model over torchrun's ranks.
    """

    model: str | None = None
    images: tuple[str, ...] = ()
    prompt: str | None = None
    input: str | None = None
    pad: int | None = None
    total_length: int | None = None
    padding_side: str | None = None
    dtype: str | None = None
    device: str | None = None
    layers: int | None = None
    random_weights: bool = False
    trust_remote_code: bool = False
    revision: str | None = None
    seed: int = 0
    text_only: bool = False
    tp_plan: str | None = None
