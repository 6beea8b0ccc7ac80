"""The page as text: what it says, what it must not say, and that texts of strangers stay texts."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from sdpa_repro.errors import InputError
from sdpa_repro.publishing.html import MARK, data, policy, python
from sdpa_repro.publishing.page import check_target, page, write_page
from tests.publishing.calls import HOSTILE
from tests.publishing.sections import ATTACK, FAULT, conditions, crashing, failing, healthy, hostile, last_row_wrong


class Elements(HTMLParser):
    """Start tags with their attributes, the text of each script and style, and the text that is shown."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.raw: dict[str, list[str]] = {"script": [], "style": []}
        self.shown = ""
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.shown += " " if tag in ("p", "li", "div", "td", "dd") else ""
        if tag in self.raw:
            self._inside = tag
            self.raw[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = "" if tag == self._inside else self._inside

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.raw[self._inside][-1] += data
        else:
            self.shown += data


def shown(text: str) -> str:
    """The visible text, each run of spaces as one."""
    return re.sub(r"\s+", " ", Elements(text).shown)


def test_the_cause_comes_first_and_every_part_is_there() -> None:
    text = shown(page([failing()]))
    assert (
        "Wrong result FLASH_ATTENTION: the last query row (64) was computed with mask row 0, when L % 32 == 1" in text
    )
    for said in (
        "49× the threshold of 0.03",
        "pytorch#191937 fixed in torch 2.14.0",
        "4 of 248 rows that decide",
        "row 64 every head 49×",
        "causal mask with left padding 3; fully masked rows: 0–2",
        "S = L, 2…128: all 3 lengths with L % 32 == 1 fail",
        "key, value = key.contiguous(), value.contiguous()",
        "fixed in torch 2.14.0 (not tried here)",
        "a mask no mask: passes",
        "this dtype no other dtype runs here",
        "It fails here, as it should (exit status 1)",
        "layout as captured, output bit-equal to the captured one",
        "layers.5.self_attn",
    ):
        assert said in text, said


def test_one_file_holds_everything() -> None:
    elements = Elements(page([failing(), healthy()]))
    for tag, attributes in elements.tags:
        assert "src" not in attributes, tag
        if tag == "link":
            assert str(attributes["href"]).startswith("data:")
        if tag == "a":
            link = str(attributes["href"])
            assert link.startswith(("#", "https://github.com/pytorch/pytorch/issues/")), link
        assert not [name for name in attributes if name.startswith("on")], tag
        assert "style" not in attributes, "the policy forbids inline styles"
    assert "@import" not in elements.raw["style"][0]
    assert "url(" not in elements.raw["style"][0]


def test_the_policy_names_the_hash_of_the_one_script_and_style() -> None:
    elements = Elements(page([failing()]))
    told = next(a["content"] for tag, a in elements.tags if tag == "meta" and a.get("http-equiv"))
    assert told is not None
    assert told.startswith("default-src 'none'; ")
    assert "unsafe" not in told
    for text in (elements.raw["style"][0], elements.raw["script"][-1]):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in told
    assert policy("a", "b") != policy("b", "a")


def test_hostile_texts_add_no_element() -> None:
    plain, evil = Elements(page([failing(preloaded=(FAULT,))])), Elements(page([hostile()]))
    names = {name for name, _ in plain.tags}
    assert {name for name, _ in evil.tags} <= names
    assert len(evil.raw["script"]) == len(plain.raw["script"])
    assert evil.raw["script"][-1] == plain.raw["script"][-1]
    assert "</script><img src=x" in evil.shown
    assert "{{ 7 * 7 }}" in evil.shown


@pytest.mark.parametrize("name", HOSTILE)
def test_each_kind_of_hostile_text_is_shown_as_text(name: str) -> None:
    base = failing()
    dump = replace(base.dump, origin={"model": HOSTILE[name], HOSTILE[name]: 1}, environment={"gpu": HOSTILE[name]})
    text = page([replace(base, dump=dump, script=HOSTILE[name].encode("utf-8", "replace").decode())])
    harmless = {tag for tag, _ in Elements(page([base])).tags}
    assert {tag for tag, _ in Elements(text).tags} <= harmless
    assert len(text) < 300_000


def test_data_cannot_end_its_script_and_is_read_back_unchanged() -> None:
    value = {"text": f"{ATTACK}<!--\u2028\u2029&amp;", "numbers": [1, 2.5, None, True]}
    text = data(value)
    assert not set("<>&\u2028\u2029") & set(text)
    assert json.loads(text) == value


def test_python_is_marked_and_nothing_of_it_is_lost() -> None:
    source = 'import torch  # <b>\nx = \'</code>\'\n\n\ndef f(a):\n    return f\'{a}\' if a else """two\nlines"""\n'
    marked = python(source)
    assert '<span class="k">import</span> torch' in marked
    assert '<span class="c"># &lt;b&gt;</span>' in marked
    assert unescape(re.sub(r"</?span[^>]*>", "", marked)) == source
    assert "<b>" not in marked


@pytest.mark.parametrize("source", ["x = (", "'''open", "\tif x:\n  y", "$$$", "", "\x00", "é = 'ü'\x0c\nz"])
def test_text_that_is_no_python_is_escaped_all_the_same(source: str) -> None:
    assert unescape(re.sub(r"</?span[^>]*>", "", python(source))) == source


def test_a_preloaded_file_is_named_everywhere_a_screenshot_may_be_taken() -> None:
    text = page([failing(preloaded=(FAULT,))])
    assert "<title>PRELOADED: " in text
    said = shown(text)
    assert "not a finding about PyTorch alone pytorch_191937.py (sha256 aaaaaaaaaaaa) ran before" in said
    assert "Wrong result, with a file preloaded" in said
    for title in ("Error of every row", "Which lengths fail", "Every backend against float64", "What it takes to fail"):
        assert f"{title} with pytorch_191937.py preloaded" in said
    assert "Script with pytorch_191937.py preloaded" in said
    assert "preloaded" not in shown(page([failing()]))


def test_a_file_preloaded_at_capture_alone_is_named_too() -> None:
    base = failing()
    result = replace(base.replay, captured_with=(FAULT,))
    section = replace(base, explanation=replace(base.explanation, replay=result))
    assert "Preloaded files: not a finding about PyTorch alone" in shown(page([section]))


def test_a_crash_has_a_sentence_in_place_of_the_heat_map() -> None:
    text = page([crashing()])
    assert "Ends the process" in shown(text)
    assert "FLASH_ATTENTION ends the process (SIGSEGV): there is no output to draw." in shown(text)
    assert 'class="overview"' not in text


def test_a_healthy_call_says_so_and_shows_that_nothing_is_beyond_its_threshold() -> None:
    said = shown(page([healthy()]))
    assert "Nothing wrong found clean on this cpu" in said
    assert "all 80 rows that decide (a row of one head counts as one) are within their threshold" in said
    assert "the largest at 0.2× of it" in said
    assert "Which lengths fail" not in said


def test_a_call_in_which_no_row_can_decide_is_not_called_healthy() -> None:
    base = healthy()
    blind = replace(base, heat=last_row_wrong(heads=2, rows=40, masked=40))
    said = shown(page([blind]))
    assert "Nothing to compare" in said
    assert "Nothing wrong found" not in said


def test_a_failure_that_was_not_explained_says_what_explains_it() -> None:
    base = crashing()
    assert "Conditions, lengths and the cause were not worked out: sdpa-repro explain" in shown(page([base]))
    assert "were not worked out" not in shown(page([failing()]))


def test_several_dumps_have_an_index_with_links() -> None:
    elements = Elements(page([failing(), healthy()], {"x.pt": "not a dump"}))
    links = [a["href"] for tag, a in elements.tags if tag == "a" and str(a["href"]).startswith("#dump")]
    ids = {a.get("id") for _, a in elements.tags}
    assert links == ["#dump-1", "#dump-2"]
    assert {"dump-1", "dump-2"} <= ids
    assert "3 attention calls" in elements.shown
    assert "Not read" in elements.shown
    every = [a["id"] for _, a in elements.tags if "id" in a]
    assert len(every) == len(set(every))


def test_an_incomplete_explanation_says_so() -> None:
    base = failing()
    explanation = replace(base.explanation, complete=False, conditions=replace(conditions(), complete=False))
    assert "Stopped before the end" in shown(page([replace(base, explanation=explanation)]))


def test_a_script_that_does_not_fail_is_not_praised() -> None:
    base = replace(failing(), script_fails=False, closed=False)
    said = shown(page([base]))
    assert "It does NOT fail here" in said
    assert "reads call.pt" in said


def test_nothing_to_show_is_an_error() -> None:
    with pytest.raises(InputError, match="no dump to show"):
        page([])


def test_a_page_replaces_a_page_but_no_other_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.html"
    check_target(path, force=False)
    assert write_page(path, page([healthy()])).read_text().startswith("<!doctype html>")
    check_target(path, force=False)
    path.write_text("my thesis")
    with pytest.raises(InputError, match=r"exists and is no report of this program: give --force"):
        check_target(path, force=False)
    check_target(path, force=True)
    with pytest.raises(InputError, match="is a folder"):
        check_target(tmp_path, force=True)
    with pytest.raises(InputError, match="null byte"):
        check_target(Path("a\0b"), force=True)
    assert [file.name for file in path.parent.iterdir()] == ["report.html"]


def test_the_mark_of_a_page_is_near_its_beginning() -> None:
    assert MARK in page([failing()])[:4096]
