"""What a factor is: something about a call that may matter to its failure, and the changed calls that tell.

A factor offers variants of the call; each is tried, and `Decides` says how their outcomes answer the question
whether the factor is needed. A factor that the call does not have (no padding, one head) is not needed, trivially.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from sdpa_repro.attention import AttentionCall


class Decides(Enum):
    """How the variants' outcomes answer. Variants that cannot run do not count."""

    FIRST = "needed when the first variant passes"
    LAST = "needed when the last variant passes"
    ANY = "needed when any variant passes"
    ALL = "needed when all variants pass"


@dataclass(frozen=True)
class Variant:
    """One changed call. `context`: the switches to run it under, when they are what is changed.

    forms: other ways to make the same change; the variant fails as soon as one of them does.
    line: Python to paste that makes this change in a user's program, when it leaves the right result as it is.
    decides: False for one that only informs.
    qualifies: where one of these passes, all of them are told with the factor even if that is not needed.
    """

    words: str
    call: AttentionCall
    context: Mapping[str, Any] | None = None
    line: str = ""
    decides: bool = True
    forms: tuple[AttentionCall, ...] = ()
    qualifies: bool = False


@dataclass(frozen=True)
class NoVariant:
    """Why there is nothing to try. `absent`: the call does not have the factor, so it cannot need it."""

    words: str
    absent: bool


@dataclass(frozen=True)
class Setting:
    """What variants may depend on besides the call: the switches, and one place (batch, head) that is wrong.

    crashes: the call ends its process or hangs, so that no wrong number can be too small to see.
    controlled: the factor's control fails as the call does.
    """

    context: Mapping[str, Any]
    batch: int = 0
    head: int = 0
    crashes: bool = False
    controlled: bool = False


Offer = Callable[[AttentionCall, Setting], Iterable[Variant] | NoVariant]


@dataclass(frozen=True)
class Factor:
    """A possible condition. `words`: how the condition reads when it is needed.

    further: more variants, for when the first ones leave the factor not needed; needed when any of them passes.
    control: a call with this factor as it is and made otherwise as some variants are; when it does not fail, these
    prove nothing and are left out (`Setting.controlled`).
    """

    id: str
    words: str
    offer: Offer
    decides: Decides = Decides.FIRST
    further: Offer | None = None
    control: Callable[[AttentionCall], AttentionCall] | None = None
