"""Everything about a call's tensors but their values: dtype, shape, stride, alignment, overlap, distance."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from itertools import combinations
from typing import Any

from torch import Tensor

from sdpa_repro.attention import ALIGNMENT, AttentionCall, span
from sdpa_repro.dumping.coverage import View, overlap

NEAR = 64 << 20
"""Distance between tensors is kept when no more than this many bytes lie between them."""


def causal_rule(mask: Tensor | None) -> dict[str, Any] | None:
    """The rule a `torch.nn.attention.bias.CausalBias` stands for; its memory is uninitialised and means nothing."""
    bias = sys.modules.get("torch.nn.attention.bias")  # importing it here would bring torch._dynamo into every process
    if bias is None or not isinstance(mask, bias.CausalBias):
        return None
    variant = bias.CausalVariant(mask.variant)
    return {"kind": "causal_bias", "variant": variant.name, "shape": [int(mask.seq_len_q), int(mask.seq_len_kv)]}


def stored_tensors(call: AttentionCall) -> dict[str, Tensor]:
    """The call's tensors that have memory of their own: all but a `CausalBias`."""
    return {name: tensor for name, tensor in call.tensors.items() if causal_rule(tensor) is None}


def neighbours(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """Names of tensors that overlap or lie within 64 MiB of each other, grouped, in address order; empty ones alone."""
    groups: list[list[str]] = []
    reach, device = 0, None
    for name in sorted(tensors, key=lambda name: (str(tensors[name].device), span(tensors[name]).start)):
        tensor, here = tensors[name], span(tensors[name])
        if not tensor.numel():
            groups.insert(0, [name])
            continue
        if tensor.device == device and here.start - reach <= NEAR:
            groups[-1].append(name)
            reach = max(reach, here.stop)
        else:
            groups.append([name])
            reach, device = here.stop, tensor.device
    return groups


def layout(call: AttentionCall) -> dict[str, Any]:
    """The layout as plain data.

    Returns `tensors`: per name `dtype`, `shape`, `stride`, `align` (data_ptr % 256; None when empty), or `rule` for
    a CausalBias; `near`: for each pair within 64 MiB of each other `names`, `distance` (bytes from the first
    tensor's first element to the second's) and `shared` (whether an element belongs to both).
    """
    tensors = stored_tensors(call)
    described: dict[str, Any] = {name: _describe(tensor) for name, tensor in tensors.items()}
    rule = causal_rule(call.attn_mask)
    if rule is not None:
        described["attn_mask"] = {"rule": rule}
    near = []
    for group in neighbours(tensors):
        members = [name for name in tensors if name in group]
        for one, other in combinations(members, 2):
            distance = tensors[other].data_ptr() - tensors[one].data_ptr()
            near.append({"names": [one, other], "distance": distance, "shared": _shared(tensors[one], tensors[other])})
    return {"tensors": described, "near": near}


def _describe(tensor: Tensor) -> dict[str, Any]:
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "align": tensor.data_ptr() % ALIGNMENT if tensor.numel() else None,
    }


def _shared(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors share a byte."""
    start = min(one.data_ptr(), other.data_ptr())
    return overlap(View.of(one, start), View.of(other, start))


def layout_differences(a: AttentionCall, b: AttentionCall) -> list[str]:
    """What the layout of `b` changed against that of `a`, as plain sentences; empty when nothing did.

    Compared are dtype, shape, stride, `data_ptr % 256`, overlap, and the distance between tensors that lie within
    64 MiB of each other in `a`. Values are not looked at.
    """
    before, after = layout(a), layout(b)
    found: list[str] = []
    for name in {**before["tensors"], **after["tensors"]}:
        found.extend(_tensor_differences(name, before["tensors"].get(name), after["tensors"].get(name)))
    pairs_before = {tuple(pair["names"]): pair for pair in before["near"]}
    pairs_after = {tuple(pair["names"]): pair for pair in after["near"]}
    for names in {**pairs_before, **pairs_after}:
        if set(names) <= before["tensors"].keys() & after["tensors"].keys():
            found.extend(_pair_differences(names, pairs_before.get(names), pairs_after.get(names)))
    return found


def _tensor_differences(name: str, before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> list[str]:
    if before is None or after is None:
        return [f"{name} is {'new' if before is None else 'missing'}"]
    if "rule" in before or "rule" in after:
        return [] if before == after else [f"{name} is no longer the same CausalBias rule or tensor"]
    found = [
        f"{name} has {key} {after[key]}, was {before[key]}" for key in ("dtype", "shape") if before[key] != after[key]
    ]
    if before["stride"] != after["stride"]:
        lost = [
            dim
            for dim, (was, now) in enumerate(zip(before["stride"], after["stride"], strict=False))
            if was == 0 != now
        ]
        note = f": the stride 0 of dimension {', '.join(map(str, lost))} is lost" if lost else ""
        found.append(f"{name} has stride {after['stride']}, was {before['stride']}{note}")
    if before["align"] != after["align"] and None not in (before["align"], after["align"]):
        found.append(f"{name} has data_ptr % {ALIGNMENT} = {after['align']}, was {before['align']}")
    return found


def _pair_differences(
    names: tuple[str, ...], before: Mapping[str, Any] | None, after: Mapping[str, Any] | None
) -> list[str]:
    one, other = names
    was_shared, is_shared = bool(before and before["shared"]), bool(after and after["shared"])
    if was_shared != is_shared:
        return [f"{other} {'now' if is_shared else 'no longer'} shares memory with {one}"]
    if before is None:
        return []
    if after is None:
        return [f"{one} and {other} are now more than {NEAR >> 20} MiB apart, were {before['distance']} bytes"]
    if before["distance"] != after["distance"]:
        return [f"{one} and {other} are now {after['distance']} bytes apart, were {before['distance']}"]
    return []
