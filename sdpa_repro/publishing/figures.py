"""The pictures of a page as plain data: what its script draws on canvas, and the strip of lengths as coordinates."""

from __future__ import annotations

import math
from typing import Any

from sdpa_repro.publishing import heat as scale
from sdpa_repro.publishing.heat import BadRows, Heat
from sdpa_repro.publishing.html import bytes_of
from sdpa_repro.publishing.length_strip import Strip, moduli
from sdpa_repro.publishing.section import Section
from sdpa_repro.visibility import ranges, ranges_text

TILES = (16, 32, 64, 128)
"""Query rows to a tile of the overlay: block sizes that kernels use."""

CELL, LEFT, TOP = 14, 52, 20
"""Pixels of a strip: to a length, and left and above of the lengths for their labels."""

MARKED_RESIDUES = 4
"""Failing residues whose columns are labelled; of more, none is."""


def heat_view(section: Section) -> dict[str, Any]:
    """The error heat map: data for the canvas, the list of wrong rows, and a sentence that says what is to be seen."""
    heat = section.heat
    if heat.codes is None:
        return {"missing": heat.missing, "words": "", "bad": [], "left_out": 0, "data": None}
    return {
        "missing": "",
        "words": heat_words(heat),
        "bad": [_bad(bad, heat) for bad in heat.bad],
        "left_out": heat.left_out,
        "tiles": TILES,
        "data": {
            "codes": bytes_of(heat.codes),
            "planes": list(heat.planes),
            "columns": heat.codes.shape[1],
            "rows": heat.rows,
            "heads": heat.heads,
            "batches": heat.batches,
            "step": heat.step,
            "tile": _tile(section),
            "scale": {"limit": scale.LIMIT, "decade": scale.PER_DECADE, "nonfinite": scale.NONFINITE},
        },
    }


def _tile(section: Section) -> int:
    """The tile size to begin with: that of the length rule, else none."""
    rule = section.explanation.length_rule
    return next((size for size in moduli(rule.rule if rule else None) if size in TILES), 0)


def heat_words(heat: Heat) -> str:
    """For people who cannot see the picture, and below it for those who can."""
    judged = f"{heat.judged:,} rows that decide (a row of one head counts as one)"
    if not heat.judged:
        return f"{heat.backend}: no row can decide"
    if not heat.wrong:
        return f"{heat.backend}: all {judged} are within their threshold, the largest at {times(heat.highest)} of it"
    worst = f"at {times(heat.highest)} of it" if math.isfinite(heat.highest) else "with NaN or infinity"
    return f"{heat.backend}: {heat.wrong:,} of {judged} are beyond their threshold, the worst {worst}"


def _bad(bad: BadRows, heat: Heat) -> dict[str, Any]:
    """One group of wrong rows, to list and to jump to."""
    rows = f"{bad.first}" if bad.first == bad.last else f"{bad.first}–{bad.last}"
    if len(bad.heads) == heat.heads:
        where = "every head" if heat.heads > 1 else "its one head"
    else:
        where = f"head{'s' * (len(bad.heads) != 1)} {ranges_text(ranges(bad.heads), 4)}"
    batch = f"batch {bad.batch}, " if heat.batches > 1 else ""
    plane = bad.batch * heat.heads + bad.worst[0]
    return {
        "rows": f"{'row' if bad.first == bad.last else 'rows'} {rows}",
        "where": f"{batch}{where}",
        "ratio": times(bad.ratio),
        "row": bad.worst[1],
        "plane": heat.planes.index(plane) if plane in heat.planes else 0,
    }


def times(ratio: float) -> str:
    """A ratio for people: "49×", "0.36×", "NaN or Inf"."""
    if not math.isfinite(ratio):
        return "NaN or Inf"
    return f"{ratio:,.0f}×" if ratio >= 10 else f"{ratio:.2g}×"


def mask_view(section: Section) -> dict[str, Any]:
    """The mask: data for the canvas, the words that describe it, and which rows are fully masked."""
    grid, told = section.grid, section.mask
    words = told.words()
    if grid is None:
        return {"headline": told.headline, "words": words, "data": None, "caption": "", "label": told.headline}
    wrong = [[bad.first, bad.last] for bad in section.heat.bad if bad.batch == grid.batch]
    place = "" if grid.alone else f"Batch {grid.batch}, head {grid.head}. "
    caption = f"{place}One cell: {_plural(grid.tall, 'query row')} × {_plural(grid.wide, 'key')}."
    if grid.sampled:
        caption += " Some rows of each cell were looked at, not all."
    masked = f"fully masked rows: {ranges_text(grid.masked_rows)}" if grid.masked_rows else "no row is fully masked"
    return {
        "headline": told.headline,
        "words": words,
        "caption": caption,
        "masked": masked,
        "label": f"Mask, query rows down and keys across: {told.headline}; {masked}",
        "data": {
            "cells": bytes_of(grid.cells),
            "masked": bytes_of(grid.masked),
            "height": grid.cells.shape[0],
            "width": grid.cells.shape[1],
            "tall": grid.tall,
            "wide": grid.wide,
            "rows": grid.rows,
            "keys": grid.keys,
            "wrong": wrong,
        },
    }


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def strip_view(strip: Strip) -> dict[str, Any]:
    """A strip as SVG coordinates: passing lengths as one path of dots, failing ones as crosses in squares."""
    width, height = LEFT + strip.period * CELL + 6, TOP + len(strip.lines) * CELL + 6
    dots, hollow, fails, labels = [], [], [], []
    for index, line in enumerate(strip.lines):
        middle = TOP + index * CELL + CELL / 2
        labels.append({"y": f"{middle + 3.5:g}", "text": line.start})
        dots += [f"M{LEFT + column * CELL + CELL / 2:g} {middle:g}h0" for column in line.passes]
        hollow += [f"M{LEFT + column * CELL + CELL / 2 - 2:g} {middle:g}h4" for column in line.untested]
        fails += [
            {
                "x": LEFT + column * CELL + 1,
                "y": TOP + index * CELL + 1,
                "text": f"{strip.variable} = {line.start + column} fails",
                "own": line.start + column == strip.origin,
            }
            for column in line.fails
        ]
    few = strip.residues if len(strip.residues) <= MARKED_RESIDUES else ()
    return {
        "words": strip.words,
        "label": strip.label,
        "variable": strip.variable,
        "period": strip.period,
        "width": width,
        "height": height,
        "dots": "".join(dots),
        "hollow": "".join(hollow),
        "fails": fails,
        "labels": labels,
        "columns": [
            {"x": LEFT + column * CELL + CELL / 2, "text": column, "bad": column in few}
            for column in _ticks(strip, few)
        ],
        "bands": [{"x": LEFT + column * CELL, "height": len(strip.lines) * CELL} for column in few],
        "left_out": strip.left_out,
        "failing_out": strip.failing_out,
        "size": CELL - 2,
    }


def _ticks(strip: Strip, few: tuple[int, ...]) -> list[int]:
    """Columns with a number: the failing ones, and every eighth that is not next to one of them."""
    plain = [column for column in range(0, strip.period, 8) if all(abs(column - bad) > 1 for bad in few)]
    return sorted({*plain, *few})
