"""Rows of a file become prompts, or one line that names the row that is wrong."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from sdpa_repro.capturing.options import PrefillOptions
from sdpa_repro.capturing.rows import open_image, read_rows
from sdpa_repro.errors import InputError


def read(folder: Path, *rows: Any, text_only: bool = False) -> Any:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return read_rows(PrefillOptions(model="m", input=str(path), text_only=text_only))


def test_prompts_and_messages_become_rows_and_blank_lines_are_skipped(tmp_path: Path) -> None:
    rows = read(tmp_path, {"prompt": "a"}, "", {"messages": [{"role": "system", "content": "b"}]})
    assert [row.messages for row in rows] == [
        [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
        [{"role": "system", "content": [{"type": "text", "text": "b"}]}],
    ]


def test_images_are_opened_relative_to_the_file_and_urls_are_left_alone(tmp_path: Path) -> None:
    Image.new("L", (3, 2)).save(tmp_path / "a.png")
    link = "https://example.org/cat.png"
    parts = [{"type": "image_url", "image_url": {"url": link}}, {"type": "text", "text": "b"}]
    rows = read(
        tmp_path,
        {"prompt": "a", "image": "a.png"},
        {"prompt": "a", "images": ["a.png", link]},
        {"messages": [{"role": "user", "content": parts}]},
    )
    assert rows[0].images[0].size == (3, 2)
    assert rows[0].images[0].mode == "RGB"
    assert rows[1].images[1] == link
    assert rows[2].images == [link]
    assert rows[2].text == "b"


def test_text_only_drops_images_without_opening_them(tmp_path: Path) -> None:
    rows = read(tmp_path, {"prompt": "a", "image": "missing.png"}, text_only=True)
    assert rows[0].images == []


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ("{nope", "line 2 is not JSON"),
        ("[1]", "line 2 is not a JSON object"),
        ({"text": "a"}, 'line 2 has neither "messages"'),
        ({"messages": []}, 'line 2 has neither "messages"'),
        ({"prompt": "a", "images": "a.png"}, 'line 2: "images" must be a list'),
        ({"prompt": "a", "image": "gone.png"}, r"line 2: there is no image .*gone\.png"),
        ({"messages": ["hello"]}, "line 2: a message is an object"),
        ({"messages": [{"role": "user", "content": 5}]}, 'line 2: "content" is a string or a list'),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "line 2: a part of type 'audio'"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "line 2: an image part needs"),
    ],
)
def test_a_bad_row_is_named_by_its_line(tmp_path: Path, row: Any, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        read(tmp_path, {"prompt": "fine"}, row)


def test_an_empty_and_a_missing_file_are_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no rows"):
        read(tmp_path, "")
    with pytest.raises(InputError, match=r"gone\.jsonl cannot be read"):
        read_rows(PrefillOptions(model="m", input=str(tmp_path / "gone.jsonl")))


def test_an_unreadable_image_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_text("not an image")
    with pytest.raises(InputError, match=r"a\.png is not an image that pillow can read"):
        open_image(tmp_path / "a.png")


def test_missing_pillow_is_named_with_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_pillow(name: str, *rest: Any, **words: Any) -> Any:
        if name == "PIL":
            raise ImportError(name)
        return real(name, *rest, **words)

    monkeypatch.setattr(builtins, "__import__", without_pillow)
    with pytest.raises(InputError, match="images need pillow: pip install pillow"):
        open_image(Path("a.png"))
