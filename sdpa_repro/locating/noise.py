"""How far rounding alone moves each value of a recorded run."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from sdpa_repro.locating.comparing import movement
from sdpa_repro.locating.recording import Recording
from sdpa_repro.locating.walking import Key

__all__ = ["rounding"]


def rounding(plain: Recording, shaken: Iterable[Recording]) -> dict[Key, Tensor]:
    """The largest movement of each token (tokens,) over shaken runs of the same inputs (see `perturbing`), by value."""
    before, noise = plain.keyed(), dict[Key, Tensor]()
    for run in shaken:
        for key, value in run.keyed().items():
            one = before.get(key)
            if one is None or not value.tensor.dtype.is_floating_point or value.tensor.shape != one.tensor.shape:
                continue
            here = movement(one, value)
            noise[key] = here.maximum(noise[key]) if key in noise else here
    return noise
