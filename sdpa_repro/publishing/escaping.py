"""Text from dumps, models and PyTorch's messages as data: in Python source, in Markdown, in file names.

A dump may come from a stranger. What it says must not add a statement to a script, markup, a link or a mention to an
issue, or a path outside the folder that is written to.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from typing import Any

LONGEST = 200
"""Characters of a foreign text that are shown."""

_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_CODING = re.compile(r"coding(?=[:=])")
_MARKUP = re.compile(r"[\\`*\[\]|~]|(?<!\w)_|_(?!\w)|^[-+=>#]|(?<=^\d)[.)]")
_INVISIBLE_SPACE = "&#8203;"


def one_line(text: object, longest: int = LONGEST) -> str:
    """The text without control, formatting and private characters, each run of spaces as one, cut at `longest`."""
    joined = re.sub(r"\s+", " ", _ESCAPES.sub("", str(text)[: 50 * longest]))
    kept = "".join(letter for letter in joined if unicodedata.category(letter)[0] != "C").strip()
    return kept if len(kept) <= longest else kept[: longest - 1].rstrip() + "…"


def comment(text: object, longest: int = LONGEST) -> str:
    """The text for a Python comment: one line that can neither end it nor declare an encoding (PEP 263)."""
    return _CODING.sub("coding ", one_line(text, longest))


def code(text: object, *, longest: int = LONGEST, in_table: bool = False) -> str:
    """Foreign text as a Markdown code span, in which nothing is a link, a mention or HTML; "" for no text."""
    plain = one_line(text, longest)
    if not plain:
        return ""
    fence = "`" * (_longest_run(plain) + 1)
    space = " " if plain.startswith("`") or plain.endswith("`") else ""
    if in_table:  # GitHub splits the cells of a row before it looks for code
        plain = plain.replace("|", "\\|")
    return f"{fence}{space}{plain}{space}{fence}"


def prose(text: object, longest: int = 2 * LONGEST) -> str:
    """A sentence as Markdown text: what it says is shown as it is, no markup, link, mention or HTML comes of it."""
    plain = _MARKUP.sub(r"\\\g<0>", one_line(text, longest).replace("&", "&amp;")).replace("<", "&lt;")
    plain = re.sub(r"#(?=\d)", f"#{_INVISIBLE_SPACE}", plain).replace("$", "&#36;")
    plain = plain.replace("://", f":{_INVISIBLE_SPACE}//").replace("@", f"@{_INVISIBLE_SPACE}")
    return re.sub(r"(?i)\b(www)\.", rf"\1{_INVISIBLE_SPACE}.", plain)


def block(text: str, language: str = "") -> str:
    """Text of several lines as a fenced code block; the fence is longer than any run of backticks inside."""
    lines = "".join(letter for letter in _ESCAPES.sub("", text) if letter in "\n\t" or _printable(letter))
    fence = "`" * max(3, _longest_run(lines) + 1)
    return f"{fence}{language}\n{lines.rstrip()}\n{fence}"


def file_name(text: object, otherwise: str) -> str:
    """A name made of letters, digits, `.`, `_` and `-` that stays in its folder; `otherwise` when nothing is left."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", one_line(text, 80)).strip("-.")
    return name or otherwise


def _printable(letter: str) -> bool:
    return unicodedata.category(letter)[0] != "C"


def _longest_run(text: str) -> int:
    """Length of the longest run of backticks."""
    return max((len(run) for run in re.findall("`+", text)), default=0)


def mapping(value: Any) -> Mapping[str, Any]:
    """The value if it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def texts(value: Any) -> list[str]:
    """The strings of a list; [] for anything else."""
    return [item for item in value if isinstance(item, str)] if isinstance(value, (list, tuple)) else []
