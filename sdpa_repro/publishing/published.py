"""What publishing came to: the files, what the script did when it was run, and the documents behind them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sdpa_repro.publishing.running import ScriptRun
from sdpa_repro.replaying.replay import Replay


@dataclass(frozen=True)
class Published:
    """What was written, and what the script did. Without a failure to report only `sentence` and `exit_status` count.

    script, issue, test, dump: paths of the files, None for those not written.
    """

    sentence: str
    exit_status: int
    replay: Replay
    title: str = ""
    cause: str = ""
    folder: Path | None = None
    script: Path | None = None
    issue: Path | None = None
    test: Path | None = None
    dump: Path | None = None
    run: ScriptRun | None = None
    closed: bool = False
    explanation: Mapping[str, Any] = field(default_factory=dict)
    reduction: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        """As plain JSON types."""
        run = self.run
        return {
            "sentence": self.sentence,
            "verdict": self.replay.verdict.value,
            "cause": self.cause,
            "title": self.title,
            "files": {
                name: None if path is None else str(path)
                for name, path in (
                    ("script", self.script),
                    ("issue", self.issue),
                    ("test", self.test),
                    ("dump", self.dump),
                )
            },
            "run": None
            if run is None
            else {
                "status": run.status,
                "fails": run.fails,
                "seconds": round(run.seconds, 1),
                "where": run.where,
                "output": run.output,
            },
            "closed": self.closed,
            "known": self.replay.document()["known"],
            "explain": dict(self.explanation),
            "reduce": dict(self.reduction),
            "notes": list(self.notes),
            "preloaded": [dict(record) for record in self.replay.preloaded],
            "environment": dict(self.replay.environment),
        }
