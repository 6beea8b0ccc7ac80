"""The stages of a prefill out of two recordings, each with its outcome, in the order of the forward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from sdpa_repro.capturing.prefill import Prefill
from sdpa_repro.locating import structure
from sdpa_repro.locating.calls import Check
from sdpa_repro.locating.comparing import Difference, exact, floats, visibility, worst
from sdpa_repro.locating.notes import Value
from sdpa_repro.locating.recording import Recording
from sdpa_repro.locating.table import PADDED, UNPADDED, Level, Outcome, Stage

Key = tuple[str, str, int]
"""Stage, point, and how often the point was passed before (see `Recording.keyed`)."""

PREPARATION = (
    ("input_ids", "input_ids", Level.MULTIMODAL),
    ("attention_mask", "attention_mask", Level.MULTIMODAL),
    ("token types", "token types", Level.MULTIMODAL),
    ("pixel inputs", "pixel inputs", Level.MULTIMODAL),
    ("image features", "image features", Level.MULTIMODAL),
    ("placeholder mask", "placeholder mask", Level.MULTIMODAL),
    ("embeddings", "embeddings", Level.MULTIMODAL),
    ("position_ids", "position_ids", Level.POSITIONS),
    ("rotary cos/sin", "rotary", Level.POSITIONS),
    ("image block ids", "image block ids", Level.MASK),
)
"""What comes before the layers: name, stage in a recording, level of a fault."""

KERNELS = {
    ("FLASH_ATTENTION", "cpu"): "aten/src/ATen/native/cpu/FlashAttentionKernel.cpp",
    ("FLASH_ATTENTION", "cuda"): "aten/src/ATen/native/transformers/cuda/flash_attn/",
    ("EFFICIENT_ATTENTION", "cuda"): "aten/src/ATen/native/transformers/cuda/mem_eff_attention/",
    ("CUDNN_ATTENTION", "cuda"): "aten/src/ATen/native/cudnn/MHA.cpp",
    ("MATH", "cpu"): "aten/src/ATen/native/transformers/attention.cpp",
    ("MATH", "cuda"): "aten/src/ATen/native/transformers/attention.cpp",
}
"""Where PyTorch keeps the source of a backend."""


@dataclass(frozen=True, eq=False)
class Pair:
    """Two runs of a prefill, and what rounding alone moves in the unpadded one (tokens,) by value."""

    prefill: Prefill
    plain: Recording
    padded: Recording
    noise: Mapping[Key, Tensor]

    @property
    def runs(self) -> tuple[tuple[str, Recording], tuple[str, Recording]]:
        """Both, with the words for them."""
        return (UNPADDED, self.plain), (PADDED, self.padded)

    def matched(self, stage: str, layer: str | None = None) -> list[tuple[Key, Value, Value]]:
        """Values of a stage (of a layer) that both runs have, in the padded run's order."""
        before = self.plain.keyed()
        return [
            (key, before[key], value)
            for key, value in self.padded.keyed().items()
            if value.stage == stage and key in before and layer in (None, value.layer)
        ]


def walk(pair: Pair) -> list[Stage]:
    """Every stage of the two runs."""
    return [*_preparation(pair), *_masks(pair), *_towers(pair), *_layers(pair), _logits(pair)]


def compared(pair: Pair, key: Key, before: Value, after: Value) -> Difference:
    """One value of both runs: floats against the noise, ids, masks and the images' own values exactly."""
    if before.stage in ("key", "value"):
        before, after = same_heads(before, after), same_heads(after, before)
    if before.tensor.dtype.is_floating_point and before.stage != "pixel inputs":
        return floats(before, after, pair.noise.get(key))
    return exact(before, after)


def same_heads(one: Value, other: Value) -> Value:
    """`one` (B, heads, tokens, width) with each head as often as in `other`, if that has a multiple of its heads.

    A call without a mask takes key/value heads as they are (`enable_gqa`), one with a mask gets them repeated.
    """
    if one.tensor.dim() != 4 or other.tensor.dim() != 4:
        return one
    heads, wanted = one.tensor.shape[1], other.tensor.shape[1]
    if heads == 0 or wanted <= heads or wanted % heads:
        return one
    return replace(one, tensor=one.tensor.repeat_interleave(wanted // heads, dim=1))


def _preparation(pair: Pair) -> list[Stage]:
    stages = []
    for name, stage, level in PREPARATION:
        values = pair.matched(stage)
        if stage == "embeddings" and not values:
            values = pair.matched("token embeddings")
        stages.append(_stage(pair, name, level, values))
    return stages


def _layers(pair: Pair) -> list[Stage]:
    """For each layer: input, then query, key, value and the answer of each SDPA call, then output."""
    stages = []
    for path, name in layer_names(pair.prefill.model).items():
        calls = pair.matched("call", path)
        stages.append(_stage(pair, f"{name} input", Level.MODEL, pair.matched("input", path)))
        for key, before, after in calls:
            title = name if len(calls) == 1 else f"{name} {after.point.removeprefix(path).strip('.')}"
            for part in ("query", "key", "value"):
                one = [each for each in pair.matched(part, path) if each[0][1:] == key[1:]]
                stages.append(_stage(pair, f"{title} {part}", Level.MODEL, one))
            stages.append(_call(pair, f"{title} SDPA", key, int(before.tensor), int(after.tensor)))
        if not calls:
            reason = "no scaled_dot_product_attention call was seen in this layer"
            stages += [_unseen(f"{name} {part}", Level.MODEL, reason) for part in ("query", "key", "value")]
            stages.append(_unseen(f"{name} SDPA", Level.BACKEND, reason))
        stages.append(_stage(pair, f"{name} output", Level.MODEL, pair.matched("output", path)))
    return stages


def layer_names(model: Any) -> dict[str, str]:
    """Path to name of every text layer, in the order in which they run: "layer 5", or "encoder layer 0"."""
    stacks = structure.stacks(model)
    several = len(stacks) > 1
    return {
        path: f"{'encoder ' if stack.encoder else 'decoder ' if several else ''}layer {index}"
        for stack in stacks
        for index, path in enumerate(stack.layers)
    }


def _towers(pair: Pair) -> list[Stage]:
    """Calls outside the text layers (a vision tower's), when one of them is wrong."""
    found = (
        _call(pair, f"{after.point} SDPA", key, int(before.tensor), int(after.tensor))
        for key, before, after in pair.matched("call", "")
    )
    return [stage for stage in found if stage.status is Outcome.DIFFERS]


def _logits(pair: Pair) -> Stage:
    """The next-token logits, from the last layer's result on."""
    model = pair.prefill.model
    head = model.get_output_embeddings()
    path = next((path for path, module in model.named_modules() if module is head), "")
    stage = _stage(pair, "logits", Level.MODEL, pair.matched("logits"))
    one, other = (run.logits[run.row] for _, run in pair.runs)
    tokens = int(one.argmax()), int(other.argmax())
    then = f"stays {tokens[0]}" if tokens[0] == tokens[1] else f"changes from {tokens[0]} to {tokens[1]}"
    apart = f"the two runs are {float((one - other).abs().max()):.3g} apart, the likeliest token {then}"
    return replace(stage, module=structure.display(model, path), file=source(model, ""), detail=apart)


def _masks(pair: Pair) -> list[Stage]:
    """Visibility between valid tokens, one stage for each kind of mask."""
    stages = []
    runs = [run.stage("mask") for _, run in pair.runs]
    for part in dict.fromkeys(value.part for run in runs for value in run):
        before, after = ([value for value in run if value.part == part] for run in runs)
        name = f"{part} mask".strip()
        if not before or not after:
            stages.append(_unseen(name, Level.MASK, "only one of the two runs shows it"))
            continue
        # layers that see the same share one value: with unequal counts the last one stands for the rest
        count = max(len(before), len(after))
        pairs = [(before[min(i, len(before) - 1)], after[min(i, len(after) - 1)]) for i in range(count)]
        found = [(visibility(one.tensor, other.tensor), other) for one, other in pairs]
        stages.append(_of(pair, name, Level.MASK, found))
    return stages or [_unseen("mask", Level.MASK)]


def _stage(pair: Pair, name: str, level: Level, values: Sequence[tuple[Key, Value, Value]]) -> Stage:
    """One stage out of the values that show it."""
    if not values:
        return _unseen(name, level)
    return _of(pair, name, level, [(compared(pair, *each), each[2]) for each in values])


def _of(pair: Pair, name: str, level: Level, found: Sequence[tuple[Difference, Value]]) -> Stage:
    """A stage from its comparisons; the first that differs decides, and the module that made that value is named."""
    chosen = worst(difference for difference, _ in found)
    value = next(value for difference, value in found if difference is chosen)
    seen = f"{value.part} at {value.point}".removeprefix(" at ") if value.stage != "mask" else ""
    detail = "; ".join(part for part in (seen if chosen.differs else "", chosen.detail) if part)
    module, file = structure.display(pair.prefill.model, value.maker), source(pair.prefill.model, value.maker)
    return Stage(name, chosen.outcome, level, chosen.moved, chosen.noise, chosen.where, module, file, detail)


def _call(pair: Pair, name: str, key: Key, before: int, after: int) -> Stage:
    """One SDPA call of both runs: the live check against the reference decides, not the movement."""
    checks = [(word, run, _check(run, index)) for (word, run), index in zip(pair.runs, (before, after), strict=True)]
    moved = next((each for each in pair.matched("attention") if each[0][1:] == key[1:]), None)
    difference = compared(pair, *moved) if moved is not None else Difference(Outcome.NOT_AVAILABLE)
    stage = Stage(name, Outcome.NOT_AVAILABLE, Level.BACKEND, difference.moved, difference.noise, module=key[1])
    wrong = [(word, run, check) for word, run, check in checks if check is not None and wrong_on_valid(run, check)]
    if wrong:
        check = of_row(*wrong[-1][1:])
        return replace(
            stage,
            status=Outcome.DIFFERS,
            where=rows_of(check),
            file=KERNELS.get((check.kernel, pair.prefill.device.type), ""),
            detail=f"{check.kernel} {how_wrong(check)}, in the {' and the '.join(word for word, _, _ in wrong)} run",
        )
    if all(check is not None and (check.status == "agrees" or check.wrong) for _, _, check in checks):
        same = difference.outcome is Outcome.EQUAL
        ratios = [check.ratio for _, _, check in checks if check is not None and not check.wrong]
        detail = "both runs agree with the float64 reference on the tokens of this row; other query rows are wrong"
        if len(ratios) == len(checks):
            detail = f"both runs agree with the float64 reference: at most {max(ratios):.2g} of the threshold"
        return replace(stage, status=Outcome.EQUAL if same else Outcome.WITHIN_NOISE, detail=detail)
    reasons = sorted({check.reason for _, _, check in checks if check is not None and check.reason})
    return replace(stage, detail="; ".join(reasons) or "not checked against the reference")


def wrong_on_valid(run: Recording, check: Check) -> bool:
    """Whether a call is wrong in a query row that belongs to a valid token of the recorded row.

    Only the first wrong rows are listed; when there are more, one of them is taken to be.
    """
    return check.wrong and (of_row(run, check) is check or bool(of_row(run, check).rows))


def of_row(run: Recording, check: Check) -> Check:
    """The check with the wrong rows of the recorded row's valid tokens alone; as it is when not all are listed."""
    if check.wrong_rows > len(check.rows) or check.lengths[0] != run.total:
        return check
    valid, own = set(run.valid.tolist()), run.row if check.batches > 1 else 0
    rows = tuple(each for each in check.rows if each[0] == own and each[2] in valid)
    return replace(check, rows=rows, wrong_rows=len(rows))


def rows_of(check: Check) -> str:
    """The wrong rows of a call in words: "query row 288, the last of 289, in 16 of 16 heads"."""
    rows = sorted({row for _, _, row in check.rows})
    if not rows:
        return "place unknown"
    count = check.lengths[0]
    if check.wrong_rows > len(check.rows):
        _, head, row = check.rows[0]
        return f"{check.wrong_rows} rows of {check.heads} heads, first query row {row} of {count} in head {head}"
    heads = len({head for _, head, _ in check.rows})
    listed = f"query row {rows[0]}" if len(rows) == 1 else f"{len(rows)} query rows from {rows[0]} to {rows[-1]}"
    place = f", the last of {count}," if rows == [count - 1] else f" of {count}"
    return f"{listed}{place} in {heads} of {check.heads} heads"


def how_wrong(check: Check) -> str:
    """By how much a call is wrong, in words."""
    if check.status == "nonfinite":
        return check.reason or "NaN or Inf where the float64 reference is finite"
    return f"off by {check.max_abs:.3g} from the float64 reference, {check.ratio:.3g} times the threshold"


def source(model: Any, path: str) -> str:
    """Source of the module at `path`; "" for what is no module of the model."""
    try:
        return structure.source_of(model.get_submodule(path))
    except AttributeError:
        return ""


def _unseen(name: str, level: Level, reason: str = "not seen in this model") -> Stage:
    return Stage(name, Outcome.NOT_AVAILABLE, level, detail=reason)


def _check(run: Recording, index: int) -> Check | None:
    return next((each for each in run.checks if each.index == index), None)
