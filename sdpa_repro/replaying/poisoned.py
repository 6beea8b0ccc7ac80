"""Positions of key and value that hold NaN or Inf, the rows that see them, and the rows they are hidden from."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sdpa_repro.replaying.runs import visible

HIDDEN_KEYS = 4096
"""Positions looked at together."""


class Broken(NamedTuple):
    """Positions, each (H, S) bool.

    hidden: those that may spoil a row which does not see them: with NaN or Inf, or with a key whose score may be
    infinite in a kernel, where adding a mask of -inf leaves NaN. in_value: those whose value has NaN or Inf, and with
    it every row that sees them; an infinite key alone may get the weight 0.
    """

    hidden: Tensor
    in_value: Tensor

    @classmethod
    def of(cls, nonfinite: Tensor, query: Tensor, key: Tensor, value: Tensor, factor: float) -> Broken:
        """For query (H, L, E), key (N, S, E) and value (N, S, Ev) with NaN or Inf in the `nonfinite` positions (N, S).

        factor: what the scores are multiplied by.
        """
        return cls(nonfinite | _may_overflow(query, key, factor), ~value.isfinite().all(-1))

    def for_heads(self, size: int) -> Broken:
        """The same for `size` query heads that share each key head."""
        return Broken(self.hidden.repeat_interleave(size, 0), self.in_value.repeat_interleave(size, 0))


def _may_overflow(query: Tensor, key: Tensor, factor: float) -> Tensor:
    """Which positions of key may have a score beyond the largest number in which a kernel holds scores."""
    width = key.shape[-1]
    if not width:
        return torch.zeros(key.shape[:-1], dtype=torch.bool, device=key.device)
    most = torch.finfo(torch.promote_types(query.dtype, torch.float32)).max
    longest = float(query.abs().amax(-1).nan_to_num(0.0, 0.0).max())  # times sqrt(E), as the key
    return key.abs().amax(-1).double() * (longest * width * max(1.0, abs(factor))) > most


def sees(broken: Broken, bias: Tensor | None, rows: slice, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Which rows a position is hidden from that may spoil them, and which see one that does; each (H, R)."""
    device = broken.hidden.device
    hidden = torch.zeros(len(broken.hidden), rows.stop - rows.start, dtype=torch.bool, device=device)
    seen = torch.zeros_like(hidden)
    row = torch.arange(rows.start, rows.stop, device=device)[:, None]
    for keys in broken.hidden.any(0).nonzero().flatten().split(HIDDEN_KEYS):
        allowed = hidden.new_ones(1, len(row), len(keys)) if bias is None else visible(bias[..., keys])
        allowed = allowed & (keys <= row) if is_causal else allowed
        hidden |= (broken.hidden[:, None, keys] & ~allowed).any(-1)
        seen |= (broken.in_value[:, None, keys] & allowed).any(-1)
    return hidden, seen
