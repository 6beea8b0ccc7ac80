"""What a reduction did, dimension by dimension: from, to, needed or not, and the nearest call that passes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from sdpa_repro.attention import AttentionCall, is_rule
from sdpa_repro.explaining.changes import cast
from sdpa_repro.mask import describe
from sdpa_repro.recipe import Kind
from sdpa_repro.reducing.candidate import INPUTS, Candidate, Sizes, formed, relaid, sound
from sdpa_repro.reducing.forms import Form, dense_strides, layout_of, words
from sdpa_repro.reducing.mask import with_form, without
from sdpa_repro.reducing.reducer import Search
from sdpa_repro.reducing.shape import STEP, varied
from sdpa_repro.replaying.trial import same_failure
from sdpa_repro.replaying.verdict import Status

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OTHER_SEEDS = (101, 102)
"""Seeds of values that the reduction did not choose itself."""


@dataclass(frozen=True)
class Row:
    """One dimension or property. needed: whether the failure goes without it (None: not tried, or nothing to try).

    neighbour: the nearest call that passes, or what was tried and fails too.
    """

    name: str
    before: str
    after: str
    needed: bool | None = None
    neighbour: str = ""


def described(candidate: Candidate) -> dict[str, int | str]:
    """Sizes, dtype, mask, values and layout in plain words."""
    call, sizes = candidate.call, candidate.sizes
    found: dict[str, int | str] = {name: getattr(sizes, name) for name in Sizes.__dataclass_fields__}
    found["dtype"] = str(call.query.dtype).removeprefix("torch.")
    found["mask"] = mask_words(candidate)
    found["values"] = "; ".join(f"{name} {words(candidate.forms.get(name), name)}" for name in INPUTS)
    found["layout"] = "; ".join(f"{name} {layout_words(candidate, name)}" for name in call.tensors if name in INPUTS)
    found["scale"] = "default" if call.scale is None else f"{call.scale:g}"
    return found


def mask_words(candidate: Candidate) -> str:
    """The mask as a noun phrase with its dtype: "causal mask (bool)"."""
    mask = candidate.call.attn_mask
    form = candidate.forms.get("attn_mask")
    if form is not None and mask is not None and form.kind not in (Kind.TRIL, Kind.PADDING):
        return f"{words(form, 'attn_mask')} ({str(mask.dtype).removeprefix('torch.')})"
    head = describe(candidate.call).headline
    if mask is None or is_rule(mask):
        return head + (" (is_causal)" if candidate.call.is_causal else "")
    return f"{head} ({str(mask.dtype).removeprefix('torch.')})"


def layout_words(candidate: Candidate, name: str) -> str:
    """The layout of one tensor in words."""
    tensor = candidate.call.tensors[name]
    return layout_of(tensor.shape, tensor.stride(), exact=candidate.exact).words


def rows(search: Search, start: Candidate) -> Iterator[Row]:
    """The table, one row after another; trials are made as it goes."""
    best, old, new = search.best, described(start), described(search.best)

    def row(name: str, tried: tuple[bool | None, str]) -> Row:
        return Row(name, str(old[name]), str(new[name]), *tried)

    yield row("B", _count(search, "B"))
    yield row("H", _heads(search))
    if old["Hkv"] != old["H"] or new["Hkv"] != new["H"]:
        yield row("Hkv", (None, "follows H"))
    yield row("L", _length(search))
    yield row("S", _keys(search))
    yield row("E", _width(search, "E"))
    if old["Ev"] != old["E"] or new["Ev"] != new["E"]:
        yield row("Ev", _width(search, "Ev"))
    yield row("mask", _mask(search))
    for names in (("query",), ("key", "value")):
        before, after = (", ".join(dict.fromkeys(layout_words(c, name) for name in names)) for c in (start, best))
        yield Row(f"{' and '.join(names)} layout", before, after, *_layout(search, names))
    yield row("values", _values(search))
    yield row("dtype", _dtype(search))
    if start.call.scale is not None:
        yield row("scale", (best.call.scale is not None, ""))
    if start.call.enable_gqa:
        after = str(best.call.enable_gqa)
        yield Row("enable_gqa", "True", after, best.call.enable_gqa, "")


def outcome(search: Search, proposals: Iterable[Candidate]) -> bool | None:
    """True when one of the calls fails, False when all that could be judged pass, None when none could."""
    judged: bool | None = None
    for proposal in proposals:
        if sound(proposal.call):
            continue
        result = search.result(proposal)
        if same_failure(result, search.first):
            return True
        if result.status is Status.AGREES:
            judged = False
    return judged


def _said(name: str, failed: bool | None) -> str:
    return f"{name} {'fails too' if failed else 'passes'}" if failed is not None else ""


def _resized(search: Search, **sizes: int) -> Iterator[Candidate]:
    new = replace(search.best.sizes, **sizes)
    return varied(search.best, new)


def _count(search: Search, name: str) -> tuple[bool | None, str]:
    """A count that can go down to 1."""
    here = getattr(search.best.sizes, name)
    if here == 1:
        return False, ""
    failed = outcome(search, _resized(search, **{name: here - 1}))
    return (None if failed is None else not failed), _said(f"{name} = {here - 1}", failed)


def _heads(search: Search) -> tuple[bool | None, str]:
    sizes = search.best.sizes
    if sizes.H == 1:
        return False, ""
    if sizes.Hkv == sizes.H:
        failed = outcome(search, _resized(search, H=sizes.H - 1, Hkv=sizes.H - 1))
        return (None if failed is None else not failed), _said(f"H = {sizes.H - 1}", failed)
    fewer = sizes.H - (sizes.H // sizes.Hkv if sizes.Hkv > 1 else 1)
    kv = max(1, sizes.Hkv - 1)
    failed = outcome(search, _resized(search, H=fewer, Hkv=kv))
    return (None if failed is None else not failed), _said(f"H = {fewer}, Hkv = {kv}", failed)


def _length(search: Search) -> tuple[bool | None, str]:
    """L, together with S while they are equal."""
    sizes = search.best.sizes
    square, said, found = sizes.L == sizes.S, [], []
    for length in (sizes.L - 1, sizes.L + 1):
        if length < 1:
            continue
        failed = outcome(search, _resized(search, L=length, S=length if square else sizes.S))
        found.append(failed)
        said.append(_said(f"L = {length}", failed))
    needed = None if all(failed is None for failed in found) else sizes.L > 1 or False in found
    return needed, ", ".join(filter(None, said))


def _keys(search: Search) -> tuple[bool | None, str]:
    """S with L as it is."""
    sizes, said, found = search.best.sizes, [], []
    for keys in (sizes.S - 1, sizes.S + 1):
        if keys < 1:
            continue
        failed = outcome(search, _resized(search, S=keys))
        found.append(failed)
        said.append(_said(f"S = {keys}", failed))
    if all(failed is None for failed in found):
        return None, ""
    at = f" at L = {sizes.L}"
    return False in found, ", ".join(filter(None, said)) + at


def _width(search: Search, name: str) -> tuple[bool | None, str]:
    sizes = search.best.sizes
    here, together = getattr(sizes, name), sizes.Ev == sizes.E
    if here <= STEP:
        return False, ""
    width = here - STEP if here % STEP == 0 else here - here % STEP
    failed = outcome(search, _resized(search, **({"E": width, "Ev": width} if together else {name: width})))
    return (None if failed is None else not failed), _said(f"{name} = {width}", failed)


def _mask(search: Search) -> tuple[bool | None, str]:
    best = search.best
    if best.call.attn_mask is None and not best.call.is_causal:
        return False, ""
    bare = without(best)
    failed = outcome(search, [replace(bare, call=replace(bare.call, is_causal=False))])
    said = [_said("no mask", failed)]
    form = best.forms.get("attn_mask")
    shape = (1, 1, best.sizes.L, best.sizes.S)
    if form != Form(Kind.FULL, constant=True):
        opened = with_form(best, Form(Kind.FULL, constant=True), shape, dense_strides(shape), torch.bool)
        said.append(_said("a mask that hides nothing", outcome(search, [opened] if opened else [])))
    return (None if failed is None else not failed), ", ".join(filter(None, said))


def _layout(search: Search, names: tuple[str, ...]) -> tuple[bool | None, str]:
    """The named tensors made dense."""
    best, changed = search.best, search.best
    for name in names:
        tensor = best.call.tensors[name]
        if not tensor.is_contiguous():
            dense = relaid(changed, name, dense_strides(tensor.shape))
            changed = changed if dense is None else dense
    if changed is best:
        return False, ""
    failed = outcome(search, [changed])
    return (None if failed is None else not failed), _said(f"dense {' and '.join(names)}", failed).replace(
        "passes", "passes" if len(names) == 1 else "pass"
    )


def _values(search: Search) -> tuple[bool | None, str]:
    """Other seeded values in all three."""
    results: list[bool | None] = []
    for seed in OTHER_SEEDS:
        forms = {name: Form(Kind.RANDINT, seed=3 * seed + index) for index, name in enumerate(INPUTS)}
        other = formed(search.best, forms)
        results.append(outcome(search, [other] if other else []))
    if all(failed is None for failed in results):
        return None, ""
    failed = True in results
    return not failed, f"other seeded values {'fail too' if failed else 'pass'}"


def _dtype(search: Search) -> tuple[bool | None, str]:
    """The other dtypes, the layout as it is."""
    call, said, found = search.best.call, [], []
    for dtype in DTYPES:
        changed: AttentionCall | None = None if dtype == call.query.dtype else cast(call, dtype)
        if changed is None:
            continue
        failed = outcome(search, [Candidate(changed, {}, search.best.exact)])
        found.append(failed)
        said.append(_said(str(dtype).removeprefix("torch."), failed))
    if all(failed is None for failed in found):
        return None, ""
    return True not in found, ", ".join(filter(None, said))
