from __future__ import annotations

from dataclasses import replace

import pytest

from sdpa_repro.capturing import ledger
from sdpa_repro.capturing.ledger import Ledger
from sdpa_repro.capturing.records import CallRecord

RECORD = CallRecord(
    index=0,
    module="layers.0",
    phase="decode",
    thread="MainThread",
    dtype="bfloat16",
    query=(1, 8, 1, 64),
    key=(1, 8, 9, 64),
    value=(1, 8, 9, 64),
    mask="none",
    key_head_stride=576,
    value_head_stride=576,
    kernel="FLASH_ATTENTION",
    status="agrees",
    ratio=0.1,
)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "FIRST", 3)
    monkeypatch.setattr(ledger, "WORST", 2)


def test_of_many_calls_the_first_and_the_worst_are_kept_and_all_are_counted() -> None:
    found = Ledger()
    ratios = [0.1, 0.2, 0.3, 0.05, 0.9, 0.4, 0.8, 0.01]
    for index, ratio in enumerate(ratios):
        found.add(replace(RECORD, index=index, ratio=ratio))
    assert [record.index for record in found.listed()] == [0, 1, 2, 4, 6]
    assert len(found) == 8
    assert found.wrong == 0


def test_wrong_calls_stay_before_healthy_ones() -> None:
    found = Ledger()
    for index in range(3):
        found.add(replace(RECORD, index=index))
    found.add(replace(RECORD, index=3, status="diverges", ratio=1.5))
    found.add(replace(RECORD, index=4, status="nonfinite", ratio=float("inf")))
    for index in range(5, 200):
        found.add(replace(RECORD, index=index, ratio=0.99))
    assert [record.index for record in found.listed()] == [0, 1, 2, 3, 4]
    assert found.wrong == 2
    assert found.statuses["agrees"] == 198


def test_an_amended_record_replaces_a_kept_one_only() -> None:
    found = Ledger()
    for index in range(9):
        found.add(replace(RECORD, index=index, ratio=0.9 - index / 10))
    found.amend(replace(RECORD, index=4, kept="a.pt"))
    found.amend(replace(RECORD, index=8, kept="b.pt"))
    assert [(record.index, record.kept) for record in found.listed()] == [
        (0, None),
        (1, None),
        (2, None),
        (3, None),
        (4, "a.pt"),
    ]
    assert len(found) == 9


def test_records_of_dumps_are_listed_though_they_were_dropped() -> None:
    found = Ledger()
    for index in range(9):
        found.add(replace(RECORD, index=index, ratio=0.9 - index / 10))
    assert [record.index for record in found.listed([replace(RECORD, index=8, kept="b.pt")])] == [0, 1, 2, 3, 4, 8]
