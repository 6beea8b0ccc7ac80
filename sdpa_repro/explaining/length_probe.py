"""Asking for one pair of lengths at a time, and which pairs are worth asking for.

A pair fails when the trial fails there with any of the masks and values it was given, for a fault can be invisible
with some; a trial that declines or cannot judge leaves the pair untested.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from sdpa_repro.attention import AttentionCall
from sdpa_repro.explaining.length_ranks import Pair, Shared, attempt
from sdpa_repro.explaining.lengths import Resize, resizer
from sdpa_repro.explaining.pacing import OutOfTimeError
from sdpa_repro.replaying.trial import Result, Trial
from sdpa_repro.replaying.verdict import Status
from sdpa_repro.visibility import scores_shape

HEADS_KEPT = 2
"""Key/value heads left when the failure survives fewer heads: two, so that no kernel sees a single one."""

CHEAP_WORK = 2e7
"""Multiply-adds of a call that is not worth cutting to fewer heads."""

MASK_WORK = 512
"""Multiply-adds that take as long as making one entry of a mask."""

TEXT_EVERY = 25
"""Trials from one progress text to the next."""

LANDMARKS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257)
"""Lengths where kernels switch, tried wherever the range reaches."""

ONE_KEY = "with one key every right row is that key's value, whatever mask and scores are: a pass says nothing"

Progress = Callable[[str], None]


@dataclass
class Probe:
    """What is known about each pair of lengths. `resizes`: the usual mask and values, then the second looks."""

    trial: Trial
    resizes: Sequence[Resize]
    deadline: float | None = None
    progress: Progress | None = None
    outcomes: dict[Pair, bool] = field(default_factory=dict)
    untested: dict[Pair, str] = field(default_factory=dict)
    costly: int = 0
    asked: int = 0

    def ask(self, rows: int, keys: int) -> bool | None:
        """Whether L = `rows`, S = `keys` fails; None when it cannot be tested. Raises OutOfTimeError."""
        pair = (rows, keys)
        if pair in self.outcomes or pair in self.untested:
            return self.outcomes.get(pair)
        result, reason = self._try(self.resizes[0], pair)
        if result is not None and result.fails:
            self.outcomes[pair] = True
            self.costly += result.status in (Status.CRASHED, Status.TIMEOUT)
        elif result is not None and result.status is Status.AGREES and keys == 1 and not self.costly:
            self.untested[pair] = ONE_KEY
        elif result is not None and result.status is Status.AGREES:
            self.outcomes[pair] = False
        else:
            self.untested[pair] = reason
        return self.outcomes.get(pair)

    def prepare(self, pairs: Sequence[Pair]) -> None:
        """Let all ranks try these pairs that are about to be asked for. Raises OutOfTimeError."""
        fresh = [pair for pair in pairs if pair not in self.outcomes and pair not in self.untested]
        if isinstance(self.trial, Shared) and fresh:
            self._check_time()
            self.trial.prepare(self.resizes[0], fresh)

    def look_again(self, rows: int, keys: int) -> bool | None:
        """Ask once more, with other masks and values, about a pair that passed."""
        for resize in self.resizes[1:]:
            if self.ask(rows, keys) is not False:
                break
            result, _ = self._try(resize, (rows, keys))
            if result is not None and result.fails:
                self.outcomes[rows, keys] = True
        return self.outcomes.get((rows, keys))

    def pairs(self, fails: bool) -> list[Pair]:
        """The pairs that fail (or pass), in order."""
        return sorted(pair for pair, outcome in self.outcomes.items() if outcome is fails)

    def _try(self, resize: Resize, pair: Pair) -> tuple[Result | None, str]:
        self._check_time()
        self.asked += 1
        if self.progress is not None and self.asked % TEXT_EVERY == 0:
            self.progress(f"length rule: {self.asked} lengths tried, now L = {pair[0]}, S = {pair[1]}")
        return attempt(self.trial, resize, pair)

    def _check_time(self) -> None:
        if self.deadline is not None and time.monotonic() >= self.deadline:
            raise OutOfTimeError


@dataclass(frozen=True)
class Axis:
    """A line of pairs through the failing one. vary: "L and S" (together), "L" or "S"."""

    vary: str
    rows: int
    keys: int

    @property
    def origin(self) -> int:
        """The number that the sweep varies, at the failing pair."""
        return self.keys if self.vary == "S" else self.rows

    def at(self, number: int) -> Pair:
        """The pair at a number on the line."""
        if self.vary == "L":
            return number, self.keys
        if self.vary == "S":
            return self.rows, number
        return number, number + self.keys - self.rows

    def number(self, pair: Pair) -> int | None:
        """Where a pair lies on the line; None when it does not."""
        number = pair[1] if self.vary == "S" else pair[0]
        return number if self.at(number) == pair else None


def near_first(origin: int, low: int, high: int, reach: int) -> Iterator[int]:
    """Numbers in [low, high] by how much they tell: next to the failing one, landmarks, steps of common tiles."""
    steps = (1, 2, 8, 16, 32, 64, 128)
    beside = chain.from_iterable((origin - step, origin + step) for step in steps)
    around = chain.from_iterable((origin - step, origin + step) for step in range(3, reach + 1))
    seen = set()
    for number in chain((origin,), beside, LANDMARKS, around):
        if low <= number <= high and number not in seen:
            seen.add(number)
            yield number


def sample(numbers: Iterable[int], count: int, seed: int) -> list[int]:
    """At most `count` of the numbers, chosen by the seed, in order."""
    pool = sorted(set(numbers))
    return sorted(random.Random(seed).sample(pool, min(count, len(pool))))


def work(call: AttentionCall, rows: int, keys: int) -> float:
    """Multiply-adds of the call at other lengths, and as much for making its mask as that takes."""
    batch, heads, _, _ = scores_shape(call)
    each = batch * heads * (call.query.shape[-1] + call.value.shape[-1])
    return float(rows * keys * (each + MASK_WORK * (call.attn_mask is not None)))


def base_call(call: AttentionCall, trial: Trial, seed: int) -> tuple[AttentionCall, str, Result | None]:
    """What the lengths are varied of: the smallest call, and the kind of mask, that still fails at its own lengths.

    The result is None when the call fails neither with a mask made for other lengths nor with its structure alone.
    """
    lengths = call.query.shape[-2], call.key.shape[-2]
    for mask in ("distinct", "kept"):
        result = trial(resizer(call, seed=seed, mask=mask)(*lengths))
        if result.fails:
            break
    else:
        return call, "kept", None
    for smaller in _fewer_heads(call, result) if work(call, *lengths) > CHEAP_WORK else ():
        again = trial(resizer(smaller, seed=seed, mask=mask)(*lengths))
        if again.fails and again.status is result.status:
            return smaller, mask, again
    return call, mask, result


def _fewer_heads(call: AttentionCall, result: Result) -> Iterator[AttentionCall]:
    """One batch entry and two heads around a wrong row, then one batch entry; views, so strides stay."""
    if result.checked is None or not result.checked.rows or any(t.dim() != 4 for t in call.tensors.values()):
        return
    batch, head, _ = result.checked.rows[0]
    heads, kv_heads = call.query.shape[1], call.key.shape[1]
    one = _narrowed(call, 0, {call.query.shape[0]: (batch, 1)})
    group = heads // kv_heads if kv_heads and heads % kv_heads == 0 else 0
    if group and kv_heads > HEADS_KEPT and call.value.shape[1] == kv_heads:
        first = min(head // group, kv_heads - HEADS_KEPT)
        parts = {kv_heads: (first, HEADS_KEPT), heads: (first * group, HEADS_KEPT * group)}
        yield _narrowed(one, 1, parts)
    if call.query.shape[0] > 1:
        yield one


def _narrowed(call: AttentionCall, dim: int, parts: dict[int, tuple[int, int]]) -> AttentionCall:
    """The call with the tensors whose size along `dim` is a key of `parts` cut to (first, count)."""
    cut = {
        name: tensor.narrow(dim, *parts[tensor.shape[dim]]) if tensor.shape[dim] in parts else tensor
        for name, tensor in call.tensors.items()
    }
    return call.with_tensors(cut)
