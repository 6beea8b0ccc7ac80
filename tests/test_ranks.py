"""Which rank this is, its share of the work, and everybody's results, without and with peers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from sdpa_repro import ranks
from tests import torchrun

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests may themselves run under a launcher."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def launched(monkeypatch: pytest.MonkeyPatch, rank: int, world: int) -> None:
    for name, number in (("RANK", rank), ("WORLD_SIZE", world), ("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", world)):
        monkeypatch.setenv(name, str(number))


def test_one_process_is_the_first_of_one_and_does_everything() -> None:
    assert (ranks.rank(), ranks.world(), ranks.is_first()) == (0, 1, True)
    assert ranks.mine("abc") == ["a", "b", "c"]
    assert ranks.gathered([1, 2, 3]) == [1, 2, 3]
    assert ranks.of_all("here") == ["here"]


def test_torchrun_says_which_rank_this_is(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, 1, 4)
    assert (ranks.rank(), ranks.world(), ranks.local_rank(), ranks.is_first()) == (1, 4, 1, False)


def test_a_cluster_that_names_a_world_in_every_shell_is_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert (ranks.rank(), ranks.world()) == (0, 1)


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [0, 1, 4, 7])
def test_the_shares_are_everything_once_and_differ_by_one_item(
    world: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = []
    for rank in range(world):
        launched(monkeypatch, rank, world)
        shares.append(ranks.mine(range(count)))
    assert sorted(item for share in shares for item in share) == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_each_rank_sees_one_gpu_and_ranks_share_where_there_are_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    for visible, rank, expected in ((None, 1, "1"), (None, 2, "0"), ("6,7", 1, "7"), ("GPU-a,GPU-b", 2, "GPU-a")):
        launched(monkeypatch, rank, 3)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        ranks.keep_to_one_gpu()
        assert os.environ["CUDA_VISIBLE_DEVICES"] == expected


def test_without_gpus_or_peers_nothing_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    ranks.keep_to_one_gpu()
    launched(monkeypatch, 1, 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    ranks.keep_to_one_gpu()
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


@pytest.mark.slow
def test_results_of_all_ranks_come_in_the_order_of_the_items(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import json, sys\n"
        "from pathlib import Path\n"
        "from sdpa_repro import ranks\n"
        "assert not __import__('torch').distributed.is_initialized()\n"
        "squares = ranks.gathered([(item * item, ranks.rank()) for item in ranks.mine(range(7))])\n"
        "again = ranks.of_all(ranks.rank() * 10)\n"
        "short = ranks.gathered(ranks.mine('abcde')[: 3 - 2 * ranks.rank()])\n"
        "Path(f'{ranks.rank()}.json').write_text(json.dumps([squares, again, short]))\n"
    )
    done = torchrun.run(script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    squares = [[item * item, item % 2] for item in range(7)]
    for rank in range(2):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == [squares, [0, 10], ["a", "b", "c", "e"]]
