"""From a dump and the documents about it to a `Story`, and to a script whose limit was checked by running it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sdpa_repro.attention import AttentionCall, viewed_once
from sdpa_repro.capturing.tiny import NAME as EMBEDDED
from sdpa_repro.dump import Dump
from sdpa_repro.errors import InputError
from sdpa_repro.publishing import wording
from sdpa_repro.publishing.escaping import mapping
from sdpa_repro.publishing.length_facts import adopted, of_call
from sdpa_repro.publishing.limit import errors_in, fitted_limit, rounding_limit
from sdpa_repro.publishing.running import ScriptRun, run_script
from sdpa_repro.publishing.script import script
from sdpa_repro.publishing.story import FAILURE, Story, switches
from sdpa_repro.publishing.tensor_lines import WORDS
from sdpa_repro.recipe import Recipe, build, from_document

MOST_BUILT = 1 << 24
"""Elements of a stated closed form that are built to compare them with a tensor that has fewer: a file may lie."""

RUN_SECONDS = 150.0
"""For one run of a script; each child of one that looks for a crash or a hang has `Story.timeout`."""


@dataclass(frozen=True)
class Tried:
    """A script, the story it tells with the limit it has, and what its run came to."""

    text: str
    story: Story
    run: ScriptRun


def recipes_of(dump: Dump) -> dict[str, Recipe]:
    """The closed forms that a dump states, those that really build its tensors: same bits, shape and strides."""
    found = {}
    for name, tensor in dump.call.tensors.items():
        stated = (dump.recipe or {}).get(name)
        if stated is None:
            continue
        try:
            recipe = from_document(stated)
            if math.prod(recipe.shape) > max(MOST_BUILT, 4 * viewed_once(tensor).numel()):
                continue
            made = build(recipe, tensor.device)
        except (InputError, RuntimeError):
            continue
        if same_tensor(made, tensor):
            found[name] = recipe
    return found


def same_tensor(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same dtype, shape, bits, and strides where a dimension is larger than 1."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if any(size > 1 and a != b for size, a, b in zip(one.shape, one.stride(), other.stride(), strict=True)):
        return False
    words = WORDS[one.element_size()]
    return torch.equal(viewed_once(one).contiguous().view(words), viewed_once(other).contiguous().view(words))


def is_synthetic(origin: Mapping[str, Any]) -> bool:
    """Whether the values come from no real model: the embedded one, or made for the purpose."""
    model = origin.get("model")
    return isinstance(model, str) and (model == EMBEDDED or model.startswith("none:"))


def story_of(
    dump: Dump,
    backend: str,
    replayed: Mapping[str, Any],
    explanation: Mapping[str, Any],
    *,
    device: str,
    inline: bool = False,
    runs: int = 1,
    searched: bool = True,
    reduction: Mapping[str, Any] | None = None,
    captured: AttentionCall | None = None,
    told: Mapping[str, Any] | None = None,
) -> Story:
    """The story of `backend` failing on the dump's call, from a replay of it and what `explain` found (or nothing).

    inline, runs, searched: as in `Story`. captured, reduction, told: the call that was reduced to the dump's, the
    document of that, and of an explanation of the captured call; all may be missing.
    """
    rule = adopted(explanation, told or {}, dump.call) if captured is not None else ""
    found = f"{rule} (found on the captured call: {of_call(captured)})" if captured is not None and rule else ""
    cells = [mapping(cell) for cell in replayed.get("cells") or ()]
    mine = [cell for cell in cells if cell.get("backend") == backend and cell.get("dtype") == replayed.get("dtype")]
    status = str(mine[0].get("status")) if mine else "diverges"
    plain = Story(
        backend=backend,
        status=status if status in FAILURE else "diverges",
        needs=tuple(wording.needed(explanation, dump.call, reduction, rule)),
        remarks=wording.remarks(explanation),
        inline=inline,
        runs=runs,
        searched=searched,
        **{**switches(dump.context), "device": device.partition(":")[0]},
    )
    return replace(plain, cause=wording.cause(plain, explanation, replayed, found))


def tried_script(
    call: AttentionCall,
    recipes: Mapping[str, Recipe],
    story: Story,
    *,
    guilty: Collection[str] = (),
    preload: Sequence[str | Path] = (),
    beside: Mapping[str, Path] | None = None,
) -> Tried:
    """Write the script, run it, and where its limit does not separate right from wrong choose another and run again.

    guilty: every backend that is wrong. beside: files that the script reads, by the name it reads them under.
    """
    if story.limit is None and not story.ends_process:
        limit, reason = rounding_limit(call, story.autocast)
        story = replace(story, limit=limit, limit_reason=reason)
    text = script(call, recipes, story)
    run = run_script(text, preload=preload, beside=beside, timeout=RUN_SECONDS)
    if story.ends_process:
        return Tried(text, story, run)
    fitted = fitted_limit(call, errors_in(run.output), {story.backend, *guilty}, story.autocast)
    if fitted is None or fitted[0] == story.limit:
        return Tried(text, story, run)
    story = replace(story, limit=fitted[0], limit_reason=fitted[1])
    text = script(call, recipes, story)
    return Tried(text, story, run_script(text, preload=preload, beside=beside, timeout=RUN_SECONDS))
