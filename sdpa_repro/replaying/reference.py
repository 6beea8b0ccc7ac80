"""The definition of attention, written out in tiles: softmax(query·keyᵀ·scale + mask)·value.

No SDPA call is involved, since a faulty kernel is faulty in float64 too. One tile of scores is held at a
time and key tiles that the mask hides are never touched, so memory does not grow with L·S and a sliding
window costs its own area. Heads that share key and value (grouped queries, expanded heads) share a tile.

Next to the output every row gets the sums from which its rounding error is bounded (`RowScale`): they
ride along as five extra columns of value in the same matrix product.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sdpa_repro.attention import AttentionCall
from sdpa_repro.replaying.poisoned import Broken, sees
from sdpa_repro.replaying.runs import TILE, Run, plan
from sdpa_repro.replaying.tiles import EXTRA, Keys, Room, RowScale, attend_block, augmented, extra_columns

CONVERTED_BYTES = 16 << 20
"""Key and value of some heads are converted for all blocks of rows together when they take no more than this."""

TILE_BYTES = {"cpu": 4 << 20, "cuda": 96 << 20}
"""Scores held at a time, by device type: what the cache holds on a CPU, fewer and larger kernels on a GPU."""

BLOCK_ROWS = 1024
"""Query rows of a block at most, those of heads that share a key counted together."""

LARGE = 1 << 24
"""Scores from which several threads are worth their start."""


@dataclass(frozen=True)
class Block:
    """Rows [first, last) of heads [head, head + G) in one batch."""

    batch: int
    head: int
    heads: int
    first: int
    last: int
    output: Tensor
    """(G, R, Ev) in the working precision; 0 in rows that may attend to nothing."""
    scale: RowScale
    live: Tensor
    """(G, R) bool: the mask allows at least one key (finfo.min counts as not allowed)."""
    poisoned: Tensor
    """(G, R) bool: a key or value the mask hides from this row is NaN or infinite."""


@dataclass(frozen=True)
class Sketch:
    """What blocks compute in place of the columns of the reference: a few combinations of them.

    columns: (Ev, m) in the working precision. output: the output under test (B, H, L, Ev); its largest entry in a
    row, at most Σ p·w, stands in for that of the reference in `scale.size`.
    """

    columns: Tensor
    output: Tensor


@dataclass(frozen=True)
class Reference:
    """The whole reference: output (B, H, L, Ev), everything else (B, H, L), on the call's device."""

    output: Tensor
    scale: RowScale
    live: Tensor
    poisoned: Tensor

    @property
    def decides(self) -> Tensor:
        """Rows that may decide a verdict: live and not poisoned, (B, H, L) bool."""
        return self.live & ~self.poisoned


def four_dims(call: AttentionCall) -> AttentionCall:
    """The call as (B, H, L, E) with a mask expanded to (B, H, L, S): values only, layout is not promised.

    Missing dimensions are added in front, several batch dimensions become one, and a `CausalBias` becomes
    the bool mask it stands for (upper left: the causal flag).
    """
    query, key, value = call.query, call.key, call.value
    mask, is_causal = call.attn_mask, call.is_causal
    while query.dim() < 4:
        query, key, value = query[None], key[None], value[None]
    rows, keys = query.shape[-2], key.shape[-2]
    variant = getattr(mask, "variant", None)
    if variant is not None:
        mask, is_causal = None, True
        if int(variant) != 1:
            mask = torch.ones(rows, keys, dtype=torch.bool, device=query.device).tril(keys - rows)
            is_causal = False
    if query.dim() == key.dim() == value.dim() == 4 and query.shape[0] == key.shape[0] == value.shape[0]:
        mask = mask if mask is None else mask.expand(query.shape[0], query.shape[1], rows, keys)
        return replace(call, query=query, key=key, value=value, attn_mask=mask, is_causal=is_causal)
    batch = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    if mask is not None:
        mask = mask.expand(*batch, query.shape[-3], rows, keys)
        mask = mask.reshape(-1, *mask.shape[-3:]) if len(batch) > 1 else mask
    tensors = []
    for tensor in (query, key, value):
        tensor = tensor.expand(*batch, *tensor.shape[-3:])
        tensors.append(tensor.reshape(-1, *tensor.shape[-3:]) if len(batch) > 1 else tensor)
    return replace(call, query=tensors[0], key=tensors[1], value=tensors[2], attn_mask=mask, is_causal=is_causal)


def reference(
    call: AttentionCall, *, precision: torch.dtype = torch.float64, late: Callable[[], bool] | None = None
) -> Reference:
    """Attention by its definition on the call's own values, on the call's device.

    Returns output (B, H, L, Ev) in `precision` (missing dimensions of the call become 1). Dropout is
    ignored. Raises ValueError when shapes do not fit together, and TimeoutError as soon as `late`, which is asked once
    a block, says True.
    """
    flat = four_dims(call)
    batches, heads, rows, _ = flat.query.shape
    device = flat.query.device
    made = torch.empty if flat.key.shape[2] else torch.zeros  # every row is in a block, unless there is no key

    def column(dtype: torch.dtype) -> Tensor:
        return made(batches, heads, rows, dtype=dtype, device=device)

    output = made(batches, heads, rows, flat.value.shape[-1], dtype=precision, device=device)
    weight, spread, scores, rounded, size = (column(precision) for _ in range(5))
    live, poisoned = column(torch.bool), column(torch.bool)

    def keep(found: Generator[Block, None, None]) -> None:
        with closing(found):  # it is within modes of its own, which end in the wrong order when a traceback keeps it
            for block in found:
                if late is not None and late():
                    raise TimeoutError("the reference was stopped before its end")
                here = (block.batch, slice(block.head, block.head + block.heads), slice(block.first, block.last))
                output[here] = block.output
                weight[here], spread[here] = block.scale.weight, block.scale.spread
                scores[here], rounded[here], size[here] = block.scale.scores, block.scale.rounded, block.scale.size
                live[here], poisoned[here] = block.live, block.poisoned

    threads = torch.get_num_threads() if device.type == "cpu" and precision == torch.float64 else 1
    if (
        threads == 1
        or batches * heads * rows * flat.key.shape[2] < LARGE
        or not _beside_each_other(flat, threads, keep)
    ):
        keep(blocks(flat, precision=precision))
    scale = RowScale(weight, spread, scores, rounded, size, flat.key.shape[2])
    return Reference(output, scale, live, poisoned)


def _beside_each_other(call: AttentionCall, threads: int, keep: Callable[[Generator[Block, None, None]], None]) -> bool:
    """The blocks in several threads of one torch thread each, since small tiles gain little from more.

    Returns False, with nothing done, when there are too few heads to share out.
    """
    check_shapes(call)
    parts = list(_parts(call, TILE_BYTES["cpu"] // torch.float64.itemsize, threads))
    if len(parts) < threads:
        return False
    inference = torch.is_inference_mode_enabled()  # a thread starts without it, and could not write to its tensors

    def share(number: int) -> None:
        torch.set_num_threads(1)  # of this thread
        with torch.inference_mode(inference), torch.no_grad():
            room = Room(torch.float64, call.query.device)
            for part in parts[number::threads]:
                keep(_head_blocks(call, part, room, None))

    try:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(share, range(threads)))
    finally:
        torch.set_num_threads(threads)
    return True


def blocks(
    call: AttentionCall,
    *,
    precision: torch.dtype = torch.float64,
    tile_bytes: int | None = None,
    sketch: Sketch | None = None,
) -> Generator[Block, None, None]:
    """The reference block by block, for callers that compare and forget. `call` as from `four_dims`.

    With a `sketch` a block's output is reference·columns (G, R, m), at the cost of m columns.
    """
    budget = tile_bytes or TILE_BYTES.get(call.query.device.type, TILE_BYTES["cpu"])
    batches, heads, rows, _ = call.query.shape
    check_shapes(call)
    if 0 in (batches, heads, rows, call.key.shape[2]):
        return
    with torch.no_grad(), torch.autocast(call.query.device.type, enabled=False):
        room = Room(precision, call.query.device)
        for part in _parts(call, budget // room.itemsize):
            yield from _head_blocks(call, part, room, sketch)


@dataclass(frozen=True)
class Part:
    """Some heads of one batch, computed together, with their mask (H or 1, L, S) and the runs of each block."""

    batch: int
    heads: Heads
    mask: Tensor | None
    step: int
    plans: list[list[Run]]


def _parts(call: AttentionCall, most: int, threads: int = 1) -> Iterator[Part]:
    """Everything there is to compute, `most` scores at a time, in no fewer parts than `threads` where heads allow."""
    groups, mask = head_groups(call), call.attn_mask
    together = -(-call.query.shape[0] * len(groups) // threads)
    size = groups[0][1] - groups[0][0]
    rows, keys, step, chunk = *_lengths(call), *_block_size(call, size, most)
    if mask is not None and mask.stride(1):
        for batch in range(call.query.shape[0]):
            for heads in _batched(groups, min(together, max(1, most // (size * min(step, rows) * min(chunk, keys))))):
                theirs = mask[batch, heads.first : heads.first + heads.count]
                yield Part(batch, heads, theirs, step, plan(theirs, call.is_causal, rows, keys, step, chunk))
        return
    plans: list[list[Run]] = []
    for batch in range(call.query.shape[0]):
        own = None if mask is None else mask[batch, :1]
        if not plans or (mask is not None and mask.stride(0)):
            plans = plan(own, call.is_causal, rows, keys, step, chunk)
        largest = max([1, *((run.last - run.first) * (run.below - run.above) for runs in plans for run in runs)])
        for heads in _batched(groups, min(together, max(1, most // (size * largest)))):
            yield Part(batch, heads, own, step, plans)


def _lengths(call: AttentionCall) -> tuple[int, int]:
    """L and S."""
    return call.query.shape[2], call.key.shape[2]


def _block_size(call: AttentionCall, size: int, most: int) -> tuple[int, int]:
    """Query rows of a block, a power of two, and keys of a run, for groups of `size` heads and `most` scores."""
    step = 1 << (max(64, min(BLOCK_ROWS // size, most // size // TILE)).bit_length() - 1)
    return step, max(1, most // size // min(step, call.query.shape[2]) // TILE) * TILE


def rows_of(call: AttentionCall, batch: int, head: int, rows: Tensor) -> AttentionCall:
    """The call for some query rows of one head, (1, 1, n, E), its causal flag written into the mask.

    `call` as from `four_dims`; `rows` int64 (n,). For measuring another path's error on few rows.
    """
    _, _, (key_head, value_head) = next(group for group in head_groups(call) if group[0] <= head < group[1])
    mask = None if call.attn_mask is None else call.attn_mask[batch, head, rows][None, None]
    if call.is_causal:
        causal = torch.arange(call.key.shape[2], device=rows.device) <= rows[:, None]
        if mask is None or mask.dtype == torch.bool:
            mask = causal[None, None] if mask is None else mask & causal
        else:
            mask = mask.masked_fill(~causal, float("-inf"))
    return replace(
        call,
        query=call.query[batch, head, rows][None, None],
        key=call.key[batch, key_head][None, None],
        value=call.value[batch, value_head][None, None],
        attn_mask=mask,
        is_causal=False,
        enable_gqa=False,
        scale=call.softmax_scale,
        dropout_p=0.0,
    )


def check_shapes(call: AttentionCall) -> None:
    """Raise ValueError when query, key and value do not describe one attention."""
    query, key, value = call.query, call.key, call.value
    if key.shape[-2] != value.shape[-2]:
        raise ValueError(f"key has {key.shape[-2]} positions, value has {value.shape[-2]}")
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"query has head_dim {query.shape[-1]}, key has {key.shape[-1]}")
    for name, tensor in (("key", key), ("value", value)):
        count = tensor.shape[-3]
        fits = count == query.shape[-3] or count == 1 or (call.enable_gqa and count and query.shape[-3] % count == 0)
        if not fits:
            raise ValueError(f"query has {query.shape[-3]} heads, {name} has {count}")


def head_groups(call: AttentionCall) -> list[tuple[int, int, tuple[int, int]]]:
    """Runs of query heads over one key head and one value head: (first, last, (key head, value head))."""
    heads = call.query.shape[1]

    def source(tensor: Tensor, head: int) -> int:
        count = tensor.shape[1]
        return 0 if tensor.stride(1) == 0 else head // (heads // count)

    groups: list[tuple[int, int, tuple[int, int]]] = []
    for head in range(heads):
        shared = (source(call.key, head), source(call.value, head))
        if groups and groups[-1][2] == shared:
            groups[-1] = (groups[-1][0], head + 1, shared)
        else:
            groups.append((head, head + 1, shared))
    return groups


@dataclass(frozen=True)
class Heads:
    """Query heads [first, first + groups·size) in groups that each share one key head and one value head."""

    first: int
    size: int
    key_heads: tuple[int, ...]
    value_heads: tuple[int, ...]

    @property
    def groups(self) -> int:
        return len(self.key_heads)

    @property
    def count(self) -> int:
        return self.groups * self.size


def _batched(groups: list[tuple[int, int, tuple[int, int]]], most: int) -> Iterator[Heads]:
    """Neighbouring groups of one size, at most `most` of them together."""
    start = 0
    while start < len(groups):
        first, last, _ = groups[start]
        stop = start + 1
        while stop < len(groups) and stop - start < most and groups[stop][1] - groups[stop][0] == last - first:
            stop += 1
        shared = [pair for _, _, pair in groups[start:stop]]
        yield Heads(first, last - first, tuple(key for key, _ in shared), tuple(value for _, value in shared))
        start = stop


def _chosen(tensor: Tensor, heads: tuple[int, ...]) -> Tensor:
    """Heads of (H, S, E) as (len(heads), S, E): a view where they are one head or neighbours."""
    first = heads[0]
    if all(head == first for head in heads):
        return tensor[first : first + 1].expand(len(heads), -1, -1)
    if heads == tuple(range(first, first + len(heads))):
        return tensor[first : first + len(heads)]
    return tensor[list(heads)]


def _head_blocks(call: AttentionCall, part: Part, room: Room, sketch: Sketch | None) -> Generator[Block, None, None]:
    """The blocks of a part."""
    batch, heads, step = part.batch, part.heads, part.step
    here = slice(heads.first, heads.first + heads.count)
    query = call.query[batch, here]
    keys, broken = _keys_of(call, batch, heads, room, sketch)
    for number, runs in enumerate(part.plans):
        rows = slice(number * step, min((number + 1) * step, query.shape[1]))
        bias = None if part.mask is None else part.mask[:, rows]
        size = None if sketch is None else sketch.output[batch, here, rows].abs().amax(-1).to(room.dtype)
        block = query[:, rows].to(room.dtype)
        output, scale, live = attend_block(block, rows.start, keys, runs, bias, call, room, size)
        poisoned = torch.zeros_like(live)
        if broken is not None:
            poisoned, seen = sees(broken, bias, rows, call.is_causal)
            output.masked_fill_(seen[..., None], float("nan"))
        if not bool(live.all()):
            output.masked_fill_(~live[..., None], 0.0)
        yield Block(batch, heads.first, heads.count, rows.start, rows.stop, output, scale, live, poisoned)


def _keys_of(
    call: AttentionCall, batch: int, heads: Heads, room: Room, sketch: Sketch | None
) -> tuple[Keys, Broken | None]:
    """Key and value of some heads, converted when they are small; which positions hold NaN or Inf, if any."""
    key, value = _chosen(call.key[batch], heads.key_heads), _chosen(call.value[batch], heads.value_heads)
    columns = extra_columns(key, value, room.dtype)
    broken = None
    if columns[1] is not None:
        query = call.query[batch, heads.first : heads.first + heads.count]
        broken = Broken.of(columns[1], query, key, value, call.softmax_scale).for_heads(heads.size)
    if sketch is not None:
        value = value.to(room.dtype) @ sketch.columns
    elements = key.shape[0] * key.shape[1] * (key.shape[2] + value.shape[2] + EXTRA)
    if elements * room.itemsize > CONVERTED_BYTES:
        return Keys(key, value, columns), broken
    converted = key if key.dtype == room.dtype else room.take("key", *key.shape).copy_(key)
    together = room.take("value", *value.shape[:2], value.shape[2] + EXTRA)
    return Keys(converted, augmented(value, columns, slice(None), together), None), broken
