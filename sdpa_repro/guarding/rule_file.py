"""The result of `explain --json` as a remedy: its conditions and length rule say which calls, its workarounds how.

The file is data: the rule's text is read clause by clause, nothing in it is evaluated.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from sdpa_repro.attention import AttentionCall, span, viewed_once
from sdpa_repro.errors import InputError
from sdpa_repro.explaining.rules import Clause, Rule
from sdpa_repro.guarding.cures import Cure
from sdpa_repro.guarding.remedies import Look, Remedy
from sdpa_repro.known_issues import SDP_BACKENDS
from sdpa_repro.situation import Answer, affected
from sdpa_repro.switches import dtype_name

LARGEST_FILE = 16 << 20
SCHEMAS = ("explain", "diagnose")
"""`diagnose` writes the keys of `explain` among its own into `result.json`."""

NEWEST_SCHEMA = 1
MOST_ENTRIES, LONGEST_RULE = 100, 400
"""Conditions in a file and characters of a length rule: explain writes far fewer, and each costs time in every call."""


@dataclass(frozen=True)
class RuleFile:
    """A remedy from a file. unneeded: why this torch does not need it, "" when it does."""

    remedy: Remedy
    unneeded: str


def read_rule(path: str | os.PathLike[str], devices: tuple[str, ...]) -> RuleFile:
    """The remedy that a result of `sdpa-repro explain --json` asks for, on a torch built for `devices`.

    A condition that cannot be told at a glance (these values, rows without a key) is taken as met: the change is
    exact, so that a call too many costs time alone. Raises InputError for a file that cannot be used.
    """
    name = Path(path).name
    found = _document(Path(path))
    backend = found.get("backend")
    if backend is None:
        raise InputError(f"{name}: the call that it explains does not fail there, so there is nothing to guard against")
    if backend not in (*SDP_BACKENDS, "default"):
        raise InputError(f"{name}: it is about {str(backend)[:40]!r}, which no call of SDPA chooses")
    replay = found["replay"] if isinstance(found.get("replay"), dict) else {}
    device = str(replay.get("device", "cpu")).partition(":")[0]
    conditions = _Conditions(
        backend,
        frozenset(_texts(found, "needed", name)),
        _pairs(found, name),
        _length_rule(found, name),
        str(replay.get("dtype")),
    )
    if not (conditions.needed or conditions.pairs or conditions.rule):
        raise InputError(f"{name}: it names no condition and no length rule; run explain to its end")
    remedy = Remedy(
        name,
        lambda look: _about(found, name),
        _fixed_in(found),
        _cure(found, backend, name),
        (device,),
        conditions.quick,
        conditions.applies,
    )
    return RuleFile(remedy, _unneeded(found, device, devices))


def parse_rule(text: str) -> Rule:
    """The rule that prints as `text`, such as "L % 32 == 1 and L > 1". Raises ValueError for anything else."""
    rule = Rule(tuple(_clause(part) for part in text.split(" and ")))
    if str(rule) != text:
        raise ValueError(text)
    return rule


_NAME = r"(?P<variable>[LS])(?: % (?P<modulus>[1-9]\d{0,5}))?"
_FORMS = (
    re.compile(rf"{_NAME} (?P<op>==|!=|<=|>=|<|>) (?P<number>\d{{1,12}}|S)"),
    re.compile(rf"{_NAME} (?P<op>in) \((?P<numbers>\d{{1,6}}(?:, \d{{1,6}})*)\)"),
    re.compile(rf"(?P<first>\d{{1,6}}) <= {_NAME} <= (?P<last>\d{{1,6}})"),
)


def _clause(text: str) -> Clause:
    found = next((match for form in _FORMS if (match := form.fullmatch(text))), None)
    if found is None:
        raise ValueError(text)
    parts = found.groupdict()
    variable, modulus = parts["variable"], int(parts["modulus"] or 0)
    if "first" in parts:
        return Clause(variable, "from", (int(parts["first"]), int(parts["last"])), modulus)
    if "numbers" in parts:
        return Clause(variable, "in", tuple(int(number) for number in parts["numbers"].split(", ")), modulus)
    if parts["number"] == "S":
        return Clause(variable, parts["op"], (), modulus, against_s=True)
    return Clause(variable, parts["op"], (int(parts["number"]),), modulus)


@dataclass(frozen=True)
class _Conditions:
    """What a call must be like. needed: all of these factors; pairs: one of each."""

    backend: str
    needed: frozenset[str]
    pairs: tuple[tuple[str, str], ...]
    rule: Rule | None
    dtype: str

    def quick(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, rows: int, keys: int) -> bool:
        """Mask, repeated heads and lengths, from which most calls are told."""
        if mask is None and "attn_mask" in self.needed:
            return False
        if "key_value_head_stride_0" in self.needed and not (_repeats(k) or _repeats(v)):
            return False
        return self.rule is None or self.rule.fails(rows, keys)

    def applies(self, look: Look) -> bool:
        """Everything that was needed."""
        if look.backend not in (self.backend, "unknown") and self.backend != "default":
            return False
        if "dtype" in self.needed and dtype_name(look.call.query.dtype) != self.dtype:
            return False
        return all(_met(id, look) for id in self.needed) and all(any(_met(id, look) for id in p) for p in self.pairs)


def _met(factor: str, look: Look) -> bool:
    """Whether the call has this factor of `explaining.factors`; True for one that a glance cannot tell."""
    return _FACTORS[factor](look) if factor in _FACTORS else True


def _repeats(tensor: Tensor) -> bool:
    return tensor.dim() > 2 and tensor.stride(-3) == 0 and tensor.shape[-3] > 1


def _shared_mask(call: AttentionCall) -> bool:
    mask = call.attn_mask
    if mask is None:
        return False
    return mask.shape[:-2] != call.query.shape[:-2] or 0 in mask.stride()


def _float_mask(call: AttentionCall) -> bool:
    return call.attn_mask is not None and call.attn_mask.dtype.is_floating_point


def _other_mask_dtype(call: AttentionCall) -> bool:
    mask = call.attn_mask
    return mask is not None and mask.dtype.is_floating_point and mask.dtype != call.query.dtype


_FACTORS: Mapping[str, Callable[[Look], bool]] = MappingProxyType(
    {
        "attn_mask": lambda look: look.call.attn_mask is not None,
        "key_value_head_stride_0": lambda look: _repeats(look.call.key) or _repeats(look.call.value),
        "no_grad": lambda look: not look.grad,
        "grad": lambda look: look.grad,
        "query_layout": lambda look: not look.call.query.is_contiguous(),
        "key_value_layout": lambda look: any(
            not viewed_once(tensor).is_contiguous() for tensor in (look.call.key, look.call.value)
        ),
        "scale": lambda look: look.call.scale is not None,
        "default_scale": lambda look: look.call.scale is None,
        "batch": lambda look: look.call.query.dim() == 4 and look.call.query.shape[0] > 1,
        "heads": lambda look: look.call.query.dim() > 2 and look.call.query.shape[-3] > 1,
        "enable_gqa": lambda look: look.call.enable_gqa,
        "bool_mask": lambda look: look.call.attn_mask is not None and look.call.attn_mask.dtype == torch.bool,
        "float_mask": lambda look: _float_mask(look.call),
        "mask_dtype": lambda look: _other_mask_dtype(look.call),
        "mask_head_broadcast": lambda look: _shared_mask(look.call),
        "no_mask": lambda look: look.call.attn_mask is None and not look.call.is_causal,
        "causal_flag": lambda look: look.call.is_causal,
        "memory_overlap": lambda look: span(look.call.key).overlaps(span(look.call.value)),
    }
)


def _document(path: Path) -> dict[str, Any]:
    hint = "give what `sdpa-repro explain --json DUMP` printed, or result.json of diagnose"
    try:
        with path.open("rb") as file:
            text = file.read(LARGEST_FILE + 1)
        if len(text) > LARGEST_FILE:
            raise InputError(f"{path.name} is too large for a rule; {hint}")
        found = json.loads(text)
    except OSError as error:
        raise InputError(f"rule {path}: {error.strerror or error}; {hint}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path.name} is no JSON document; {hint}") from error
    schema = found.get("schema") if isinstance(found, dict) else None
    if not isinstance(schema, dict) or schema.get("name") not in SCHEMAS:
        raise InputError(f"{path.name} is no result of explain or diagnose; {hint}")
    version = schema.get("version")
    if type(version) is not int or version > NEWEST_SCHEMA:
        raise InputError(f"{path.name} was written by a newer sdpa-repro: upgrade, or run explain again")
    document: dict[str, Any] = found
    return document


def _texts(found: Mapping[str, Any], key: str, name: str) -> list[str]:
    values = found.get(key)
    if not isinstance(values, list) or len(values) > MOST_ENTRIES or not all(isinstance(each, str) for each in values):
        raise InputError(f"{name}: {key!r} is no list of texts; run explain again")
    return values


def _pairs(found: Mapping[str, Any], name: str) -> tuple[tuple[str, str], ...]:
    pairs = found.get("alternatives", [])
    for pair in pairs if isinstance(pairs, list) and len(pairs) <= MOST_ENTRIES else [None]:
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(value, str) for value in pair):
            raise InputError(f"{name}: 'alternatives' are no pairs of texts; run explain again")
    return tuple((first, second) for first, second in pairs)


def _length_rule(found: Mapping[str, Any], name: str) -> Rule | None:
    lengths = found.get("length_rule")
    text = lengths.get("rule") if isinstance(lengths, dict) else None
    if text is None:
        return None
    try:
        return parse_rule(text if isinstance(text, str) and len(text) <= LONGEST_RULE else "")
    except ValueError:
        raise InputError(f"{name}: cannot read the length rule {str(text)[:60]!r}; run explain again") from None


_DENSE_LINE = re.compile(r"((?:query|key|value)(?:, (?:query|key|value))*) = .*\.contiguous\(\)")


def _cure(found: Mapping[str, Any], backend: str, name: str) -> Cure:
    """The narrowest change that explain has verified on the call: contiguous tensors, else MATH."""
    listed = found.get("workarounds")
    helps = [help_ for help_ in listed if isinstance(help_, dict)] if isinstance(listed, list) else []
    verified = [str(help_.get("line")) for help_ in helps if help_.get("verified") is True]
    for line in verified:
        dense = _DENSE_LINE.fullmatch(line)
        if dense is not None:
            names = tuple(dense[1].split(", "))
            if line == f"{dense[1]} = {', '.join(f'{each}.contiguous()' for each in names)}":
                return Cure(dense=names)
    if backend != "MATH" and any("SDPBackend.MATH" in line for line in verified):
        return Cure(math=True)
    raise InputError(f"{name}: neither contiguous tensors nor MATH was verified to cure the call: nothing can be done")


def _known(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    listed = found.get("known")
    return [match for match in listed if isinstance(match, dict)] if isinstance(listed, list) else []


def _fixed_in(found: Mapping[str, Any]) -> str | None:
    fixed = next((match.get("fixed_in") for match in _known(found)), None)
    return _word(fixed) if isinstance(fixed, str) else None


def _about(found: Mapping[str, Any], name: str) -> str:
    """For warnings: "the rule in result.json (pytorch#191937, fixed in 2.14.0)"."""
    match = next(iter(_known(found)), None)
    if match is None:
        return f"the rule in {name} (no known issue)"
    emulated = " as emulated where it was found" if match.get("match") == "emulated" else ""
    fixed = _fixed_in(found)
    release = f"fixed in {fixed}" if fixed else "no release with a fix known"
    return f"the rule in {name} ({_word(match.get('issue'))}{emulated}, {release})"


def _word(value: object) -> str:
    """A value of the file as part of a sentence: printable, since it may go to a terminal, and short."""
    return "".join(each if each.isprintable() else "?" for each in str(value)[:40])


def _unneeded(found: Mapping[str, Any], device: str, devices: tuple[str, ...]) -> str:
    """Why this torch does not need the rule. A planted fault is fixed in no release."""
    if device not in devices:
        return f"the rule is about {_word(device.upper())}, which this torch is not built for"
    known = _known(found)
    releases = [match.get("fixed_in") for match in known if match.get("match") != "emulated"]
    fixed = [text for text in releases if isinstance(text, str) and _fixed_here(text)]
    if known and len(fixed) == len(known):
        return f"{_word(known[0].get('issue'))} is fixed in {_word(fixed[0])}"
    return ""


def _fixed_here(release: str) -> bool:
    try:
        return affected(torch.__version__, None, None, release) is Answer.NO
    except ValueError:
        return False
