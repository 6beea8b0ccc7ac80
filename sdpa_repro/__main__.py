"""`python -m sdpa_repro`: the same as the command `sdpa-repro`."""

from __future__ import annotations

import sys

from sdpa_repro.cli import main

if __name__ == "__main__":
    sys.exit(main())
