"""A picture of one dump for pasting into an issue: heat map, mask and lengths, drawn by matplotlib (extra `plots`)."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from sdpa_repro.errors import InputError
from sdpa_repro.publishing import files
from sdpa_repro.publishing import heat as scale
from sdpa_repro.publishing.figures import heat_words
from sdpa_repro.publishing.html import plain
from sdpa_repro.publishing.length_strip import Strip
from sdpa_repro.publishing.section import Section

COLD = ("#eff4f8", "#cbdde9", "#86aeca")
HOT = ("#f4ad48", "#e2651f", "#b3132f", "#4d0b2d")
NAN, INK, SOFT, PASS, FAIL, SHOWN = "#b000b8", "#1a1e23", "#59626c", "#b9b6ad", "#e2651f", "#33526b"
COLUMNS = 4096
"""Columns of the heat map at most."""

DECADES = (-2.0, 3.0)
"""Powers of ten of the threshold that the colours span: blue up to 1, orange to dark beyond."""

PNG = b"\x89PNG\r\n\x1a\n"


def check_picture(path: Path, *, force: bool) -> None:
    """Raise InputError when matplotlib is missing, the name does not end in .png, or a file that is no PNG is there."""
    try:
        import matplotlib  # noqa: F401 (only whether it is there)
    except ModuleNotFoundError:
        raise InputError("--png needs matplotlib: pip install matplotlib") from None
    if path.suffix.lower() != ".png" or "\0" in str(path):
        raise InputError(f"--png {str(path)[:200]!r}: give a name that ends in .png")
    if path.is_dir():
        raise InputError(f"{path} is a folder: give a file name for --png")
    files.check_writable(path.parent)
    if path.exists() and not force and path.read_bytes()[: len(PNG)] != PNG:
        raise InputError(f"{path} exists and is no PNG picture: give --force to replace it, or another name")


def write_picture(section: Section, path: Path) -> Path:
    """Draw the section into a PNG file, written whole or not at all; returns its path."""
    return files.write(path.parent, path.name, picture(section))


def picture(section: Section) -> bytes:
    """The picture as PNG: title, heat map, mask and the first strip of lengths. A preloaded file is named in it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7.6), dpi=150, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    strips = section.strips
    axes: dict[str, Any] = figure.subplot_mosaic(
        [["heat", "heat"], ["mask", "strip"]], height_ratios=(1, 1.25), width_ratios=(1, 1.35)
    )
    _title(figure, section)
    _heat(figure, axes["heat"], section)
    _mask(axes["mask"], section)
    _strip(axes["strip"], strips[0] if strips else None, section)
    out = io.BytesIO()
    figure.savefig(out, format="png", metadata={"Software": "sdpa-repro"})
    return out.getvalue()


def _title(figure: Any, section: Section) -> None:
    cause = _wrapped(plain(section.explanation.cause, 220), 100)
    planted = ", ".join(plain(name, 60) for name in section.preloaded)
    note = f"\nPRELOADED: {planted}; not a finding about PyTorch alone" if planted else ""
    figure.suptitle(_literal(cause + note), x=0.01, ha="left", fontsize=12, fontweight="bold", color=INK)


def _literal(text: str) -> str:
    """Dollar signs begin formulas in matplotlib."""
    return text.replace("$", r"\$")


def _wrapped(text: str, width: int) -> str:
    lines = [""]
    for word in text.split(" "):
        if lines[-1] and len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines[:3])


def _heat(figure: Any, axes: Any, section: Section) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    heat = section.heat
    if heat.codes is None:
        _empty(axes, heat.missing)
        return
    share = -DECADES[0] / (DECADES[1] - DECADES[0])
    stops = [(index * share / 2, shade) for index, shade in enumerate(COLD)]
    stops += [(share + index * (1 - share) / 3, shade) for index, shade in enumerate(HOT)]
    colours = LinearSegmentedColormap.from_list("error", stops).with_extremes(bad=(1, 1, 1, 0), over=NAN)
    codes = scale.worst_of(heat.codes, -(-heat.codes.shape[1] // COLUMNS)).double()
    powers = ((codes - scale.LIMIT) / scale.PER_DECADE).clamp(*DECADES)
    powers[codes == scale.NONFINITE] = DECADES[1] + 1
    powers[codes <= scale.UNDECIDED] = float("nan")
    rows, planes = heat.codes.shape[1] * heat.step, len(heat.codes)
    axes.set_facecolor("white")
    axes.patch.set(hatch="////", edgecolor=PASS)
    drawn = axes.imshow(
        powers.numpy(),
        aspect="auto",
        interpolation="nearest",
        cmap=colours,
        vmin=DECADES[0],
        vmax=DECADES[1],
        extent=(-0.5, rows - 0.5, planes - 0.5, -0.5),
    )
    for bad in heat.bad:
        _arrow(axes, "▾", ((bad.first + bad.last) / 2, -0.5), ha="center", va="bottom")
    bar = figure.colorbar(drawn, ax=axes, pad=0.01, ticks=range(int(DECADES[0]), int(DECADES[1]) + 1))
    bar.ax.set_yticklabels(["≤ 0.01×", "0.1×", "threshold", "10×", "100×", "≥ 1000×"])
    axes.set_title(_literal(heat_words(heat)), loc="left", fontsize=9, color=SOFT, pad=14)
    axes.set_xlabel("query row", color=SOFT)
    axes.set_ylabel("head" if heat.batches == 1 else "batch · heads + head", color=SOFT)


def _mask(axes: Any, section: Section) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    grid, told = section.grid, section.mask
    if grid is None:
        _empty(axes, told.headline)
        return
    extent = (-0.5, grid.keys - 0.5, grid.rows - 0.5, -0.5)
    shades = LinearSegmentedColormap.from_list("mask", ["#f3f1eb", SHOWN])
    axes.imshow(
        grid.cells.numpy(), cmap=shades, vmin=0, vmax=255, interpolation="nearest", extent=extent, aspect="auto"
    )
    for first, last in grid.masked_rows[:200]:
        axes.axhspan(first - 0.5, last + 0.5, facecolor="none", edgecolor=SOFT, hatch="////", linewidth=0)
    for bad in section.heat.bad:
        if bad.batch == grid.batch:
            _arrow(axes, "▸", (-0.5, (bad.first + bad.last) / 2), ha="right", va="center")
    masked = f", {sum(last - first + 1 for first, last in grid.masked_rows)} rows fully masked (hatched)"
    axes.set_title(
        _literal(_wrapped(told.headline + (masked if grid.masked_rows else ""), 60)), loc="left", fontsize=9, color=SOFT
    )
    axes.set_xlabel("key", color=SOFT)
    axes.set_ylabel("query row", color=SOFT)


def _strip(axes: Any, strip: Strip | None, section: Section) -> None:
    if strip is None:
        _empty(axes, "lengths were not tried")
        return
    for index, line in enumerate(strip.lines):
        axes.plot(line.passes, [index] * len(line.passes), ".", color=PASS, markersize=3.5)
        axes.plot(line.fails, [index] * len(line.fails), "X", color=FAIL, markersize=7)
    axes.set_xlim(-1, strip.period)
    axes.set_ylim(len(strip.lines) - 0.5, -0.5)
    axes.set_yticks(range(len(strip.lines)), [str(line.start) for line in strip.lines], fontsize=7)
    axes.set_xlabel(f"{strip.variable} % {strip.period}    (× fails, • passes)", color=SOFT)
    rule = section.explanation.length_rule
    found = f"fails when {rule.rule}" if rule is not None and rule.rule else strip.words
    axes.set_title(_literal(_wrapped(found, 70)), loc="left", fontsize=9, color=SOFT)


def _arrow(axes: Any, text: str, place: tuple[float, float], **align: str) -> None:
    """A mark at the border of a picture, which the layout does not make room for."""
    axes.annotate(text, place, color=FAIL, annotation_clip=False, **align).set_in_layout(False)


def _empty(axes: Any, text: str) -> None:
    axes.set_axis_off()
    axes.text(0.0, 0.5, _literal(_wrapped(plain(text), 70)), color=SOFT, fontsize=10, va="center")
