"""One prefill of a sweep: the logits, the SDPA calls that are wrong, and what went into the layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sdpa_repro.capturing.prefill import Prefill, forward
from sdpa_repro.capturing.recorder import Seen, listening
from sdpa_repro.capturing.session import judge
from sdpa_repro.locating import structure
from sdpa_repro.locating.sweep import WrongCall
from sdpa_repro.visibility import bias_rows

__all__ = ["Given", "Run", "measure"]

EXACT = 8.0
"""Inputs of the first layer may move by so many units in the last place: they are looked up, hardly computed."""

Given = dict[str, Tensor]
"""What the layers of a run were given, by name, on the coordinates of one row's valid tokens."""


@dataclass(frozen=True, eq=False)
class Run:
    """What one prefill showed. logits: (B, vocabulary) float32 on the CPU. wrong: for each row of the batch the
    SDPA calls that are wrong on one of its valid tokens. given: for the first row."""

    logits: Tensor
    wrong: tuple[tuple[WrongCall, ...], ...]
    calls: int
    given: Given


def measure(prefill: Prefill, inputs: Mapping[str, Tensor], *, given: bool = True, check: bool = True) -> Run:
    """Run once. given: note the calls' masks and the first layers' inputs. check: judge every SDPA call live."""
    watch = Watch(inputs["attention_mask"].bool().cpu(), given=given, check=check)
    with ExitStack() as stack:
        if given:
            for one in structure.stacks(prefill.model):
                _first_layer(stack, watch, one.owner, next(iter(one.layers.values())))
        with listening(watch):
            logits = forward(prefill, inputs)
    return Run(logits, tuple(tuple(each) for each in watch.wrong), watch.count, watch.given)


def differences(plain: Given, padded: Given) -> tuple[str, ...]:
    """Names of what the layers were given otherwise than in the unpadded run, in the order of the forward pass.

    What only one of the runs shows is left out.
    """
    found = []
    for name in [name for name in plain if name in padded]:
        one, other = plain[name], padded[name]
        if one.shape != other.shape:
            found.append(name)
        elif one.dtype == torch.bool:
            found += [name] if not torch.equal(one, other) else []
        elif not _close(one, other):
            found.append(name)
    return tuple(found)


class Watch:
    """A listener of the recorder: what the calls of one run were given and whether they answered it rightly."""

    def __init__(self, valid: Tensor, *, given: bool, check: bool) -> None:
        """valid: bool (B, L) on the CPU. given: note what the layers are given. check: judge the calls."""
        self.valid = valid
        self.check = check
        self.given_wanted = given
        self.count = 0
        self.given: Given = {}
        self.wrong: list[list[WrongCall]] = [[] for _ in valid]
        self._masks: list[tuple[Tensor | None, bool, tuple[int, ...], Tensor]] = []

    def expect(self, module: str, phase: str) -> int | None:
        """Every call is wanted."""
        self.count += 1
        return self.count - 1

    def enter(self, index: int, seen: Seen) -> None:
        """Note which valid token sees which."""
        if self.given_wanted:
            visible = self._visible(seen)
            if visible is not None:
                self.given[f"mask of call {index} ({seen.module})"] = visible

    def take(self, index: int, seen: Seen) -> None:
        """Judge the call; a padding token's row may be anything."""
        if seen.output is None or not self.check:
            return
        live = seen.judged(judge)
        if not live.wrong:
            return
        query_rows = seen.call.query.shape[-2]
        for batch, valid in enumerate(self.valid):
            rows = {row for at, _, row in live.rows if at == batch or seen.call.query.shape[0] != len(self.valid)}
            if query_rows == len(valid):
                rows = {row for row in rows if bool(valid[row])}
            if rows or live.wrong_rows > len(live.rows):
                found = WrongCall(seen.module, seen.kernel, live.max_abs, live.ratio, tuple(sorted(rows)))
                self.wrong[batch].append(found)

    def passed(self, reason: str) -> None:
        """A call that cannot be looked at is not judged."""

    def elsewhere(self, thread: str) -> None:
        """Calls of other contexts are not this run's."""

    def _visible(self, seen: Seen) -> Tensor | None:
        """Bool (n, n) or (L, n) visibility between valid tokens of row 0; None when keys are not the sequence."""
        call, valid = seen.call, self.valid[0]
        rows, keys = call.query.shape[-2], call.key.shape[-2]
        if call.query.dim() != 4 or keys != len(valid):
            return None
        for mask, causal, shape, visible in self._masks:
            if mask is call.attn_mask and causal == call.is_causal and shape == (rows, keys):
                return visible
        seen_by = bias_rows(call, 0, 0, 0, rows)[:, valid.to(call.query.device)]
        visible = (seen_by[valid.to(seen_by.device)] if rows == len(valid) else seen_by).cpu()
        self._masks.append((call.attn_mask, call.is_causal, (rows, keys), visible))
        return visible

    def note(self, name: str, value: Any) -> None:
        """Keep a floating-point tensor (1 or B, L, ...), or those of a tuple, on the valid tokens of row 0."""
        if isinstance(value, (tuple, list)):
            for index, each in enumerate(value):
                self.note(f"{name}[{index}]", each)
        elif isinstance(value, Tensor) and value.dim() == 3 and value.shape[1] == self.valid.shape[1]:
            self.given[name] = value[0].detach()[self.valid[0].to(value.device)].to("cpu", copy=True)


def _first_layer(stack: ExitStack, watch: Watch, owner: str, layer: nn.Module) -> None:
    """Note the embeddings and the rotary cosines and sines that the first layer of `owner` gets."""

    def before(_: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        for index, value in enumerate(args):
            watch.note(f"input {index} of the first layer of {owner}", value)
        for name, value in kwargs.items():
            watch.note(f"{name} of the first layer of {owner}", value)

    remove: Callable[[], None] = layer.register_forward_pre_hook(before, with_kwargs=True).remove
    stack.callback(remove)


def _close(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal but for a few roundings of their largest entry."""
    if not one.dtype.is_floating_point:
        return torch.equal(one, other)
    left, right = one.double(), other.double()
    limit = EXACT * torch.finfo(one.dtype).eps * float(left.abs().nan_to_num().max()) if left.numel() else 0.0
    return torch.allclose(left, right, rtol=0.0, atol=limit, equal_nan=True)
