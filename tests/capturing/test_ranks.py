"""Capture in a run of several ranks: each looks at its own calls, rank 0 tells which ranks are wrong."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from sdpa_repro import dump
from sdpa_repro.capturing import folder
from sdpa_repro.capturing.model_run import capture_model
from sdpa_repro.capturing.options import PrefillOptions
from sdpa_repro.capturing.records import Options
from tests import models, torchrun

FAULTS = Path(__file__).resolve().parent.parent / "faults"
FAULT = FAULTS / "pytorch_191937.py"
LENGTH = 65
"""The planted kernel is wrong where L % 64 == 1, for a single key/value head of width 8."""

SCRIPT = """
    import os, signal, sys, time
    from pathlib import Path
    import torch
    import torch.nn.functional as F

    rank = int(os.environ["RANK"])
    if rank == 1:
        sys.path.insert(0, {faults!r})
        import pytorch_191937
    query = torch.randn(1, 2, 65, 8)
    key = torch.randn(1, 1, 65, 8).expand(1, 2, 65, 8)
    mask = torch.ones(65, 65, dtype=torch.bool).tril()
    mask[0] = False
    with torch.no_grad():
        F.scaled_dot_product_attention(query, key, key, attn_mask=mask[None, None])
    for _ in range(1200):
        if Path("dumps/index.jsonl").exists():
            break
        time.sleep(0.1)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(120)
"""
"""Rank 1 has a wrong call; once that is dumped rank 0 is killed, and torchrun ends the other."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama of 8 query heads and 2 key/value heads: on each of 2 ranks 4 and 1."""
    return models.save_llama(tmp_path_factory.mktemp("models") / "llama", heads=8)


def capture(*words: Any) -> list[str]:
    """The command line of `sdpa-repro capture`, for torchrun."""
    return ["-m", "sdpa_repro", "capture", "--out", "dumps", "--json", *map(str, words)]


@pytest.mark.slow
def test_a_fault_that_only_tensor_parallelism_brings_about_is_found_on_both_ranks(llama: Path, tmp_path: Path) -> None:
    words = ("--model", llama, "--tp-plan", "auto", "--total-length", LENGTH, "--preload", FAULT, "--no-prove")
    done = torchrun.run(*capture(*words), cwd=tmp_path)
    report = json.loads(done.stdout)
    assert done.returncode == 1, done.stderr
    assert report["sentence"].startswith("4 of 4 attention calls wrong on both ranks")
    assert report["ranks"] == {"world": 2, "wrong": [0, 1]}
    assert [(call["rank"], call["query"][1], call["key_head_stride"]) for call in report["calls"]] == [
        (0, 4, 0),
        (0, 4, 0),
        (1, 4, 0),
        (1, 4, 0),
    ]
    index = folder.entries(tmp_path / "dumps")
    assert sorted((entry["rank"], entry["call_index"], entry["world"]) for entry in index) == [
        (0, 0, 2),
        (0, 1, 2),
        (1, 0, 2),
        (1, 1, 2),
    ]
    assert sorted(entry["file"] for entry in index) == sorted(each["file"] for each in report["dumps"])
    for entry in index:
        stored = dump.load(tmp_path / "dumps" / entry["file"])
        assert entry["file"].endswith(f"-rank{entry['rank']}.pt")
        assert (stored.origin["rank"], stored.origin["world"]) == (entry["rank"], 2)
        assert stored.call.query.shape[1] == 4
        assert stored.call.key.stride(1) == stored.call.value.stride(1) == 0


@pytest.mark.slow
def test_the_same_model_in_one_process_never_meets_that_fault(llama: Path, tmp_path: Path) -> None:
    options = PrefillOptions(model=str(llama), total_length=LENGTH)
    report = capture_model(options, tmp_path / "dumps", Options(), preload=[FAULT], progress=lambda text: None)
    assert (report["checked"], report["wrong"]) == (2, 0)
    assert {call["key_head_stride"] for call in report["calls"]} == {LENGTH * 8}
    assert report["ranks"] == {"world": 1, "wrong": []}


@pytest.mark.slow
def test_a_healthy_model_split_over_ranks_is_recorded_by_a_script_as_healthy(llama: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
        import torch, sdpa_repro
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained({str(llama)!r}, tp_plan="auto", attn_implementation="sdpa")
        ids = torch.arange({LENGTH})[None] % 20 + 5
        mask = torch.ones_like(ids)
        mask[:, :7] = 0
        with torch.inference_mode(), sdpa_repro.capture("dumps") as session:
            model(input_ids=ids, attention_mask=mask)
        assert [call.status for call in session.calls] == ["agrees", "agrees"]
        """)
    )
    done = torchrun.run(script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    index = folder.entries(tmp_path / "dumps")
    assert sorted((entry["rank"], entry["healthy"], entry["heads"]) for entry in index) == [
        (0, True, [4, 4]),
        (1, True, [4, 4]),
    ]


@pytest.mark.slow
def test_of_a_script_the_wrong_rank_is_named_even_when_the_other_one_is_killed(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT.format(faults=str(FAULTS))))
    words = ["capture", "--out", "dumps", "--json", "--no-prove", "--", *torchrun.launch("script.py")]
    done = torchrun.call([sys.executable, "-m", "sdpa_repro", *words], tmp_path)
    report = json.loads(done.stdout)
    assert report["script"]["status"] != 0
    assert report["ranks"] == {"world": 2, "wrong": [1]}
    assert "wrong on rank 1 of 2" in report["sentence"]
    (entry,) = folder.entries(tmp_path / "dumps")
    assert (entry["rank"], entry["healthy"]) == (1, False)
    assert dump.load(tmp_path / "dumps" / entry["file"]).live["status"] == "diverges"


@pytest.mark.slow
def test_rank_0_tells_what_a_rank_found_that_died(llama: Path, tmp_path: Path) -> None:
    preload = tmp_path / "dies.py"
    preload.write_text(
        textwrap.dedent(f"""
        import os, signal, sys, time
        from pathlib import Path
        sys.path.insert(0, {str(FAULTS)!r})
        from emulation import replace_flash

        calls = []
        def change(output, arguments):
            calls.append(1)
            if os.environ["RANK"] == "1" and len(calls) == 2:
                for _ in range(1200):
                    if Path("dumps/index.jsonl").exists():
                        break
                    time.sleep(0.1)
                os.kill(os.getpid(), signal.SIGKILL)
            output[:, :, -1] += os.environ["RANK"] == "1"
            return output

        replace_flash(change)
        """)
    )
    words = ("--model", llama, "--tp-plan", "auto", "--total-length", LENGTH, "--preload", preload)
    done = torchrun.run(*capture(*words), cwd=tmp_path)
    report = json.loads(done.stdout)
    assert done.returncode == 1, done.stderr
    assert report["failed"]
    assert report["ranks"] == {"world": 2, "wrong": [1]}
    assert [(each["rank"], each["status"]) for each in report["dumps"]] == [(1, "diverges")]
    assert "rank 1 of 2" in report["sentence"]
    assert "broke off" in report["sentence"]
