"""What has to hold for a prompt however it is padded and batched, as a checklist.

An item is broken at points: a total length in a batch of so many rows. What follows from another broken item, as
logits do from a wrong mask, is told apart, so that one fault is one item.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from sdpa_repro.locating.table import Level, Outcome, Stage
from sdpa_repro.locating.verdict import INVARIANTS

TYPES, FEATURES, POSITIONS, BLOCKS = "token types", "feature placement", "positions", "image block ids"
VISIBILITY, LOGITS, GREEDY, CACHES = "visibility", "logits", "greedy output", "dynamic and static cache"

STATEMENTS = {
    TYPES: INVARIANTS["token types"],
    FEATURES: INVARIANTS["embeddings"],
    POSITIONS: INVARIANTS["position_ids"],
    BLOCKS: INVARIANTS["image block ids"],
    VISIBILITY: INVARIANTS["mask"],
    LOGITS: "padding moves the next-token logits by no more than rounding does",
    GREEDY: "the greedy continuation does not depend on padding, near ties aside",
    CACHES: "a valid token sees the same valid tokens with a dynamic and with a static cache",
}
"""The items in the order of the forward pass, and what each says."""

STAGES = {
    TYPES: ("input_ids", "token types"),
    FEATURES: ("pixel inputs", "image features", "placeholder mask", "embeddings"),
    POSITIONS: ("position_ids", "rotary cos/sin"),
    BLOCKS: ("image block ids",),
}
"""The stages of `walking.walk` that an item looks at; visibility looks at all masks."""

ABOVE = {
    FEATURES: (TYPES,),
    BLOCKS: (TYPES,),
    VISIBILITY: (TYPES, BLOCKS),
    LOGITS: (TYPES, FEATURES, POSITIONS, BLOCKS, VISIBILITY),
    GREEDY: (TYPES, FEATURES, POSITIONS, BLOCKS, VISIBILITY, LOGITS),
}
"""Items that an item follows from."""

ABSENT = {
    TYPES: "the model has no token types",
    FEATURES: "the prompt has no image",
    POSITIONS: "the model shows no positions: none are passed and it has no rotary embedding",
    BLOCKS: "the model makes no block ids for this prompt",
    VISIBILITY: "no mask was seen: the model does not call scaled_dot_product_attention",
}
"""Why an item is not applicable when none of its stages is there."""


class Status(str, Enum):
    """What is known about an item."""

    HOLDS = "holds"
    BROKEN = "broken"
    NOT_APPLICABLE = "not applicable"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True, order=True)
class Point:
    """A total length (tokens with padding) in a batch of so many rows."""

    batch: int
    total: int

    def __str__(self) -> str:
        beside = f" in a batch of {self.batch}" if self.batch > 1 else ""
        return f"total length {self.total}{beside}"


@dataclass(frozen=True)
class Finding:
    """An item that is broken at a point: how, where first, and the module and source file to look at."""

    point: Point
    how: str
    module: str = ""
    file: str = ""


@dataclass(frozen=True)
class Item:
    """One line of the checklist. checked: points looked at. reason: why it is not applicable or not checked.

    follows: the item that explains all of this one's findings, "" when it is broken by itself.
    """

    name: str
    status: Status
    checked: int = 0
    findings: tuple[Finding, ...] = ()
    reason: str = ""
    follows: str = ""

    @property
    def first(self) -> Finding | None:
        """The finding at the smallest batch and total length."""
        return min(self.findings, key=lambda finding: finding.point, default=None)

    @property
    def guilty(self) -> bool:
        """Whether it is broken by itself."""
        return self.status is Status.BROKEN and not self.follows

    def document(self) -> dict[str, Any]:
        """The item as plain values."""
        first = self.first
        return {
            "name": self.name,
            "invariant": STATEMENTS[self.name],
            "status": self.status.value,
            "checked": self.checked,
            "follows": self.follows,
            "reason": self.reason,
            "broken_at": [{"total": each.point.total, "batch": each.point.batch} for each in sorted_(self.findings)],
            "first": {"how": first.how, "module": first.module, "file": first.file} if first is not None else None,
        }


@dataclass
class Checklist:
    """The items being filled in. A point counts for an item once it was looked at, whatever was found."""

    checked: dict[str, set[Point]] = field(default_factory=lambda: {name: set() for name in STATEMENTS})
    findings: dict[str, list[Finding]] = field(default_factory=lambda: {name: [] for name in STATEMENTS})
    absent: dict[str, str] = field(default_factory=dict)

    def hold(self, name: str, point: Point) -> None:
        """The item was looked at and holds."""
        self.checked[name].add(point)

    def broken(self, name: str, finding: Finding) -> None:
        """The item was looked at and is broken."""
        self.checked[name].add(finding.point)
        self.findings[name].append(finding)

    def leave_out(self, name: str, reason: str) -> None:
        """The item cannot be looked at; the first reason counts."""
        self.absent.setdefault(name, reason)

    def look_at(self, point: Point, stages: Sequence[Stage], *, image: bool) -> None:
        """Fill in what the stages of a padded and an unpadded run say. image: whether the prompt has one."""
        for name in (*STAGES, VISIBILITY):
            own = [stage for stage in stages if _belongs(stage, name)]
            wrong = next((stage for stage in own if stage.status is Outcome.DIFFERS), None)
            if wrong is not None:
                how = "; ".join(part for part in (wrong.name, wrong.where, wrong.detail) if part)
                self.broken(name, Finding(point, how, wrong.module, wrong.file))
            elif all(stage.status is Outcome.NOT_AVAILABLE for stage in own if _counts(stage)) or (
                name == FEATURES and not image
            ):
                self.leave_out(name, ABSENT[name])
            else:
                self.hold(name, point)

    def items(self) -> tuple[Item, ...]:
        """The checklist as far as it went."""
        found = [self._item(name) for name in STATEMENTS]
        broken = {item.name: item for item in found if item.status is Status.BROKEN}
        return tuple(replace(item, follows=_follows(item, broken)) for item in found)

    def _item(self, name: str) -> Item:
        checked, findings = len(self.checked[name]), tuple(sorted_(self.findings[name]))
        if findings:
            return Item(name, Status.BROKEN, checked, findings)
        if checked:
            return Item(name, Status.HOLDS, checked)
        if name in self.absent:
            return Item(name, Status.NOT_APPLICABLE, reason=self.absent[name])
        return Item(name, Status.NOT_CHECKED, reason="stopped before")


def sorted_(findings: Iterable[Finding]) -> list[Finding]:
    """Findings by batch and total length."""
    return sorted(findings, key=lambda finding: finding.point)


def _belongs(stage: Stage, name: str) -> bool:
    if name == VISIBILITY:
        return stage.level is Level.MASK and stage.name != BLOCKS
    return stage.name in STAGES[name]


def _counts(stage: Stage) -> bool:
    """Ids are always there: they do not make an item applicable."""
    return stage.name != "input_ids"


def _follows(item: Item, broken: Mapping[str, Item]) -> str:
    """The first item above that is broken wherever this one is."""
    points = {finding.point for finding in item.findings}
    for name in ABOVE.get(item.name, ()) if points else ():
        if name in broken and points <= {finding.point for finding in broken[name].findings}:
            return name
    return ""
