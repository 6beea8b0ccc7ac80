"""What the search for a failure's conditions came to: which factors are needed, which are not, and what helps."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any


class Outcome(str, Enum):
    """What became of one changed call, seen from the original failure."""

    PASSES = "passes"
    FAILS = "fails"
    FAILS_OTHERWISE = "fails in another way"
    HIDDEN = "passes, but rounding would hide the error"
    DECLINED = "declined"
    INVALID = "invalid"


FAILING = (Outcome.FAILS, Outcome.FAILS_OTHERWISE)


@dataclass(frozen=True)
class Tried:
    """One variant and its outcome; `reason` is PyTorch's when it was declined or invalid."""

    words: str
    outcome: Outcome
    reason: str = ""
    line: str = ""
    decides: bool = True
    qualifies: bool = False

    def text(self) -> str:
        """For people: "no mask: passes"."""
        return f"{self.words}: {self.outcome.value}" + (f" ({self.reason})" if self.reason else "")


@dataclass(frozen=True)
class Answer:
    """One factor's answer. why: what was tried and what came of it, or why nothing was."""

    id: str
    words: str
    tried: tuple[Tried, ...] = ()
    why: str = ""

    def text(self) -> str:
        """One line for people."""
        return f"{self.words} ({self.why or '; '.join(tried.text() for tried in self.tried)})"

    @property
    def qualified(self) -> str:
        """The words, and what limits them: variants that qualify the answer, when one of those passes."""
        told = [tried for tried in self.tried if tried.qualifies]
        if not any(tried.outcome is Outcome.PASSES for tried in told):
            return self.words
        return f"{self.words} ({'; '.join(tried.text() for tried in told)})"


@dataclass(frozen=True)
class Workaround:
    """What helps, and a line to paste. verified: tried on this very call, which is right with it.

    at: where it was tried instead, such as "at L = 257, S = 257", when that was a shorter call.
    """

    words: str
    line: str
    verified: bool
    at: str = ""

    @property
    def told(self) -> str:
        """The words with what they are worth, for people."""
        where = "" if self.verified else f" ({self.at or 'not tried here'})"
        return self.words.replace("on this call", "on a shorter call") + where if self.at else self.words + where


@dataclass(frozen=True)
class Conditions:
    """needed: changing any one of these cures the failure. alternatives: pairs of which one is enough for it.

    flaky: the call does not fail every time. complete: False when time ran out or Ctrl-C came first.
    """

    fails: bool
    flaky: bool = False
    needed: tuple[Answer, ...] = ()
    not_needed: tuple[Answer, ...] = ()
    not_tested: tuple[Answer, ...] = ()
    alternatives: tuple[tuple[str, str], ...] = ()
    workarounds: tuple[Workaround, ...] = ()
    trials: int = 0
    complete: bool = True

    def document(self) -> dict[str, Any]:
        """As plain JSON types; needed, not_needed and not_tested are lists of factor ids."""
        answers = (*self.needed, *self.not_needed, *self.not_tested)
        return {
            "needed": [answer.id for answer in self.needed],
            "not_needed": [answer.id for answer in self.not_needed],
            "not_tested": [answer.id for answer in self.not_tested],
            "alternatives": [list(pair) for pair in self.alternatives],
            "why": {answer.id: answer.text() for answer in answers},
            "workarounds": [
                {"words": found.words, "line": found.line, "verified": found.verified, "at": found.at}
                for found in self.workarounds
            ],
            "fails": self.fails,
            "flaky": self.flaky,
            "trials": self.trials,
            "complete": self.complete,
        }

    def words(self) -> list[str]:
        """Lines for people, the needed conditions first; the trivially absent ones are left out."""
        if not self.fails and not self.complete:
            return ["stopped before the call was tried"]
        if not self.fails:
            return ["the call does not fail here: there are no conditions to find"]
        lines = ["it does not fail every time: each trial was run up to 3 times"] if self.flaky else []
        lines += [f"needed: {answer.text()}" for answer in self.needed]
        lines += [f"needed: one of {first} and {second}" for first, second in self.alternatives]
        plain = [answer.qualified for answer in self.not_needed if answer.tried]
        lines += [f"not needed: {', '.join(plain)}"] if plain else []
        reasons = dict.fromkeys(answer.why for answer in self.not_tested if not answer.tried)
        for why in reasons:
            same = [answer.words for answer in self.not_tested if not answer.tried and answer.why == why]
            lines.append(f"not tested: {', '.join(same)} ({why})")
        lines += [f"not tested: {answer.text()}" for answer in self.not_tested if answer.tried]
        return lines if self.complete else [*lines, "stopped before the end: what is missing here was not tried"]
