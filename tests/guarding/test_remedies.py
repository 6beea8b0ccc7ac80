"""Which known issues have a remedy on which torch, and that the quick look never hides a call that matches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch

from sdpa_repro.attention import AttentionCall
from sdpa_repro.guarding.remedies import Look, Remedy, devices_here, known_remedies
from sdpa_repro.known_issues import KNOWN_ISSUES
from sdpa_repro.situation import Answer, Situation
from tests.calls import make_call


def names(version: str, *devices: str) -> set[str]:
    return {remedy.name for remedy in known_remedies(version, devices)}


def test_a_release_with_the_fix_needs_nothing() -> None:
    assert {"pytorch#191937", "pytorch#192138", "pytorch#191612"} <= names("2.13.0", "cuda")
    assert names("2.14.0", "cuda") == {"pytorch#193893", "pytorch#196678"}
    assert "pytorch#187227" in names("2.12.1", "cuda")
    assert "pytorch#187227" not in names("2.13.0", "cuda")
    assert names("2.13.0", "cpu") == names("2.14.0", "mps") == set()
    assert names("2.8.0", "mps") == {"pytorch#163597", "pytorch#181133", "pytorch#169222"}
    assert names("2.13.0+rocm6.4", "cuda") == {"ROCm/pytorch#3230"}


def test_a_cpu_is_always_among_the_devices() -> None:
    assert devices_here()[0] == "cpu"
    assert ("cuda" in devices_here()) == (torch.version.cuda is not None or torch.version.hip is not None)


def by_name(version: str, device: str, name: str) -> Remedy:
    return next(remedy for remedy in known_remedies(version, (device,)) if remedy.name == name)


def calls() -> Iterator[AttentionCall]:
    """Calls around the conditions of all remedies."""
    for rows, heads, layout, mask in product(
        (1, 8, 32, 33, 64, 65), (1, 8, 40), ("expanded", "dense"), (None, "causal", "float", "flag")
    ):
        for width, dtype in ((64, torch.bfloat16), (136, torch.float32)):
            yield make_call(rows=rows, keys=64, heads=heads, width=width, layout=layout, mask=mask, dtype=dtype)
        yield make_call(batch=2, rows=rows, keys=40, heads=2, width=64, mask=mask)
    yield make_call(heads=8, kv_heads=2, layout="gqa")
    yield replace(make_call(), attn_mask=torch.zeros(33, 33))


@pytest.mark.parametrize("version", ["2.8.0", "2.12.0", "2.13.0"])
@pytest.mark.parametrize("device", ["cuda", "mps"])
@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (12, 0)])
def test_the_quick_look_hides_no_call_that_matches(version: str, device: str, capability: tuple[int, int]) -> None:
    issues = {known.issue: known for known in KNOWN_ISSUES}
    matched = set()
    for call, grad in product(calls(), (False, True)):
        glance = (call.query, call.key, call.value, call.attn_mask, call.is_causal)
        for remedy in known_remedies(version, (device,)):
            backend = issues[remedy.name].backends[0]
            situation = Situation(call, backend, device, version, grad, capability)
            if issues[remedy.name].trigger(situation) is Answer.YES:
                matched.add(remedy.name)
                assert remedy.quick(*glance, call.query.shape[-2], call.key.shape[-2])
                assert remedy.applies(Look(call, backend, device, grad, capability))
    expected = {"pytorch#191937", "pytorch#192138"} if device == "cuda" else set()
    if device == "mps" and version == "2.8.0":
        expected = {"pytorch#163597", "pytorch#181133", "pytorch#169222"}
    assert expected <= matched


def test_only_the_kernel_with_the_bug_is_meant() -> None:
    remedy, call = by_name("2.13.0", "cuda", "pytorch#191937"), make_call()
    assert remedy.applies(Look(call, "EFFICIENT_ATTENTION", "cuda", False, (9, 0)))
    assert remedy.applies(Look(call, "unknown", "cuda", False, (9, 0)))
    for backend in ("MATH", "FLASH_ATTENTION", "CUDNN_ATTENTION"):
        assert not remedy.applies(Look(call, backend, "cuda", False, (9, 0)))
    assert not remedy.applies(Look(call, "EFFICIENT_ATTENTION", "cuda", True, (9, 0)))


def test_the_warning_names_issue_and_release() -> None:
    look = Look(make_call(), "EFFICIENT_ATTENTION", "cuda", False, (9, 0))
    assert by_name("2.13.0", "cuda", "pytorch#191937").about(look) == "pytorch#191937, fixed in 2.14.0"
    assert by_name("2.13.0", "cuda", "pytorch#193893").about(look) == "pytorch#193893, no release with a fix known"


def test_an_emulated_bug_is_called_emulated_and_is_one_of_a_cuda_kernel() -> None:
    remedies = known_remedies("2.13.0", ("cpu",), emulated=True)
    issues = {known.issue: known for known in KNOWN_ISSUES}
    assert {issues[remedy.name].device for remedy in remedies} == {"cuda"}
    look = Look(make_call(), "FLASH_ATTENTION", "cpu", False, None)
    assert [remedy.name for remedy in remedies if remedy.applies(look)] == ["pytorch#191937"]
    assert "as emulated here on FLASH_ATTENTION, CPU" in remedies[0].about(look)


def test_a_bug_of_one_gpu_is_looked_for_on_that_gpu_alone() -> None:
    remedies = known_remedies("2.13.0", ("cuda",))

    def on(capability: tuple[int, int]) -> set[str]:
        return {remedy.name for remedy in remedies if remedy.on(capability)}

    everywhere = {"pytorch#191937", "pytorch#192138"}
    assert on((8, 0)) == on((12, 0)) == everywhere
    assert on((9, 0)) == everywhere | {"pytorch#196678", "pytorch#191612"}
    assert on((10, 0)) == everywhere | {"pytorch#193893", "pytorch#191612"}
