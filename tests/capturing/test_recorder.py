"""The recorder sees every call and changes none: identity, output, RNG, modes, compilers, tensor subclasses."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import signal
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from sdpa_repro.capturing import Session, capture, recorder, session
from sdpa_repro.capturing.passing import FLAT
from sdpa_repro.dump import load
from sdpa_repro.errors import InputError
from sdpa_repro.replaying.check import LiveCheck, check
from tests.calls import make_call
from tests.capturing.conftest import ORIGINAL


def attend(rows: int = 5, heads: int = 2, **keywords: Any) -> Tensor:
    query = torch.arange(heads * rows * 8, dtype=torch.float32).reshape(1, heads, rows, 8) / 100
    return F.scaled_dot_product_attention(query, query, query, **keywords)


def run(call: Any) -> Tensor:
    return F.scaled_dot_product_attention(call.query, call.key, call.value, **call.keywords)


class Attention(nn.Module):
    """A self-attention layer of one head, as small as can be."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        query = self.project(hidden)[:, None]
        return F.scaled_dot_product_attention(query, query, query, is_causal=True)[:, 0]


class Model(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(layers))

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return hidden


def modules(session: Session) -> list[str]:
    return [call.module for call in session.calls]


def test_a_call_is_seen_wherever_the_function_is_reached_from(tmp_path: Path) -> None:
    alias = types.ModuleType("user_module_with_an_alias")
    alias.sdpa = F.scaled_dot_product_attention  # type: ignore[attr-defined]
    sys.modules[alias.__name__] = alias
    query = torch.ones(1, 1, 3, 4)
    try:
        with capture(tmp_path) as session:
            F.scaled_dot_product_attention(query, query, query)
            torch._C._nn.scaled_dot_product_attention(query, query, query)
            alias.sdpa(query, query, query)
        assert [call.index for call in session.calls] == [0, 1, 2]
        assert alias.sdpa is ORIGINAL
    finally:
        del sys.modules[alias.__name__]


def test_a_module_imported_meanwhile_does_not_keep_the_replacement(tmp_path: Path) -> None:
    late = types.ModuleType("user_module_imported_late")
    try:
        with capture(tmp_path):
            late.sdpa = F.scaled_dot_product_attention  # type: ignore[attr-defined]
            sys.modules[late.__name__] = late
            attend()
        assert late.sdpa is ORIGINAL
    finally:
        del sys.modules[late.__name__]


def test_the_function_is_put_back_when_the_block_raises(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), capture(tmp_path):
        raise ZeroDivisionError
    assert F.scaled_dot_product_attention is ORIGINAL


def test_a_function_that_someone_put_in_its_place_is_called_and_put_back(tmp_path: Path) -> None:
    def doubled(*args: Any, **kwargs: Any) -> Tensor:
        return ORIGINAL(*args, **kwargs) * 2

    F.scaled_dot_product_attention = doubled
    try:
        with capture(tmp_path) as session:
            output = attend()
        assert F.scaled_dot_product_attention is doubled
        assert torch.equal(output, attend())
    finally:
        F.scaled_dot_product_attention = ORIGINAL
    (call,) = session.calls
    assert call.kernel.endswith("doubled")
    assert call.status == "diverges"


def test_nested_sessions_both_see_the_inner_calls(tmp_path: Path) -> None:
    with capture(tmp_path / "outer") as outer:
        attend()
        with capture(tmp_path / "inner") as inner:
            attend()
        attend()
    assert (len(outer.calls), len(inner.calls)) == (3, 1)


def test_the_replacement_passes_for_the_original(tmp_path: Path) -> None:
    table = {ORIGINAL: "found"}
    with capture(tmp_path):
        attend()
        seen = F.scaled_dot_product_attention
        assert seen is torch._C._nn.scaled_dot_product_attention
        assert table[seen] == "found"
        assert {seen: "found"}[ORIGINAL] == "found"
        assert seen.__name__ == "scaled_dot_product_attention"
        assert seen.__doc__ == ORIGINAL.__doc__
        assert copy.deepcopy(seen) is seen
        holder = type("Holder", (), {"attend": seen})()
        query = torch.ones(1, 1, 2, 2)
        holder.attend(query, query, query)
        pickled = pickle.dumps({"attention": seen})
    assert pickle.loads(pickled)["attention"] is ORIGINAL


def test_checks_and_own_work_are_not_recorded(tmp_path: Path, plant: Callable[[str], None]) -> None:
    plant("pytorch_191937")
    call = make_call()
    with torch.no_grad(), capture(tmp_path / "outer") as outer, capture(tmp_path / "inner") as inner:
        run(call)
    assert (len(outer.calls), len(inner.calls)) == (1, 1)
    assert inner.calls[0].status == "diverges"


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_the_output_is_the_same_bit_for_bit(tmp_path: Path, mode: Any) -> None:
    model = Model().to(torch.bfloat16)
    hidden = torch.randn(2, 33, 8, dtype=torch.bfloat16)
    with mode():
        expected = model(hidden)
        with capture(tmp_path) as session:
            output = model(hidden)
    assert torch.equal(output, expected)
    assert output.requires_grad == expected.requires_grad
    assert output.is_inference() == expected.is_inference()
    assert len(session.calls) == 2


def test_gradients_are_the_same(tmp_path: Path) -> None:
    model, hidden = Model(), torch.randn(1, 9, 8)
    model(hidden).sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    with capture(tmp_path):
        model(hidden).sum().backward()
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert len(found) == len(expected) > 0
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_the_random_state_and_the_grad_mode_are_left_alone(tmp_path: Path, plant: Callable[[str], None]) -> None:
    plant("pytorch_191937")
    before = torch.get_rng_state()
    with torch.no_grad(), capture(tmp_path) as session:
        run(make_call())
        assert not torch.is_grad_enabled()
        assert torch.get_float32_matmul_precision() == "highest"
    assert session.calls[0].status == "diverges"
    assert torch.equal(torch.get_rng_state(), before)


def test_multi_head_attention_is_seen_and_unchanged(tmp_path: Path) -> None:
    layer, hidden = nn.MultiheadAttention(8, 2), torch.randn(7, 3, 8)
    expected = layer(hidden, hidden, hidden, need_weights=False)[0]
    with capture(tmp_path) as session:
        output = layer(hidden, hidden, hidden, need_weights=False)[0]
    assert torch.equal(output, expected)
    assert [(call.module, call.query) for call in session.calls] == [("MultiheadAttention", (3, 2, 7, 4))]


def test_the_encoder_fast_path_is_unchanged_and_named_when_no_call_is_seen(tmp_path: Path) -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 2).eval()
    hidden = torch.randn(2, 5, 8)
    with torch.no_grad():
        expected = encoder(hidden)
        with (
            pytest.raises(InputError, match=r"2 x fused torch\._transformer_encoder_layer_fwd") as error,
            capture(tmp_path),
        ):
            output = encoder(hidden)
    assert torch.equal(output, expected)
    assert "set_fastpath_enabled(False)" in str(error.value)
    assert torch._transformer_encoder_layer_fwd.__class__.__name__ == "builtin_function_or_method"


def test_modules_are_named_by_their_path(tmp_path: Path) -> None:
    with capture(tmp_path) as session:
        Model()(torch.randn(1, 3, 8))
    assert modules(session) == ["layers.0", "layers.1"]


def test_calls_in_other_threads_are_counted_by_name(tmp_path: Path) -> None:
    thread = threading.Thread(target=attend, name="loader")
    with capture(tmp_path) as session:
        attend()
        thread.start()
        thread.join()
    assert len(session.calls) == 1
    assert session.summary()["elsewhere"] == {"loader": 1}


def test_all_threads_can_be_recorded(tmp_path: Path) -> None:
    threads = [threading.Thread(target=attend, name=f"worker {number}") for number in range(4)]
    with capture(tmp_path, all_threads=True) as session:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(call.thread for call in session.calls) == [f"worker {number}" for number in range(4)]
    assert sorted(call.index for call in session.calls) == [0, 1, 2, 3]


@pytest.fixture
def checkers(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """The threads in which calls have been checked, in a process whose threads are not known to have a pool."""
    found: list[threading.Thread] = []

    def noted(*arguments: Any, **words: Any) -> LiveCheck:
        found.append(threading.current_thread())
        assert not torch.is_grad_enabled()
        return check(*arguments, **words)

    monkeypatch.setattr(session, "check", noted)
    monkeypatch.setattr(recorder._RECORDER, "pools", recorder.Pools())
    return found


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_a_check_stays_out_of_a_thread_that_may_have_no_pool_yet(
    tmp_path: Path, checkers: list[threading.Thread]
) -> None:
    with capture(tmp_path):
        attend(heads=1)
        with sdpa_kernel(SDPBackend.MATH):
            attend(heads=2)
    assert len(checkers) == 2
    assert threading.current_thread() not in checkers


@pytest.mark.usefixtures("two_threads")
def test_a_thread_whose_pool_has_computed_a_call_checks_this_one_and_later_ones(
    tmp_path: Path, checkers: list[threading.Thread]
) -> None:
    with capture(tmp_path, keep="all"):
        attend(heads=2)
        attend(heads=1)
    assert checkers == [threading.current_thread()] * 2


@pytest.mark.usefixtures("two_threads")
def test_the_pool_of_one_thread_says_nothing_of_another(tmp_path: Path, checkers: list[threading.Thread]) -> None:
    with capture(tmp_path, all_threads=True):
        attend(heads=2)
        other = threading.Thread(target=lambda: attend(heads=1))
        other.start()
        other.join()
    assert checkers[0] is threading.current_thread()
    assert checkers[1] not in (threading.current_thread(), other)


@pytest.mark.usefixtures("two_threads")
def test_a_call_computed_by_one_thread_starts_no_pool(tmp_path: Path, checkers: list[threading.Thread]) -> None:
    with capture(tmp_path):
        torch.set_num_threads(1)
        attend(heads=2)
        torch.set_num_threads(2)
        attend(heads=1)
    assert checkers[0] is threading.current_thread()  # where one thread computes, none is started
    assert checkers[1] is not threading.current_thread()


class Answers(TorchDispatchMode):
    """Computes every call by itself."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "flash" in str(function):
            return torch.zeros_like(args[0]), torch.zeros(args[0].shape[:-1])
        return function(*args, **(kwargs or {}))


@pytest.mark.usefixtures("two_threads")
def test_a_call_that_a_mode_answers_starts_no_pool(tmp_path: Path, checkers: list[threading.Thread]) -> None:
    with capture(tmp_path):
        with Answers():
            attend(heads=2)
        attend(heads=1)
    assert len(checkers) == 2
    assert threading.current_thread() not in checkers


@pytest.mark.usefixtures("two_threads")
@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="there is no SIGUSR1")
def test_a_check_stays_out_of_a_thread_that_a_signal_handler_or_a_profiler_is_in(
    tmp_path: Path, checkers: list[threading.Thread]
) -> None:
    with capture(tmp_path):
        attend()
        with torch.autograd.profiler.profile():
            attend()
        before = signal.signal(signal.SIGUSR1, lambda *_: None)  # may raise what the check would take for its own
        attend()
        signal.signal(signal.SIGUSR1, before)
        attend()
    assert [thread is threading.current_thread() for thread in checkers] == [True, False, False, True]


@pytest.mark.usefixtures("two_threads")
def test_a_check_stays_out_of_autocast_and_transforms(tmp_path: Path, checkers: list[threading.Thread]) -> None:
    def within(numbers: Tensor) -> Tensor:
        attend()  # of plain tensors
        return numbers

    with capture(tmp_path):
        attend()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            attend()
        torch.vmap(within)(torch.ones(3))
    assert [thread is threading.current_thread() for thread in checkers] == [True, False, False]


def test_tasks_started_inside_the_session_belong_to_it(tmp_path: Path) -> None:
    async def job() -> None:
        await asyncio.sleep(0)
        attend()

    async def main() -> Session:
        with capture(tmp_path) as session:
            await asyncio.gather(job(), asyncio.to_thread(attend))
        return session

    assert len(asyncio.run(main()).calls) == 2


def test_tensors_are_not_kept_alive_by_the_recorder(tmp_path: Path) -> None:
    kept: list[weakref.ref[Tensor]] = []

    class Layer(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            temporary = hidden * 2
            kept.append(weakref.ref(temporary))
            output = F.scaled_dot_product_attention(temporary, temporary, temporary)
            del temporary
            assert kept[-1]() is None
            return output

    gc.disable()
    try:
        with torch.no_grad(), capture(tmp_path) as session:
            Layer()(torch.ones(1, 1, 3, 4))
    finally:
        gc.enable()
    assert len(session.calls) == 1


def test_locals_that_a_function_holds_are_not_emptied(tmp_path: Path) -> None:
    class Layer(nn.Module):
        def forward(self, hidden: Tensor) -> dict[str, Any]:
            mine = locals()
            F.scaled_dot_product_attention(hidden, hidden, hidden)
            return mine

    hidden = torch.ones(1, 1, 3, 4)
    with capture(tmp_path):
        found = Layer()(hidden)
    assert found["hidden"] is hidden


def test_a_call_that_raises_is_recorded_dumped_and_raised_unchanged(tmp_path: Path) -> None:
    query = torch.ones(1, 1, 3, 4)
    with pytest.raises(RuntimeError) as plain:
        F.scaled_dot_product_attention(query, query[..., :2], query)
    with capture(tmp_path) as session, pytest.raises(RuntimeError) as error:
        F.scaled_dot_product_attention(query, query[..., :2], query)
    assert (type(error.value), str(error.value)) == (type(plain.value), str(plain.value))
    (call,) = session.calls
    assert call.status == "raised"
    dump = load(session.dumps[0])
    assert dump.output is None
    assert str(error.value).splitlines()[0] in dump.origin["raised"]
    assert dump.call.key.shape == (1, 1, 3, 2)


def test_wrong_arguments_are_for_torch_to_refuse(tmp_path: Path) -> None:
    query = torch.ones(1, 1, 3, 4)
    with capture(tmp_path), pytest.raises(TypeError, match=r"unknown|unexpected"):
        F.scaled_dot_product_attention(query, attend(), query, **{"sclae": 1.0})  # type: ignore[arg-type]


@pytest.mark.parametrize("flat", ["query", "key", "value"])
def test_a_tensor_of_one_dimension_is_for_torch_to_refuse(flat: str, tmp_path: Path) -> None:
    tensors = {name: torch.ones(1, 1, 3, 4) for name in ("query", "key", "value")}
    with capture(tmp_path) as session:
        attend()
        with pytest.raises(RuntimeError, match="at least 2 dim"):
            F.scaled_dot_product_attention(**{**tensors, flat: torch.ones(4)})
    assert session.summary()["passed"] == {FLAT: 1}


def test_what_goes_wrong_in_the_recorder_never_reaches_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise LookupError("of the recorder")

    expected = attend()
    for name in ("phase_of", "local"):
        with capture(tmp_path) as session, monkeypatch.context() as patch:
            attend()
            patch.setattr(recorder, name, broken)
            assert torch.equal(attend(), expected)
        assert session.summary()["passed"] == {"the recorder could not look at it (LookupError: of the recorder)": 1}


@pytest.mark.parametrize("bias", [causal_upper_left, causal_lower_right])
def test_causal_bias_is_checked_as_what_it_means_and_stored_as_its_rule(tmp_path: Path, bias: Any) -> None:
    call = make_call(rows=5, keys=9, mask=None, dtype=torch.float32)
    mask = bias(5, 9)
    expected = F.scaled_dot_product_attention(call.query, call.key, call.value, attn_mask=mask)
    with capture(tmp_path) as session:
        output = F.scaled_dot_product_attention(call.query, call.key, call.value, attn_mask=mask)
    assert torch.equal(output, expected)
    (record,) = session.calls
    assert record.status == "agrees"
    assert record.mask == f"CausalBias {mask.variant.name}"
    stored: Any = load(session.dumps[0]).call.attn_mask
    assert stored.variant == mask.variant


def test_autocast_is_judged_in_the_dtype_it_computes_in(tmp_path: Path) -> None:
    call = make_call(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = run(call)
        with capture(tmp_path) as session:
            output = run(call)
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, expected)
    assert session.calls[0].status == "agrees"
    assert session.calls[0].ratio > 0.001
    dump = load(session.dumps[0])
    assert dump.call.query.dtype == torch.float32
    assert dump.context["autocast"]["enabled"] is True


def test_dropout_is_recorded_without_a_verdict(tmp_path: Path) -> None:
    torch.manual_seed(3)
    expected = attend(dropout_p=0.5)
    torch.manual_seed(3)
    with capture(tmp_path) as session:
        output = attend(dropout_p=0.5)
    assert torch.equal(output, expected)
    assert session.calls[0].status == "unchecked"
    assert "dropout" in session.calls[0].reason


def test_modes_of_the_model_see_nothing_of_the_recorder(tmp_path: Path) -> None:
    class Functions(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    seen: list[str] = []
    call = make_call()
    with Functions(), Operators():  # type: ignore[no-untyped-call]
        run(call)
        expected, seen = seen, []
        with capture(tmp_path) as session:
            seen.clear()
            run(call)
            found = list(seen)
    assert found == expected
    assert session.calls[0].status == "agrees"


def test_a_default_device_does_not_lead_the_check_astray(tmp_path: Path) -> None:
    call = make_call()
    with torch.device("meta"), capture(tmp_path) as session:
        run(call)
    assert session.calls[0].status == "agrees"


def test_meta_nested_and_vmapped_tensors_pass_through_and_are_counted(tmp_path: Path) -> None:
    meta = torch.ones(1, 1, 3, 4, device="meta")
    pieces = [torch.ones(2, 1, 4), torch.ones(3, 1, 4)]
    nested = torch.nested.nested_tensor(pieces, layout=torch.jagged).transpose(1, 2)
    plain = torch.randn(2, 1, 3, 4)
    batched = torch.vmap(lambda each: F.scaled_dot_product_attention(each, each, each))
    with torch.no_grad():
        expected = batched(plain[:, None])
        with capture(tmp_path) as session:
            F.scaled_dot_product_attention(meta, meta, meta)
            F.scaled_dot_product_attention(nested, nested, nested)
            assert torch.equal(batched(plain[:, None]), expected)
            attend()
    assert len(session.calls) == 1
    passed = session.summary()["passed"]
    assert set(passed) == {"meta tensors", "nested tensors", "functorch (vmap, grad) tensors"}


def test_fake_tensors_pass_through(tmp_path: Path) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode()
    query = mode.from_tensor(torch.ones(1, 1, 3, 4))
    with pytest.raises(InputError, match="1 x fake tensors"), mode, capture(tmp_path):
        F.scaled_dot_product_attention(query, query, query)


def test_subclasses_of_tensors_without_their_own_dispatch_are_recorded(tmp_path: Path) -> None:
    class Named(Tensor):
        pass

    query = torch.ones(1, 1, 3, 4).as_subclass(Named)
    with capture(tmp_path) as session:
        output = F.scaled_dot_product_attention(query, query, query)
    assert type(output) is Named
    assert session.calls[0].status == "agrees"
    assert type(load(session.dumps[0]).call.query) is Tensor


def test_tracing_with_torchscript_passes_through(tmp_path: Path) -> None:
    query = torch.randn(1, 1, 3, 4)
    with capture(tmp_path) as session:
        traced = torch.jit.trace(
            lambda each: F.scaled_dot_product_attention(each, each, each), query, check_trace=False
        )
        attend()
    assert torch.equal(traced(query), F.scaled_dot_product_attention(query, query, query))
    assert session.summary()["passed"] == {"torch.jit.trace": 1}


def test_symbolic_tracing_passes_through(tmp_path: Path) -> None:
    with capture(tmp_path) as session:
        graph = torch.fx.symbolic_trace(Attention())
        attend()
    hidden = torch.randn(1, 3, 8)
    assert graph(hidden).shape == hidden.shape
    assert sum(session.summary()["passed"].values()) == 1


SCRIPTED = """
import torch
def scripted(query):
    return torch.nn.functional.scaled_dot_product_attention(query, query, query, None, 0.0, False)
"""


def test_torchscript_compiles_inside_a_session_and_after_it(tmp_path: Path) -> None:
    source = tmp_path / "scripted_attention.py"
    source.write_text(SCRIPTED)
    sys.path.insert(0, str(tmp_path))
    try:
        from scripted_attention import scripted  # type: ignore[import-not-found]
    finally:
        sys.path.remove(str(tmp_path))
    query = torch.randn(1, 1, 3, 4)
    with capture(tmp_path / "dumps"):
        inside = torch.jit.script(scripted)(query)
        attend()
    assert torch.equal(inside, torch.jit.script(scripted)(query))


@pytest.mark.slow
def test_compiled_code_keeps_working_and_is_seen_where_it_can_be(tmp_path: Path) -> None:
    def double(query: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, query, query, is_causal=True) * 2

    query = torch.randn(1, 2, 5, 8)
    expected = double(query)
    with capture(tmp_path) as session:
        eager = torch.compile(double, backend="eager", fullgraph=True)
        for _ in range(3):
            assert torch.equal(eager(query), expected)
        assert len(session.calls) == 3
        traced = torch.compile(double, backend="aot_eager", fullgraph=True)
        assert torch.allclose(traced(query), expected)
        assert len(session.calls) == 3
    (reason,) = session.summary()["passed"]
    assert reason.startswith("torch.compile")
    assert torch.equal(eager(query), expected)
    assert torch.allclose(traced(query), expected)
    torch._dynamo.reset()
    again = torch.compile(double, backend="eager", fullgraph=True)
    assert torch.equal(again(query), expected)


COMPILED_FIRST = """
import sys, torch
import torch.nn.functional as F
from sdpa_repro.capturing import capture

def double(query):
    return F.scaled_dot_product_attention(query, query, query) * 2

query = torch.randn(1, 2, 5, 8)
with capture(sys.argv[1]) as session:
    torch.compile(double, backend="eager", fullgraph=True)(query)
assert len(session.calls) == 1, session.summary()
torch.compile(double, backend="eager", fullgraph=True)(query)
torch._dynamo.reset()
torch.compile(double, backend="eager", fullgraph=True)(query)
"""


@pytest.mark.slow
def test_dynamo_may_be_imported_first_inside_a_session(tmp_path: Path) -> None:
    import subprocess

    done = subprocess.run(
        [sys.executable, "-c", COMPILED_FIRST, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_compiling_with_inductor_gives_the_same_output(tmp_path: Path) -> None:
    def double(query: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, query, query) * 2

    query = torch.randn(1, 2, 5, 8)
    expected = torch.compile(double, fullgraph=True)(query)
    torch._dynamo.reset()
    with pytest.raises(InputError, match=r"torch\.compile"), capture(tmp_path):
        output = torch.compile(double, fullgraph=True)(query)
    assert torch.equal(output, expected)


def test_a_dtensor_is_recorded_as_its_local_shard(tmp_path: Path) -> None:
    import torch.distributed as distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    store = distributed.FileStore(str(tmp_path / "store"), 1)  # type: ignore[attr-defined]
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        plain = torch.randn(1, 2, 5, 8)
        sharded = distribute_tensor(plain, mesh, [Shard(1)])
        whole = distribute_tensor(plain, mesh, [Replicate()])
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), capture(tmp_path / "dumps") as session:
            for query in (sharded, whole):
                F.scaled_dot_product_attention(query, query, query)
    finally:
        distributed.destroy_process_group()
    seen = len(session.calls) + sum(session.summary()["passed"].values())
    assert seen == 2
    assert [call.rank for call in session.calls] == [0] * len(session.calls)
    assert all(call.status == "agrees" for call in session.calls)
    assert len(session.calls) >= 1
    assert torch.equal(load(session.dumps[0]).call.query, plain)


def test_a_recomputation_that_checkpoint_cuts_short_did_not_raise(tmp_path: Path) -> None:
    from torch.utils.checkpoint import checkpoint

    def block(hidden: Tensor) -> Tensor:
        query = hidden * 2
        return F.scaled_dot_product_attention(query, query, query)

    hidden = torch.randn(1, 2, 5, 8, requires_grad=True)
    with capture(tmp_path) as session:
        checkpoint(block, hidden, use_reentrant=False).sum().backward()
    assert hidden.grad is not None
    assert [call.status for call in session.calls] == ["agrees"]
    (reason,) = session.summary()["passed"]
    assert "torch.utils.checkpoint" in reason


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_default_dtype_of_the_program_does_not_lead_the_check_astray(tmp_path: Path, dtype: torch.dtype) -> None:
    call = make_call(rows=300, width=64, dtype=torch.float32)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with capture(tmp_path) as session:
            run(call)
    finally:
        torch.set_default_dtype(before)
    assert (session.calls[0].status, session.calls[0].reason) == ("agrees", "")


def test_hooks_on_saved_tensors_see_nothing_of_a_call_that_is_made_again(
    tmp_path: Path, plant: Callable[[str], None]
) -> None:
    plant("nan_live")
    call = make_call(batch=8, dtype=torch.float32, mask=None)
    saved: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(1)
        return tensor

    query = call.query.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        F.scaled_dot_product_attention(query, call.key, call.value)
        expected = len(saved)
        with capture(tmp_path, max_bytes=200_000) as session:
            F.scaled_dot_product_attention(query, call.key, call.value)
    assert "alone, to fit into --max-bytes" in session.calls[0].note
    assert len(saved) == 2 * expected > 0
