"""What ends every `--help`: examples to paste, and what each exit status means."""

from __future__ import annotations

from collections.abc import Mapping

COMMON = {2: "bad usage or bad input", 70: "a bug in sdpa-repro", 130: "interrupted"}
"""Exit statuses that mean the same for every verb, unless it says more."""


def epilog(statuses: Mapping[int, str], *examples: str) -> str:
    """The end of a verb's help, for click's `epilog`.

    statuses: what each exit status of the verb means; those of `COMMON` are added. examples: command lines, each
    with a remark after two spaces or more where it needs one. Neither is wrapped, so keep lines under 95 letters.
    """
    meanings = sorted({**COMMON, **statuses}.items())
    return "\n\n".join(
        [
            "\n".join(["\b", "Example:" if len(examples) == 1 else "Examples:", *(f"  {line}" for line in examples)]),
            "\n".join(["\b", "Exit status:", *(f"  {status:<4} {meaning}" for status, meaning in meanings)]),
        ]
    )
