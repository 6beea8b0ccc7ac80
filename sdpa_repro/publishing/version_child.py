"""What other environments run of this package: its versions, or the replay of a dump. It takes torch and numpy only.

Started by `version_runs` with the source of this very package, in a Python that has neither it nor click.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from sdpa_repro.errors import InputError


def main(words: list[str]) -> None:
    """Do the job in the first word (JSON) and write the answer, JSON too, to the file in the second.

    The job: `dump` (None: tell the software only), `device`, `timeout`, `preload`.
    """
    signal.signal(signal.SIGTERM, _stop)
    job = json.loads(words[0])
    try:
        answer = _replay(job) if job.get("dump") else _software()
    except InputError as error:
        answer = {"input_error": str(error)}
    Path(words[1]).write_text(json.dumps(answer), encoding="utf-8")


def _software() -> dict[str, Any]:
    from sdpa_repro.environment import software

    return software()


def _replay(job: dict[str, Any]) -> dict[str, Any]:
    """The document of a replay in the captured dtype."""
    from sdpa_repro.replaying.replay import replay

    return replay(
        job["dump"],
        device=job["device"],
        dtypes=("captured",),
        runs=job["runs"],
        timeout=job["timeout"],
        preload=job["preload"],
    ).document()


def _stop(number: int, frame: FrameType | None) -> None:
    """End in order: the worker process is closed on the way."""
    sys.exit(128 + number)
