"""Each stage calls its verb's function once, with what the stages before it found."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sdpa_repro.capturing import prefill
from sdpa_repro.capturing.options import PrefillOptions
from sdpa_repro.diagnosing import chain
from sdpa_repro.diagnosing.chain import Case, Reduced
from sdpa_repro.diagnosing.place import STATE
from sdpa_repro.diagnosing.stages import Stages
from sdpa_repro.errors import InputError
from sdpa_repro.locating import locate
from tests.calls import make_call
from tests.diagnosing.test_stages import Told
from tests.killed_work import made_replay, stand_ins
from tests.replaying.dumps import write_dump


@pytest.fixture
def case(tmp_path: Path) -> Case:
    (tmp_path / STATE).mkdir()
    dump = write_dump(make_call(rows=5, heads=2, width=8), tmp_path / "x.pt")
    return Case(Stages(tmp_path, "key", Told()), dump, budget=3.0)


def test_nothing_is_replayed_or_reduced_twice(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, dict[str, Any]] = {}
    with stand_ins(), monkeypatch.context() as patched:
        for name in ("explain", "reduce_dump", "publish"):
            real = getattr(chain, name)

            def noted(*words: Any, _name: str = name, _real: Any = real, **options: Any) -> Any:
                given[_name] = options
                return _real(*words, **options)

            patched.setattr(chain, name, noted)
        result = chain.replayed(case)
        chain.explained(case, result)
        small = chain.reduced(case, result)
        made = chain.published(case, result, small)
        assert chain.drawn(case, result, made).read_text() == "<html></html>"
    assert {name: options["replayed"] for name, options in given.items()} == dict.fromkeys(given, result)
    assert given["publish"]["reduction"] == small.document
    assert Path(small.document["output"]) == small.output


def test_a_call_that_cannot_be_reduced_is_published_as_it_is(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object, **__: object) -> None:
        raise InputError("it is not to be reduced")

    with stand_ins(), monkeypatch.context() as patched:
        patched.setattr(chain, "reduce_dump", refuses)
        small = chain.reduced(case, made_replay(case.dump))
    assert small == Reduced("not reduced: it is not to be reduced")


def test_a_small_call_that_does_not_fail_when_read_back_is_not_left_there(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unproven(_: Path, target: Path, **__: object) -> SimpleNamespace:
        target.write_bytes(b"small")
        return SimpleNamespace(output=target, proven=False, sentence="only here", document=dict)

    monkeypatch.setattr(chain, "reduce_dump", unproven)
    assert chain.reduced(case, made_replay(case.dump)) == Reduced("not reduced: only here")
    assert not (case.dump.parent / "call.pt").exists()


@pytest.mark.parametrize(("status", "kept"), [(1, True), (0, True), (130, False)])
def test_the_model_is_located_at_the_paddings_that_were_captured(
    status: int, kept: bool, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def located(of: Any, pads: list[int], **options: Any) -> SimpleNamespace:
        seen.append((of, pads, options["lengths"]))
        return SimpleNamespace(sentence="positions differ", exit_status=status, document=lambda: {"level": Path("a")})

    model = SimpleNamespace(length=282)
    monkeypatch.setattr(prefill, "prepare", lambda options, say: model)
    monkeypatch.setattr(prefill, "totals", lambda of, options: [289, 300])
    monkeypatch.setattr(locate, "locate_prefill", located)
    for _ in range(2):
        found = chain.located(case.stages, PrefillOptions(), "key", ())
        assert (found.sentence, found.exit_status, found.document) == ("positions differ", status, {"level": "a"})
    assert seen == [(model, [7, 18], False)] * (1 if kept else 2)
