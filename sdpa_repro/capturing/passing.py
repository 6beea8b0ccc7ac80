"""Which calls are only passed through: tensors without memory to read, or code that is being traced."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from sdpa_repro.attention import AttentionCall, is_rule

COMPILED = "torch.compile tracing (of the compiled calls only those of backend='eager' are seen)"
FAKE = "fake tensors (tracing)"
TRACED = "torch.jit.trace"
NOT_TENSORS = "arguments that are not tensors (torch.fx tracing)"
NESTED = "nested tensors"
FUNCTORCH = "functorch (vmap, grad) tensors"
FLAT = "tensors of less than two dimensions (which torch refuses)"
GRAPH = "CUDA graph capture (replays are not seen)"
RECOMPUTED = "recomputed by torch.utils.checkpoint, which stops within the call"

_PLAIN_DISPATCH = Tensor.__torch_dispatch__


def bound(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> AttentionCall:
    """The arguments as `scaled_dot_product_attention` takes them. Raises TypeError for ones it does not have."""
    return AttentionCall(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def bind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> AttentionCall | None:
    """The call, or None when the arguments do not fit (torch then says so itself)."""
    try:
        return bound(*args, **kwargs)
    except TypeError:
        return None


def reason_to_pass(call: AttentionCall) -> str | None:
    """Why this call cannot be looked at, in words for the report; None when it can."""
    for tensor in (call.query, call.key, call.value, call.attn_mask):
        reason = _reason(tensor) if tensor is not None else None
        if reason is not None:
            return reason
    if min(tensor.dim() for tensor in (call.query, call.key, call.value)) < 2:
        return FLAT
    if torch._C._get_tracing_state() is not None:
        return TRACED
    if torch.compiler.is_compiling():
        return COMPILED
    if call.query.is_cuda and torch.cuda.is_current_stream_capturing():
        return GRAPH
    return None


def _reason(tensor: Any) -> str | None:
    if not isinstance(tensor, Tensor):
        return NOT_TENSORS
    kind = type(tensor)
    if kind is not Tensor and kind.__torch_dispatch__ is not _PLAIN_DISPATCH:
        if _is_dtensor(tensor):
            return None
        if torch.compiler.is_compiling() or kind.__name__ == "FunctionalTensor":
            return COMPILED
        if kind.__name__ == "FakeTensor":
            return FAKE
        return NESTED if tensor.is_nested else f"{kind.__name__} tensors"
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return FUNCTORCH
    if torch._is_functional_tensor(tensor):
        return COMPILED
    if tensor.is_nested:
        return NESTED
    if tensor.layout != torch.strided:
        return "sparse tensors"
    return "meta tensors" if tensor.is_meta else None


def ends_early(error: Exception) -> bool:
    """Whether it is no failure: `torch.utils.checkpoint` ends a recomputation this way when it has all it needs."""
    checkpoint = sys.modules.get("torch.utils.checkpoint")
    kind = getattr(checkpoint, "_StopRecomputationError", None)
    return kind is not None and isinstance(error, kind)


def local(call: AttentionCall, output: Tensor) -> tuple[AttentionCall, Tensor] | str:
    """Plain tensors: subclasses as what they hold, DTensors as this rank's shards; or a reason why that cannot be.

    A shard is an attention call by itself when query, key, value and output are sharded alike, along batch or
    heads, and the mask (a DTensor or not) broadcasts over the shards.
    """
    if not any(_is_dtensor(tensor) for tensor in (*call.tensors.values(), output)):
        return _plain(call), output if type(output) is Tensor else output.as_subclass(Tensor)
    sharded: list[Any] = [call.query, call.key, call.value, output]
    if not all(_is_dtensor(tensor) for tensor in sharded):
        return "DTensors mixed with plain tensors"
    placements = {_placements(tensor) for tensor in sharded}
    if len(placements) > 1 or any(dim not in (None, 0, 1) for dim in next(iter(placements))):
        return "DTensors that are not sharded alike along batch or heads"
    shards = {name: getattr(tensor, "_local_tensor", tensor) for name, tensor in call.tensors.items()}
    here = call.with_tensors(shards)
    mask = here.attn_mask
    if mask is not None and mask.dim() > 2:
        for size, rows in zip(mask.shape[-3::-1], here.query.shape[-3::-1], strict=False):
            if size not in (1, rows):
                return "DTensors with a mask that is not sharded with them"
    return here, sharded[3]._local_tensor


def _plain(call: AttentionCall) -> AttentionCall:
    """The call without Python subclasses of Tensor; a `CausalBias` is needed as it is."""
    odd = {name: tensor for name, tensor in call.tensors.items() if type(tensor) is not Tensor and not is_rule(tensor)}
    return call.with_tensors({name: tensor.as_subclass(Tensor) for name, tensor in odd.items()}) if odd else call


def _is_dtensor(tensor: Tensor) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _placements(tensor: Any) -> tuple[int | str | None, ...]:
    """Per mesh dimension: the sharded dimension, None for replicated, "other" for partial sums and the rest."""
    found: list[int | str | None] = []
    for placement in tensor.placements:
        if placement.is_replicate():
            found.append(None)
        elif placement.is_shard():
            found.append(placement.dim % tensor.dim())
        else:
            found.append("other")
    return tuple(found)
