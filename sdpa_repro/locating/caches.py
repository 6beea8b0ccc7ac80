"""The masks that a prompt meets with a dynamic and with a static cache, side by side.

transformers prepares them in two places: a model's `forward` makes its own masks for a dynamic cache, `generate` hands
ready ones to `forward` for a static cache. What a token sees must not depend on which of the two a user asked for.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sdpa_repro.capturing import load_errors
from sdpa_repro.capturing.prefill import Prefill, PrefillOptions, totals
from sdpa_repro.errors import InputError
from sdpa_repro.locating import structure
from sdpa_repro.locating.comparing import visibility
from sdpa_repro.locating.recording import Recording, record

__all__ = ["CacheComparison", "compare_caches", "generated"]

REMEMBERED = "_previous_max_cache_length"
"""What transformers' `generate` leaves on a model after a run with a static cache."""


@dataclass(frozen=True)
class CacheComparison:
    """One prompt with both caches: what valid tokens see of each other, slots without a token left out.

    masks: the kinds of mask that were seen ("sliding", "global", "" for models with one kind). different: for each
    kind that differs, how, in words. moved: the largest difference of the next-token logits. tokens: the likeliest
    token with a dynamic and with a static cache. module, file: the class whose `create_masks_for_generate` makes those
    of a static cache. maker: the class whose `forward` makes those of a dynamic one. equal_inputs: whether both runs
    were given the same ids, token types and positions. prepared: whether a static cache given to `forward` itself meets
    the dynamic cache's masks, so that only those prepared by `generate` differ; None when that was not to be found out.
    """

    total: int
    masks: tuple[str, ...]
    different: Mapping[str, str]
    moved: float
    tokens: tuple[int, int]
    module: str
    file: str
    prepared: bool | None = None
    maker: str = ""
    equal_inputs: bool = True

    @property
    def headline(self) -> str:
        """The first entry of each kind that differs. Empty when nothing differs."""
        return "; ".join(f"{kind} mask: {how.partition(' (')[0]}".strip() for kind, how in self.different.items())

    @property
    def sentence(self) -> str:
        """What differs, what follows from it, and whose difference it is. Empty when nothing differs."""
        if not self.different:
            return ""
        parts = [f"{kind} mask: {how}".strip() for kind, how in self.different.items()]
        then = "stays" if self.tokens[0] == self.tokens[1] else f"changes from {self.tokens[0]} to {self.tokens[1]}"
        moved = f"logits move by up to {self.moved:.3g}, the next token {then}"
        parts.append(moved if self.moved else "the next-token logits of this prompt stay the same")
        if not self.equal_inputs:
            parts.append("generate gives the two caches other ids, token types or positions")
        elif self.prepared:
            parts.append(
                f"of the same inputs {self.maker}.forward makes the masks of the dynamic cache and "
                f"{self.module}.create_masks_for_generate those of the static one"
            )
        return "; ".join(parts)

    def document(self) -> dict[str, Any]:
        """The comparison as plain values."""
        return {
            **vars(self),
            "masks": list(self.masks),
            "different": dict(self.different),
            "tokens": list(self.tokens),
        }


def compare_caches(prefill: Prefill, inputs: Mapping[str, Tensor], *, row: int = 0) -> CacheComparison:
    """Run the prefill of `generate` with a dynamic and with a static cache and compare the masks of one row.

    inputs: as `padded` returns them. Raises InputError, one line, for a model that does not take both caches or shows
    no mask.
    """
    if prefill.side == "encoder":
        raise InputError("padding is on the encoder, which has no cache")
    if not hasattr(prefill.model, "generate"):
        raise InputError("the model has no generate")
    dynamic, static = (_recorded(prefill, inputs, row, cache) for cache in ("dynamic", "static"))
    one, other = masks_of(dynamic), masks_of(static)
    if not one or set(one) != set(other):
        raise InputError("the masks of the two caches were not both seen")
    different = _different(one, other, _types(dynamic))
    row = row if len(dynamic.logits) > 1 else 0
    before, after = dynamic.logits[row], static.logits[row]
    return CacheComparison(
        total=dynamic.total,
        masks=tuple(one),
        different=different,
        moved=float((before - after).abs().max()),
        tokens=(int(before.argmax()), int(after.argmax())),
        module=type(prefill.model).__name__,
        file=structure.source_of(prefill.model),
        prepared=_by_forward(prefill, inputs, row, one) if different else None,
        maker=_maker(prefill, dynamic, next(iter(different or one))),
        equal_inputs=_given(dynamic) == _given(static),
    )


def generated(
    prefill: Prefill, inputs: Mapping[str, Tensor], count: int, cache: str | None = None
) -> tuple[Tensor, Tensor]:
    """Greedy continuation by the model's `generate`: tokens (B, n) and their logits (n, B, vocabulary), n <= count.

    Both on the CPU, the logits float32. cache: "dynamic" or "static"; None for the model's own. Raises InputError when
    memory runs out, and when the model has no positions for so many tokens.
    """
    if prefill.side == "decoder":
        longest = int(inputs["attention_mask"].sum(-1).max())
        totals(prefill, PrefillOptions(total_length=max(prefill.length, longest + count - 1)))
    words = {name: tensor for name, tensor in inputs.items() if name != "position_ids"}
    settings: dict[str, Any] = {
        "do_sample": False,
        "num_beams": 1,
        "max_new_tokens": count,
        "pad_token_id": prefill.pad_token,
    }
    settings |= {"return_dict_in_generate": True, "output_logits": True}
    settings |= {"cache_implementation": cache} if cache else {}
    try:
        with torch.inference_mode(), _left_as_it_was(prefill.model):
            found = prefill.model.generate(**words, **settings)
    except Exception as error:
        if load_errors.is_out_of_memory(error):
            raise load_errors.out_of_memory(prefill.device) from error
        raise
    logits = torch.stack(tuple(found.logits)).detach().to("cpu", torch.float32)
    return found.sequences[:, -len(logits) :].cpu(), logits


def masks_of(run: Recording) -> dict[str, Tensor]:
    """What valid tokens see of each other in a run, by kind of mask: bool (n, n). Of several of a kind the first."""
    found: dict[str, Tensor] = {}
    for value in run.stage("mask"):
        found.setdefault(value.part, value.tensor)
    return found


def _recorded(prefill: Prefill, inputs: Mapping[str, Tensor], row: int, cache: str) -> Recording:
    """The prefill of `generate` with one kind of cache."""
    try:
        return record(prefill, inputs, row=row, run=lambda: generated(prefill, inputs, 1, cache)[1][0])
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"the model takes no {cache} cache: {load_errors.first_line(error)}") from error


def _maker(prefill: Prefill, run: Recording, kind: str) -> str:
    """The class of the module that made a kind of mask in a run."""
    path = next(value.maker for value in run.stage("mask") if value.part == kind)
    return type(prefill.model.get_submodule(path)).__name__


def _given(run: Recording) -> list[list[float]]:
    """The ids, token types and positions that the model's parts met, each once."""
    found: dict[str, list[float]] = {}
    for value in run.values:
        if value.stage in ("input_ids", "token types", "position_ids") and value.point != "inputs":
            found.setdefault(value.stage, value.tensor.flatten().tolist())
    return [found[stage] for stage in sorted(found)]


def _types(run: Recording) -> Tensor | None:
    """The types (n,) of the valid tokens, 0 for text; None when the model has none."""
    found = [value.tensor.flatten() for value in run.stage("token types")]
    return found[0] if found else None


def _different(
    dynamic: Mapping[str, Tensor], static: Mapping[str, Tensor], types: Tensor | None = None
) -> dict[str, str]:
    """For each kind of mask that differs: the first entry, how many there are, and what they have in common."""
    found = {}
    for kind, mask in dynamic.items():
        difference = visibility(mask, static[kind])
        if mask.shape != static[kind].shape:
            found[kind] = difference.where
        elif difference.differs:
            rows, keys = (mask != static[kind]).nonzero().unbind(1)
            row, key = int(rows[0]), int(keys[0])
            sees, does_not = ("dynamic", "static") if bool(mask[row, key]) else ("static", "dynamic")
            pair = f"token {row} sees token {key} with a {sees} cache and does not with a {does_not} one"
            found[kind] = f"{pair} ({difference.detail}{_common(rows, keys, types)})"
    return found


def _common(rows: Tensor, keys: Tensor, types: Tensor | None) -> str:
    """What all entries that differ have in common: tokens that are no text, or that they look ahead."""
    parts = []
    if types is not None and bool((types[rows] != 0).all()) and bool((types[keys] != 0).all()):
        parts.append("all between tokens of images or other media")
    if bool((keys > rows).all()):
        parts.append("all towards later tokens")
    return "".join(f", {part}" for part in parts)


def _by_forward(prefill: Prefill, inputs: Mapping[str, Tensor], row: int, dynamic: Mapping[str, Tensor]) -> bool | None:
    """Whether `forward` makes the dynamic cache's masks for a static one too."""
    from transformers import StaticCache

    accepted = inspect.signature(prefill.model.forward).parameters
    name = next((name for name in ("cache", "past_key_values") if name in accepted), None)
    if name is None:
        return None
    total = inputs["input_ids"].shape[1]
    try:
        cache: Any = StaticCache(config=prefill.model.config.get_text_config(decoder=True), max_cache_len=total + 1)
        run = record(prefill, {**inputs, name: cache}, row=row)
    except Exception:  # whatever a model says to a cache that it was not made for, and no memory for one more run
        return None
    return not _different(dynamic, static) if set(static := masks_of(run)) == set(dynamic) else None


@contextmanager
def _left_as_it_was(model: Any) -> Iterator[None]:
    """`generate` remembers the size of its last static cache on the model; take that back after the block."""
    attributes = vars(model)
    before = attributes.get(REMEMBERED)
    try:
        yield
    finally:
        attributes.pop(REMEMBERED, None)
        if before is not None:
            attributes[REMEMBERED] = before
