"""A mask drawn with characters."""

from __future__ import annotations

import torch
from torch import Tensor

from sdpa_repro.attention import AttentionCall
from sdpa_repro.visibility import bias_rows, row_blocks, scores_shape


def picture(
    call: AttentionCall, width: int = 48, height: int = 24, batch: int = 0, head: int = 0, *, ascii_only: bool = False
) -> list[str]:
    """The mask of one batch and head as lines of characters, rows down and keys across, with a legend.

    A character stands for a block of rows × keys: all allowed, some, none; "x" where the rows are fully masked.
    finfo.min counts as hidden.
    """
    _, _, rows, keys = scores_shape(call)
    if not rows or not keys:
        return [f"nothing to draw: L = {rows}, S = {keys}"]
    everything, some, nothing, masked = "#+.x" if ascii_only else "█▒·x"
    tall, wide = -(-rows // height), -(-keys // width)
    margin = len(str(rows - 1))
    lines = []
    for start in range(0, rows, tall):
        any_seen, all_seen, live = _row_group(call, batch, head, start, min(start + tall, rows))
        cells = []
        for left in range(0, keys, wide):
            seen = any_seen[left : left + wide].any()
            cell = everything if all_seen[left : left + wide].all() else some if seen else nothing
            cells.append(cell if live.any() else masked)
        flag = f" {masked}" if live.any() and not live.all() else ""
        lines.append(f"{start:>{margin}} {''.join(cells)}{flag}")
    times = "x" if ascii_only else "×"
    lines.append(f"{'':>{margin}} {everything} all allowed, {some} some, {nothing} none, {masked} fully masked rows")
    lines.append(
        f"{'':>{margin}} one character: {_plural(tall, 'query row')} (down) {times} {_plural(wide, 'key')} (across)"
    )
    return lines


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _row_group(call: AttentionCall, batch: int, head: int, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
    """Over the rows [start, stop): keys that some row sees, keys that all see, and rows that see any key."""
    any_seen, all_seen, live = [], [], []
    for first, last in row_blocks(stop - start, call.key.shape[-2]):
        visible = bias_rows(call, batch, head, start + first, start + last)
        any_seen.append(visible.any(0).cpu())
        all_seen.append(visible.all(0).cpu())
        live.append(visible.any(1).cpu())
    return torch.stack(any_seen).any(0), torch.stack(all_seen).all(0), torch.cat(live)
