"""A result of `explain` as a rule: what it says is read, and what it cannot be is refused in one line."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sdpa_repro.errors import InputError
from sdpa_repro.guarding.cures import Cure
from sdpa_repro.guarding.remedies import Look
from sdpa_repro.guarding.rule_file import parse_rule, read_rule
from tests.calls import make_call
from tests.guarding.calls import DENSE_LINE, MATH_LINE, WRONG, rule_file

CPU = ("cpu",)


@pytest.mark.parametrize(
    ("text", "fails", "passes"),
    [
        ("L % 32 == 1 and L > 1", [(33, 1), (65, 9)], [(1, 1), (32, 1)]),
        ("L % 48 in (1, 2) and S >= 8", [(49, 8), (50, 9)], [(51, 8), (49, 7)]),
        ("1 <= S % 64 <= 3", [(5, 65), (5, 67)], [(5, 64), (5, 68)]),
        ("L < S", [(4, 5)], [(5, 5)]),
        ("L != S and S % 7 != 0", [(4, 5)], [(5, 5), (4, 7)]),
        ("L <= 256", [(256, 1)], [(257, 1)]),
    ],
)
def test_a_rule_is_read_as_it_prints(text: str, fails: list[Any], passes: list[Any]) -> None:
    rule = parse_rule(text)
    assert str(rule) == text
    assert all(rule.fails(*lengths) for lengths in fails)
    assert not any(rule.fails(*lengths) for lengths in passes)


@pytest.mark.parametrize(
    "text",
    ["", "True", "L", "L % 0 == 1", "L == 1 or S == 1", "E > 1", "L  > 1", "L > 01", "__import__('os')", "L > 1 and "],
)
def test_anything_else_is_no_rule(text: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(text.split(" and ")[-1])):
        parse_rule(text)


def applies(path: Path, call: Any = WRONG, backend: str = "FLASH_ATTENTION", grad: bool = False) -> bool:
    remedy = read_rule(path, CPU).remedy
    glance = (call.query, call.key, call.value, call.attn_mask, call.is_causal)
    lengths = (call.query.shape[-2], call.key.shape[-2])
    return remedy.quick(*glance, *lengths) and remedy.applies(Look(call, backend, "cpu", grad, None))


def test_all_needed_conditions_backend_and_lengths_decide(tmp_path: Path) -> None:
    path = rule_file(tmp_path)
    assert applies(path)
    assert not applies(path, grad=True)
    assert not applies(path, backend="MATH")
    assert not applies(path, make_call(rows=34))
    assert not applies(path, make_call(rows=33, layout="dense"))
    assert not applies(path, replace(WRONG, attn_mask=None))
    assert not applies(rule_file(tmp_path, needed=["dtype"], replay={"device": "cpu", "dtype": "bfloat16"}))
    assert applies(rule_file(tmp_path, needed=["dtype"]))


@pytest.mark.parametrize(
    ("factor", "holds", "fails"),
    [
        ("query_layout", WRONG, replace(WRONG, query=WRONG.query.contiguous())),
        ("key_value_layout", replace(WRONG, key=WRONG.query), WRONG),
        ("scale", replace(WRONG, scale=1.0), WRONG),
        ("default_scale", WRONG, replace(WRONG, scale=1.0)),
        ("batch", make_call(batch=2), WRONG),
        ("heads", WRONG, make_call(heads=1)),
        ("enable_gqa", make_call(heads=4, kv_heads=2, layout="gqa"), WRONG),
        ("bool_mask", WRONG, make_call(mask="float")),
        ("float_mask", make_call(mask="float"), WRONG),
        ("mask_dtype", replace(make_call(), attn_mask=torch.zeros(33, 33)), make_call(mask="float")),
        ("mask_head_broadcast", WRONG, make_call(heads=1)),
        ("no_mask", make_call(mask=None), make_call(mask="flag")),
        ("causal_flag", make_call(mask="flag"), WRONG),
        ("memory_overlap", replace(WRONG, value=WRONG.key), WRONG),
    ],
)
def test_a_condition_is_told_from_the_call(factor: str, holds: Any, fails: Any, tmp_path: Path) -> None:
    path = rule_file(tmp_path, needed=[factor], length_rule=None)
    assert applies(path, holds)
    assert not applies(path, fails)


def test_a_condition_that_cannot_be_told_counts_as_met(tmp_path: Path) -> None:
    for factor in ("values", "fully_masked_rows", "head_dim", "alignment", "a factor of a later version"):
        assert applies(rule_file(tmp_path, needed=[factor]))


def test_of_a_pair_one_condition_is_enough(tmp_path: Path) -> None:
    path = rule_file(tmp_path, needed=[], alternatives=[["scale", "attn_mask"]], length_rule=None)
    assert applies(path, WRONG)
    assert applies(path, replace(WRONG, attn_mask=None, scale=1.0))
    assert not applies(path, replace(WRONG, attn_mask=None))


def test_the_narrowest_verified_change_is_taken(tmp_path: Path) -> None:
    def cure(*lines: tuple[str, bool], **changes: Any) -> Cure:
        found = [{"words": "", "line": line, "verified": verified} for line, verified in lines]
        return read_rule(rule_file(tmp_path, workarounds=found, **changes), CPU).remedy.cure

    assert cure((MATH_LINE, True), (DENSE_LINE, True)) == Cure(dense=("key", "value"))
    assert cure(("query = query.contiguous()", True)) == Cure(dense=("query",))
    assert cure((MATH_LINE, True), (DENSE_LINE, False)) == Cure(math=True)
    for lines, changes in (
        ([], {}),
        ([(MATH_LINE, False)], {}),
        ([(MATH_LINE, True)], {"backend": "MATH"}),
        ([("query = value.contiguous()", True)], {}),
    ):
        with pytest.raises(InputError, match="nothing can be done"):
            cure(*lines, **changes)


def test_a_release_with_the_fix_does_not_need_the_rule(tmp_path: Path) -> None:
    exact = {"issue": "pytorch#1", "match": "exact"}
    assert read_rule(rule_file(tmp_path), CPU).unneeded == ""
    fixed = read_rule(rule_file(tmp_path, known=[{**exact, "fixed_in": "2.2.0"}]), CPU)
    assert fixed.unneeded == "pytorch#1 is fixed in 2.2.0"
    assert read_rule(rule_file(tmp_path, known=[{**exact, "fixed_in": "99.0.0"}]), CPU).unneeded == ""
    assert read_rule(rule_file(tmp_path, known=[{**exact, "fixed_in": None}]), CPU).unneeded == ""
    elsewhere = read_rule(rule_file(tmp_path, replay={"device": "cuda:0", "dtype": "float32"}), CPU)
    assert "not built for" in elsewhere.unneeded
    assert elsewhere.remedy.devices == ("cuda",)


def test_the_warning_says_what_the_rule_is_about(tmp_path: Path) -> None:
    look = Look(WRONG, "FLASH_ATTENTION", "cpu", False, None)
    about = read_rule(rule_file(tmp_path), CPU).remedy.about(look)
    assert about == "the rule in result.json (pytorch#191937 as emulated where it was found, fixed in 2.14.0)"
    assert "no known issue" in read_rule(rule_file(tmp_path, known=[]), CPU).remedy.about(look)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"schema": {"name": "replay", "version": 1}}, "no result of explain"),
        ({"schema": None}, "no result of explain"),
        ({"schema": {"name": "explain", "version": 2}}, "newer sdpa-repro"),
        ({"backend": None}, "nothing to guard against"),
        ({"backend": "eager"}, "no call of SDPA"),
        ({"backend": ["MATH"]}, "no call of SDPA"),
        ({"needed": "attn_mask"}, "no list of texts"),
        ({"needed": [1]}, "no list of texts"),
        ({"needed": [], "length_rule": None}, "no condition"),
        ({"alternatives": [["a"]]}, "no pairs"),
        ({"alternatives": 3}, "no pairs"),
        ({"length_rule": {"rule": "exec('1')"}}, "cannot read the length rule"),
        ({"length_rule": {"rule": 7}}, "cannot read the length rule"),
        ({"workarounds": None}, "nothing can be done"),
        ({"needed": [f"factor {number}" for number in range(1000)]}, "no list of texts"),
        ({"alternatives": [["a", "b"]] * 1000}, "no pairs"),
        ({"length_rule": {"rule": " and ".join(["L % 32 == 1"] * 1000)}}, "cannot read the length rule"),
    ],
)
def test_a_document_that_cannot_be_used_is_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=words) as refused:
        read_rule(rule_file(tmp_path, **changes), CPU)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "7", "[" * 100_000, "\udcff"])
def test_a_file_that_is_no_document_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(InputError, match="explain --json"):
        read_rule(path, CPU)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        read_rule(tmp_path / "missing.json", CPU)
    with pytest.raises(InputError, match="directory"):
        read_rule(tmp_path, CPU)


def test_odd_values_beside_what_is_read_do_no_harm(tmp_path: Path) -> None:
    path = rule_file(tmp_path, known=[None, {"fixed_in": 3}], replay=None, workarounds=[None, *json.loads("[]")])
    with pytest.raises(InputError, match="nothing can be done"):
        read_rule(path, CPU)


def test_what_a_file_says_is_printable_and_short_in_a_warning(tmp_path: Path) -> None:
    look = Look(WRONG, "FLASH_ATTENTION", "cpu", False, None)
    hostile = "\x1b[2J" + "9" * 1000
    path = rule_file(tmp_path, known=[{"issue": hostile, "match": "exact", "fixed_in": hostile}])
    about = read_rule(path, CPU).remedy.about(look)
    assert about.isprintable()
    assert len(about) < 200
    elsewhere = read_rule(rule_file(tmp_path, replay={"device": hostile, "dtype": "float32"}), CPU).unneeded
    assert elsewhere.isprintable()
    assert len(elsewhere) < 200


def test_a_call_without_heads_does_not_repeat_them(tmp_path: Path) -> None:
    flat = WRONG.with_tensors({name: WRONG.tensors[name][0, 0] for name in ("query", "key", "value")})
    assert not applies(rule_file(tmp_path), replace(flat, attn_mask=torch.ones(33, 33, dtype=torch.bool)))


def test_the_result_of_diagnose_holds_the_same_rule(tmp_path: Path) -> None:
    path = rule_file(tmp_path, schema={"name": "diagnose", "version": 1}, dump="x.pt", stopped=None)
    assert applies(path)
    assert not applies(path, make_call(rows=32, padding=3, dtype=torch.float32))
