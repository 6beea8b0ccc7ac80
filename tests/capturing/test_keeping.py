"""Which dumps stay when slots and bytes are few: a wrong call is never lost to healthy ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from sdpa_repro import dump
from sdpa_repro.attention import AttentionCall
from sdpa_repro.capturing import CallRecord, Session, capture
from sdpa_repro.capturing.aside import Job
from sdpa_repro.capturing.keeping import viewed_bytes
from sdpa_repro.capturing.report import severity
from tests.calls import make_call

Plant = Callable[[str], None]
WRONG, HEALTHY = 33, 32
"""Lengths: the planted kernel is wrong at the first."""

SIZE = viewed_bytes(make_call(rows=WRONG, width=136), torch.empty(1, 4, WRONG, 136, dtype=torch.bfloat16))
"""Bytes of a call that is wrong, and a little more than those of a healthy one."""


def call(rows: int, seed: int = 0) -> AttentionCall:
    return make_call(rows=rows, width=136, seed=seed)


def captured(folder: Path, lengths: list[int], **options: Any) -> Session:
    with torch.no_grad(), capture(folder, **options) as session:
        for seed, rows in enumerate(lengths):
            each = call(rows, seed)
            F.scaled_dot_product_attention(each.query, each.key, each.value, **each.keywords)
    return session


def kept(session: Session) -> list[CallRecord]:
    return [record for record in session.calls if record.kept]


def check_folder(session: Session) -> None:
    """Files, index and session say the same, and every file can be read."""
    lines = [json.loads(line) for line in (session.out / "index.jsonl").read_text().splitlines()]
    files = sorted(path.name for path in session.out.glob("*.pt"))
    assert sorted(line["file"] for line in lines) == files
    assert sorted(path.name for path in session.dumps) == files
    assert sorted(str(record.kept) for record in kept(session)) == files
    for path in session.dumps:
        dump.load(path)


LONG_RUN = [HEALTHY] * 6 + [WRONG] + [HEALTHY] * 3 + [WRONG]


@pytest.mark.parametrize("options", [{"max_dumps": 3}, {"max_bytes": 4 * SIZE}], ids=["slots", "bytes"])
def test_a_wrong_call_takes_the_place_of_healthy_ones(tmp_path: Path, plant: Plant, options: dict[str, int]) -> None:
    plant("pytorch_191937")
    session = captured(tmp_path, LONG_RUN, keep="all", **options)
    statuses = [record.status for record in kept(session)]
    assert statuses.count("diverges") == 2
    assert len(statuses) >= 3
    assert session.calls[10].kept
    check_folder(session)


def test_a_worse_call_takes_the_bytes_of_less_bad_ones(tmp_path: Path, plant: Plant) -> None:
    plant("pytorch_191937")
    session = captured(tmp_path, [WRONG] * 8, max_bytes=3 * SIZE)
    ratios = sorted((record.ratio for record in session.calls), reverse=True)
    assert session.calls[[record.ratio for record in session.calls].index(ratios[0])].kept
    check_folder(session)


@pytest.mark.parametrize("keep", ["diverging", "worst", "all"])
@pytest.mark.parametrize("max_dumps", [None, 1, 2])
@pytest.mark.parametrize("max_bytes", [1, SIZE + SIZE // 2, 3 * SIZE, 100 * SIZE])
def test_limits_hold_and_the_worst_stay_in_every_combination(
    tmp_path: Path, plant: Plant, keep: str, max_dumps: int | None, max_bytes: int
) -> None:
    plant("pytorch_191937")
    lengths = [HEALTHY, WRONG, HEALTHY, WRONG, WRONG, HEALTHY]
    session = captured(tmp_path, lengths, keep=keep, max_dumps=max_dumps, max_bytes=max_bytes)
    found = kept(session)
    assert len(found) <= session.options.slots
    worst = max(record.ratio for record in session.calls)
    if max_bytes > SIZE:
        assert worst in [record.ratio for record in found]
        check_folder(session)
    else:
        assert found == []
    left_out = [record for record in session.calls if not record.kept and record.wrong]
    if len(found) > len([record for record in found if record.wrong]):
        assert not left_out, "a healthy call is kept and a wrong one is not"


def test_dumps_are_told_the_worst_first(tmp_path: Path, plant: Plant) -> None:
    plant("pytorch_191937")
    session = captured(tmp_path, LONG_RUN, keep="all")
    by_file = {record.kept: record for record in session.calls}
    order = [severity(vars(by_file[path.name])) for path in session.dumps]
    assert order == sorted(order, reverse=True)
    assert len(order) == len(LONG_RUN)


def test_a_dump_that_is_being_written_outlives_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pressed(job: object) -> None:
        raise KeyboardInterrupt

    each = call(HEALTHY)
    with torch.no_grad(), capture(tmp_path, keep="all") as session:
        F.scaled_dot_product_attention(each.query, each.key, each.value, **each.keywords)
        with monkeypatch.context() as now:
            now.setattr(Job, "wait", pressed)
            with pytest.raises(KeyboardInterrupt):
                session.summary()
    assert [record.index for record in kept(session)] == [0]
    check_folder(session)
