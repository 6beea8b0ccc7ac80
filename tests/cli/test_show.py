"""`sdpa-repro show`: what it says about calls of every kind, and about files that want to do harm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from torch.nn.attention.bias import causal_lower_right

from sdpa_repro import dump
from sdpa_repro.attention import AttentionCall
from sdpa_repro.cli.show import command
from sdpa_repro.errors import InputError
from tests.calls import causal_mask, make_call
from tests.make_sample import PATH as SAMPLE

UNFOLDED = torch.randn(1, 1, 30).unfold(-1, 8, 2)


def show(*arguments: object) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


def written(
    folder: Path, call: AttentionCall, name: str = "x.pt", output: torch.Tensor | None = None, **told: Any
) -> Path:
    dump.save(dump.snapshot(call, output, **told), folder / name)
    return folder / name


def lines_of(path: Path) -> list[str]:
    result = show(path)
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def first_line(folder: Path, call: AttentionCall) -> str:
    return lines_of(written(folder, call))[0]


def row_of(lines: list[str], name: str) -> str:
    return next(text for text in lines if text.startswith(name + "  "))


def test_the_first_line_says_what_the_call_is_and_the_last_what_to_run_next() -> None:
    lines = lines_of(SAMPLE)
    assert lines[0] == (
        "query (1, 2, 33, 512) bfloat16 on cpu, key/value expanded from one head, causal mask with left padding 7"
    )
    assert lines[-1].startswith("next: ")
    assert lines[-1].endswith(f"replay {SAMPLE}")


def test_each_tensor_has_its_layout_in_the_table(tmp_path: Path) -> None:
    lines = lines_of(written(tmp_path, make_call(heads=4, rows=33, width=136)))
    key = row_of(lines, "key")
    assert "bfloat16" in key
    assert "(1, 4, 33, 136)" in key
    assert "(0, 0, 136, 1)" in key
    assert f" {33 * 136 * 2} " in key
    assert key.endswith("head stride 0")
    assert row_of(lines, "query").endswith("not contiguous")
    assert f" {-(-33 * 33 // 8)} " in row_of(lines, "attn_mask")


def test_the_mask_stands_there_in_words_and_as_a_picture(tmp_path: Path) -> None:
    lines = lines_of(written(tmp_path, make_call(rows=33, padding=7)))
    assert "mask: causal, left padding 7, fully masked rows 0–6, density 0.3223" in lines
    assert any(text.startswith("   0 xxxx") for text in lines)
    assert any(text.startswith("  32 ·······█") for text in lines)


def test_a_mask_only_implied_by_is_causal_is_described_too(tmp_path: Path) -> None:
    path = written(tmp_path, make_call(mask="flag"))
    lines = lines_of(path)
    assert lines[0].endswith("is_causal, no mask tensor")
    assert "mask: causal, density 0.5152" in lines
    assert "is_causal True" in row_of(lines, "flags")


def test_key_and_value_heads_are_told(tmp_path: Path) -> None:
    assert "key/value with 2 heads for 4" in first_line(tmp_path, make_call(kv_heads=2, layout="gqa"))
    assert "key/value with 4 heads of its own" in first_line(tmp_path, make_call(layout="dense"))
    mixed = make_call()
    mixed = mixed.with_tensors({"value": mixed.value.contiguous()})
    assert "key expanded from one head, value with 4 heads of its own" in first_line(tmp_path, mixed)


def test_other_lengths_and_widths_are_told(tmp_path: Path) -> None:
    line = first_line(tmp_path, make_call(rows=4, keys=9, value_width=8, mask=None))
    assert "9 keys, value head_dim 8, no mask" in line


def test_a_value_that_is_a_part_of_key_shares_its_memory(tmp_path: Path) -> None:
    key = torch.randn(1, 2, 9, 16)
    path = written(tmp_path, AttentionCall(torch.randn(1, 2, 9, 16), key, key[..., :8]))
    lines = lines_of(path)
    assert "shares memory with value" in row_of(lines, "key")
    assert "shares memory with key" in row_of(lines, "value")


@pytest.mark.parametrize(
    "call",
    [
        AttentionCall(torch.randn(1, 2, 4, 8), torch.randn(1, 2, 0, 8), torch.randn(1, 2, 0, 8)),
        AttentionCall(torch.randn(3, 4, 8), torch.randn(3, 5, 8), torch.randn(3, 5, 8), torch.zeros(4, 5)),
        AttentionCall(torch.randn(4, 8), torch.randn(5, 8), torch.randn(5, 8)),
        AttentionCall(torch.randn(2, 3, 1, 4, 8), torch.randn(2, 3, 1, 5, 8), torch.randn(2, 3, 1, 5, 8)),
        AttentionCall(torch.randn(1, 1, 4, 8), torch.randn(1, 1, 5, 8), torch.randn(1, 1, 5, 8), torch.ones(5).bool()),
        AttentionCall(torch.randn(1, 1, 9, 8).mT, torch.randn(1, 1, 8, 9), torch.randn(1, 1, 8, 9), scale=0.5),
        AttentionCall(UNFOLDED, UNFOLDED, UNFOLDED),
    ],
    ids=["S=0", "3-D", "2-D", "5-D", "mask (S,)", "last stride", "unfold"],
)
def test_calls_of_unusual_shapes_are_shown(tmp_path: Path, call: AttentionCall) -> None:
    lines = lines_of(written(tmp_path, call))
    assert lines[0].startswith(f"query {tuple(call.query.shape)} float32 on cpu")


def test_a_causal_bias_is_shown_as_a_rule(tmp_path: Path) -> None:
    key = torch.randn(1, 2, 9, 8)
    call = AttentionCall(torch.randn(1, 2, 4, 8), key, key, causal_lower_right(4, 9))
    lines = lines_of(written(tmp_path, call))
    assert "CausalBias (causal, aligned to the bottom right" in lines[0]
    assert "a rule: LOWER_RIGHT" in row_of(lines, "attn_mask")


def test_batch_rows_with_other_masks_are_listed_and_the_first_is_drawn(tmp_path: Path) -> None:
    mask = torch.cat([causal_mask(33, 33, padding) for padding in (7, 0)])
    call = make_call(batch=2).with_tensors({"attn_mask": mask})
    text = "\n".join(lines_of(written(tmp_path, call)))
    assert "batch row 0: causal, left padding 7, fully masked rows 0–6, batch row 1: causal" in text
    assert "batch row 0, head 0:" in text


def test_live_result_origin_and_surroundings_are_told(tmp_path: Path) -> None:
    live = {"ran": "EFFICIENT_ATTENTION", "status": "diverges", "max_abs": 0.3, "ratio": 41.7}
    live |= {"rows": [[0, 0, 288]], "wrong_rows": 16, "reason": ""}
    path = written(
        tmp_path,
        make_call(),
        live=live,
        origin={"module": "layers.5.self_attn", "total_length": 289, "padding": 7, "rank": None, "calls": 2},
        context={
            "device": "cuda:0",
            "grad": False,
            "inference": True,
            "backends": {"MATH": True, "FLASH_ATTENTION": False},
        },
        environment={"torch": "2.13.0+cu130", "gpu": "NVIDIA B200"},
        preloaded=[{"name": "fault.py", "sha256": "0" * 64}],
    )
    lines = lines_of(path)
    assert " on cuda:0, " in lines[0]
    live_row = row_of(lines, "live")
    assert "diverges in EFFICIENT_ATTENTION, max error 0.3, 41.7 x the threshold, 16 wrong rows" in live_row
    assert "[[0, 0, 288]]" in live_row
    assert row_of(lines, "calls").split(maxsplit=1)[1] == "2 up to this one"
    assert "1 mod 32, 33 mod 64" in row_of(lines, "residues")
    assert "backends off: FLASH_ATTENTION, inference" in row_of(lines, "context")
    assert "gpu NVIDIA B200" in row_of(lines, "environment")
    assert "fault.py" in row_of(lines, "preloaded")
    assert not any(text.startswith("rank") for text in lines)


def test_what_the_dump_reveals_is_said_unless_it_is_made_from_a_recipe(tmp_path: Path) -> None:
    text = "\n".join(lines_of(written(tmp_path, make_call())))
    assert "whoever has the model can recover the input" in text
    made = "\n".join(lines_of(written(tmp_path, make_call(), recipe={"query": "zeros"})))
    assert "recover" not in made
    assert "reveal nothing" in made


def test_text_from_the_dump_cannot_drive_the_terminal(tmp_path: Path) -> None:
    evil = "layer\x1b[2J\x1b]0;owned\x07\r\nnext: rm -rf /\u202e"
    path = written(
        tmp_path,
        make_call(),
        origin={"module": evil, evil: evil, "notes": [evil] * 500},
        context={"device": evil, "flash_impl": evil, "backends": {evil: False}, "threads": evil},
        environment={"torch": evil},
        live={"status": evil, "ran": evil, "rows": evil, "reason": evil, "ratio": evil, "wrong_rows": evil},
        preloaded=[{"name": evil, "sha256": evil}],
    )
    lines = lines_of(path)
    text = "\n".join(lines)
    assert not any(letter in text for letter in "\x1b\x07\r\u202e")
    assert not any(line.startswith("next: rm") for line in lines)
    assert max(map(len, lines)) < 2000
    assert json.loads(show("--json", path).stdout)["dumps"][0]["origin"]["module"] == evil


def test_surroundings_of_the_wrong_types_are_shown_as_they_are(tmp_path: Path) -> None:
    wrong = {"device": 3, "grad": "no", "requires_grad": [1], "backends": 7, "autocast": "on", "threads": {"a": 1}}
    path = written(tmp_path, make_call(), context=wrong, live={"ratio": None, "rows": 4}, origin={"total_length": "x"})
    assert "device 3" in row_of(lines_of(path), "context")


def test_several_dumps_and_folders_are_shown_in_turn(tmp_path: Path) -> None:
    first = written(tmp_path, make_call(), "a.pt")
    second = written(tmp_path, make_call(dtype=torch.float32), "b.pt")
    lines = lines_of(tmp_path)
    assert sum(text.startswith("query (1, 4, 33, 136)") for text in lines) == 2
    assert lines[-1].endswith(f"replay {first} {second}")


def test_a_bad_file_among_good_ones_costs_status_2_but_not_the_others(tmp_path: Path) -> None:
    good = written(tmp_path, make_call())
    (tmp_path / "bad.pt").write_bytes(b"no dump")
    result = show(good, tmp_path / "bad.pt")
    assert result.exit_code == 2
    assert result.stdout.startswith("query (1, 4, 33, 136)")
    assert "bad.pt" in result.stderr


def test_a_single_bad_file_and_an_empty_folder_are_bad_input(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "missing.pt", tmp_path / "empty"):
        assert isinstance(show(path).exception, InputError)


def test_json_is_one_document_with_stable_keys(tmp_path: Path) -> None:
    path = written(tmp_path, make_call(rows=33, padding=7), live={"ratio": float("nan")})
    document = json.loads(show("--json", path).stdout)
    assert document["schema"]["name"] == "show"
    assert {"sdpa_repro", "preloaded", "environment", "dumps"} <= document.keys()
    (body,) = document["dumps"]
    assert body["mask"]["words"][:2] == ["causal", "left padding 7"]
    assert body["mask"]["parts"][0]["fully_masked"] == [[0, 6]]
    assert body["tensors"]["key"]["stride"] == [0, 0, 136, 1]
    assert body["call"] == {
        "is_causal": False,
        "scale": None,
        "softmax_scale": pytest.approx(136**-0.5),
        "enable_gqa": False,
        "dropout_p": 0.0,
    }
    assert body["live"]["ratio"] == "nan"
    assert {"file", "summary", "near", "context", "origin", "recipe", "reveals"} <= body.keys()


def test_an_expanded_tensor_is_never_materialised(tmp_path: Path) -> None:
    query = torch.randn(1, 1, 1, 8).expand(1, 512, 4096, 8)
    call = AttentionCall(
        query, query, query, torch.ones(1, 1, 1, 4096, dtype=torch.bool).expand(1, 512, 4096, 4096)[:, :1]
    )
    path = written(tmp_path, call)
    assert path.stat().st_size < 20_000
    assert "every row sees every key" in "\n".join(lines_of(path))


def test_a_mask_of_one_number_has_a_row_of_its_own(tmp_path: Path) -> None:
    one = torch.ones(1, 2, 4, 8)
    call = AttentionCall(one, one, one, torch.zeros(()))
    assert "()" in row_of(lines_of(written(tmp_path, call)), "attn_mask")


def test_a_query_without_rows_and_columns_is_bad_input(tmp_path: Path) -> None:
    call = AttentionCall(torch.ones(8), torch.ones(8), torch.ones(8))
    result = show(written(tmp_path, call))
    assert isinstance(result.exception, InputError)
    assert "fewer than two dimensions" in str(result.exception)
