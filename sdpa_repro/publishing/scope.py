"""What of an issue holds for the reduced call, what for the captured one, and the worst element in numbers.

Everything here returns Markdown; "" where nothing is known.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sdpa_repro.attention import AttentionCall, is_rule
from sdpa_repro.publishing.escaping import mapping, one_line, prose, texts
from sdpa_repro.publishing.length_facts import counts, hidden, of_call
from sdpa_repro.replaying.reference import reference
from sdpa_repro.switches import dtype_name

ALIKE = 0.02
"""How far, relatively, the script's error may be from that of the recorded output where both tell of one failure."""

LONG = 200
"""Characters of the words about lengths above which a table has a summary of them."""

_NEAR = ("nearest passing: ", "incomplete: ")
_HELD_OUT = re.compile(r"^\d+ lengths? held out of the fit: ")

_OF_THIS_CALL = ("attn_mask", "is_causal", "enable_gqa")
"""Arguments that reducing changes: a line about them need not fit the captured call."""


def worst_element(call: AttentionCall, output: Tensor | None, error: float | None) -> str:
    """Expected and actual value of the most wrong element: "element [0, 1, 32, 0]: expected 32, got 0".

    output: (…, L, Ev), recorded when the call failed; error: largest error in the script's run. Nothing is said
    where the two do not tell of the same failure.
    """
    if output is None or error is None or output.shape != (*call.query.shape[:-1], call.value.shape[-1]):
        return ""
    made = reference(call)
    right = made.output.double().reshape(output.shape)
    off = (output.detach().to(right.device).double() - right).abs()
    off = torch.where(off.isnan(), math.inf, off)
    off = torch.where(made.decides.reshape(output.shape[:-1])[..., None], off, -1.0)
    if not off.numel():
        return ""
    place = tuple(int(index) for index in torch.unravel_index(off.argmax(), off.shape))
    worst = float(off[place])
    same = math.isclose(worst, error, rel_tol=ALIKE) if math.isfinite(worst) else not math.isfinite(error)
    if worst <= 0 or not same:
        return ""
    at = ", ".join(str(index) for index in place)
    return f"element [{at}]: expected {float(right[place]):.6g}, got {float(output[place]):.6g}"


def rule_note(
    call: AttentionCall, explained: Mapping[str, Any], captured: AttentionCall | None, told: Mapping[str, Any]
) -> str:
    """What follows the length rule of `call` in brackets, where the captured call has another head_dim or rule.

    explained: of `call`; told: of the captured call, or empty.
    """
    here, there = _rule(explained), _rule(told)
    if captured is None or not here:
        return ""
    mine, other = call.query.shape[-1], captured.query.shape[-1]
    if mine == other and (not there or here == there):
        return ""
    if not there:
        return f" (at head_dim {mine}; not known for the captured call, head_dim {other})"
    same = "the same in the captured call" if here == there else "in the captured call"
    return f" ({same}, head_dim {other}{'' if here == there else f': {there}'})"


def _rule(explained: Mapping[str, Any]) -> str:
    return one_line(mapping(explained.get("length_rule")).get("rule") or "")


def lengths(
    explained: Mapping[str, Any],
    told: Mapping[str, Any] | None = None,
    captured: AttentionCall | None = None,
    adopted: str = "",
) -> tuple[str, list[str]]:
    """What the table says about the lengths tried, and the sentences that are too long for it.

    told, captured: the explanation of the captured call, and that call. adopted: its rule, where the issue states it.
    """
    told = told or {}
    if adopted and captured is not None:
        more = [f"captured call: {text}" for text in _sentences(told)]
        return _of_both(explained, told, adopted), [
            prose(text) for text in (*more, *(f"reduced call: {text}" for text in _sentences(explained)))
        ]
    rule = mapping(explained.get("length_rule"))
    words = [text for text in texts(rule.get("words")) if not text.startswith("fails when ")]
    contrary = _contrary(explained, told, captured)
    if not words:
        return _counts(explained), []
    if len(words) <= 2 or sum(map(len, words)) <= LONG:
        return "; ".join([*map(prose, words), *contrary]), []
    near = [text for text in words if text.startswith(_NEAR)]
    counted, listed = _counts(explained), _sentences(explained)
    if not counted:
        counted, near = prose(words[0]), [text for text in near if text != words[0]]
        listed = [text for text in listed if text != words[0]]
    return "; ".join([counted, *map(prose, near), *contrary]), [prose(text) for text in listed]


def _of_both(explained: Mapping[str, Any], told: Mapping[str, Any], rule: str) -> str:
    """The counts of the captured call, and how many of its failing lengths the reduced call's values do not show."""
    text = f"captured call: {_counts(told)}"
    passing, tried = hidden(explained, rule)
    if passing:
        text += f"; reduced call: at its values {passing} of the {tried} pairs that the rule names do not show it"
    return text


def _contrary(explained: Mapping[str, Any], told: Mapping[str, Any], captured: AttentionCall | None) -> list[str]:
    """A rule of the captured call that is not stated as that of the reduced call, which has none."""
    there = _rule(told)
    if captured is None or not there or _rule(explained):
        return []
    return [prose(f"the captured call ({of_call(captured)}) fails when {there}")]


def _sentences(explained: Mapping[str, Any]) -> list[str]:
    """A line for each sweep, the pairs apart from them, the sum; what the table says is left out."""
    rule = mapping(explained.get("length_rule"))
    said = [text for text in texts(rule.get("words")) if not text.startswith(("fails when ", *_NEAR))]
    said = [text for text in said if not _HELD_OUT.search(text) and text != rule.get("why")]
    apart = _apart(rule)
    number = counts(explained)
    if apart:
        said.append(apart)
    if number and rule.get("sweeps"):
        said.append(f"a pair on several of these lines counts once: {_sum(number)}")
    return said


def _apart(rule: Mapping[str, Any]) -> str:
    """The pairs off the sweeps: "pairs (L, S) apart from these: (2, 9) fail; (3, 4), (5, 6) pass"."""
    groups: dict[bool, list[str]] = {True: [], False: []}
    for one in map(mapping, rule.get("apart") or ()):
        groups[one.get("fails") is True].append(f"({one.get('L')}, {one.get('S')})")
    said = [
        f"{', '.join(listed)} {verb}{ending * (len(listed) == 1)}"
        for listed, verb, ending in ((groups[True], "fail", "s"), (groups[False], "pass", "es"))
        if listed
    ]
    return f"pairs (L, S) apart from these: {'; '.join(said)}" if said else ""


def _sum(number: tuple[int, int]) -> str:
    fails, passes = number
    pairs = "pair (L, S) fails" if fails == 1 else "pairs (L, S) fail"
    return f"{fails} {pairs} and {passes} pass{'es' if passes == 1 else ''}"


def _counts(explained: Mapping[str, Any]) -> str:
    rule, number = mapping(explained.get("length_rule")), counts(explained)
    if not rule.get("rule") or number is None:
        return ""
    text = f"{_sum(number)}, all as the rule says"
    if rule.get("held_out"):
        text += f" ({rule['held_out']} of them held out of the fit)"
    return prose(text)


def workaround_note(line: str, captured: Mapping[str, Any], *, reduced: bool) -> str:
    """What limits a workaround's line: " (for this reduced call)", " (transformers models)", or nothing.

    captured: the explanation of the captured call, or empty: a line that was tried there, too, holds there.
    """
    if line.startswith("model.set_attn_implementation"):
        return " (models of transformers)"
    there = [mapping(item) for item in captured.get("workarounds") or ()]
    if not reduced or any(item.get("line") == line and item.get("verified") is True for item in there):
        return ""
    target = line.partition(" = ")[0]
    return " (for this reduced call)" if any(name in target for name in _OF_THIS_CALL) else ""


def layout(call: AttentionCall) -> str:
    """Shapes, dtype and strides of a call: "bfloat16; query (1, 8, 289, 512) stride (…); key and value …"."""
    groups: dict[str, list[str]] = {}
    for name, tensor in call.tensors.items():
        kind = f" {dtype_name(tensor.dtype)}" if tensor.dtype != call.query.dtype else ""
        text = f"{tuple(tensor.shape)}{kind} stride {tuple(tensor.stride())}"
        groups.setdefault(text, []).append(name)
    said = [f"{' and '.join(names)} {text}" for text, names in groups.items()]
    flags = ["is_causal"] if call.is_causal else []
    flags += ["enable_gqa"] if call.enable_gqa else []
    flags += ["a CausalBias"] if call.attn_mask is not None and is_rule(call.attn_mask) else []
    return prose("; ".join([dtype_name(call.query.dtype), *said, *flags]), 600)
