"""What of an issue holds for the reduced call, what for the captured one, and the worst element in numbers.

Everything here returns Markdown; "" where nothing is known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sdpa_repro.attention import AttentionCall, is_rule
from sdpa_repro.publishing.escaping import one_line, prose
from sdpa_repro.publishing.wording import mapping, texts
from sdpa_repro.replaying.reference import reference
from sdpa_repro.switches import dtype_name

ALIKE = 0.02
"""How far, relatively, the script's error may be from that of the recorded output where both tell of one failure."""

LONG = 200
"""Characters of the words about lengths above which a table has a summary of them."""

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


def length_scope(
    call: AttentionCall, explained: Mapping[str, Any], captured: AttentionCall | None, told: Mapping[str, Any]
) -> str:
    """For which head_dim the length rule holds, where the captured call has another head_dim or another rule.

    explained: of `call`; told: of the captured call, or empty.
    """
    here, there = _rule(explained), _rule(told)
    if captured is None or not here:
        return ""
    mine, other = call.query.shape[-1], captured.query.shape[-1]
    if mine == other and (not there or here == there):
        return ""
    first = f"at head_dim {mine}: {here}"
    if there:
        return prose(f"{first}; in the captured call (head_dim {other}): {there}")
    return prose(f"{first}; the captured call has head_dim {other}, where the rule may be another")


def _rule(explained: Mapping[str, Any]) -> str:
    return one_line(mapping(explained.get("length_rule")).get("rule") or "")


def lengths(explained: Mapping[str, Any]) -> tuple[str, list[str]]:
    """What the table says about the lengths tried, and the sentences that are too long for it."""
    rule = mapping(explained.get("length_rule"))
    words = [text for text in texts(rule.get("words")) if not text.startswith("fails when ")]
    if not words:
        return _counts(rule), []
    if len(words) <= 2 or sum(map(len, words)) <= LONG:
        return "; ".join(prose(text) for text in words), []
    near = [text for text in words if text.startswith(("nearest passing: ", "incomplete: "))]
    counted = _counts(rule)
    if not counted:
        counted, near, words = prose(words[0]), [text for text in near if text != words[0]], words[1:]
    return "; ".join([counted, *map(prose, near)]), [prose(text) for text in words if text not in near]


def _counts(rule: Mapping[str, Any]) -> str:
    if not rule.get("rule") or rule.get("fails") is None:
        return ""
    text = f"{rule.get('fails')} that fail and {rule.get('passes')} that pass, all as {rule['rule']} says"
    if rule.get("held_out"):
        text += f"; {rule['held_out']} of them were held out of the fit"
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
