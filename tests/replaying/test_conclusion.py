"""The verdict and its sentence, from tables written by hand."""

from __future__ import annotations

from typing import Any

import pytest

from sdpa_repro.known_issues import Match
from sdpa_repro.replaying.backends import Backend
from sdpa_repro.replaying.cells import Cell, bad_document, ranges
from sdpa_repro.replaying.conclusion import Conclusion, Live, conclude, place, short_place, with_known
from sdpa_repro.replaying.verdict import Bad, Status, Verdict

BAD = Bad(batches=(0,), heads=tuple(range(16)), rows=(288,), count=16, worst=(0, 3, 288))
NOT_HERE = ("EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "OVERRIDEABLE")


def table(chosen: str = "FLASH_ATTENTION", **changed: Any) -> list[Cell]:
    """A clean CPU table, with the status (and other fields) of some rows replaced."""
    cells = []
    for backend in Backend:
        fields: dict[str, Any] = {"status": Status.DECLINED if backend.value in NOT_HERE else Status.AGREES}
        if backend is Backend.DEFAULT:
            fields["chosen"] = chosen
        change = changed.get(backend.value, {})
        fields |= change if isinstance(change, dict) else {"status": change}
        cells.append(Cell(backend.value, "bfloat16", **fields))
    return cells


def judge(cells: list[Cell], live: Live | None = None, device: str = "cpu") -> Conclusion:
    return conclude(cells, live or Live(None, device, None), device, heads=16)


def test_a_clean_table_is_healthy_and_claims_no_more_than_it_ran() -> None:
    found = judge(table())
    assert (found.verdict, found.guilty, found.exit_status) == (Verdict.HEALTHY, (), 0)
    assert found.sentence == (
        "clean on this cpu: eager, MATH and FLASH_ATTENTION agree with float64 "
        "(EFFICIENT_ATTENTION, CUDNN_ATTENTION and OVERRIDEABLE not tested: not on cpu)"
    )


def test_a_wrong_kernel_is_named_once_with_the_default_that_took_it() -> None:
    wrong = {"status": Status.DIVERGES, "bad": BAD}
    found = judge(table(default=wrong, FLASH_ATTENTION=wrong))
    assert (found.verdict, found.guilty, found.exit_status) == (Verdict.BACKEND_WRONG, ("FLASH_ATTENTION",), 1)
    assert found.sentence == "FLASH_ATTENTION is wrong in query row 288 of 16 heads"


def test_math_can_be_the_guilty_one() -> None:
    found = judge(table(MATH={"status": Status.DIVERGES, "bad": BAD}))
    assert (found.verdict, found.guilty) == (Verdict.BACKEND_WRONG, ("MATH",))


def test_a_default_that_takes_math_is_math() -> None:
    wrong = {"status": Status.DIVERGES, "bad": BAD}
    found = judge(table(chosen="MATH", default=wrong, MATH=wrong))
    assert found.guilty == ("MATH",)


def test_eager_alone_is_eager_wrong_and_the_others_are_named_right() -> None:
    found = judge(table(eager={"status": Status.NONFINITE, "bad": BAD}))
    assert (found.verdict, found.guilty, found.exit_status) == (Verdict.EAGER_WRONG, ("eager",), 1)
    assert found.sentence.startswith("eager (matmul, softmax, matmul) gives NaN or Inf in query row 288 of 16 heads")
    assert found.sentence.endswith("MATH and FLASH_ATTENTION are right")


def test_a_backend_goes_before_eager() -> None:
    wrong = {"status": Status.DIVERGES, "bad": BAD}
    assert judge(table(eager=wrong, FLASH_ATTENTION=wrong)).verdict is Verdict.BACKEND_WRONG


@pytest.mark.parametrize(
    ("status", "reason", "said"),
    [
        (Status.CRASHED, "SIGSEGV", "FLASH_ATTENTION crashes: SIGSEGV"),
        (Status.TIMEOUT, "no result after 120 s", "FLASH_ATTENTION hangs: no result after 120 s"),
        (Status.ERROR, "RuntimeError: no", "FLASH_ATTENTION raises RuntimeError: no"),
        (Status.UNSTABLE, "runs differ by 0.3", "FLASH_ATTENTION is unstable: runs differ by 0.3"),
    ],
)
def test_every_way_to_fail_has_its_words(status: Status, reason: str, said: str) -> None:
    found = judge(table(FLASH_ATTENTION={"status": status, "reason": reason}))
    assert found.verdict is Verdict.BACKEND_WRONG
    assert found.sentence == said


def test_a_default_without_a_name_is_not_accused_besides_the_kernel_that_failed_alike() -> None:
    error = {"status": Status.ERROR, "reason": "IndexError: x"}
    found = judge(table(chosen="unknown", default=error, FLASH_ATTENTION=error))
    assert found.guilty == ("FLASH_ATTENTION",)


def test_a_call_that_math_rejects_is_invalid_whatever_else_accepts_it() -> None:
    found = judge(table(MATH={"status": Status.ERROR, "reason": "RuntimeError: sizes"}))
    assert (found.verdict, found.exit_status) == (Verdict.INVALID_CALL, 1)
    assert found.sentence == "not a valid call: MATH rejects it (RuntimeError: sizes); FLASH_ATTENTION accepts it"


def test_seen_live_and_clean_here_is_unreproducible() -> None:
    found = judge(table(), Live("FLASH_ATTENTION", "cpu", True))
    assert (found.verdict, found.exit_status) == (Verdict.UNREPRODUCIBLE, 3)
    assert "not a sign that all is well" in found.sentence


def test_seen_live_on_a_gpu_sends_to_a_gpu() -> None:
    found = judge(table(), Live("EFFICIENT_ATTENTION", "cuda", True))
    assert found.verdict is Verdict.UNREPRODUCIBLE
    assert found.sentence.endswith("EFFICIENT_ATTENTION cannot run on this cpu: replay it on a cuda machine")


def test_a_healthy_gpu_call_on_a_cpu_claims_nothing_about_the_gpu() -> None:
    found = judge(table(), Live("EFFICIENT_ATTENTION", "cuda", False))
    assert found.verdict is Verdict.HEALTHY
    assert found.sentence.startswith("clean on this cpu")
    assert found.sentence.endswith("EFFICIENT_ATTENTION cannot run on this cpu: replay it on a cuda machine")


def test_a_fault_planted_at_capture_only_is_not_called_a_lost_layout() -> None:
    found = judge(table(), Live("FLASH_ATTENTION", "cpu", True, planted="x.py"))
    assert "x.py" in found.sentence
    assert "layout" not in found.sentence


def test_an_exception_seen_live_and_not_here_is_unreproducible_unless_memory_ran_out() -> None:
    live = Live.of({"status": "raised"}, {"device": "cpu"}, {"raised": "RuntimeError: x"})
    assert judge(table(), live).sentence.startswith("raised live (RuntimeError: x), runs clean here")
    full = Live.of(None, {"device": "cpu"}, {"raised": "OutOfMemoryError: CUDA out of memory."})
    assert judge(table(), full).verdict is Verdict.HEALTHY


def test_the_sentence_says_when_the_kernel_that_ran_live_is_right() -> None:
    found = judge(table(MATH={"status": Status.DIVERGES, "bad": BAD}), Live("FLASH_ATTENTION", "cpu", False))
    assert found.sentence.endswith("; FLASH_ATTENTION, which ran live, is right here")


def test_no_backend_at_all_is_not_called_clean() -> None:
    found = judge([Cell(backend.value, "float32", Status.DECLINED) for backend in Backend])
    assert found.sentence == "nothing could be judged: no backend ran this call"


@pytest.mark.parametrize(
    ("live", "wrong"),
    [
        (None, None),
        ({"status": "agrees", "ratio": 0.3}, False),
        ({"status": "nonfinite"}, True),
        ({"ratio": 31.0}, True),
        ({"ratio": float("nan")}, True),
        ({"status": "unchecked", "ratio": 0.0}, None),
    ],
)
def test_the_live_result_is_read_whatever_is_missing(live: dict[str, Any] | None, wrong: bool | None) -> None:
    assert Live.of(live, {"device": "cuda:1"}) == Live(None, "cuda", wrong)


def test_places_are_short_and_exact() -> None:
    assert place(BAD, 1, 16) == "query row 288 of 16 heads"
    one = Bad((1,), (3,), (0, 1, 2, 9), 4, (1, 3, 1))
    assert place(one, 2, 16) == "query rows 0-2, 9 of head 3 in batch 1"
    some = Bad((0,), (3, 4), tuple(range(0, 20, 2)), 20, (0, 3, 2))
    assert place(some, 1, 16) == "10 query rows of 2 of 16 heads"
    assert short_place(BAD) == "row 288, heads 0-15, worst 0,3,288"


def test_long_lists_of_rows_become_ranges_in_documents() -> None:
    many = Bad((0,), (0,), (*range(100), 200), 101, (0, 0, 5))
    assert bad_document(many)["rows"] == [[0, 99], [200, 200]]
    assert bad_document(BAD)["rows"] == [288]
    assert ranges((1, 2, 3, 7)) == [(1, 3), (7, 7)]


def test_an_emulated_bug_never_passes_for_a_real_one() -> None:
    match = Match("pytorch#191937", "emulated", "title", "2.14.0", "workaround")
    planted = [{"name": "pytorch_191937.py", "sha256": "0"}]
    assert with_known("X is wrong", [match], planted) == (
        "X is wrong; known: pytorch#191937 (emulated by pytorch_191937.py), fixed in 2.14.0"
    )
    assert with_known("X is wrong", [], planted) == "X is wrong (with pytorch_191937.py preloaded)"
    real = Match("pytorch#191937", "exact", "title", "2.14.0", "workaround")
    assert with_known("X is wrong", [real], []) == "X is wrong; known: pytorch#191937, fixed in 2.14.0"


def test_a_kernel_that_was_not_asked_for_is_not_called_clean() -> None:
    maths = [cell for cell in table() if cell.backend == "MATH"]
    found = judge(maths, Live("FLASH_ATTENTION", "cpu", True))
    assert found.verdict is Verdict.UNREPRODUCIBLE
    assert found.sentence == (
        "wrong live, clean here; FLASH_ATTENTION, which ran live, was not judged here "
        "(not among the backends asked for)"
    )
    wrong = [Cell("MATH", "bfloat16", Status.DIVERGES, bad=BAD)]
    said = judge(wrong, Live("FLASH_ATTENTION", "cpu", True)).sentence
    assert said.endswith("; FLASH_ATTENTION, which ran live, was not judged here (not among the backends asked for)")


def test_a_kernel_that_declines_on_the_device_of_the_capture_does_not_send_there() -> None:
    declined = {"status": Status.DECLINED, "reason": "needs 80 GiB, 8 GiB are free"}
    found = judge(table(chosen="MATH", FLASH_ATTENTION=declined), Live("FLASH_ATTENTION", "cpu", True))
    assert "machine" not in found.sentence
    assert found.sentence.endswith(
        "FLASH_ATTENTION, which ran live, was not judged here (needs 80 GiB, 8 GiB are free)"
    )


def test_the_default_row_speaks_for_the_kernel_that_it_took() -> None:
    default = [cell for cell in table() if cell.backend == "default"]
    found = judge(default, Live("FLASH_ATTENTION", "cpu", True))
    assert "the layout was lost on the way" in found.sentence


def test_several_kernels_accept_a_call_that_math_rejects() -> None:
    found = judge(table(MATH={"status": Status.ERROR, "reason": "x"}, CUDNN_ATTENTION=Status.AGREES))
    assert found.sentence.endswith("; CUDNN_ATTENTION and FLASH_ATTENTION accept it")


def test_eager_is_not_accused_of_raising_where_nothing_can_be_compared() -> None:
    cells = [Cell("MATH", "float32", Status.NOT_COMPARABLE), Cell("eager", "float32", Status.ERROR, "IndexError: x")]
    found = conclude(cells, Live(None, "cpu", None), "cpu", undecided="no reference: query has 6 heads, key has 0")
    assert found.verdict is Verdict.HEALTHY
    assert found.sentence == "nothing to compare: no reference: query has 6 heads, key has 0"


def test_a_hang_is_told_with_the_time_that_it_was_waited_for_in_full() -> None:
    default = {"status": Status.TIMEOUT, "reason": "no result after 120 s"}
    found = judge(table(default=default, FLASH_ATTENTION={"status": Status.TIMEOUT, "reason": "no result after 10 s"}))
    assert found.guilty == ("FLASH_ATTENTION",)
    assert found.sentence == "FLASH_ATTENTION hangs: no result after 120 s"


def not_taken(dtype: str = "float8_e4m3fn") -> list[Cell]:
    return [Cell(backend.value, dtype, Status.DECLINED, "not implemented") for backend in Backend]


def test_a_dtype_that_no_backend_takes_is_nobody_s_failure() -> None:
    found = judge(not_taken(), Live("FLASH_ATTENTION", "cuda", False))
    assert (found.verdict, found.guilty, found.exit_status) == (Verdict.HEALTHY, (), 0)
    assert found.sentence == (
        "nothing could be judged: no backend on this cpu takes float8_e4m3fn queries; replay it on the cuda machine "
        "where it ran, or see what these values give in another dtype (replay --dtype bfloat16)"
    )


def test_where_it_ran_there_is_no_other_machine_to_go_to() -> None:
    assert judge(not_taken("float8_e5m2"), Live(None, "cpu", None)).sentence == (
        "nothing could be judged: no backend on this cpu takes float8_e5m2 queries; see what these values give in "
        "another dtype (replay --dtype bfloat16)"
    )


@pytest.mark.parametrize(
    ("raised", "said"), [("", "wrong live; "), ("RuntimeError: x", "raised live (RuntimeError: x); ")]
)
def test_a_dtype_that_no_backend_takes_is_not_clean_where_it_was_wrong_live(raised: str, said: str) -> None:
    found = judge(not_taken(), Live("FLASH_ATTENTION", "cuda", True, raised=raised))
    assert (found.verdict, found.exit_status) == (Verdict.UNREPRODUCIBLE, 3)
    assert found.sentence.startswith(f"{said}nothing could be judged: no backend on this cpu takes float8_e4m3fn")
    assert "clean" not in found.sentence


def test_a_backend_that_takes_float8_is_judged_as_any_other() -> None:
    cells = [Cell("default", "float8_e4m3fn", Status.AGREES, chosen="CUDNN_ATTENTION"), *not_taken()[1:]]
    assert judge(cells, device="cuda").sentence.startswith("clean on this cuda: CUDNN_ATTENTION agrees with float64")
