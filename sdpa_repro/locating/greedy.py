"""What the model goes on to say, padded and unpadded, side by side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sdpa_repro.capturing.prefill import Prefill, padded
from sdpa_repro.errors import InputError
from sdpa_repro.locating.caches import generated
from sdpa_repro.locating.running import Path, running

__all__ = ["Continuation", "continuations"]


@dataclass(frozen=True)
class Continuation:
    """Greedy tokens after the first row of a prompt on one path, unpadded and padded by `pad` tokens.

    first: index of the first token that differs, None when all are equal.
    """

    path: Path
    pad: int
    plain: tuple[int, ...]
    padded: tuple[int, ...]

    @property
    def first(self) -> int | None:
        longest = max(len(self.plain), len(self.padded))
        return next((at for at in range(longest) if self.plain[at : at + 1] != self.padded[at : at + 1]), None)

    @property
    def sentence(self) -> str:
        """How they compare, in words."""
        start = f"greedy, {self.path.value}: "
        at = self.first
        if at is None:
            return f"{start}the same {len(self.plain)} tokens with and without padding"
        one, other = (str(tokens[at]) if at < len(tokens) else "the end" for tokens in (self.plain, self.padded))
        return f"{start}token {at} differs: {one} unpadded, {other} with {self.pad} tokens of padding"

    def document(self) -> dict[str, Any]:
        """The two as plain values."""
        return {
            "path": self.path.value,
            "pad": self.pad,
            "plain": list(self.plain),
            "padded": list(self.padded),
            "first_difference": self.first,
        }


def continuations(
    prefill: Prefill, pad: int, count: int, *, progress: Callable[[str], None] = lambda sentence: None
) -> tuple[Continuation, ...]:
    """`count` greedy tokens (fewer when the model ends) as default and under MATH, through the model's `generate`.

    Raises InputError when the model cannot generate, and for a decoder padded on the right: it goes on after padding.
    """
    if not hasattr(prefill.model, "generate"):
        raise InputError(f"{prefill.name} has no generate: leave out --greedy")
    if prefill.side == "decoder" and prefill.padding_side == "right":
        raise InputError("a decoder padded on the right goes on after the padding: leave out --greedy")
    found = []
    for path in (Path.DEFAULT, Path.MATH):
        progress(f"{count} greedy tokens, {path.value}")
        with running(prefill, path) as ready:
            plain, other = (_generate(ready, ready.length + extra, count) for extra in (0, pad))
        found.append(Continuation(path, pad, plain, other))
    return tuple(found)


def _generate(prefill: Prefill, total: int, count: int) -> tuple[int, ...]:
    """The tokens that follow the first row."""
    tokens, _ = generated(prefill, padded(prefill, total), count)
    return tuple(int(token) for token in tokens[0])
