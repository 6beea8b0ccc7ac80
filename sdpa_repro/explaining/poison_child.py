"""The child process of `poison_isolated`: one dump, one backend, one line of JSON on standard output.

Run as `main()` with the job in `argv[1]`: {"dump", "backend", "device", "preload": [paths]}.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path

from sdpa_repro.dump import load
from sdpa_repro.environment import preload
from sdpa_repro.errors import InputError
from sdpa_repro.explaining.poison import Poison, poison
from sdpa_repro.replaying.backends import Backend
from sdpa_repro.replaying.trial import in_process


def main() -> None:
    """Do the job; whatever else prints goes to standard error."""
    job = json.loads(sys.argv[1])
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        preload(job["preload"])
        dump = load(Path(job["dump"]), job["device"])
        found = poison(dump.call, in_process(Backend(job["backend"]), dump.context))
    except InputError as error:
        found = Poison(None, f"not tested: {error}")
    channel.write(json.dumps(found.document()) + "\n")
    channel.flush()
