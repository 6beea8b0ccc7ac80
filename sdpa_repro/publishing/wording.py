"""Sentences of an issue from the documents of `explain`, `reduce` and `replay`; what they do not hold is not said.

Everything here returns Markdown. Every key of a document may be missing or None.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from sdpa_repro.attention import AttentionCall
from sdpa_repro.explaining.factors import FACTORS
from sdpa_repro.publishing.escaping import code, mapping, one_line, prose, texts
from sdpa_repro.publishing.length_facts import pairs
from sdpa_repro.publishing.story import FAILURE, Story
from sdpa_repro.switches import dtype_name

LABELS = {
    "diverges": "module: correctness (silent)",
    "nonfinite": "module: NaNs and Infs",
    "crashed": "module: crash",
}

PHRASES = {
    "attn_mask": "an attn_mask",
    "key_value_head_stride_0": "key and value expanded from one head (head stride 0)",
    "no_grad": "no grad",
}
"""Factors as a PyTorch developer would put them; the others are worded as in `explain`."""

ALSO = {
    "attn_mask": "without a mask",
    "key_value_head_stride_0": "with key and value copied for every head",
    "no_grad": "with a gradient recorded",
    "length_L": "at other L",
    "length_S": "at other S",
    "values": "with other values",
    "dtype": "in another dtype",
    "head_dim": "at another head_dim",
    "query_layout": "with a contiguous query",
    "key_value_layout": "with contiguous key and value",
    "scale": "without a given scale",
    "batch": "with one batch row",
    "heads": "with fewer heads",
    "enable_gqa": "with key and value heads copied for enable_gqa",
    "fully_masked_rows": "without fully masked rows",
    "left_padding": "without left padding",
    "bool_mask": "with 0 and -inf as the mask",
    "float_mask": "with an equal bool mask",
    "mask_dtype": "with the mask in the query's dtype",
    "mask_head_broadcast": "with the mask copied for every head",
    "no_mask": "with a mask that hides nothing",
    "default_scale": "with the scale given",
    "causal_flag": "with an equal mask for is_causal",
    "grad": "without a gradient",
    "memory_overlap": "with value in memory of its own",
    "alignment": "at other pointer alignment",
}
"""The change of a factor that was tried, for those that are not needed."""

COUNTED = {"B": "batch", "H": "heads"}
"""Rows of a reduction's table that say whether a number can be 1, and the factors of `explain` for that.

`explain` keeps the stride of a repeated head when it takes fewer heads, a maintainer who writes 1 does not.
"""

REDUCED = ("values", "dtype")
"""Rows of a reduction's table that `explain` may lack and the script does not show."""

WRITTEN_OUT = "matmul, softmax, matmul written out (transformers' eager)"
"""PyTorch people mean something else by eager."""

_EAGER = re.compile(r"\beager\b")
_ISSUE = re.compile(r"^(?:ROCm/)?pytorch#\d+$")
_DENSE = re.compile(r"^((?:query|key|value)(?:, (?:query|key|value))*) = .*\.contiguous\(\)$")
_LENGTHS = ("length_L", "length_S")
_TILES = re.compile(r": S = \d+, the last key tile of [^:]*? left out")
_CAPTURED = re.compile(r" \(found on the captured call: [^()]*\)")


def cause(story: Story, explanation: Mapping[str, Any], replay: Mapping[str, Any], rule: str = "") -> str:
    """One plain sentence: what the backend does and when, ending in a full stop.

    rule: over lengths, with what follows it in brackets, where the explanation has none of its own.
    """
    said = explanation.get("sentence")
    if not said:
        what = mapping(explanation.get("hypothesis")).get("sentence")
        own = mapping(explanation.get("length_rule")).get("rule")
        said = replay.get("sentence") if not what and not own else None
        if not said:
            said = f"{story.backend}: {what}" if what else f"{story.backend} {FAILURE[story.status]}"
            said += f" when {own}" if own else ""
    text = one_line(said, 400).partition("; known: ")[0].partition("; possibly ")[0]
    text = re.sub(r" \(with [^()]* preloaded\)$", "", text).rstrip(".").replace(", when ", " when ")
    text += f" when {rule}" if rule else ""
    return text + (", but not in every run." if story.runs > 1 and "runs" not in text else ".")


def title(story: Story, sentence: str, needs: Sequence[str], *, emulated: bool) -> str:
    """The issue's title as plain text: where, what, when."""
    where = story.device.upper() + (", with files preloaded" if emulated else "")
    text = sentence.rstrip(".").removeprefix(story.backend)
    text = re.sub(r"\b(row|key) \(\d+\)", r"\1", text)
    text = _CAPTURED.sub("", _TILES.sub("", text))
    joined = f"SDPA {story.backend} ({where}){'' if text.startswith((':', ' ')) else ': '}{text}"
    layout = next((need for need in needs if "stride 0" in need), None)
    if layout and len(joined) + len(layout) < 170:
        joined += f", with {layout}"
    return one_line(joined, 200)


def needed(
    explanation: Mapping[str, Any], call: AttentionCall, reduction: Mapping[str, Any] | None = None, rule: str = ""
) -> list[str]:
    """The conditions in plain words; the length rule, last, in place of "the length".

    rule: one to state where the explanation has none. reduction: its table may say that several heads are needed.
    """
    here = {
        "dtype": dtype_name(call.query.dtype),
        "head_dim": f"head_dim {call.query.shape[-1]}",
        "length_L": _length("L", call.query.shape[-2], explanation),
        "length_S": _length("S", call.key.shape[-2], explanation),
    }
    rule = one_line(mapping(explanation.get("length_rule")).get("rule") or rule)
    given = texts(explanation.get("needed"))
    factors = [factor for factor in given if not (rule and factor in _LENGTHS)]
    words = [here.get(factor) or factor_words(factor) for factor in factors]
    if (
        "heads" not in given
        and "key_value_head_stride_0" not in given
        and "H" in texts(mapping(reduction).get("needed"))
    ):
        words.append("more than one head")
    for pair in explanation.get("alternatives") or ():
        words.append("one of " + " and ".join(factor_words(factor) for factor in texts(pair)))
    return [*words, rule] if rule else words


def _length(name: str, number: int, explanation: Mapping[str, Any]) -> str:
    """A length that matters without a rule: this one, or one of several that fail."""
    failing = {pair["LS".index(name)] for pair, fails in pairs(explanation).items() if fails}
    return f"some lengths {name}, such as {number}" if failing - {number} else f"{name} = {number}"


def also_fails(explanation: Mapping[str, Any], reduction: Mapping[str, Any]) -> list[str]:
    """What was changed and the failure stayed, in words that follow "also fails".

    Left out: things that the call never had, and numbers of heads or batch rows that the reduction found to matter.
    """
    why = mapping(explanation.get("why"))
    matters = {COUNTED[name] for name in texts(reduction.get("needed")) if name in COUNTED}
    found = {}
    for factor in texts(explanation.get("not_needed")):
        told = str(why.get(factor, ""))
        if factor not in matters and (not why or ": fails" in told):
            found[factor] = _changed(factor, told)
    for factor in texts(reduction.get("not_needed")):
        if factor in REDUCED and factor not in found:
            found[factor] = ALSO[factor]
    wanted = set(texts(explanation.get("needed")))
    return [words for factor, words in found.items() if factor not in wanted]


def _changed(factor: str, told: str) -> str:
    """The change of a factor, with what exactly fails where the explanation tells it: "in float16 and float32"."""
    failing = re.findall(r"(?:[(;] ?)([^():;]+): fails", told)
    if factor in ("dtype", "head_dim") and failing:
        names = [text.removeprefix("head_dim ") for text in failing]
        return f"{'in' if factor == 'dtype' else 'at head_dim'} {' and '.join(names)}"
    if factor == "heads" and re.search(r" alone, contiguous [^:;]+: passes", told):
        return "with one head whose stride stays 0"
    if factor == "heads" and any(" alone" in text for text in failing):
        return "with one head"
    return ALSO.get(factor) or f"without {factor_words(factor)}"


def not_tested(explanation: Mapping[str, Any]) -> list[str]:
    """Factors that could not be tried."""
    return [factor_words(factor) for factor in texts(explanation.get("not_tested"))]


def factor_words(factor: str) -> str:
    """A factor id as a phrase."""
    if factor in PHRASES:
        return PHRASES[factor]
    return next((known.words for known in FACTORS if known.id == factor), one_line(factor, 60))


def computes(explanation: Mapping[str, Any]) -> str:
    """What the kernel computed instead."""
    sentence = mapping(explanation.get("hypothesis")).get("sentence")
    outside = mapping(explanation.get("poison"))
    exact = "" if "NaN" in str(sentence) else ", to rounding, in every wrong row"
    words = [prose(sentence) + exact] if sentence else []
    if sentence and str(sentence) in str(explanation.get("sentence")):  # it stands right above
        words = ["what the sentence above says" + exact] if exact else []
    if outside.get("reads_outside") is True:
        words.append("it reads memory outside its inputs: " + prose(outside.get("words", "")))
    return "; ".join(words)


def wrong_rows(cell: Mapping[str, Any], rows: int, heads: int, *, others: bool = True) -> str:
    """Which rows of which heads are wrong, from a cell of the replay table; `others`: and that the others are right."""
    bad = mapping(cell.get("bad"))
    if not bad:
        return ""
    which, where = _indices(bad.get("rows")), _indices(bad.get("heads"))
    text = f"query row{'s' * (which[1] != 1)} {which[0]} of 0…{rows - 1}"
    if which[1] == rows:
        text = f"every query row, 0…{rows - 1}," if rows > 1 else "the one query row"
    every = "in every head" if heads > 1 else "in the one head"
    text += f" {every}" if where[1] == heads else f" in head{'s' * (where[1] != 1)} {where[0]} of 0…{heads - 1}"
    return text + "; every other row is within rounding of float64" * (which[1] < rows and others)


def _indices(listed: Any) -> tuple[str, int]:
    """Indices, or [first, last] pairs, as text and their number."""
    pairs = [tuple(item) if isinstance(item, (list, tuple)) else (item, item) for item in listed or ()]
    joined: list[tuple[int, int]] = []
    for first, last in pairs:
        if joined and joined[-1][1] == first - 1:
            joined[-1] = (joined[-1][0], last)
        else:
            joined.append((first, last))
    text = ", ".join(f"{first}" if first == last else f"{first}…{last}" for first, last in joined[:8])
    return text + ", …" * (len(joined) > 8), sum(last - first + 1 for first, last in joined)


def workarounds(explanation: Mapping[str, Any], note: Callable[[str], str] = lambda line: "") -> list[str]:
    """What helps, those first that were tried on this very call. note: what limits a line, in brackets."""
    found = [mapping(item) for item in explanation.get("workarounds") or ()]
    found.sort(key=lambda item: item.get("verified") is not True)
    return [
        f"{prose(_EAGER.sub(WRITTEN_OUT, str(item.get('words', ''))))}: {code(item.get('line', ''))}"
        + note(str(item.get("line")))
        + ("" if item.get("verified") is True else " (not tried here)")
        for item in found
        if item.get("line")
    ]


def remarks(explanation: Mapping[str, Any]) -> dict[str, str]:
    """A comment for the line of the script whose layout matters: making it dense was tried and cures the call."""
    for item in explanation.get("workarounds") or ():
        match = _DENSE.match(str(mapping(item).get("line", "")))
        if match and mapping(item).get("verified") is True:
            names = match[1].split(", ")
            behind = f" on {' and '.join(names)}" if len(names) > 1 else ""
            return {names[0]: f".contiguous(){behind} hides the bug"}
    return {}


def known_note(known: Iterable[Any]) -> str:
    """What to do first when the bug is already reported; "" when nothing fits."""
    for item in map(mapping, known):
        issue, fixed = str(item.get("issue", "")), one_line(item.get("fixed_in") or "", 20)
        if not _ISSUE.match(issue):
            continue
        name = issue if "/" in issue else f"pytorch/{issue}"
        if item.get("match") == "possible":
            return f"This may be {name}: compare with it before posting."
        first = f"This is {name}" + (", as emulated here" if item.get("match") == "emulated" else "")
        if fixed:
            return f"{first}, fixed in {fixed}: upgrade to torch {fixed} or later. A new issue would be a duplicate."
        return f"{first}, for which no fixed release is known: add to that issue, a new one would be a duplicate."
    return ""


def labels(story: Story) -> list[str]:
    """Labels that triage would set."""
    found = ["module: sdpa"]
    if story.status in LABELS:
        found.append(LABELS[story.status])
    if story.device in ("cuda", "cpu"):
        found.append(f"module: {story.device}")
    if story.backend == "CUDNN_ATTENTION":
        found.append("module: cudnn")
    return found
