"""The triggers of the known bugs, run for real on this machine's CPU, and how their processes are handled."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sdpa_repro.errors import InputError
from sdpa_repro.explaining.known_here import Job, Outcome, _run, check_here, plan
from sdpa_repro.explaining.trigger_call import UntestableError, attend, compared, defined
from sdpa_repro.explaining.triggers import TRIGGERS
from sdpa_repro.known_issues import KNOWN_ISSUES
from sdpa_repro.situation import release

FAULTS = Path(__file__).resolve().parent.parent / "faults"
TORCH = release(torch.__version__)[0]
CPU_BUGS = {
    "pytorch#193728": TORCH < (2, 15, 0),
    "pytorch#187801": TORCH < (2, 14, 0),
    "pytorch#187506": TORCH < (2, 14, 0),
    "pytorch#141219": TORCH < (2, 15, 0),
    "pytorch#118628": TORCH < (2, 15, 0),
    "pytorch#141218": (2, 5, 0) <= TORCH < (2, 10, 0),
    "pytorch#127055": False,
    "pytorch#103963": False,
}
"""Whether the installed torch has each bug that needs no accelerator, from the upstream threads."""


def by_issue(outcomes: list[Outcome]) -> dict[str, Outcome]:
    return {outcome.issue: outcome for outcome in outcomes}


@pytest.fixture(scope="module")
def here() -> dict[str, Outcome]:
    return by_issue(check_here())


@pytest.fixture(scope="module")
def planted() -> dict[str, Outcome]:
    return by_issue(check_here([FAULTS / "pytorch_191937.py"]))


def test_every_known_issue_has_a_trigger_or_a_reason() -> None:
    assert list(TRIGGERS) == [known.issue for known in KNOWN_ISSUES]
    assert all(trigger.run is not None or trigger.why_not for trigger in TRIGGERS.values())


@pytest.mark.slow
@pytest.mark.parametrize("issue", CPU_BUGS)
def test_the_bugs_of_the_cpu_are_reported_as_upstream_states_them(here: dict[str, Outcome], issue: str) -> None:
    assert here[issue].status == ("affected" if CPU_BUGS[issue] else "not affected"), here[issue]


@pytest.mark.slow
def test_a_crash_is_reported_with_its_signal(here: dict[str, Outcome]) -> None:
    assert "SIGFPE" in here["pytorch#141219"].detail


@pytest.mark.slow
def test_the_bugs_of_other_devices_cannot_be_tested_without_one(here: dict[str, Outcome]) -> None:
    expected = {"cuda": "no CUDA device", "mps": "no MPS device", "rocm": "no ROCm device"}
    if torch.cuda.is_available():
        del expected["cuda" if torch.version.hip is None else "rocm"]
    if torch.backends.mps.is_available():
        del expected["mps"]
    for known in KNOWN_ISSUES:
        if known.device in expected and TRIGGERS[known.issue].run is not None:
            outcome = here[known.issue]
            assert (outcome.status, outcome.detail) == ("not tested", expected[known.device])


@pytest.mark.slow
def test_a_planted_bug_is_found_and_marked_as_emulated(planted: dict[str, Outcome]) -> None:
    outcome = planted["pytorch#191937"]
    assert (outcome.status, outcome.emulated, outcome.device) == ("affected", True, "cpu")
    assert outcome.detail.startswith("query row 32 off by")


@pytest.mark.slow
def test_planting_one_bug_says_nothing_about_the_others_of_that_device(planted: dict[str, Outcome]) -> None:
    for issue in ("pytorch#192138", "pytorch#191612", "pytorch#163597", "ROCm/pytorch#3230"):
        assert planted[issue].status == "not tested"
        assert "nothing like it was preloaded" in planted[issue].detail


@pytest.mark.slow
def test_a_preload_that_crashes_or_fails_is_told_apart_from_a_bug(tmp_path: Path) -> None:
    failing = tmp_path / "failing.py"
    failing.write_text("raise ValueError('no such kernel')")
    with pytest.raises(InputError, match=r"failing\.py failed with ValueError: no such kernel"):
        check_here([failing])
    silent = tmp_path / "silent.py"
    silent.write_text('import os\nprint(\'{"event": "noise"}\', flush=True)\nos.kill(os.getpid(), 9)')
    outcomes = check_here([silent])
    assert {outcome.status for outcome in outcomes} == {"not tested"}
    assert any("killed by SIGKILL while starting" in outcome.detail for outcome in outcomes)


def test_a_missing_preload_is_bad_input() -> None:
    with pytest.raises(InputError, match=r"nowhere\.py"):
        check_here(["nowhere.py"])


def replacing(tmp_path: Path, issue: str, body: str) -> Path:
    """A file to preload that lets the trigger of an issue do something else."""
    path = tmp_path / "replacing.py"
    path.write_text(
        "import os, signal, time\nimport sdpa_repro.explaining.triggers as triggers\n"
        f"triggers.TRIGGERS[{issue!r}] = triggers.Trigger(lambda device, backend: {body})\n"
    )
    return path


def run_two(preload: Path, timeout: float = 60.0) -> dict[str, Outcome]:
    jobs = [Job("pytorch#103963", "cpu", None), Job("pytorch#118628", "cpu", None), Job("pytorch#127055", "cpu", None)]
    return by_issue(_run(jobs, [preload], timeout, lambda outcome: None))


@pytest.mark.slow
def test_a_trigger_that_hangs_costs_its_own_time_only(tmp_path: Path) -> None:
    started = time.monotonic()
    outcomes = run_two(replacing(tmp_path, "pytorch#103963", "time.sleep(600)"), timeout=20.0)
    assert time.monotonic() - started < 300
    assert outcomes["pytorch#103963"].detail == "no answer within 20 s"
    assert outcomes["pytorch#127055"].status == "not affected"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "status"), [("SIGKILL", "not tested"), ("SIGSEGV", "affected")])
def test_only_a_signal_of_the_process_itself_convicts_a_trigger(tmp_path: Path, name: str, status: str) -> None:
    outcomes = run_two(replacing(tmp_path, "pytorch#103963", f"os.kill(os.getpid(), signal.{name})"))
    assert outcomes["pytorch#103963"].status == status
    assert outcomes["pytorch#103963"].detail == f"the process was killed by {name}"
    assert outcomes["pytorch#127055"].status == "not affected"


@pytest.mark.slow
def test_a_device_that_breaks_convicts_its_trigger_and_costs_the_others_nothing(tmp_path: Path) -> None:
    error = "(_ for _ in ()).throw(RuntimeError('CUDA error: an illegal memory access was encountered'))"
    outcomes = run_two(replacing(tmp_path, "pytorch#103963", error))
    assert outcomes["pytorch#103963"].status == "affected"
    assert outcomes["pytorch#127055"].status == "not affected"


@pytest.mark.slow
def test_an_error_that_nobody_expected_is_no_answer(tmp_path: Path) -> None:
    outcomes = run_two(replacing(tmp_path, "pytorch#103963", "1 / 0"))
    assert outcomes["pytorch#103963"].status == "not tested"
    assert outcomes["pytorch#103963"].detail == "ZeroDivisionError: division by zero"


@pytest.mark.slow
def test_the_children_ignore_the_folder_they_are_started_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    (outcome,) = _run([Job("pytorch#103963", "cpu", None)], [], 60.0, lambda outcome: None)
    assert outcome.status == "not affected", outcome


def test_cpu_bugs_run_on_their_own_kernel() -> None:
    known = {known.issue: known for known in KNOWN_ISSUES}
    assert plan(known["pytorch#193728"]) == Job("pytorch#193728", "cpu", "FLASH_ATTENTION")


def test_a_compiled_path_is_declared_untestable() -> None:
    known = next(known for known in KNOWN_ISSUES if known.issue == "pytorch#195320")
    assert plan(known) == "needs torch.compile, which takes longer than this check"


# What the triggers measure with.


def values(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def test_the_definition_averages_the_values_that_a_row_sees() -> None:
    zeros = torch.zeros(1, 1, 3, 4)
    value = torch.arange(3.0)[None, None, :, None].expand(1, 1, 3, 4)
    assert defined(zeros, zeros, value, causal=True)[0, 0, :, 0].tolist() == [0.0, 0.5, 1.0]
    mask = torch.tensor([[False, False, False], [True, False, True], [False, False, True]])
    assert defined(zeros, zeros, value, mask)[0, 0, :, 0].tolist() == [0.0, 1.0, 2.0]
    bias = torch.zeros(3, 3).masked_fill(~mask, -math.inf)
    assert defined(zeros, zeros, value, bias)[0, 0, 1:, 0].tolist() == [1.0, 2.0]


def test_the_definition_shares_key_heads_in_order() -> None:
    query, key = torch.zeros(1, 4, 1, 2), torch.zeros(1, 2, 1, 2)
    value = torch.tensor([5.0, 7.0])[None, :, None, None]
    assert defined(query, key, value).flatten().tolist() == [5.0, 5.0, 7.0, 7.0]


def test_a_finding_names_the_wrong_rows() -> None:
    right = values(1, 2, 5, 4).double()
    wrong = right.clone()
    assert compared(wrong, right).affected is False
    wrong[0, 1, 3, 2] += 0.5
    assert compared(wrong, right).detail == "query row 3 off by 0.5"
    wrong[0, 0, 1, 0] = math.nan
    assert compared(wrong, right).detail == "2 of 5 query rows not finite"


def test_a_backend_that_does_not_take_the_call_cannot_be_tested() -> None:
    tensor = values(1, 1, 4, 8)
    with pytest.raises(UntestableError, match="EFFICIENT_ATTENTION does not take this call here"):
        attend("EFFICIENT_ATTENTION", tensor, tensor, tensor)
    with pytest.raises(UntestableError, match="this torch has no NEWER_ATTENTION"):
        attend("NEWER_ATTENTION", tensor, tensor, tensor)


@pytest.mark.parametrize(
    "issue",
    [
        "pytorch#191937",
        "pytorch#192138",
        "pytorch#112577",
        "pytorch#108503",
        "pytorch#124877",
        "pytorch#191612",
        "pytorch#127055",
        "pytorch#163597",
        "pytorch#181133",
        "pytorch#169222",
        "ROCm/pytorch#3230",
        "pytorch#103963",
    ],
)
def test_a_healthy_kernel_passes_the_triggers_of_other_devices(issue: str) -> None:
    run = TRIGGERS[issue].run
    assert run is not None
    assert not run("cpu", "FLASH_ATTENTION" if issue != "pytorch#191612" else "MATH").affected
