"""The kinds of call that a grid goes through: backend, dtype, head_dim and layout, each made from one dumped call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from types import MappingProxyType

import torch

from sdpa_repro.attention import AttentionCall
from sdpa_repro.environment import dtype_name
from sdpa_repro.errors import InputError
from sdpa_repro.explaining import changes
from sdpa_repro.replaying.backends import Backend, missing_reason

Change = Callable[[AttentionCall], AttentionCall | None]

AS_DUMPED = "as-dumped"
ALL = "all"

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
)


def with_one_head(call: AttentionCall) -> AttentionCall | None:
    """The first key/value head, repeated with stride 0 for all of them; None when there is but one already."""
    if call.key.dim() != 4 or all(tensor.shape[1] == 1 or not tensor.stride(1) for tensor in (call.key, call.value)):
        return None
    key, value = (tensor[:, :1].expand(-1, tensor.shape[1], -1, -1) for tensor in (call.key, call.value))
    return replace(call, key=key, value=value)


LAYOUTS: Mapping[str, Change] = MappingProxyType(
    {
        AS_DUMPED: lambda call: call,
        "dense": lambda call: changes.with_dense(call, "query", "key", "value"),
        "dense-query": lambda call: changes.with_dense(call, "query"),
        "dense-key-value": lambda call: changes.with_dense(call, "key", "value"),
        "one-head": with_one_head,
    }
)
"""Layouts by name, and what makes the dumped call one of them (None: it is one already)."""


@dataclass(frozen=True)
class Kind:
    """A call like the dumped one in another form, through one backend."""

    backend: Backend
    dtype: str
    head_dim: int
    layout: str

    def __str__(self) -> str:
        return f"{self.backend.value}, {self.dtype}, head_dim {self.head_dim}, {self.layout}"

    def made_from(self, call: AttentionCall) -> AttentionCall | str:
        """The call in this form, or why it cannot have it."""
        cast = call if self.dtype == dtype_name(call.query.dtype) else changes.cast(call, DTYPES[self.dtype])
        if cast is None:
            return f"a value overflows in {self.dtype}"
        wide = cast if self.head_dim == call.query.shape[-1] else changes.with_head_dim(cast, self.head_dim)
        if wide is None:
            return "tensors that share memory cannot grow"
        return LAYOUTS[self.layout](wide) or f"the call is {self.layout} as it was dumped"


def kinds_of(
    call: AttentionCall,
    ran: str | None,
    *,
    backends: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    head_dims: Sequence[int] = (),
    layouts: Sequence[str] = (),
) -> list[Kind]:
    """Every combination of what is asked for; what is not asked for is as in the dumped call.

    ran: the kernel that ran in the model, the backend to try when none is asked for. Raises InputError for names
    that do not exist and head_dims below 1.
    """
    own = dtype_name(call.query.dtype)
    wanted_dtypes = [own if name == "captured" else name for name in dtypes or (own,)]
    _known(set(wanted_dtypes) - {own}, DTYPES, "dtype")
    _known(layouts, LAYOUTS, "layout")
    if any(width < 1 for width in head_dims):
        raise InputError("a head_dim is at least 1")
    chosen = _backends(call, ran, backends)
    widths = head_dims or (call.query.shape[-1],)
    combined = product(chosen, wanted_dtypes, widths, layouts or (AS_DUMPED,))
    return list(dict.fromkeys(Kind(*each) for each in combined))


def _backends(call: AttentionCall, ran: str | None, asked: Sequence[str]) -> list[Backend]:
    device = call.query.device.type
    if ALL in asked:
        return [backend for backend in Backend if not missing_reason(backend, device)]
    names = {backend.value for backend in Backend}
    if not asked:
        here = ran in names and not missing_reason(Backend(ran), device)
        return [Backend(ran) if here else Backend.DEFAULT]
    _known(asked, names, "backend")
    return [Backend(name) for name in asked]


def _known(names: Sequence[str] | set[str], known: Mapping[str, object] | set[str], what: str) -> None:
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise InputError(f"there is no {what} {unknown[0]!r}: choose from {', '.join(known)}")
