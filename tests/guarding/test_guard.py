"""`guard()`: the calls that meet a bug are right inside it, all others and everything outside are untouched."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

import sdpa_repro
from sdpa_repro.capturing import padding
from sdpa_repro.capturing.patching import Patch
from sdpa_repro.capturing.tiny import PAD, tiny_gemma4, tiny_inputs
from sdpa_repro.errors import InputError
from sdpa_repro.guarding import guard as module
from sdpa_repro.guarding import switch
from sdpa_repro.guarding.guard import Guard, GuardNotNeeded
from sdpa_repro.guarding.switch import GuardWarning
from tests.calls import make_call
from tests.guarding.calls import WRONG, attend, by_math, is_right, rule_file
from tests.guarding.conftest import ORIGINALS

Planted = list[dict[str, str]]
quiet = pytest.mark.filterwarnings("ignore::sdpa_repro.guarding.switch.GuardWarning")


def guard(planted: Planted, **options: Any) -> Guard:
    return sdpa_repro.guard(preloaded=planted, **options)


@quiet
def test_a_call_that_meets_the_bug_is_right_inside_and_wrong_outside(planted: Planted) -> None:
    assert not is_right(attend())
    with guard(planted) as opened:
        assert is_right(attend())
    assert not is_right(attend())
    report = opened.report()
    assert (report["calls"], report["changed"]) == (1, {"pytorch#191937": 1})
    assert report["needed"]


@quiet
def test_only_that_call_changes(planted: Planted) -> None:
    others = [
        make_call(rows=32, padding=3, dtype=torch.float32),
        make_call(rows=33, padding=3, dtype=torch.float32, layout="dense"),
        make_call(rows=33, dtype=torch.float32, mask=None),
        make_call(rows=1, keys=33, dtype=torch.float32),
        make_call(rows=33, padding=3, dtype=torch.float32, width=64),
    ]
    plain = [attend(call) for call in others]
    with guard(planted) as opened:
        guarded = [attend(call) for call in others]
        with_grad = functional.scaled_dot_product_attention(
            WRONG.query.clone().requires_grad_(), WRONG.key, WRONG.value, attn_mask=WRONG.attn_mask
        )
        with sdpa_kernel(SDPBackend.MATH):
            attend()
    assert all(torch.equal(one, other) for one, other in zip(plain, guarded, strict=True))
    assert is_right(with_grad.detach())
    assert opened.report()["changed"] == {}
    assert opened.report()["calls"] == len(others) + 2


@quiet
@pytest.mark.parametrize("words", [("query", "key", "value"), ("key", "value"), ()])
def test_arguments_may_be_given_by_name(planted: Planted, words: tuple[str, ...]) -> None:
    tensors = {name: WRONG.tensors[name] for name in ("query", "key", "value")}
    places = [tensor for name, tensor in tensors.items() if name not in words]
    named = {name: tensors[name] for name in words}
    with guard(planted), torch.no_grad():
        assert is_right(functional.scaled_dot_product_attention(*places, **named, attn_mask=WRONG.attn_mask))
    with guard(planted), torch.no_grad():
        assert is_right(functional.scaled_dot_product_attention(*tensors.values(), WRONG.attn_mask, 0.0, False))


def test_a_wrong_call_of_the_function_raises_what_torch_raises(planted: Planted) -> None:
    with guard(planted), pytest.raises(TypeError):
        functional.scaled_dot_product_attention(WRONG.query)
    with guard(planted), pytest.raises(TypeError):
        functional.scaled_dot_product_attention(WRONG.query, WRONG.key, WRONG.value, WRONG.attn_mask, wrong=1)
    with guard(planted), pytest.raises(RuntimeError):
        attend(make_call(rows=33, dtype=torch.float32).with_tensors({"key": WRONG.key[..., :8]}))


def test_there_is_one_warning_that_names_the_issue_and_the_release(planted: Planted) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with guard(planted):
            for rows in (33, 65, 33):
                attend(make_call(rows=rows, padding=3, dtype=torch.float32))
            with guard(planted):
                attend()
    texts = [str(warning.message) for warning in said if issubclass(warning.category, GuardWarning)]
    assert len(texts) == 1
    assert "pytorch#191937 (as emulated here on FLASH_ATTENTION, CPU), fixed in 2.14.0" in texts[0]
    assert "contiguous key and value" in texts[0]


def test_a_warning_that_is_an_error_leaves_nothing_behind(planted: Planted) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", GuardWarning)
        with pytest.raises(GuardWarning), guard(planted):
            attend()
    assert functional.scaled_dot_product_attention is ORIGINALS[0]


@quiet
def test_one_head_of_an_expanded_key_gets_other_strides_too(planted: Planted) -> None:
    one = WRONG.with_tensors({name: WRONG.tensors[name][:, :1] for name in ("query", "key", "value")})
    assert one.key.is_contiguous()
    assert one.key.stride(1) == 0
    assert not is_right(attend(one), one)
    with guard(planted) as guarding:
        assert is_right(attend(one), one)
    assert guarding.report()["changed"] == {"pytorch#191937": 1}


@quiet
def test_ctrl_c_while_a_guard_closes_does_not_disarm_the_next(
    planted: Planted, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(patch: Patch) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr(Patch, "restore", interrupted)
        with pytest.raises(KeyboardInterrupt), guard(planted):
            assert is_right(attend())
    functional.scaled_dot_product_attention = ORIGINALS[0]  # as if it had come half way through
    with guard(planted):
        assert is_right(attend())
    assert not is_right(attend())


def test_a_guard_that_cannot_be_opened_or_closed_gives_the_compiler_back(
    planted: Planted, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[object] = []
    monkeypatch.setattr(module, "_suspend_compiler", lambda: "callback")
    monkeypatch.setattr(module, "_resume_compiler", given.append)

    def interrupted(*args: object, **words: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr(switch, "enter", interrupted)
        with pytest.raises(KeyboardInterrupt), guard(planted):
            raise AssertionError("is not open")
    assert given == ["callback"]
    guarding = guard(planted)
    with monkeypatch.context() as context:
        context.setattr(switch, "leave", interrupted)
        with pytest.raises(KeyboardInterrupt), guarding:
            pass
    assert given == ["callback", "callback"]
    switch.leave(guarding, everywhere=False)


@quiet
def test_an_exception_leaves_nothing_behind(planted: Planted) -> None:
    def interrupted() -> None:
        with guard(planted), guard(planted):
            attend()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert functional.scaled_dot_product_attention is ORIGINALS[0]
    assert not is_right(attend())


@quiet
def test_guards_nest_and_one_may_be_open_twice(planted: Planted) -> None:
    outer, inner = guard(planted), guard(planted)
    with outer:
        with inner, outer:
            assert is_right(attend())
        assert is_right(attend())
        assert outer.depth == 1
    assert not is_right(attend())
    assert outer.report()["changed"] == {"pytorch#191937": 2}
    assert inner.report()["changed"] == {"pytorch#191937": 1}


@quiet
def test_a_decorated_function_is_guarded_and_may_call_itself(planted: Planted) -> None:
    opened = guard(planted)

    @opened
    def twice(times: int) -> list[Tensor]:
        return [attend(), *(twice(times - 1) if times > 1 else [])]

    assert twice.__name__ == "twice"
    assert all(is_right(output) for output in twice(2))
    assert not is_right(attend())
    assert opened.report()["calls"] == 2


@quiet
def test_a_decorated_coroutine_is_guarded_while_others_are_not(planted: Planted) -> None:
    @guard(planted)
    async def guarded() -> Tensor:
        await asyncio.sleep(0)
        return attend()

    async def plain() -> Tensor:
        await asyncio.sleep(0)
        return attend()

    async def both() -> list[Tensor]:
        return await asyncio.gather(guarded(), plain(), guarded(), plain())

    assert [is_right(output) for output in asyncio.run(both())] == [True, False, True, False]


def test_a_generator_cannot_be_decorated(planted: Planted) -> None:
    def generator() -> Iterator[Tensor]:
        yield attend()

    with pytest.raises(TypeError, match="with block"):
        guard(planted)(generator)


@quiet
def test_threads_started_inside_are_guarded_and_others_are_told_of(planted: Planted) -> None:
    barrier, results = threading.Barrier(8), {}

    def work(name: str, opened: Guard | None = None) -> None:
        barrier.wait(60)
        for _ in range(5):
            results.setdefault(name, []).append(attend())
        if opened is not None:
            with opened:
                results[f"{name}, guarded"] = [attend()]
        barrier.wait(60)

    mine = guard(planted)
    outside = [threading.Thread(target=work, args=(f"outside {i}",), name=f"outside {i}") for i in range(3)]
    outside.append(threading.Thread(target=work, args=("mixed", guard(planted)), name="mixed"))
    for thread in outside:
        thread.start()
    with mine as opened:
        inside = [threading.Thread(target=work, args=(f"inside {i}",)) for i in range(4)]
        for thread in inside:
            thread.start()
        for thread in (*inside, *outside):
            thread.join(120)
    assert len(results) == 9
    for name, outputs in results.items():
        expected = name.startswith("inside") or name.endswith("guarded")
        assert [is_right(output) for output in outputs] == [expected] * len(outputs), name
    report = opened.report()
    assert report["changed"] == {"pytorch#191937": 20}
    assert report["threads_not_covered"] == {**{f"outside {i}": 5 for i in range(3)}, "mixed": 5}
    assert not [thread for thread in (*inside, *outside) if "run" in vars(thread)]


def test_a_call_of_a_thread_that_is_not_covered_is_warned_about(planted: Planted) -> None:
    with ThreadPoolExecutor(1, thread_name_prefix="older") as pool:
        pool.submit(int).result()
        with guard(planted), pytest.warns(GuardWarning, match="thread older_0, and left as it is; open the guard"):
            assert not is_right(pool.submit(attend).result())
        with guard(planted, all_threads=True), pytest.warns(GuardWarning, match="contiguous key and value"):
            assert is_right(pool.submit(attend).result())


@quiet
def test_a_thread_that_outlives_the_guard_is_not_guarded_any_more(planted: Planted) -> None:
    go, results = threading.Event(), []

    def work() -> None:
        results.append(attend())
        go.wait(60)
        results.append(attend())

    with guard(planted):
        thread = threading.Thread(target=work)
        thread.start()
        while not results:
            go.wait(0.01)
    with guard(planted):
        go.set()
        thread.join(60)
    assert [is_right(output) for output in results] == [True, False]


@quiet
@pytest.mark.parametrize(
    "events", ["guard capture capture guard", "capture guard guard capture", "guard capture " * 2, "capture guard " * 2]
)
def test_guard_and_capture_open_and_close_in_any_order(planted: Planted, events: str, tmp_path: Path) -> None:
    both: dict[str, Any] = {"guard": guard(planted), "capture": sdpa_repro.capture(tmp_path)}
    is_open = dict.fromkeys(both, False)
    session, expected = None, []
    for name in events.split():
        if is_open[name]:
            both[name].__exit__(None, None, None)
        else:
            session = both[name].__enter__() if name == "capture" else session
            both[name].__enter__() if name == "guard" else None
        is_open[name] = not is_open[name]
        assert is_right(attend()) == is_open["guard"]
        if is_open["capture"]:
            expected.append(not is_open["guard"])
    assert session is not None
    assert [call.wrong for call in session.calls] == expected
    assert {call.kernel for call in session.calls} == {"FLASH_ATTENTION"}
    assert {call.key_head_stride for call in session.calls} == {0}


@quiet
def test_a_module_that_imports_the_function_meanwhile_gets_the_original_back(planted: Planted, tmp_path: Path) -> None:
    path = tmp_path / "late.py"
    path.write_text("from torch.nn.functional import scaled_dot_product_attention as attention\n")
    spec = importlib.util.spec_from_file_location("late_for_the_guard", path)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules["late_for_the_guard"] = module
    try:
        with guard(planted):
            spec.loader.exec_module(module)
            assert module.attention is not ORIGINALS[0]
            assert module.attention == ORIGINALS[0]
        assert module.attention is ORIGINALS[0]
    finally:
        del sys.modules["late_for_the_guard"]


@quiet
def test_a_function_mode_does_not_see_the_guard_look(planted: Planted) -> None:
    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(getattr(function, "__name__", str(function)))
            return function(*args, **(kwargs or {}))

    call = make_call(rows=32, dtype=torch.float32)
    with guard(planted), Mode():
        functional.scaled_dot_product_attention(call.query, call.key, call.value, attn_mask=call.attn_mask)
    assert seen == ["scaled_dot_product_attention"]


@quiet
def test_multi_head_attention_is_guarded_too(planted: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    tokens = torch.randn(1, 5, 8)
    with guard(planted) as opened:
        layer(tokens, tokens, tokens, need_weights=False, attn_mask=torch.zeros(5, 5, dtype=torch.bool))
    assert opened.report()["calls"] == 1


@quiet
def test_calls_that_cannot_be_looked_at_pass_and_are_counted(planted: Planted) -> None:
    tensors = {name: tensor.to("meta") for name, tensor in WRONG.tensors.items()}
    nested = torch.nested.nested_tensor([WRONG.query[0].transpose(0, 1)], layout=torch.jagged).transpose(1, 2)
    with guard(planted) as opened:
        attend(WRONG.with_tensors(tensors))
        functional.scaled_dot_product_attention(nested, nested, nested)
        assert opened.report()["changed"] == {}
        assert is_right(attend())
    report = opened.report()
    assert report["calls"] == 3
    assert "nested tensors" in report["passed"]


def test_a_subclass_of_tensor_is_guarded_like_a_tensor(planted: Planted) -> None:
    class Named(torch.Tensor):
        pass

    tensors = {name: WRONG.tensors[name].as_subclass(Named) for name in ("query", "key", "value")}
    with guard(planted), pytest.warns(GuardWarning):
        assert is_right(attend(WRONG.with_tensors(tensors)).as_subclass(Tensor))


@quiet
@pytest.mark.slow
def test_code_that_torch_compile_runs_is_guarded_or_told_of(planted: Planted) -> None:
    def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(query * 1, key, value, attn_mask=mask)

    def opens(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        with guard(planted):
            output = functional.scaled_dot_product_attention(query * 1, key, value, attn_mask=mask)
        return output * 1

    tensors = (WRONG.query, WRONG.key, WRONG.value, WRONG.attn_mask)
    with torch.no_grad():
        torch._dynamo.reset()
        with guard(planted):
            assert is_right(torch.compile(attention, backend="eager")(*tensors))
        for backend in ("eager", "aot_eager"):
            torch._dynamo.reset()
            assert is_right(torch.compile(opens, backend=backend)(*tensors))
        torch._dynamo.reset()
        with guard(planted), pytest.warns(GuardWarning, match=r"torch\.compile has traced an attention call"):
            torch.compile(attention, backend="aot_eager")(*tensors)
        torch._dynamo.reset()


def test_a_torch_that_does_not_need_it_is_not_touched() -> None:
    opened = sdpa_repro.guard()
    if not opened.unneeded:
        pytest.skip("this torch is built for a GPU and has bugs there")
    with pytest.warns(GuardNotNeeded, match="does nothing"):
        opened.__enter__()
    assert functional.scaled_dot_product_attention is ORIGINALS[0]
    opened.__exit__(None, None, None)
    report = opened.report()
    assert not report["needed"]
    assert torch.__version__ in report["why"]
    assert report["issues"] == []


def test_a_rule_of_explain_decides_instead_of_the_known_issues(planted: Planted, tmp_path: Path) -> None:
    with sdpa_repro.guard(rule_file(tmp_path)) as opened:
        with pytest.warns(GuardWarning, match=r"the rule in result\.json"):
            output = attend()
        assert is_right(output)
        attend(make_call(rows=34, padding=3, dtype=torch.float32))
    assert opened.report()["changed"] == {"result.json": 1}


@quiet
def test_a_rule_whose_cure_is_math_gives_exactly_math(planted: Planted, tmp_path: Path) -> None:
    lines = [{"words": "", "line": "with torch.nn.attention.sdpa_kernel(SDPBackend.MATH): ...", "verified": True}]
    with sdpa_repro.guard(rule_file(tmp_path, workarounds=lines)):
        output = attend()
    assert torch.equal(output, by_math())


def test_a_rule_that_cannot_be_used_is_refused_before_anything_is_touched(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        sdpa_repro.guard(tmp_path / "missing.json")


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_gemma4(dtype=torch.float32)


def generated(model: Any, inputs: dict[str, Tensor]) -> list[int]:
    """Eight greedy tokens; in float32 the best token leads by 0.02 and more, and rounding moves logits by 0.00002."""
    with torch.no_grad():
        tokens = model.generate(**inputs, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    return [int(token) for token in tokens[0, inputs["input_ids"].shape[1] :]]


@quiet
@pytest.mark.slow
@pytest.mark.parametrize(
    "inputs",
    [
        lambda model: tiny_inputs(model, 289),
        lambda model: tiny_inputs(model, 65, images=0),
        lambda model: padding.pad_inputs(tiny_inputs(model), 289, pad_token=PAD, side="left", positions=False),
    ],
    ids=["image", "text", "left-padded"],
)
def test_generation_under_the_guard_is_that_under_math_token_for_token(
    model: Any, planted: Planted, inputs: Callable[[Any], dict[str, Tensor]]
) -> None:
    given = inputs(model)
    with sdpa_kernel(SDPBackend.MATH):
        expected = generated(model, given)
    assert generated(model, given) != expected
    with guard(planted) as opened:
        assert generated(model, given) == expected
    assert opened.report()["changed"] == {"pytorch#191937": 1}
