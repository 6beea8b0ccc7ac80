"""The lines of a script that build its tensors: closed forms, few values written out, or values read from a file.

Each way ends in a tensor with the shape and strides of the original, and shows the layout in plain sight: values in
the order of the dimensions, then `.transpose`, `.expand`, or `.as_strided` where nothing plainer gives these strides.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sdpa_repro.attention import AttentionCall, is_rule, overlaps_itself, span, span_elements, viewed_once
from sdpa_repro.errors import InputError
from sdpa_repro.recipe import Recipe, line

WIDTH = 120
"""Columns of a line."""

MOST_INLINE = 256
"""Values without a closed form that are written out, all tensors together."""

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by the bytes they take: a tensor's bits are written as these."""

_DTYPE_AND_DEVICE = re.compile(r"\.to\((torch\.\w+)\)\.to\(device\)")

NAMES = {"query": "query", "key": "key", "value": "value", "attn_mask": "mask"}
"""Variables of the script by argument."""


@dataclass(frozen=True)
class TensorText:
    """Lines that build the tensors, and how the values came in.

    inline: arguments whose values are written out. stored: arguments whose values are read from the file.
    """

    lines: tuple[str, ...]
    inline: tuple[str, ...] = ()
    stored: tuple[str, ...] = ()
    bias: str = ""
    """What of `torch.nn.attention.bias` the lines use."""


def tensor_lines(
    call: AttentionCall,
    recipes: Mapping[str, Recipe],
    *,
    inline: bool = False,
    remarks: Mapping[str, str] | None = None,
    file: str = "call.pt",
) -> TensorText:
    """Lines for every tensor of the call; needs a variable `device`, and with stored values a dict `stored`.

    recipes: closed forms by argument. inline: whether the values of other tensors may be written out (they are up to
    `MOST_INLINE` in number). remarks: a trailing comment by argument. Raises InputError for tensors without a closed
    form that overlap in a way that lines of a script cannot show.
    """
    rest = {name: tensor for name, tensor in call.tensors.items() if name not in recipes and not is_rule(tensor)}
    views = {name: owner for name in rest if (owner := _owner(name, rest))}
    count = sum(viewed_once(tensor).numel() for name, tensor in rest.items() if name not in views)
    written = inline and count <= MOST_INLINE
    bias = _causal_bias(call)
    lines: list[str] = []
    if rest and not written:
        lines.append(f'stored = torch.load(Path(__file__).with_name("{file}"), weights_only=True)["tensors"]')
    for name, tensor in sorted(call.tensors.items(), key=lambda item: item[0] in views):
        if is_rule(tensor):
            made = [f"mask = {bias}({call.query.shape[-2]}, {call.key.shape[-2]})"]
        elif name in recipes:
            made = _DTYPE_AND_DEVICE.sub(r".to(device, \1)", line(recipes[name], NAMES[name], "device")).splitlines()
        elif name in views:
            made = [_view(name, views[name], rest)]
        else:
            made = _values(name, tensor, written)
        lines += _remarked(made, (remarks or {}).get(name))
    used = tuple(name for name in rest if name not in views)
    return TensorText(tuple(lines), used if written else (), () if written else used, bias)


def _owner(name: str, tensors: Mapping[str, Tensor]) -> str | None:
    """The tensor in whose memory this one lies, the earlier of two that lie in each other.

    Raises InputError when memory is shared in another way.
    """
    if overlaps_itself(viewed_once(tensors[name])):
        raise InputError(f"{name} overlaps itself in a way no script shows plainly: use sdpa-repro share instead")
    here = span(tensors[name])
    earlier = True
    for other, tensor in tensors.items():
        there = span(tensor)
        if other == name:
            earlier = False
        elif here.nbytes and there.nbytes and here.overlaps(there):
            inside = there.start <= here.start and here.stop <= there.stop
            around = here.start <= there.start and there.stop <= here.stop
            if not (inside or around) or tensor.dtype != tensors[name].dtype:
                raise InputError(f"{name} and {other} overlap in a way no script shows plainly: share the dump instead")
            if inside and (earlier or not around):
                return other
    return None


def _view(name: str, owner: str, tensors: Mapping[str, Tensor]) -> str:
    """The line that lays a tensor over another one's memory, as a slice of its last dimension where it is one."""
    here, there = tensors[name], tensors[owner]
    offset = (here.data_ptr() - there.data_ptr()) // here.element_size()
    same = here.shape[:-1] == there.shape[:-1] and here.stride() == there.stride()
    if same and offset + here.shape[-1] <= there.shape[-1]:
        stop = offset + here.shape[-1]
        cut = f"[..., {offset or ''}:{stop}]" if stop < there.shape[-1] or offset else ""
        return f"{NAMES[name]} = {NAMES[owner]}{cut}"
    return (
        f"{NAMES[name]} = {NAMES[owner]}.as_strided({tuple(here.shape)}, {here.stride()}, "
        f"{NAMES[owner]}.storage_offset() + {offset})"
    )


def _causal_bias(call: AttentionCall) -> str:
    """The function of `torch.nn.attention.bias` that makes the mask, a rule without memory; "" for other masks."""
    if not is_rule(call.attn_mask):
        return ""
    return "causal_upper_left" if int(getattr(call.attn_mask, "variant", 1)) == 1 else "causal_lower_right"


def _values(name: str, tensor: Tensor, written: bool) -> list[str]:
    """Lines for one tensor whose values are written out or stored."""
    once = viewed_once(tensor)
    shape = tuple(once.shape)
    if written:
        words = once.contiguous().view(WORDS[tensor.element_size()]).flatten().tolist()
        dtype = WORDS[tensor.element_size()]
        source = f"torch.tensor({words}, dtype={dtype}).view({tensor.dtype}).view({shape})"
    elif tensor.dtype == torch.bool:
        bits = f'stored["{name}"]["data"][:, None] >> torch.arange(8)'
        source = f"(({bits}) & 1).bool().flatten()[:{once.numel()}].view({shape})"
    else:
        source = f'stored["{name}"]["data"]'
    variable = NAMES[name]
    text = f"{variable} = {source}.to(device){layout_text(tensor)}"
    if _strides_of(text, variable, tensor):
        return _wrapped_numbers(text)
    count, stride = span_elements(tensor), tuple(once.stride())
    return [
        f"memory = torch.zeros({count}, dtype={tensor.dtype}, device=device)",
        *_wrapped_numbers(f"memory.as_strided({shape}, {stride}).copy_({source})"),
        f"{variable} = memory.as_strided({tuple(tensor.shape)}, {tensor.stride()})",
    ]


def layout_text(tensor: Tensor) -> str:
    """Method calls that give a dense tensor of the viewed elements this tensor's strides, as far as plain ones can."""
    once = viewed_once(tensor)
    order = sorted(range(once.dim()), key=lambda dim: -int(once.stride()[dim]) if once.shape[dim] > 1 else 0)
    order = _keep_ones_in_place(order, once)
    moved = [dim for dim, now in enumerate(order) if dim != now]
    text = ""
    if len(moved) == 2:
        text += f".transpose({moved[0]}, {moved[1]}).contiguous().transpose({moved[0]}, {moved[1]})"
    elif moved:
        back = tuple(order.index(dim) for dim in range(len(order)))
        text += f".permute{tuple(order)}.contiguous().permute{back}"
    if once.shape != tensor.shape:
        one = tensor.dim() > 1 and tensor.shape[0] == 1 and tensor.stride(0) == 0  # as a dimension that expand adds
        text += f"{'[0]' * one}.expand{tuple(tensor.shape)}"
    return text


def _keep_ones_in_place(order: list[int], tensor: Tensor) -> list[int]:
    """The memory order of the dimensions larger than 1; those of size 1 stay where they are."""
    large = iter(dim for dim in order if tensor.shape[dim] > 1)
    return [next(large) if tensor.shape[dim] > 1 else dim for dim in range(tensor.dim())]


def _strides_of(text: str, variable: str, tensor: Tensor) -> bool:
    """Whether the layout calls of a line give the tensor's strides, tried on values without meaning."""
    calls = layout_text(tensor)
    dense = torch.empty(tuple(viewed_once(tensor).shape), dtype=torch.uint8)
    made = eval(f"dense{calls}", {"__builtins__": {}}, {"dense": dense})  # our own text, made of integers alone
    return bool(made.shape == tensor.shape and made.stride() == tensor.stride())


def _remarked(lines: list[str], remark: str | None) -> list[str]:
    """The lines, none too wide, with a remark behind the last one or, where that has no room, above them."""
    fitted = [part for each in lines for part in wrapped(each)]
    if not remark:
        return fitted
    if len(fitted) and len(fitted[-1]) + len(remark) + 4 <= WIDTH:
        return [*fitted[:-1], f"{fitted[-1]}  # {remark}"]
    return [f"# {remark}", *fitted]


def wrapped(text: str) -> list[str]:
    """An assignment as lines of at most `WIDTH` columns: the last calls of a chain move to lines of their own."""
    if len(text) <= WIDTH or "\n" in text:
        return text.splitlines()
    try:
        statement = ast.parse(text).body[0]
    except SyntaxError:
        return [text]
    if not isinstance(statement, ast.Assign):
        return [text]
    cuts: list[int] = []
    node: ast.expr = statement.value
    while True:
        if isinstance(node, ast.Subscript):
            cuts.append(node.slice.col_offset - 1)
            node = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            cuts.append((node.func.end_col_offset or 0) - len(node.func.attr) - 1)
            node = node.func.value
        else:
            break
    start = statement.value.col_offset
    cuts = [cut for cut in sorted(cuts) if not text[start:cut].isidentifier()]
    fitting = [cut for cut in cuts if cut <= WIDTH]
    if fitting:
        name = text[: text.index(" = ")]
        return [text[: fitting[-1]], *wrapped(f"{name} = {name}{text[fitting[-1] :]}")]
    return [text]


def _wrapped_numbers(text: str) -> list[str]:
    """A line with a long list of numbers, broken between them."""
    if len(text) <= WIDTH or "[" not in text:
        return [text]
    before, _, rest = text.partition("[")
    numbers, _, after = rest.partition("]")
    if not numbers.replace(",", "").replace("-", "").replace(" ", "").isdigit():
        return [text]
    broken = textwrap.wrap(numbers, WIDTH - 4, break_on_hyphens=False, break_long_words=False)
    return ["\n".join([before + "[", *("    " + part for part in broken), "]" + after])]
