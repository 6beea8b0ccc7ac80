"""Programs that stand for a Python with another torch: they print what a script would print there."""

from __future__ import annotations

from pathlib import Path

OUTPUT = """\
torch {torch} on cpu; largest error against float64, at most 0.25 is rounding
MATH                  3.553e-15
FLASH_ATTENTION      {flash}
EFFICIENT_ATTENTION  declined: No viable backend for scaled_dot_product_attention was found
CUDNN_ATTENTION      declined: No viable backend for scaled_dot_product_attention was found
default              {flash}
"""
WRONG, RIGHT = "16  wrong in query rows 32", "3.553e-15"
FAILED = "AssertionError: wrong result from FLASH_ATTENTION, default"

SCRIPT = """\
import torch
for name in ("MATH", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "default"):
    pass
"""
"""A script that the programs stand for; the order of its backends is all that is read from it."""

FACTS = '{"torch": "2.14.1", "python": "3.12.1", "cpu": "AVX2", "platform": "Linux"}'


def interpreter(path: Path, output: str = "", status: int = 0, facts: str = FACTS, then: str = "") -> str:
    """A program that answers the question for versions with `facts`, and runs any script by printing `output`.

    then: shell commands between printing and ending with `status`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".out").write_text(output)
    path.with_suffix(".facts").write_text(facts)
    path.write_text(
        "#!/bin/sh\n"
        f'if [ "$2" = -c ]; then cat "{path.with_suffix(".facts")}" > "$6"; exit 0; fi\n'
        f'cat "{path.with_suffix(".out")}"\n{then}\nexit {status}\n'
    )
    path.chmod(0o755)
    return str(path)


def failing(path: Path, torch: str = "2.13.0") -> str:
    """One where FLASH is wrong."""
    return interpreter(path, OUTPUT.format(torch=torch, flash=WRONG) + FAILED + "\n", 1)


def passing(path: Path, torch: str = "2.14.1") -> str:
    """One where every backend is right."""
    return interpreter(path, OUTPUT.format(torch=torch, flash=RIGHT))
