"""Foreign text stays text: in comments, in Markdown, in file names."""

from __future__ import annotations

import io
import re
import tokenize
from pathlib import Path

import pytest

from sdpa_repro.publishing.escaping import block, code, comment, file_name, one_line, prose
from tests.publishing.calls import HOSTILE

hostile = pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)


@hostile
def test_one_line_is_one_printable_line_of_bounded_length(text: str) -> None:
    line = one_line(text)
    assert len(line) <= 200
    assert line.isprintable()
    assert line.splitlines() in ([], [line])


@hostile
def test_a_comment_is_a_comment_and_nothing_else(text: str) -> None:
    source = f"# {comment(text)}\nx = 1\n"
    kinds = [token.type for token in tokenize.tokenize(io.BytesIO(source.encode()).readline)]
    assert kinds[:3] == [tokenize.ENCODING, tokenize.COMMENT, tokenize.NL]
    assert kinds.count(tokenize.NAME) == 1


@hostile
def test_a_comment_declares_no_encoding(text: str) -> None:
    encoding, _ = tokenize.detect_encoding(io.BytesIO(f"# {comment(text)}\n".encode()).readline)
    assert encoding == "utf-8"


@hostile
@pytest.mark.parametrize("in_table", [False, True])
def test_a_code_span_is_closed_by_its_own_fence_only(text: str, in_table: bool) -> None:
    span = code(text, in_table=in_table)
    fence = re.match("`+", span)
    assert fence is not None
    inner = span[len(fence[0]) : -len(fence[0])]
    assert span.endswith(fence[0])
    assert fence[0] not in re.findall("`+", inner)
    assert "\n" not in span
    assert not in_table or not re.search(r"(?<!\\)\|", inner)


@hostile
def test_prose_has_no_markup_link_or_mention(text: str) -> None:
    shown = prose(text)
    assert "<" not in shown
    assert not re.search(r"(?<!\\)[\[\]`*|~]", shown)
    assert not re.search(r"@\w|://|www\.\w|#\d|\$", shown.replace("&#36;", "").replace("&#8203;", "\u200b"))
    assert not re.match(r"[-+=>#]", shown)


def test_prose_leaves_a_plain_sentence_alone() -> None:
    sentence = "the last query row (32) was computed with mask row 0, when L % 32 == 1 and L > 1"
    assert prose(sentence) == sentence


@hostile
def test_a_block_ends_where_it_should(text: str) -> None:
    lines = block(text).split("\n")
    assert lines[0] == lines[-1]
    assert len(lines[0]) >= 3
    assert not [line for line in lines[1:-1] if lines[0] in line]


@hostile
def test_a_file_name_stays_in_its_folder(text: str, tmp_path: Path) -> None:
    name = file_name(text, "dump")
    assert name not in ("", ".", "..")
    assert (tmp_path / name).resolve().parent == tmp_path.resolve()
    assert re.fullmatch(r"[A-Za-z0-9._-]+", name)
