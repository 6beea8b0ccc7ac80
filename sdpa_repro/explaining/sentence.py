"""A hypothesis in one sentence: which rows, of which heads, were computed how."""

from __future__ import annotations

from sdpa_repro.explaining.believed import Counterfactual
from sdpa_repro.explaining.evidence import Evidence
from sdpa_repro.visibility import ranges, ranges_text


def sentence_of(evidence: Evidence, candidate: Counterfactual) -> str:
    """For example "the last query row (288) was computed with mask row 0"."""
    text, several = subject(evidence)
    verb = ("are" if several else "is") if candidate.symptom else ("were" if several else "was")
    return f"{text} {verb} {candidate.clause}"


def subject(evidence: Evidence) -> tuple[str, bool]:
    """The wrong rows in words, and whether that is a plural."""
    batches, heads, length, _ = evidence.output.shape
    rows = sorted({row for _, _, row in evidence.places})
    several = 1 < len(rows) < length
    if len(rows) == length:
        text = "every query row" if length > 1 else "the query row"
    elif several:
        text = f"query rows {ranges_text(ranges(rows))}"
    else:
        text = f"the last query row ({rows[0]})" if rows[0] == length - 1 else f"query row {rows[0]}"
    wrong_heads = {head for _, head in evidence.wrong}
    wrong_batches = {batch for batch, _ in evidence.wrong}
    if len(wrong_heads) < heads:
        text += f" of head{'s' * (len(wrong_heads) > 1)} {ranges_text(ranges(wrong_heads))}"
    if len(wrong_batches) < batches:
        text += f" in batch entr{'ies' if len(wrong_batches) > 1 else 'y'} {ranges_text(ranges(wrong_batches))}"
    return text, several
