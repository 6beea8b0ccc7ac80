"""Random healthy calls of every kind, and how close their errors come to the thresholds: `make calibrate`.

Prints, and writes to docs/calibration.md, the largest error over threshold for each path and dtype on two
sets of seeds: the one the constants in `sdpa_repro.replaying.verdict` were set on, and one held out.
"""

from __future__ import annotations

import argparse
import random
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from sdpa_repro.attention import AttentionCall
from sdpa_repro.replaying.backends import Backend, Declined, run
from sdpa_repro.replaying.reference import reference
from sdpa_repro.replaying.verdict import Judgement, RowErrors, judge, row_errors

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LENGTHS = (1, 2, 3, 5, 8, 16, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 200, 257, 289, 400, 512, 513, 1024, 1025)
WIDTHS = (1, 2, 3, 4, 7, 8, 16, 32, 64, 72, 80, 96, 128, 136, 256)
MASKS = (
    "none", "flag", "causal", "left", "right", "window", "random", "one_key",
    "float", "float_inf", "alibi", "finfo_min", "constant", "keys",
)  # fmt: skip
VALUES = (
    "normal", "tiny", "large", "saturated", "outlier", "sink", "equal", "zero_query",
    "eighths", "offset", "mixed", "one_hot", "big_value", "small_value",
)  # fmt: skip
LAYOUTS = ("dense", "transposed", "expanded", "gqa", "strided")


@dataclass(frozen=True)
class Sample:
    """A healthy call and the words for what it is."""

    call: AttentionCall
    mask: str
    values: str
    layout: str


def samples(seed: int, count: int, longest: int = 1025) -> Iterator[Sample]:
    """`count` calls, the same for a seed on every machine."""
    choose = random.Random(seed)
    for index in range(count):
        yield sample(choose, seed * 1_000_003 + index, longest)


def sample(choose: random.Random, seed: int, longest: int = 1025) -> Sample:
    """One call with every property drawn independently."""
    lengths = [length for length in LENGTHS if length <= longest]
    rows = choose.choice(lengths)
    keys = rows if choose.random() < 0.6 else choose.choice(lengths)
    width = choose.choice(WIDTHS)
    value_width = width if choose.random() < 0.7 else choose.choice(WIDTHS)
    batch, heads = choose.choice((1, 1, 2)), choose.choice((1, 2, 4))
    dtype, values, layout = choose.choice(DTYPES), choose.choice(VALUES), choose.choice(LAYOUTS)
    kind = choose.choice(MASKS)
    scale = choose.choice((None, None, None, 1.0, 0.25))
    generator = torch.Generator().manual_seed(seed)
    query, key, value = draw(generator, values, batch, heads, rows, keys, width, value_width)
    mask, is_causal = draw_mask(generator, kind, batch, heads, rows, keys, dtype)
    call = lay_out(AttentionCall(query.to(dtype), key.to(dtype), value.to(dtype)), layout)
    call = AttentionCall(
        call.query, call.key, call.value, mask, is_causal=is_causal, scale=scale, enable_gqa=layout == "gqa"
    )
    return Sample(call, kind, values, layout)


def draw(
    generator: torch.Generator, kind: str, batch: int, heads: int, rows: int, keys: int, width: int, value_width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value in float32: from tiny to saturated, with outliers, sinks, equal or exact values."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    query, key = normal(batch, heads, rows, width), normal(batch, heads, keys, width)
    value = normal(batch, heads, keys, value_width)
    if kind == "tiny":
        query, key, value = query * 1e-3, key * 1e-3, value * 1e-3
    elif kind == "large":
        query, key = query * 5, key * 5
    elif kind == "saturated":
        query, key = query * 12, key * 12  # explicit scores still fit float16: 12 * 12 * 16 * 5 sigma
    elif kind == "outlier":
        query[..., :1] *= 40
        key[..., :1] *= 10
        value[..., :1] *= 50
    elif kind == "sink":
        key[..., :1, :] *= 15
        value[..., :1, :] *= 0.01
    elif kind == "equal":
        key, value = key[:, :, :1].expand_as(key).clone(), value[:, :, :1].expand_as(value).clone()
    elif kind == "zero_query":
        query = torch.zeros_like(query)
    elif kind == "eighths":
        query, key, value = ((tensor * 8).round() / 8 for tensor in (query, key, value))
    elif kind == "offset":
        query, value = query + 3, value + 100
    elif kind == "mixed":
        value = value * torch.exp(3 * normal(batch, heads, keys, 1))
    elif kind == "one_hot":
        value = torch.zeros_like(value)
        value[..., -1, :] = 1
    elif kind == "big_value":
        value = value * 1000
    elif kind == "small_value":
        value = value * 1e-6
    return query, key, value


def draw_mask(
    generator: torch.Generator, kind: str, batch: int, heads: int, rows: int, keys: int, dtype: torch.dtype
) -> tuple[Tensor | None, bool]:
    """A mask of one kind, in one of the shapes that broadcast, and the causal flag."""
    row, column = torch.arange(rows)[:, None], torch.arange(keys)[None, :]
    offset = keys - rows
    causal = column <= row + max(offset, 0)
    if kind in ("none", "flag"):
        return None, kind == "flag"
    if kind == "causal":
        return causal[None, None], False
    if kind in ("left", "right"):
        count = max(1, keys // 5)
        padded = column >= count if kind == "left" else column < keys - count
        return (causal & padded)[None, None].expand(batch, 1, rows, keys), False
    if kind == "window":
        return (causal & (column > row + max(offset, 0) - 16))[None, None], False
    if kind == "random":
        return torch.rand(batch, heads, rows, keys, generator=generator) > 0.5, False
    if kind == "one_key":
        return (torch.randint(keys, (rows, 1), generator=generator) == column), False
    if kind == "keys":
        return (torch.rand(keys, generator=generator) > 0.3)[None, None, None].expand(batch, 1, rows, keys), False
    bias = torch.randn(rows, keys, generator=generator)
    if kind == "alibi":
        bias = -0.5 * (row + max(offset, 0) - column).abs().float()
    elif kind == "constant":
        bias = torch.full((rows, keys), 5.0)
    bias = bias.to(dtype)
    if kind == "float_inf":
        bias = bias.masked_fill(~causal, float("-inf"))
    elif kind == "finfo_min":
        bias = torch.zeros(rows, keys, dtype=dtype).masked_fill(~causal, torch.finfo(dtype).min)
    return bias[None, None], False


def lay_out(call: AttentionCall, layout: str) -> AttentionCall:
    """The call's heads and strides as a layout has them; values of repeated heads are those of the first."""
    query, key, value = call.query, call.key, call.value
    heads = query.shape[1]
    if layout == "transposed":
        query, key, value = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (query, key, value))
    elif layout == "expanded":
        key, value = key[:, :1].expand(-1, heads, -1, -1), value[:, :1].expand(-1, heads, -1, -1)
    elif layout == "gqa":
        key, value = key[:, : max(1, heads // 2)], value[:, : max(1, heads // 2)]
    elif layout == "strided":
        key, value = (torch.cat([t, t], 2)[:, :, : t.shape[2]] for t in (key, value))
    return AttentionCall(query, key, value)


PATHS = (Backend.DEFAULT, Backend.EAGER, Backend.MATH, Backend.FLASH_ATTENTION)


@dataclass
class Tally:
    """What became of one path in one dtype: ratios of error to threshold, and calls it declined."""

    ratios: list[float] = field(default_factory=list)
    floors: list[float] = field(default_factory=list)
    alarms: list[str] = field(default_factory=list)
    declined: int = 0


def judge_sample(drawn: Sample) -> dict[Backend, tuple[Judgement, Judgement] | None]:
    """Each path's judgement with the noise of the others, and by the floor alone; None where it declined."""
    call = drawn.call
    expected = reference(call)
    errors: dict[Backend, RowErrors] = {}
    for path in PATHS:
        try:
            errors[path] = row_errors(run(call, path), expected)
        except (Declined, RuntimeError):
            continue
    noise = {path.value: errors[path] for path in (Backend.MATH, Backend.EAGER) if path in errors}
    dtype = call.query.dtype
    return {
        path: (
            judge(errors[path], expected, dtype, path.value, noise),
            judge(errors[path], expected, dtype, path.value),
        )
        if path in errors
        else None
        for path in PATHS
    }


def tally(seeds: range, count: int, longest: int) -> dict[tuple[str, torch.dtype], Tally]:
    """Judge `count` calls for every seed."""
    found = {(path.value, dtype): Tally() for path in PATHS for dtype in DTYPES}
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in seeds:
            for index, drawn in enumerate(samples(seed, count, longest)):
                dtype = drawn.call.query.dtype
                for path, judged in judge_sample(drawn).items():
                    entry = found[path.value, dtype]
                    if judged is None:
                        entry.declined += 1
                        continue
                    entry.ratios.append(judged[0].ratio)
                    entry.floors.append(judged[1].ratio)
                    if judged[0].ratio > 1:
                        words = (drawn.mask, drawn.values, drawn.layout, tuple(drawn.call.query.shape))
                        entry.alarms.append(f"seed {seed} call {index}: {words}, {judged[0].ratio:.2f}")
    return found


def table(sets: dict[str, dict[tuple[str, torch.dtype], Tally]]) -> list[str]:
    """Markdown rows, one for each set, path and dtype."""
    lines = [
        "| seeds | path | dtype | calls | declined | false alarms | largest error / threshold | by the floor alone |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, found in sets.items():
        for (path, dtype), entry in found.items():
            worst = max(entry.ratios, default=0.0)
            alone = max(entry.floors, default=0.0)
            lines.append(
                f"| {name} | {path} | {str(dtype).removeprefix('torch.')} | {len(entry.ratios)} | {entry.declined} "
                f"| {len(entry.alarms)} | {worst:.2f} | {alone:.2f} |"
            )
    return lines


HEADER = """# Calibration of the verdict

Written by `make calibrate`. Random healthy calls on a CPU, torch {torch}: lengths 1 to {longest}, head_dim and value
width from 1 to 256, {masks} kinds of mask, {values} kinds of values (tiny, saturated, outlier channels, sinks, equal
keys, one-hot values, ...), {layouts} layouts. The constants of the floor in `sdpa_repro/replaying/verdict.py` were set
on the first set of seeds and not touched before the second was run. A false alarm is a ratio above 1; FLASH_ATTENTION
declines calls whose value width differs from head_dim.

"""


def main() -> int:
    """Run both sets, print and write the table; status 1 when any healthy call raised an alarm."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=250, help="calls for each seed")
    parser.add_argument("--longest", type=int, default=1025)
    parser.add_argument("--fit", default="1:6", help="seeds A:B the constants were set on")
    parser.add_argument("--held-out", default="101:109", help="seeds A:B for confirmation")
    parser.add_argument("--output", type=Path, default=Path("docs/calibration.md"))
    options = parser.parse_args()
    start = time.perf_counter()
    sets = {}
    for name, text in (("fit", options.fit), ("held out", options.held_out)):
        first, last = (int(part) for part in text.split(":"))
        sets[f"{name} {text}"] = tally(range(first, last), options.count, options.longest)
    lines = table(sets)
    print("\n".join(lines))
    alarms = [alarm for found in sets.values() for entry in found.values() for alarm in entry.alarms]
    print("\n".join(alarms) or "no false alarm", f"({time.perf_counter() - start:.0f} s)")
    text = HEADER.format(
        torch=torch.__version__,
        longest=options.longest,
        masks=len(MASKS),
        values=len(VALUES),
        layouts=len(LAYOUTS),
    )
    options.output.parent.mkdir(exist_ok=True)
    options.output.write_text(text + "\n".join(lines) + "\n")
    return 1 if alarms else 0


if __name__ == "__main__":
    raise SystemExit(main())
