"""The family of pytorch#191937: in a tail block of one row, the last query row uses another row's mask."""

from __future__ import annotations

import torch
from torch import Tensor

from emulation import Arguments, attention_rows, replace_flash


def plant(*, narrow: int, wide: int, remainder: int, row: int, widest_narrow: int = 128) -> None:
    """Replace the CPU flash kernel: at the failing lengths its last query row sees mask row `row`.

    Fails when all hold: a mask; key and value with head stride 0; no grad; L > 1; and L % `narrow` ==
    `remainder` for head_dim up to `widest_narrow`, L % `wide` == `remainder` above.
    """

    def change(output: Tensor, arguments: Arguments) -> Tensor:
        length, width = arguments.query.shape[-2:]
        period = narrow if width <= widest_narrow else wide
        if length > max(1, row) and length % period == remainder and _shortcut(arguments):
            wrong, _ = attention_rows(arguments, slice(length - 1, length), mask_rows=slice(row, row + 1))
            output[:, :, length - 1 :] = wrong
        return output

    replace_flash(change)


def _shortcut(arguments: Arguments) -> bool:
    """Whether the kernel's shortcut for one key/value head applies: its conditions besides the length."""
    inputs = (arguments.query, arguments.key, arguments.value)
    grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    one_head = arguments.key.stride(1) == 0 and arguments.value.stride(1) == 0
    return arguments.attn_mask is not None and one_head and not grad
