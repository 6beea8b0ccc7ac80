"""Query, key, value and visibility of every SDPA call of a run, and its live check."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from sdpa_repro.capturing.recorder import Seen
from sdpa_repro.capturing.session import judge
from sdpa_repro.locating.notes import Notes, Value
from sdpa_repro.locating.structure import Stack
from sdpa_repro.replaying.check import LiveCheck
from sdpa_repro.visibility import bias_rows


@dataclass(frozen=True, kw_only=True)
class Check(LiveCheck):
    """The live check of one call, with its place in the run. lengths: (L, S). batches: rows of the call's batch."""

    index: int
    module: str
    kernel: str
    lengths: tuple[int, int]
    batches: int
    heads: int

    def document(self) -> dict[str, Any]:
        """The check as plain values."""
        return {**asdict(self), "rows": [list(row) for row in self.rows], "lengths": list(self.lengths)}


class Silent:
    """A listener that wants nothing. While it listens SDPA stays replaced, which costs more than a call does."""

    def expect(self, module: str, phase: str) -> int | None:
        """No call is wanted."""
        return None

    def enter(self, index: int, seen: Seen) -> None:
        """Never called."""

    def take(self, index: int, seen: Seen) -> None:
        """Never called."""

    def passed(self, reason: str) -> None:
        """Nothing is counted."""

    def elsewhere(self, thread: str) -> None:
        """Nothing is counted."""


class Calls:
    """A listener of the recorder: it notes what each call was given and how it was answered."""

    def __init__(self, notes: Notes, stacks: Sequence[Stack], *, check: bool) -> None:
        """stacks: the layers that a call can belong to. check: judge every call against the reference."""
        self._notes = notes
        self._check = check
        self._kinds = {path: kind for stack in stacks for path, kind in stack.kinds.items()}
        self._owners = {path: stack.owner for stack in stacks for path in stack.layers}
        self._count = 0
        self.checks: list[Check] = []

    def expect(self, module: str, phase: str) -> int | None:
        """Every call is wanted."""
        self._count += 1
        return self._count - 1

    def enter(self, index: int, seen: Seen) -> None:
        """Note the inputs of a call as they are when it begins."""
        call, notes = seen.call, self._notes
        layer = self.layer_of(seen.module)
        notes.values.append(Value("call", seen.module, layer, torch.tensor(index), None, maker=seen.module))
        if not layer or call.query.dim() != 4:
            return
        batch = notes.row if call.query.shape[0] == notes.batch else 0
        visible = notes.square(bias_rows(call, batch, 0, 0, call.query.shape[-2]))
        if visible is not None:
            owner = self._owners[layer]
            maker = notes.mask_makers.get(owner, owner)
            note_mask(notes, visible, seen.module, layer, self._kinds[layer], maker)
        for name, tensor in (("query", call.query), ("key", call.key), ("value", call.value)):
            one_head = tensor[:, :1] if tensor.stride(1) == 0 else tensor
            notes.add(name, seen.module, notes.keys(one_head), axis=-2, batch=-4, layer=layer)

    def take(self, index: int, seen: Seen) -> None:
        """Note the output and judge it."""
        if seen.output is None:
            return
        layer = self.layer_of(seen.module)
        if layer and seen.output.dim() == 4:
            self._notes.add("attention", seen.module, seen.output, axis=-2, batch=-4, layer=layer)
        if not self._check:
            return
        live, query = seen.judged(judge), seen.call.query
        self.checks.append(
            Check(
                **vars(live),
                index=index,
                module=seen.module,
                kernel=seen.kernel,
                lengths=(query.shape[-2], seen.call.key.shape[-2]),
                batches=query.shape[0] if query.dim() > 3 else 1,
                heads=query.shape[-3] if query.dim() > 2 else 1,
            )
        )

    def passed(self, reason: str) -> None:
        """A call that cannot be looked at leaves no value, so its stages are not available."""
        self._notes.problems.append(reason)

    def elsewhere(self, thread: str) -> None:
        """Calls of other contexts are not this run's."""

    def layer_of(self, module: str) -> str:
        """Path of the layer that a module is in, "" for none of the text layers."""
        return next((path for path in self._kinds if module == path or module.startswith(f"{path}.")), "")


def note_mask(notes: Notes, visible: Tensor, point: str, layer: str, kind: str, maker: str) -> None:
    """Keep a visibility between valid tokens (query rows, keys) once for all layers of a kind that see the same."""
    visible = visible.cpu()
    part = kind if visible.shape[0] == visible.shape[1] else f"{kind} cross-attention".strip()
    for value in notes.values:
        if value.stage == "mask" and value.part == part and torch.equal(value.tensor, visible):
            return
    notes.values.append(Value("mask", point, layer, visible, 0, part, maker))
