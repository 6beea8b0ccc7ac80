"""Results as JSON and back, so that a later process can go on with them: the program's own dataclasses and enums.

Not pickle: a folder may come from somebody else, and reading it must not run anything. Only the classes that the
expected result is made of, by its type hints, are ever built.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_type_hints

TAG = "$"
PACKAGE = "sdpa_repro."


def encoded(value: Any, folder: Path) -> Any:
    """The value in what JSON has; a path below `folder` is kept relative to it. Raises TypeError for other objects."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Enum):
        return {TAG: _name(type(value)), "value": value.value}
    if isinstance(value, str):  # torch's version is more than a str
        return str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {TAG: "float", "value": str(float(value))}
    if isinstance(value, Path):
        return {TAG: "path", **_path(value, folder)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {each.name: encoded(getattr(value, each.name), folder) for each in dataclasses.fields(value)}
        return {TAG: _name(type(value)), "fields": fields}
    if isinstance(value, tuple):
        return {TAG: "tuple", "items": [encoded(item, folder) for item in value]}
    if isinstance(value, list):
        return [encoded(item, folder) for item in value]
    if isinstance(value, Mapping):
        return {TAG: "dict", "items": [[encoded(k, folder), encoded(v, folder)] for k, v in value.items()]}
    raise TypeError(f"{type(value).__name__} cannot be kept")


def decoded(value: Any, folder: Path, kind: type) -> Any:
    """What `encoded` was given, made of the classes that `kind` consists of. Raises ValueError for anything else."""
    try:
        found = _decoded(value, folder, _classes(kind))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a kept result: {error}") from error
    if not isinstance(found, kind):
        raise ValueError(f"not a {kind.__name__}")
    return found


def _decoded(value: Any, folder: Path, classes: Mapping[str, type]) -> Any:
    if isinstance(value, list):
        return [_decoded(item, folder, classes) for item in value]
    if not isinstance(value, dict):
        return value
    tag = value[TAG]
    if tag == "float":
        return float(value["value"])
    if tag == "path":
        return folder / value["below"] if "below" in value else Path(value["value"])
    if tag == "tuple":
        return tuple(_decoded(item, folder, classes) for item in value["items"])
    if tag == "dict":
        return {_decoded(k, folder, classes): _decoded(v, folder, classes) for k, v in value["items"]}
    found = classes[tag]
    if issubclass(found, Enum):
        return found(value["value"])
    return found(**{str(name): _decoded(field, folder, classes) for name, field in value["fields"].items()})


def _path(path: Path, folder: Path) -> dict[str, str]:
    try:
        return {"below": str(path.resolve().relative_to(folder.resolve()))}
    except ValueError:
        return {"value": str(path)}


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _classes(kind: Any, found: dict[str, type] | None = None) -> dict[str, type]:
    """The dataclasses and enums of this package that a type consists of, by name."""
    found = {} if found is None else found
    for part in get_args(kind):
        _classes(part, found)
    if not isinstance(kind, type) or not kind.__module__.startswith(PACKAGE) or _name(kind) in found:
        return found
    if issubclass(kind, Enum):
        found[_name(kind)] = kind
    elif dataclasses.is_dataclass(kind):
        found[_name(kind)] = kind
        for hint in get_type_hints(kind).values():
            _classes(hint, found)
    return found
