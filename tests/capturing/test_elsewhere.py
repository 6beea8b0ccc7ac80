"""Signs of attention that was not seen; looking for them changes nothing in the process."""

from __future__ import annotations

import functools
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sdpa_repro.capturing import capture
from sdpa_repro.capturing.elsewhere import _children_alive, hints
from sdpa_repro.errors import InputError

QUERY = torch.ones(1, 1, 3, 4)


class Attention(nn.Module):
    def forward(self, query: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, query, query)


class Holder(nn.Module):
    """Keeps the function, as layers do that let their user choose one."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = F.scaled_dot_product_attention

    def forward(self, query: Tensor) -> Tensor:
        return self.attend(query, query, query)


def nothing() -> None:
    """The work of a child process."""


@pytest.mark.skipif(not hasattr(os, "waitid"), reason="there is no os.waitid")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_children_are_left_for_the_program_to_wait_for() -> None:
    before = _children_alive()
    child = multiprocessing.get_context("fork").Process(target=nothing)
    child.start()
    assert child.pid is not None
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and can still be waited for
    assert f"{before + 1} running" in " ".join(hints(1e9, thorough=False))
    assert os.waitpid(child.pid, 0) == (child.pid, 0)


@pytest.mark.parametrize("holder", [Holder, lambda: functools.partial(F.scaled_dot_product_attention)])
def test_what_holds_the_function_itself_is_named_when_nothing_was_seen(tmp_path: Path, holder: type[Holder]) -> None:
    held = holder()
    words: dict[str, Tensor] = {} if isinstance(held, nn.Module) else {"key": QUERY, "value": QUERY}
    said = r"holds? the function itself .*sdpa-repro capture -- script\.py"
    with pytest.raises(InputError, match=said), capture(tmp_path):
        held(QUERY, **words)


@pytest.mark.slow
def test_neither_torch_nor_the_recorder_is_named_as_a_holder() -> None:
    program = (
        "import torch, torch._dynamo, torch.nn.attention.flex_attention\n"
        "from sdpa_repro.capturing import capture, elsewhere\n"
        "print('; '.join(elsewhere.hints(1e9, thorough=True)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert "function itself" not in done.stdout


def test_torchscript_is_named_when_nothing_was_seen(tmp_path: Path) -> None:
    traced = torch.jit.trace(Attention(), QUERY, check_trace=False)
    with pytest.raises(InputError, match="TorchScript"), capture(tmp_path):
        traced(QUERY)


def test_exported_graphs_are_named_when_nothing_was_seen(tmp_path: Path) -> None:
    exported = torch.export.export(Attention(), (QUERY,)).module()
    with pytest.raises(InputError, match=r"torch\.export"), capture(tmp_path):
        exported(QUERY)
