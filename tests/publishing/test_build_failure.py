"""Why an environment could not be built: words of pip, venv and uv, as they print them, become one line."""

from __future__ import annotations

import pytest

from sdpa_repro.publishing.build_failure import failure

NO_VERSION = """\
ERROR: Could not find a version that satisfies the requirement torch==2.99.0 (from versions: 2.9.1, 2.10.0, 2.13.0, \
2.14.0, 2.14.1)
ERROR: No matching distribution found for torch==2.99.0
"""
OFFLINE = """\
WARNING: Retrying (Retry(total=0, connect=None)) after connection broken by 'NewConnectionError('<pip._vendor>: Failed \
to establish a new connection: [Errno -3] Temporary failure in name resolution')': /simple/torch/
ERROR: Could not find a version that satisfies the requirement torch==2.14.1 (from versions: none)
ERROR: No matching distribution found for torch==2.14.1
"""
FULL = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n"
CONSTRAINT = """\
ERROR: Cannot install torch==2.99.0 because these package versions have conflicting dependencies.
The conflict is caused by:
    The user requested torch==2.99.0
    The user requested (constraint) torch<=2.14.1
ERROR: ResolutionImpossible: for help visit https://pip.example
"""
UV_NO_VERSION = """\
  x No solution found when resolving dependencies:
  `-> Because there is no version of torch==2.99.0 and you require torch==2.99.0, we can conclude that your
      requirements are unsatisfiable.
"""
UV_OFFLINE = "error: Failed to fetch: `https://x/simple/torch/`\n  Caused by: dns error: failed to lookup address\n"
UV_FULL = "error: Failed to write to the cache\n  Caused by: No space left on device (os error 28)\n"


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (NO_VERSION, "no torch 2.99.0 for Python 3.11 on this platform; the index has 2.14.0, 2.14.1"),
        (OFFLINE, "the package index was not reached: no network, or one that needs --index-url or a proxy"),
        (OFFLINE.replace("none", "2.13.0+cpu"), "the package index was not reached"),
        (FULL, "the disk is full: an environment takes 1 to 8 GB in ~/.cache"),
        (CONSTRAINT, "no torch 2.99.0 that pip's configuration here allows (torch<=2.14.1)"),
        (
            "WARNING: Retrying (Retry(total=0, connect=None)) after 'NewConnectionError'\n" + CONSTRAINT,
            "the package index was not reached, and no torch 2.99.0 is at hand that pip's configuration here allows (",
        ),
        (UV_NO_VERSION, "no torch 2.99.0 for Python 3.11 on this platform"),
        (UV_OFFLINE, "the package index was not reached: no network, or one that needs --index-url or a proxy"),
        (UV_FULL, "the disk is full: an environment takes 1 to 8 GB in ~/.cache"),
        ("The virtual environment was not created: ensurepip is not available.\n", "venv cannot be used with this "),
        ("noise\nERROR: something new\nlast words\n", "ERROR: something new"),
        ("only this\n\n", "only this"),
        ("", "the command that builds it failed without a word"),
    ],
)
def test_the_reason_is_told_from_what_was_printed(output: str, said: str) -> None:
    assert failure(output, "2.99.0", "3.11", "~/.cache").startswith(said)


def test_the_releases_next_to_the_one_asked_for_are_named() -> None:
    output = NO_VERSION.replace("2.99.0", "2.12.0")
    assert failure(output, "2.12.0", "3.11", "").endswith("; the index has 2.9.1, 2.10.0, 2.13.0, 2.14.0")


def test_one_line_comes_of_any_output() -> None:
    text = failure("ERROR: a\x1b[31mb\u202ec\rd" + "x" * 5000, "1", "3", "")
    assert "\n" not in text
    assert "\x1b" not in text
    assert len(text) <= 200
