"""Catch attention calls while a model or a script runs, check each live, and dump those that matter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sdpa_repro.capturing.records import CallRecord
    from sdpa_repro.capturing.session import Session, capture

__all__ = ["CallRecord", "Session", "capture"]


def __getattr__(name: str) -> Any:
    """Import torch only when one of the exported names is used."""
    if name == "CallRecord":
        from sdpa_repro.capturing import records

        return records.CallRecord
    if name in __all__:
        from sdpa_repro.capturing import session

        return getattr(session, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
