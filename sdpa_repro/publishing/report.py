"""From dumps to one page: replay and explain each, write its script, draw it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sdpa_repro.errors import INTERRUPTED, InputError
from sdpa_repro.explaining.explain import Explanation, explain
from sdpa_repro.known_issues import sentence
from sdpa_repro.publishing.page import check_target, page, write_page
from sdpa_repro.publishing.publish import publish
from sdpa_repro.publishing.section import Section, section, with_script, without_explanation
from sdpa_repro.replaying.replay import replay
from sdpa_repro.replaying.verdict import Verdict
from sdpa_repro.replaying.worker import Worker

Progress = Callable[[str], None]

SEVERITY = (0, 2, 3, 1, INTERRUPTED)
"""Exit statuses, the one that wins over all others last."""


@dataclass(frozen=True)
class Reported:
    """A page that was written. unread: file name → why that dump could not be read."""

    output: Path
    sections: tuple[Section, ...]
    unread: dict[str, str]
    exit_status: int

    @property
    def sentence(self) -> str:
        """The answer: that of the one dump, or how many of several are wrong."""
        if len(self.sections) == 1 and not self.unread:
            return _answer(self.sections[0].explanation)
        wrong = sum(one.replay.exit_status == 1 for one in self.sections)
        text = f"{len(self.sections)} dumps, {wrong} wrong"
        return text + (f", {len(self.unread)} unreadable" if self.unread else "")

    def document(self) -> dict[str, Any]:
        """As plain JSON types."""
        replays = [one.replay for one in self.sections]
        preloaded = {name: sha for one in self.sections for name, sha in one.preloaded.items()}
        return {
            "output": str(self.output),
            "sentence": self.sentence,
            "dumps": [{"file": one.path.name, "verdict": one.verdict.value} for one in replays],
            "errors": [{"file": name, "error": reason} for name, reason in self.unread.items()],
            "preloaded": [{"name": name, "sha256": sha} for name, sha in preloaded.items()],
            "environment": dict(replays[0].environment) if replays else {},
        }


def _answer(found: Explanation) -> str:
    """The cause, and the issue when it is known."""
    if not found.known or "known:" in found.cause:
        return found.cause
    device = found.replay.device.partition(":")[0]
    return f"{found.cause}; known: {sentence(found.known[0], str(found.backend), device)}"


def report(
    paths: Sequence[str | Path],
    output: str | Path = "report.html",
    *,
    explained: bool = True,
    scripted: bool = True,
    device: str | None = None,
    preload: Sequence[str | Path] = (),
    budget: float | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Reported:
    """Write one page about the dumps in `paths`.

    explained: whether conditions, lengths and the cause are worked out; scripted: whether a script is written and run,
    which takes an explained failure. budget: seconds for explaining one dump, and as many for reducing it. A dump that
    cannot be read is named on the page when there are others. `exit_status` is the most severe of the dumps', as
    `replay` gives it. Raises InputError for bad input, and before any work for an `output` that must not be replaced.
    """
    target, say = Path(output), progress or (lambda text: None)
    check_target(target, force=force)
    sections: list[Section] = []
    unread: dict[str, str] = {}
    statuses = []
    with Worker(preload) as worker:  # imports torch while this process works
        options = _Options(explained, scripted, device, tuple(preload), budget, say, worker)
        for index, path in enumerate(map(Path, paths), 1):
            if len(paths) > 1:
                say(f"{path} ({index} of {len(paths)})")
            try:
                made = _section(path, options)
            except InputError as error:
                if len(paths) == 1:
                    raise
                unread[path.name] = str(error)
                statuses.append(2)
                continue
            sections.append(made)
            statuses.append(made.replay.exit_status)
            if made.explanation.interrupted:  # the page shows what is known
                statuses = [INTERRUPTED]
                break
    text = page(sections, unread)
    return Reported(write_page(target, text), tuple(sections), unread, max(statuses, key=SEVERITY.index))


@dataclass(frozen=True)
class _Options:
    """What is the same for every dump."""

    explained: bool
    scripted: bool
    device: str | None
    preload: tuple[str | Path, ...]
    budget: float | None
    say: Progress
    worker: Worker


def _section(path: Path, options: _Options) -> Section:
    """Everything about one dump."""
    say, preload, worker = options.say, options.preload, options.worker
    if not options.explained:
        result = replay(path, device=options.device, dtypes=("captured",), runs=1, progress=say, worker=worker)
        say("drawing")
        return section(without_explanation(path, result), worker=worker)
    found = explain(path, device=options.device, preload=preload, budget=options.budget, progress=say)
    say("drawing")
    made = section(found, worker=worker)
    if not options.scripted or found.interrupted or found.replay.verdict is not Verdict.BACKEND_WRONG:
        return made
    with tempfile.TemporaryDirectory(prefix="sdpa-repro-") as scratch:
        try:
            published = publish(
                path,
                Path(scratch) / "issue",
                preload=preload,
                device=found.replay.device,
                budget=options.budget,
                captured=found.document(),
                progress=say,
            )
        except InputError as error:
            return replace(made, notes=(*made.notes, f"no script: {error}"))
        return with_script(made, published)
