"""Plain data out of an untrusted document: each reader returns a value of the type it names or raises Refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from sdpa_repro.dumping import Refused

MAX_ITEMS = 64
"""Entries in a list that the format itself defines (buffers, preloaded files)."""

MAX_DEPTH = 32
MAX_NODES = 20_000
MAX_BYTES = 512 << 10
MAX_INTEGER = 1 << 63
"""Limits on one piece of metadata (`context`, `origin`, …): nesting, keys and values, bytes of text, an integer."""


def mapping(value: object, where: str) -> dict[str, Any]:
    """A dict, its keys and values unchecked."""
    if not isinstance(value, dict):
        raise Refused(f"{where} must be a dict")
    return value


def listing(value: object, where: str) -> list[Any]:
    """A list of at most MAX_ITEMS, its items unchecked."""
    if not isinstance(value, list) or len(value) > MAX_ITEMS:
        raise Refused(f"{where} must be a list of at most {MAX_ITEMS}")
    return value


def text(value: object, where: str) -> str:
    """A string."""
    if type(value) is not str or len(value) > MAX_BYTES:
        raise Refused(f"{where} must be a string")
    return value


def flag(value: object, where: str) -> bool:
    """A bool, not an integer in its place."""
    if type(value) is not bool:
        raise Refused(f"{where} must be a bool")
    return value


def number(value: object, where: str) -> float:
    """A float; an int that a float can hold is accepted."""
    if type(value) is int and abs(value) < MAX_INTEGER:
        return float(value)
    if type(value) is not float:
        raise Refused(f"{where} must be a number")
    return value


def integer(value: object, where: str, low: int = 0, high: int = MAX_INTEGER - 1) -> int:
    """An integer from `low` to `high`, both included; bools and floats are none."""
    if type(value) is not int:
        raise Refused(f"{where} must be an integer")
    if not low <= value <= high:
        raise Refused(f"{where} is {value if abs(value) < MAX_INTEGER else 'huge'}, not between {low} and {high}")
    return value


def integers(value: object, where: str, longest: int, high: int) -> tuple[int, ...]:
    """A tuple of at most `longest` integers from 0 to `high`."""
    if type(value) is not list or len(value) > longest:
        raise Refused(f"{where} must be a list of at most {longest} integers")
    return tuple(integer(item, where, high=high) for item in value)


class _Budget:
    """What is left of the limits while one piece of metadata is walked."""

    def __init__(self) -> None:
        self.nodes = MAX_NODES
        self.bytes = MAX_BYTES

    def spend(self, nbytes: int, where: str) -> None:
        self.nodes -= 1
        self.bytes -= nbytes
        if self.nodes < 0 or self.bytes < 0:
            raise Refused(f"{where} is too large")


def plain(value: object, where: str) -> Any:
    """A copy made of dict, list, str, int, float, bool and None alone.

    Tuples become lists, subclasses their base type, a torch dtype or device its name. Raises Refused for anything
    else, for keys that are no strings, and past the limits above.
    """
    return _plain(value, where, MAX_DEPTH, _Budget())


def _plain(value: object, where: str, depth: int, budget: _Budget) -> Any:
    if depth < 0:
        raise Refused(f"{where.split('.')[0]} is nested too deeply")
    if value is None or isinstance(value, (bool, float)):
        budget.spend(8, where)
        return value if value is None or isinstance(value, bool) else float(value)
    if isinstance(value, int):
        budget.spend(8, where)
        return integer(int(value), where, low=-MAX_INTEGER)
    if isinstance(value, (str, torch.dtype, torch.device)):
        words = str.__str__(value) if isinstance(value, str) else str(value)
        budget.spend(len(words.encode("utf-8", "surrogatepass")), where)
        return words
    if isinstance(value, Mapping):
        budget.spend(8, where)
        return {
            _key(key, where, budget): _plain(item, f"{where}.{key}"[:80], depth - 1, budget)
            for key, item in value.items()
        }
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        budget.spend(8, where)
        return [_plain(item, where, depth - 1, budget) for item in value]
    raise Refused(f"{where} holds a {type(value).__name__}, not plain data")


def _key(key: object, where: str, budget: _Budget) -> str:
    if not isinstance(key, str):
        raise Refused(f"{where} has a key that is no string")
    words = str.__str__(key)
    budget.spend(len(words.encode("utf-8", "surrogatepass")), where)
    return words
