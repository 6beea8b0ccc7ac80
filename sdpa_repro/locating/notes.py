"""The values of a run as they are noted down: one row, valid tokens only, in host memory."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")
SEQUENCE = {
    "input_ids": "input_ids",
    "attention_mask": "attention_mask",
    "position_ids": "position_ids",
    **dict.fromkeys(TOKEN_TYPES, "token types"),
}
"""Arguments that run along the sequence, and their stage."""

PIXELS = ("pixel", "image_", "video_", "input_features")
"""First words of arguments that hold an image, a video or a sound."""


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor seen at a point of the run.

    stage: what it is ("position_ids", "query", ...). point: path of the module, or name of the function or input.
    layer: path of the layer it belongs to, "" outside. tensor: the row's values on the CPU, valid tokens only.
    axis: the dimension that runs over these tokens, None when there is none. part: what tells two values of one
    point apart ("cos of sliding_attention"). maker: path of the module that made the value.
    """

    stage: str
    point: str
    layer: str
    tensor: Tensor
    axis: int | None
    part: str = ""
    maker: str = ""


@dataclass
class Notes:
    """The list being written during a run. attention_mask: (L,) of the row; batch: rows of the run.

    mask_makers: for the path of a module with layers, the module that builds their masks. image_tokens: for each row
    of the batch, how many image features go to it, None while it is not known. problems: what could not be looked at.
    """

    attention_mask: Tensor
    batch: int
    row: int
    values: list[Value] = field(default_factory=list)
    mask_makers: dict[str, str] = field(default_factory=dict)
    image_tokens: list[int] | None = None
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.valid = self.attention_mask.nonzero().flatten()
        self.total = int(self.attention_mask.shape[0])

    def stage_of(self, name: str, tensor: Tensor) -> str:
        """The stage an argument belongs to by its name, "" for none. A mask of four dimensions is another stage."""
        if name in SEQUENCE and tensor.shape[-1:] == (self.total,) and tensor.dim() <= 3:
            return SEQUENCE[name]
        return "pixel inputs" if name.startswith(PIXELS) else ""

    def add(
        self,
        stage: str,
        point: str,
        tensor: Tensor,
        *,
        axis: int | None,
        batch: int | None = None,
        layer: str = "",
        part: str = "",
        maker: str | None = None,
    ) -> None:
        """Keep a tensor's row and valid tokens.

        axis, batch: dimensions from the end; a dimension that is not there or has another size is left whole.
        maker: the module at `point` itself when None.
        """
        tensor = tensor.detach()
        if batch is not None and tensor.dim() >= -batch:
            tensor = self.one_row(tensor, batch)
        along = self.along(tensor, axis)
        kept = tensor.index_select(axis, self.valid.to(tensor.device)) if along and axis is not None else tensor
        made = point if maker is None else maker
        self.values.append(Value(stage, point, layer, kept.to("cpu", copy=True), axis if along else None, part, made))

    def add_pixels(self, name: str, tensor: Tensor) -> None:
        """Keep the row's part of an image input; of a batch whose images are not one a row nothing is kept."""
        if self.batch == 1 or tensor.shape[0] == self.batch:
            self.add("pixel inputs", name, tensor, axis=None, batch=-tensor.dim())

    def settle(self) -> None:
        """Leave the row's image features of those of a whole batch, or none when it is not known which they are."""
        if self.batch == 1:
            return
        counts = self.image_tokens or []
        first = sum(counts[: self.row])
        kept = []
        for value in self.values:
            if value.stage != "image features":
                kept.append(value)
            elif counts and value.tensor.shape[0] == sum(counts):
                kept.append(replace(value, tensor=value.tensor[first : first + counts[self.row]]))
        self.values[:] = kept

    def one_row(self, tensor: Tensor, batch: int) -> Tensor:
        """The row of a tensor whose dimension `batch` counts rows; the whole when it has one for all."""
        if self.batch == 1 or tensor.shape[batch] != self.batch:
            return tensor
        return tensor.narrow(batch, self.row, 1)

    def along(self, tensor: Tensor, axis: int | None) -> bool:
        """Whether a dimension runs over the whole sequence, so that the valid tokens can be taken from it."""
        return axis is not None and tensor.dim() >= -axis and tensor.shape[axis] == self.total

    def put(self, hidden: Tensor, values: Tensor) -> Tensor:
        """Hidden states (B, L, width) with the row's valid tokens replaced by `values` (1, n, width), if they fit."""
        if hidden.dim() != 3 or values.dim() != 3 or hidden.shape[-1] != values.shape[-1]:
            return hidden
        row = self.row if hidden.shape[0] == self.batch else 0
        tokens = self.valid if hidden.shape[1] == self.total else torch.arange(hidden.shape[1])
        if len(tokens) != values.shape[1]:
            return hidden
        fed = hidden.clone()
        fed[row, tokens.to(hidden.device)] = values[0].to(hidden)
        return fed

    def keys(self, tensor: Tensor) -> Tensor:
        """The first `total` keys (dimension -2): a static cache has more slots than tokens."""
        return tensor.narrow(-2, 0, self.total) if tensor.shape[-2] > self.total else tensor

    def square(self, visible: Tensor) -> Tensor | None:
        """The part of a visibility (L, S) between valid tokens; None when neither side is the sequence."""
        rows, keys = visible.shape
        if keys > self.total:
            visible, keys = visible[:, : self.total], self.total
        if keys != self.total:
            return None
        valid = self.valid.to(visible.device)
        return visible[valid][:, valid] if rows == self.total else visible[:, valid]


def first_tensor(value: object) -> Tensor | None:
    """The tensor itself, or the first one in a tuple, list or model output."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, (tuple, list)):
        return next((each for each in value if isinstance(each, Tensor)), None)
    found = getattr(value, "last_hidden_state", None)
    return found if isinstance(found, Tensor) else None


def flat_features(value: object) -> Tensor | None:
    """Image features as one (n, width) tensor, from a tensor, a list of them, or a model output; None if unknown."""
    for name in ("pooler_output", "last_hidden_state"):
        inner = getattr(value, name, None)
        if inner is not None:
            return flat_features(inner)
    if isinstance(value, Tensor):
        return value.reshape(-1, value.shape[-1]) if value.dim() > 1 else None
    if isinstance(value, (tuple, list)):
        found = [flat for each in value if (flat := flat_features(each)) is not None]
        return torch.cat(found) if found and len({flat.shape[-1] for flat in found}) == 1 else None
    return None
