"""How `sdpa-repro show` prints a dump. Whatever comes from the dump is cleaned: it may come from a stranger."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sdpa_repro.cli import output

LONGEST = 300
"""Characters of one text from a dump that are printed; --json has all of it."""

MOST_FACTS = 40
"""Entries of an origin that are printed; it may come from a stranger."""

DIMENSIONS = ("batch", "head", "row", "last")


def print_dump(body: Mapping[str, Any]) -> None:
    """Print what `describe` found."""
    output.answer(body["summary"])
    output.line(f"file: {output.clean(body['file'])}, {body['file_bytes']} bytes")
    output.line()
    rows = [_tensor_row(name, told) for name, told in body["tensors"].items()]
    output.table(["tensor", "dtype", "shape", "stride", "offset", "align", "bytes", "memory"], rows)
    _print_mask(body["mask"])
    output.line()
    facts = [(name, text) for name, text in _facts(body) if text]
    margin = max(len(name) for name, _ in facts)
    for name, text in facts:
        output.line(f"{name:{margin}}  {text}")


def _tensor_row(name: str, told: Mapping[str, Any]) -> list[str]:
    if "rule" in told:
        rule = told["rule"]
        return [name, "CausalBias", str(tuple(rule["shape"])), "", "", "", "0", f"a rule: {rule['variant']}"]
    shape, stride = told["shape"], told["stride"]
    names = ("batch",) * (len(shape) - 4) + DIMENSIONS[4 - min(len(shape), 4) :]
    notes = [f"{dim} stride 0" for dim, n, s in zip(names, shape, stride, strict=True) if n > 1 and s == 0]
    if not notes:
        notes.append("contiguous" if told["contiguous"] else "not contiguous")
    if stride and stride[-1] not in (0, 1) and shape[-1] > 1:
        notes.append(f"last stride {stride[-1]}")
    if told["overlaps_itself"]:
        notes.append("overlaps itself")
    if told["shares_memory_with"]:
        notes.append(f"shares memory with {', '.join(told['shares_memory_with'])}")
    align = "" if told["align"] is None else str(told["align"])
    place = [str(told["offset"]), align, str(told["stored_bytes"]), ", ".join(notes)]
    return [name, told["dtype"], str(tuple(shape)), str(tuple(stride)), *place]


def _print_mask(told: Mapping[str, Any]) -> None:
    output.line()
    output.line(f"mask: {', '.join(told['words'])}")
    if len(told["parts"]) > 1:
        output.line("  batch row {}, head {}:".format(*told["pictured"]))
    for text in told["picture"]:
        output.line(f"  {text}")


def _facts(body: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Flags, live result, origin, surroundings and what it all reveals, as (name, text); the dump's texts cleaned."""
    call, origin, live = body["call"], body["origin"], body["live"]
    given = "given" if call["scale"] is not None else "1/sqrt(E), not given"
    flags = f"scale {call['softmax_scale']:.6g} ({given}), is_causal {call['is_causal']}"
    facts = [("flags", f"{flags}, enable_gqa {call['enable_gqa']}, dropout_p {call['dropout_p']:g}")]
    facts.append(("live", _live(live) if live is not None else "no live check recorded"))
    told = [(_text(name), _told(name, value)) for name, value in origin.items() if value not in (None, "", {})]
    facts += told[:MOST_FACTS]
    length = origin.get("total_length")
    if isinstance(length, int):
        facts.append(("residues", f"total length = {length % 32} mod 32, {length % 64} mod 64"))
    facts += [("preloaded", f"{_text(entry.get('name'))} (not run here)") for entry in body["preloaded"]]
    facts += [("context", _context(body["context"])), ("environment", _environment(body["environment"]))]
    return facts + [("reveals", text) for text in body["reveals"]]


def _told(name: object, value: object) -> str:
    """A fact about where the call comes from; `calls` is a count when it was made, not of the whole run."""
    return f"{_text(value)} up to this one" if name == "calls" else _text(value)


def _context(context: Mapping[str, Any]) -> str:
    """Modes and switches of the run, those that are off or usual left out; "" when none was recorded."""
    if not context:
        return ""
    words = [f"device {_text(context.get('device', 'unknown'))}"]
    words.append("grad on" if context.get("grad") else "no grad")
    wants = context.get("requires_grad")
    if isinstance(wants, Mapping) and any(wants.values()):
        words.append(f"requires_grad: {_text(', '.join(str(name) for name, value in wants.items() if value))}")
    backends = context.get("backends")
    if isinstance(backends, Mapping):
        off = [str(name) for name, value in backends.items() if not value]
        words.append(f"backends off: {_text(', '.join(off))}" if off else "all backends on")
    autocast = context.get("autocast")
    if isinstance(autocast, Mapping) and autocast.get("enabled"):
        words.append(f"autocast {_text(autocast.get('dtype'))}")
    switches = ("inference", "deterministic", "tf32", "math_half_reduction", "flush_denormal")
    words += [name.replace("_", " ") for name in switches if context.get(name) is True]
    for name in ("flash_impl", "matmul_precision", "threads"):
        if context.get(name) is not None:
            words.append(f"{name.replace('_', ' ')} {_text(context[name])}")
    return ", ".join(words)


def _environment(environment: Mapping[str, Any]) -> str:
    known = {name: value for name, value in environment.items() if value is not None}
    return ", ".join(f"{_text(name)} {_text(value)}" for name, value in known.items())


def _live(live: Mapping[str, Any]) -> str:
    """The live check's result in a line."""
    text = f"{_text(live.get('status', 'unknown'))} in {_text(live.get('ran', 'an unknown kernel'))}"
    ratio, error = live.get("ratio"), live.get("max_abs")
    if isinstance(ratio, (int, float)) and isinstance(error, (int, float)):
        text += f", max error {error:.3g}, {ratio:.3g} x the threshold"
    if live.get("wrong_rows"):
        text += f", {_text(live['wrong_rows'])} wrong rows"
    rows = live.get("rows")
    if isinstance(rows, list) and rows:
        text += f" (batch, head, row: {_text(rows[:4])}{' …' * (len(rows) > 4)})"
    return text + (f", {_text(live['reason'])}" if live.get("reason") else "")


def _text(value: object) -> str:
    """A value of the dump as one harmless line."""
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    text = output.clean(text[: 4 * LONGEST])
    return text if len(text) <= LONGEST else text[:LONGEST] + "…"
