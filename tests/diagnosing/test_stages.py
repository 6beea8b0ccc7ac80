"""A stage is done once for what it depends on; what was cut short, changed or lost is done again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from sdpa_repro.diagnosing.place import LOG, STATE
from sdpa_repro.diagnosing.stages import Stages


@dataclass
class Told:
    """What a watcher was told."""

    lines: list[tuple[str, ...]] = field(default_factory=list)

    def begin(self, name: str) -> None:
        self.lines.append(("begin", name))

    def say(self, text: str) -> None:
        self.lines.append(("say", text))

    def end(self, name: str, words: str) -> None:
        self.lines.append(("end", name, words))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / STATE).mkdir()
    return tmp_path


def run(
    folder: Path, depends: object = 1, key: str = "key", *, keep: bool = True, work: Callable[[], str] = str
) -> bool:
    """Run a stage that writes two files; whether its result was reused."""
    text, dump = folder / "issue.md", folder / "x.pt"

    def job() -> str:
        text.write_text("issue")
        dump.write_bytes(b"dump")
        return work()

    stages = Stages(folder, key, Told())
    stages.run("issue", depends, str, job, words=str, wrote=lambda _: [text, dump, None], keep=lambda _: keep)
    return stages.done[0].reused


def test_the_second_time_the_result_is_there(folder: Path) -> None:
    assert [run(folder), run(folder), run(folder)] == [False, True, True]


def test_another_dependency_or_another_command_is_another_result(folder: Path) -> None:
    run(folder)
    assert not run(folder, depends=2)
    assert not run(folder, depends=2, key="other")
    assert run(folder, depends=2, key="other")


def test_a_result_that_was_cut_short_is_not_kept(folder: Path) -> None:
    assert [run(folder, keep=False), run(folder)] == [False, False]


def test_a_lost_file_or_a_changed_dump_counts_and_an_edited_text_does_not(folder: Path) -> None:
    run(folder)
    (folder / "issue.md").write_text("with my own words")
    assert run(folder)
    assert (folder / "issue.md").read_text() == "with my own words"
    (folder / "x.pt").write_bytes(b"other")
    assert not run(folder)
    (folder / "issue.md").unlink()
    assert not run(folder)


@pytest.mark.parametrize("broken", [b"", b"{", b"[]", b'{"key": 1}', b"null", b"\xff"])
def test_a_damaged_record_is_done_again(folder: Path, broken: bytes) -> None:
    run(folder)
    (folder / STATE / "issue.json").write_bytes(broken)
    assert not run(folder)
    assert run(folder)


def test_a_stage_that_raises_keeps_nothing(folder: Path) -> None:
    def broken() -> str:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        run(folder, work=broken)
    assert not run(folder)


def test_the_watcher_and_the_log_hear_of_each_stage(folder: Path) -> None:
    told = Told()
    for _ in range(2):
        stages = Stages(folder, "key", told)
        stages.say("hello")
        stages.run("replay", 1, str, lambda: "healthy", words=lambda word: word)
    assert told.lines == [
        ("say", "hello"),
        ("begin", "replay"),
        ("end", "replay", "healthy"),
        ("say", "hello"),
        ("begin", "replay"),
        ("end", "replay", "healthy (from before)"),
    ]
    log = (folder / LOG).read_text().splitlines()
    assert len(log) == 6
    assert log[0].endswith("hello")
    assert "replay: ended after" in log[2]
    assert "replay: reused" in log[5]


def test_a_log_that_cannot_be_written_stops_nothing(folder: Path) -> None:
    (folder / LOG).mkdir()
    assert not run(folder)


def test_a_result_that_cannot_be_kept_is_still_a_result(folder: Path) -> None:
    (folder / STATE / "replay.json").mkdir()
    told = Told()
    assert Stages(folder, "key", told).run("replay", 1, str, lambda: "wrong", words=str) == "wrong"
    assert told.lines[1][1].startswith("replay: a later start has to do it again: cannot write ")
    assert told.lines[-1] == ("end", "replay", "wrong")
