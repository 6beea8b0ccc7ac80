"""HTML of a page that holds texts from strangers: everything is escaped, and nothing but the page's own code may run.

The page carries a content security policy that names the hash of its one script and its one style sheet and allows no
connection, so that a text which slipped through could neither run nor call anybody.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import keyword
import tokenize
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from sdpa_repro.publishing.escaping import one_line

TEMPLATES = Path(__file__).parent / "templates"
MARK = '<meta name="generator" content="sdpa-repro report">'
"""By this line a page of this program is known."""

_IN_SCRIPT = {ord(letter): f"\\u{ord(letter):04x}" for letter in "<>&\u2028\u2029"}


def render(values: Mapping[str, Any]) -> str:
    """The page from `templates/report.html.j2`; every value is escaped unless it is `Markup`."""
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: "" if value is None else value,
    )
    style, code = (f"\n{source(name)}" for name in ("report.css", "report.js"))
    own = {
        "mark_line": Markup(MARK),
        "policy": policy(code, style),
        "style": Markup(style),
        "code": Markup(code),
        "data": lambda value: Markup(data(value)),
        "python": lambda text: Markup(python(text)),
    }
    text = environment.get_template("report.html.j2").render({**values, **own})
    return text.encode("utf-8", "replace").decode("utf-8").rstrip() + "\n"


def source(name: str) -> str:
    """A file of the templates folder."""
    return (TEMPLATES / name).read_text(encoding="utf-8")


def policy(code: str, style: str) -> str:
    """The content security policy for a page with this script and this style sheet."""
    return (
        f"default-src 'none'; script-src {_hash(code)}; style-src {_hash(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"


def data(value: Any) -> str:
    """JSON for a `<script type="application/json">`: nothing in it can end the element or be read as markup."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).translate(_IN_SCRIPT)


def bytes_of(tensor: Tensor) -> str:
    """A uint8 tensor as base64 text."""
    return base64.b64encode(tensor.contiguous().numpy().tobytes()).decode("ascii")


def plain(value: object, longest: int = 300) -> str:
    """A text or a value from a dump as one harmless line; the template escapes it."""
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return one_line(text, longest)


def python(text: str) -> str:
    """Python source as HTML, escaped, with comments, strings and keywords marked."""
    from markupsafe import escape

    lines = io.StringIO(text).readlines()
    out: list[str] = []
    at = (1, 0)
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            kind = _kind(token)
            if kind:
                out += [str(escape(_between(lines, at, token.start)))]
                out += [f'<span class="{kind}">{escape(token.string)}</span>']
                at = token.end
    except (tokenize.TokenError, SyntaxError):
        pass
    return "".join(out) + str(escape(_between(lines, at, (len(lines) + 1, 0))))


def _kind(token: tokenize.TokenInfo) -> str:
    if token.type == tokenize.COMMENT:
        return "c"
    if token.type == tokenize.STRING:
        return "s"
    return "k" if token.type == tokenize.NAME and keyword.iskeyword(token.string) else ""


def _between(lines: list[str], start: tuple[int, int], stop: tuple[int, int]) -> str:
    """The text from one (line, column) to another."""
    if start[0] == stop[0]:
        return lines[start[0] - 1][start[1] : stop[1]] if start[0] <= len(lines) else ""
    parts = [lines[start[0] - 1][start[1] :]] if start[0] <= len(lines) else []
    parts += lines[start[0] : stop[0] - 1]
    if stop[1] and stop[0] <= len(lines):
        parts.append(lines[stop[0] - 1][: stop[1]])
    return "".join(parts)
