"""One prefill of a model: prepared, padded and run.

The three steps of every verb that runs a model are

    prefill = prepare(options)
    for total in totals(prefill, options):
        logits = forward(prefill, padded(prefill, total))
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sdpa_repro.capturing import load_errors, loading, padding, placement, processors, prompts, synthetic, tiny
from sdpa_repro.capturing.options import PrefillOptions
from sdpa_repro.capturing.rows import read_rows
from sdpa_repro.errors import InputError

__all__ = ["Prefill", "PrefillOptions", "forward", "of_model", "padded", "prepare", "totals"]

RESIDUES = 64
"""Padded totals to try when none is asked for: one of each residue modulo the largest tile of query rows."""


@dataclass(frozen=True)
class Prefill:
    """A model and a prompt, ready to be padded and run.

    inputs: the batch on the model's device, unpadded or naturally padded to its longest row; `length` is
    its input_ids.shape[1]. side: which part of the model the prompt goes to, "decoder" or "encoder".
    padding_side: "left" or "right". notes: sentences for the user. embedded: the model is `tiny`'s.
    """

    model: Any
    inputs: dict[str, Tensor]
    name: str
    dtype: torch.dtype
    device: torch.device
    length: int
    side: str
    padding_side: str
    pad_token: int
    notes: tuple[str, ...] = ()
    embedded: bool = False


def prepare(options: PrefillOptions, progress: Callable[[str], None] | None = None) -> Prefill:
    """Load the model and make the batch, cheap checks first. Raises InputError, one line that says what to do.

    progress: called with a sentence before each step that takes time.
    """
    say = progress or (lambda sentence: None)
    loading.transformers_version()
    if options.model is None:
        return _embedded(options, say)
    name = loading.display_name(options.model)
    rows = read_rows(options)
    say(f"reading the configuration of {name}")
    config = loading.load_config(options)
    side = "encoder" if config.is_encoder_decoder else "decoder"
    padding_side = options.padding_side or ("right" if side == "encoder" else "left")
    processor, notes = processors.load_processor(config, options, images=any(row.images for row in rows))
    if processor is None:
        inputs, remarks = synthetic.synthetic_inputs(config, seed=options.seed, text_only=options.text_only)
        if options.prompt or options.images or options.input:
            remarks.append("the prompt that was given is not used")
    else:
        inputs, remarks = prompts.encode(processor, rows, name=name, side=padding_side)
    pad_token, remark = prompts.pad_token_of(processor, config)
    remarks += [remark] if remark else []
    say(f"{'building' if options.random_weights else 'loading'} {name}")
    model = loading.load_model(config, options)
    notes += [*remarks, *_remarks(model, options, side, padding_side)]
    return _prefill(model, inputs, name, side, padding_side, pad_token, notes)


def of_model(model: Any, inputs: Mapping[str, Any], *, padding_side: str | None = None) -> Prefill:
    """A prefill of a transformers model and the inputs that a processor made for it.

    input_ids (B, L); padding that all rows share is taken off. Raises InputError for a model in training mode and for
    inputs without input_ids.
    """
    if getattr(model, "training", False):
        raise InputError("the model is in training mode: call model.eval() first")
    tensors = {name: tensor for name, tensor in inputs.items() if isinstance(tensor, Tensor)}
    if "input_ids" not in tensors:
        raise InputError("the inputs have no input_ids: give what the processor or tokenizer returns")
    if "attention_mask" in tensors:
        kept = tensors["attention_mask"].bool().any(0).nonzero().flatten()
        tensors |= {name: tensors[name].index_select(1, kept) for name in padding.sequence_aligned(tensors)}
    side = "encoder" if model.config.is_encoder_decoder else "decoder"
    pad_token, remark = prompts.pad_token_of(None, model.config)
    padding_side = padding_side or ("right" if side == "encoder" else "left")
    name = type(model).__name__
    return _prefill(model, tensors, name, side, padding_side, pad_token, [remark] if remark else [])


def totals(prefill: Prefill, options: PrefillOptions) -> list[int]:
    """Padded lengths to try: the one asked for, or one of each residue modulo 64 from the prompt's length on.

    Models with a table of learned positions get no more than fits it. Raises InputError when the length
    asked for is shorter than the prompt or longer than the table.
    """
    limit = _position_limit(prefill.model)
    if limit is not None and prefill.length > limit:
        raise InputError(f"the prompt has {prefill.length} tokens, {prefill.name} takes {limit}: give a shorter one")
    if options.pad is None and options.total_length is None:
        lengths = range(prefill.length, prefill.length + RESIDUES)
        return [total for total in lengths if limit is None or total <= limit]
    total = options.total_length if options.total_length is not None else prefill.length + (options.pad or 0)
    if total < prefill.length:
        raise InputError(f"the prompt has {prefill.length} tokens: a total length of {total} is too short for it")
    if limit is not None and total > limit:
        raise InputError(f"{prefill.name} has positions for {limit} tokens: {total} are too many, give fewer")
    return [total]


def padded(prefill: Prefill, total: int, side: str | None = None) -> dict[str, Tensor]:
    """The batch padded to `total` tokens on `side` (the prefill's own when None), as arguments for `forward`.

    Everything along the sequence is padded in lockstep, pixels are untouched. position_ids are counted from
    the mask when the model takes them, and left to the model when it builds its own from an image grid
    (M-RoPE). Encoder-decoder models are padded on the encoder's input. Raises InputError when the prompt is
    longer than `total`.
    """
    if total < prefill.length:
        raise InputError(f"the prompt has {prefill.length} tokens: a total length of {total} is too short for it")
    return padding.pad_inputs(
        prefill.inputs,
        total,
        pad_token=prefill.pad_token,
        side=side or prefill.padding_side,
        positions=_takes_positions(prefill),
    )


def forward(prefill: Prefill, inputs: Mapping[str, Tensor]) -> Tensor:
    """Next-token logits (B, vocabulary), float32 on the CPU, after the last valid token of every row.

    One forward pass under inference mode with a fresh cache, as `generate` does for a prefill, with the
    head applied to the last valid tokens only. An encoder-decoder model gets one start token on the
    decoder. Raises InputError when memory runs out.
    """
    model = prefill.model
    words: dict[str, Any] = dict(inputs)
    last = padding.last_valid(inputs["attention_mask"])
    accepted = _parameters(model)
    if prefill.side == "encoder":
        words["decoder_input_ids"] = torch.full_like(inputs["input_ids"][:, :1], _start_token(model))
        last = torch.zeros_like(last)
    elif "logits_to_keep" in accepted:
        rows, last = torch.unique(last, return_inverse=True)
        at_end = rows.tolist() == [inputs["input_ids"].shape[1] - 1]
        words["logits_to_keep"] = 1 if at_end else rows
    if "use_cache" in accepted:
        words["use_cache"] = True
    try:
        with torch.inference_mode():
            logits = model(**words).logits
    except Exception as error:
        if load_errors.is_out_of_memory(error):
            raise load_errors.out_of_memory(prefill.device) from error
        raise
    chosen: Tensor = logits[torch.arange(len(last), device=logits.device), last.to(logits.device)]
    return chosen.detach().to("cpu", torch.float32)


def _embedded(options: PrefillOptions, say: Callable[[str], None]) -> Prefill:
    """The embedded model with its synthetic prompt."""
    say(f"building the {tiny.NAME}")
    device = placement.target_device(options.device)
    dtype = placement.target_dtype(options.dtype) or torch.bfloat16
    model = tiny.tiny_gemma4(options.seed, dtype, device=device, layers=options.layers or tiny.LAYERS)
    inputs = tiny.tiny_inputs(model, images=0 if options.text_only else 1, seed=options.seed)
    side = options.padding_side or "left"
    return _prefill(model, inputs, tiny.NAME, "decoder", side, tiny.PAD, [], embedded=True)


def _prefill(
    model: Any,
    inputs: Mapping[str, Tensor],
    name: str,
    side: str,
    padding_side: str,
    pad_token: int,
    notes: list[str],
    *,
    embedded: bool = False,
) -> Prefill:
    """Move the batch to the model and drop what its forward does not know."""
    device = model.get_input_embeddings().weight.device
    device = model.device if device.type == "meta" else device
    dtype = model.dtype
    known = _known_inputs(model, prompts.to_device(inputs, device, dtype))
    length = known["input_ids"].shape[1]
    if length == 0:
        raise InputError("the prompt has no tokens: give some text")
    return Prefill(model, known, name, dtype, device, length, side, padding_side, pad_token, tuple(notes), embedded)


def _known_inputs(model: Any, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without sequence inputs the model has no parameter for (token_type_ids for Llama), as users drop them."""
    accepted = _parameters(model) | _parameters(getattr(model, "model", model))
    optional = padding.sequence_aligned(inputs).keys() - {"input_ids", "attention_mask"}
    return {name: tensor for name, tensor in inputs.items() if name in accepted or name not in optional}


def _remarks(model: Any, options: PrefillOptions, side: str, padding_side: str) -> list[str]:
    """What the user should know about how this model is run."""
    remarks = []
    if options.device is None and torch.cuda.is_available() and not placement.has_accelerate():
        remarks.append("accelerate is not installed: the model goes to one device")
    if side == "encoder":
        remarks.append(f"encoder-decoder model: the encoder's input is padded, on the {padding_side}")
    if padding_side == "left" and "position_ids" not in _parameters(model) and _position_limit(model) is not None:
        remarks.append(
            "left padding moves this model's learned positions: padded and unpadded results differ by design"
        )
    return remarks


def _takes_positions(prefill: Prefill) -> bool:
    """Whether position_ids are passed: the model takes them and does not build its own from an image grid."""
    model = prefill.model
    own = any(hasattr(part, "get_rope_index") for part in (model, getattr(model, "model", None)))
    has_grid = any(name.endswith("grid_thw") for name in prefill.inputs)
    return "position_ids" in _parameters(model) and not (own and has_grid)


def _position_limit(model: Any) -> int | None:
    """How many positions a model's text side has a table for; None when positions are computed (RoPE, relative)."""
    tables = ("embed_positions", "wpe", "position_embeddings", "position_embedding")
    for name, module in model.named_modules():
        outside = any(sense in name for sense in ("vision", "visual", "image", "audio"))
        if name.endswith(tables) and isinstance(module, torch.nn.Embedding) and not outside:
            limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
            return int(limit) if isinstance(limit, int) else module.num_embeddings
    return None


def _start_token(model: Any) -> int:
    """The token an encoder-decoder model's decoder starts with."""
    settings = (model.generation_config, model.config, model.config.get_text_config(decoder=True))
    for name in ("decoder_start_token_id", "bos_token_id", "pad_token_id"):
        for config in settings:
            token = getattr(config, name, None)
            if isinstance(token, int):
                return token
    return 0


def _parameters(model: Any) -> set[str]:
    """Names of the parameters of a model's forward."""
    return set(inspect.signature(model.forward).parameters)
