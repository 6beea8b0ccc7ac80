"""One run of a model with its intermediate values, on the coordinates of one row's valid tokens.

    recording = record(prefill, padded(prefill, 289))
    recording.stage("position_ids")

A value is kept where it was seen: every stage is a list, since the same thing (position_ids, say) passes
several modules and may be changed on its way. Hooks and wrapped functions only look; the model's output is
the same bits with and without them, and nothing of them is left afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sdpa_repro.capturing.prefill import Prefill, forward
from sdpa_repro.capturing.recorder import listening
from sdpa_repro.locating import structure
from sdpa_repro.locating.calls import Calls, Check
from sdpa_repro.locating.notes import Notes, Value
from sdpa_repro.locating.watching import feed_layers, watch_inside, watch_model

__all__ = ["Recording", "Value", "record"]


@dataclass(frozen=True, eq=False)
class Recording:
    """What one run showed.

    values: in the order in which they were seen. valid: positions (n,) of the row's tokens that are not
    padding; total: length with padding; logits: (B, vocabulary) float32 as `forward` returns them. checks: the
    live check of every SDPA call, when asked for. problems: what could not be looked at, and why.
    """

    values: tuple[Value, ...]
    valid: Tensor
    total: int
    row: int
    logits: Tensor
    checks: tuple[Check, ...] = ()
    problems: tuple[str, ...] = ()

    def stage(self, name: str) -> list[Value]:
        """The values of a stage, in the order in which they were seen."""
        return [value for value in self.values if value.stage == name]

    def layer_inputs(self) -> dict[str, list[Tensor]]:
        """What each layer was given, by its path: one tensor for each time that it was run through."""
        found: dict[str, list[Tensor]] = {}
        for value in self.stage("input"):
            found.setdefault(value.layer, []).append(value.tensor)
        return found

    def keyed(self) -> dict[tuple[str, str, int], Value]:
        """Every value under its stage, the point where it was seen, and how often that point was passed before."""
        found: dict[tuple[str, str, int], Value] = {}
        for value in self.values:
            count = 0
            while (value.stage, value.point, count) in found:
                count += 1
            found[value.stage, value.point, count] = value
        return found


def record(
    prefill: Prefill,
    inputs: Mapping[str, Tensor],
    *,
    row: int = 0,
    check: bool = False,
    inside: str | None = None,
    feed: Recording | None = None,
    run: Callable[[], Tensor] | None = None,
) -> Recording:
    """Run `forward(prefill, inputs)` once and keep what its stages hold for one row of the batch.

    inputs: as `padded` returns them; a batch of 1 is used for any `row`. check: judge every SDPA call live. inside:
    path of a layer; only the outputs of the modules below it are then kept, under the stage "inside". feed: give
    each layer the input that it had in another recording, on valid tokens, so that every layer is seen by itself.
    run: what to run instead, returning logits (B, vocabulary), for a model called in another way (with a static
    cache, say) on the same inputs.
    """
    batch = inputs["input_ids"].shape[0]
    row = row if batch > 1 else 0
    notes = Notes(inputs["attention_mask"][row], batch, row)
    stacks = structure.stacks(prefill.model)
    calls = Calls(notes, stacks, check=check)
    with ExitStack() as stack:
        if inside is None:
            _inputs(notes, inputs)
            watch_model(stack, notes, prefill.model, stacks)
            stack.enter_context(listening(calls))
        else:
            watch_inside(stack, notes, prefill.model, inside)
        if feed is not None:
            feed_layers(stack, notes, stacks, feed.layer_inputs())
        logits = run() if run is not None else forward(prefill, inputs)
    notes.settle()
    notes.add("logits", "", logits[row], axis=None)
    return Recording(
        tuple(notes.values),
        notes.valid.cpu(),
        notes.total,
        row,
        logits,
        tuple(calls.checks),
        tuple(dict.fromkeys(notes.problems)),
    )


def _inputs(notes: Notes, inputs: Mapping[str, Any]) -> None:
    """What goes into the model, before anything happens to it."""
    for name, tensor in inputs.items():
        if not isinstance(tensor, Tensor):
            continue
        stage = notes.stage_of(name, tensor)
        if stage == "pixel inputs":
            notes.add_pixels(name, tensor)
        elif stage:
            notes.add(stage, "inputs", tensor, axis=-1, batch=-2)
