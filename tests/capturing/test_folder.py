"""The index of a folder of dumps: whole lines, no line for a missing file, several writers at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from sdpa_repro.capturing import folder
from sdpa_repro.errors import InputError


def write(path: Path) -> int:
    return path.write_bytes(b"dump")


def files(path: Path) -> list[str]:
    return [entry["file"] for entry in folder.entries(path)]


def test_a_dump_gets_a_line_and_a_name_of_its_own(tmp_path: Path) -> None:
    first = folder.add(tmp_path, "L05-self_attn-call12-289x289", write, {"healthy": False})
    second = folder.add(tmp_path, "L05-self_attn-call12-289x289", write, {"healthy": True})
    assert first == ("L05-self_attn-call12-289x289.pt", 4)
    assert second == ("L05-self_attn-call12-289x289-2.pt", 4)
    assert [json.loads(line) for line in (tmp_path / "index.jsonl").read_text().splitlines()] == [
        {"file": first[0], "healthy": False},
        {"file": second[0], "healthy": True},
    ]


def test_a_replaced_dump_is_gone_from_index_and_disk(tmp_path: Path) -> None:
    old, _ = folder.add(tmp_path, "a", write, {})
    folder.add(tmp_path, "b", write, {})
    folder.add(tmp_path, "c", write, {}, instead_of=old)
    assert files(tmp_path) == ["b.pt", "c.pt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.pt", "c.pt", "index.jsonl"]


def test_a_dump_can_be_replaced_under_its_own_name(tmp_path: Path) -> None:
    old, _ = folder.add(tmp_path, "a", write, {"status": "unchecked"})
    assert folder.add(tmp_path, "a", write, {"status": "agrees"}, instead_of=old) == ("a.pt", 4)
    assert folder.entries(tmp_path) == [{"file": "a.pt", "status": "agrees"}]


def test_nothing_is_left_of_a_dump_that_cannot_be_written(tmp_path: Path) -> None:
    def full(path: Path) -> int:
        raise InputError("no space")

    with pytest.raises(InputError):
        folder.add(tmp_path, "a", full, {})
    assert list(tmp_path.iterdir()) == []


def test_a_removed_dump_leaves_the_others(tmp_path: Path) -> None:
    for stem in "abc":
        folder.add(tmp_path, stem, write, {})
    folder.remove(tmp_path, "b.pt")
    assert files(tmp_path) == ["a.pt", "c.pt"]
    assert not (tmp_path / "b.pt").exists()


def test_a_torn_line_costs_itself_only(tmp_path: Path) -> None:
    folder.add(tmp_path, "a", write, {})
    with (tmp_path / "index.jsonl").open("a") as index:
        index.write('{"file": "torn')
    folder.add(tmp_path, "b", write, {})
    assert files(tmp_path) == ["a.pt", "b.pt"]


@pytest.mark.parametrize(
    "line",
    [b"\xff\xfe", b'{"file": ["a.pt"]}', b'{"file": "../b.pt"}', b'{"file": "%s"}' % (b"n" * 999), b"[" * 99999],
)
def test_a_foreign_line_costs_itself_only(line: bytes, tmp_path: Path) -> None:
    folder.add(tmp_path, "a", write, {})
    (tmp_path.parent / "b.pt").touch()
    with (tmp_path / folder.INDEX).open("ab") as index:
        index.write(line)
    folder.add(tmp_path, "c", write, {})
    assert files(tmp_path) == ["a.pt", "c.pt"]


def test_numbers_that_json_lacks_are_written_as_text(tmp_path: Path) -> None:
    folder.add(tmp_path, "a", write, {"live_ratio": float("inf")})
    assert folder.entries(tmp_path) == [{"file": "a.pt", "live_ratio": "inf"}]


def test_writers_at_once_lose_no_line_and_share_no_name(tmp_path: Path) -> None:
    def work() -> None:
        mine = None
        for _ in range(10):
            mine, _ = folder.add(tmp_path, "same", write, {}, instead_of=mine)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(files(tmp_path)) == len(set(files(tmp_path))) == 8
    assert sorted(files(tmp_path)) == sorted(path.name for path in tmp_path.glob("*.pt"))


@pytest.mark.parametrize(
    ("module", "stem"),
    [
        ("model.language_model.layers.5.self_attn", "L05-self_attn-call12-289x290"),
        ("encoder.11", "L11-encoder-call12-289x290"),
        ("MultiheadAttention", "MultiheadAttention-call12-289x290"),
        ("generate.py:123", "generate-call12-289x290"),
        ("<string>:1", "string-call12-289x290"),
        ("a/../../b c\n", "b_c-call12-289x290"),
        ("", "call-call12-289x290"),
    ],
)
def test_names_mean_something_and_are_safe(module: str, stem: str) -> None:
    assert folder.stem_of(module, folder.layer_of(module), 12, 289, 290) == stem


def test_a_line_that_was_cut_short_is_an_error_and_its_dump_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = os.write
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda descriptor, line: whole(descriptor, line[:10]))
        with pytest.raises(InputError, match="No space left"):
            folder.add(tmp_path, "first", write, {"status": "diverges"})
    assert not (tmp_path / "first.pt").exists()
    folder.add(tmp_path, "second", write, {"status": "diverges"})
    assert [line["file"] for line in folder.entries(tmp_path)] == ["second.pt"]


FORKED_MEANWHILE = """
import os, sys, threading
from pathlib import Path
from sdpa_repro.capturing import folder

out, inside, forked = Path(sys.argv[1]), threading.Event(), threading.Event()

def slow(path):
    inside.set()
    forked.wait()
    return path.write_bytes(b"first")

writer = threading.Thread(target=lambda: folder.add(out, "first", slow, {}))
writer.start()
inside.wait()
until, end = os.pipe()
child = os.fork()
if child == 0:
    os.close(end)
    os.read(until, 1)  # as long as the parent lives
    os._exit(0)
forked.set()
writer.join()
print(folder.add(out, "second", lambda path: path.write_bytes(b"second"), {})[0])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no os.fork")
def test_a_child_that_was_forked_during_a_write_does_not_keep_the_folder_locked(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKED_MEANWHILE, str(tmp_path)], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == "second.pt\n"
