"""Dumps that somebody broke, or made to harm: mutants of good dump files, the same ones for a seed and a number.

`mutant(seed, index)` gives the bytes of one file and the words that say what was done to it. Mutants are made at each
level of the file: its bytes, the zip around the records, the pickle in it, the document in that, and the texts.
Nothing in them does anything but leave a mark, a file called MARK, where it is run.
"""

from __future__ import annotations

import io
import math
import pickle
import random
import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch.nn.attention.bias import causal_lower_right

from sdpa_repro import dump
from sdpa_repro.attention import AttentionCall
from tests.calls import make_call
from tests.make_sample import in_one_arena

MARK = "sdpa-repro-fuzz-ran"
"""The file that appears in the working folder when something from a mutant was run."""

Document = dict[str, Any]


# ---- good dumps to begin with


def _call(**words: Any) -> AttentionCall:
    return make_call(**{"heads": 2, "rows": 5, "width": 8, "dtype": torch.float32, **words})


def _value_in_key() -> AttentionCall:
    call = _call(layout="dense")
    return call.with_tensors({"value": call.key[..., :4]})


def _unfolded() -> AttentionCall:
    call = _call(layout="dense", heads=1)
    return call.with_tensors({"key": torch.arange(64.0).unfold(0, 8, 3)[:5][None, None]})


def _flat() -> AttentionCall:
    call = _call(layout="dense", heads=1, mask=None)
    return call.with_tensors({name: tensor[0, 0] for name, tensor in call.tensors.items()})


CALLS: tuple[Callable[[], AttentionCall], ...] = (
    _call,
    lambda: _call(mask="float", dtype=torch.bfloat16),
    lambda: _call(mask="flag", layout="gqa"),
    lambda: _call(mask=None, batch=2, layout="dense"),
    _value_in_key,
    _unfolded,
    _flat,
    lambda: replace(_call(mask=None), attn_mask=causal_lower_right(5, 5)),
)


@cache
def _documents() -> tuple[bytes, ...]:
    """The good documents, pickled: each use gets its own copy."""
    found = []
    for make in CALLS:
        call = make()
        if not isinstance(
            getattr(call.attn_mask, "variant", None), object
        ) or call.key.untyped_storage().data_ptr() != (call.value.untyped_storage().data_ptr()):
            plain = {name: tensor for name, tensor in call.tensors.items() if not hasattr(tensor, "variant")}
            call = call.with_tensors(in_one_arena(plain))
        recipe = {"tensors": {"query": {"kind": "randn", "shape": [1, 2, 5, 8], "dtype": "float32"}}}
        document = dump.snapshot(
            call,
            call.query.clone(),
            context={"grad": False, "device": "cpu", "requires_grad": {"query": True}, "backends": {"math": True}},
            origin={"module": "m", "total_length": 5, "model": "none", "command": "python x.py", "padding": 1},
            environment={"torch": "2.13.0", "python": "3.12"},
            live={"status": "diverges", "ran": "FLASH_ATTENTION", "ratio": 9.0, "max_abs": 1.0, "rows": [[0, 0, 4]]},
            recipe=recipe if make is CALLS[0] else None,
            preloaded=[{"name": "fault.py", "sha256": "0" * 64}] if make is CALLS[1] else (),
        )
        found.append(pickle.dumps(document))
    return tuple(found)


def document(which: int) -> Document:
    """A fresh copy of one of the good documents."""
    documents = _documents()
    found: Document = pickle.loads(documents[which % len(documents)])
    return found


def written(content: object) -> bytes:
    """The file that `torch.save` makes."""
    room = io.BytesIO()
    torch.save(content, room, pickle_protocol=2)
    return room.getvalue()


# ---- a zip whose every field can be chosen


@dataclass(frozen=True)
class Part:
    """One record. Fields that are None are what they should be; `directory` overrides them in the directory alone."""

    name: bytes
    data: bytes
    crc: int | None = None
    method: int = 0
    flags: int = 0
    size: int | None = None
    packed: int | None = None
    extra: bytes = b""
    local_name: bytes | None = None
    at: int | None = None
    comment: bytes = b""


def parts_of(whole: bytes) -> list[Part]:
    """The records of a good file."""
    with zipfile.ZipFile(io.BytesIO(whole)) as file:
        return [Part(name.encode(), file.read(name)) for name in file.namelist()]


def zipped(parts: list[Part], tail: Callable[[int, int, int], bytes] | None = None) -> bytes:
    """The zip of the records; `tail(count, nbytes, first)` writes what follows the directory."""
    body, directory = bytearray(), bytearray()
    for part in parts:
        crc = zlib.crc32(part.data) if part.crc is None else part.crc
        size = len(part.data) if part.size is None else part.size
        packed = len(part.data) if part.packed is None else part.packed
        at = len(body) if part.at is None else part.at
        name = part.name if part.local_name is None else part.local_name
        pad = b"FB" + struct.pack("<H", -(len(body) + 34 + len(name)) % 64) if len(body) < 1 << 20 else b""
        pad += b"Z" * (struct.unpack("<H", pad[2:])[0] if pad else 0)
        local = struct.pack(
            "<4s5H3L2H", b"PK\3\4", 20, part.flags, part.method, 0, 0, crc, packed & 0xFFFFFFFF, size & 0xFFFFFFFF,
            len(name), len(pad),
        )  # fmt: skip
        body += local + name + pad + part.data
        directory += struct.pack(
            "<4s6H3L5H2L", b"PK\1\2", 20, 20, part.flags, part.method, 0, 0, crc, packed & 0xFFFFFFFF,
            size & 0xFFFFFFFF, len(part.name), len(part.extra), len(part.comment), 0, 0, 0, at & 0xFFFFFFFF,
        )  # fmt: skip
        directory += part.name + part.extra + part.comment
    make = tail or (
        lambda count, nbytes, first: struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, count, count, nbytes, first, 0)
    )
    return bytes(body + directory + make(len(parts) & 0xFFFF, len(directory), len(body)))


def _end64(choose: random.Random) -> Callable[[int, int, int], bytes]:
    """A 64-bit end, one number of which may lie."""

    def tail(count: int, nbytes: int, first: int) -> bytes:
        numbers = [count, count, nbytes, first]
        at = first + nbytes
        if choose.random() < 0.8:
            numbers[choose.randrange(4)] = choose.choice(HUGE)
        if choose.random() < 0.2:
            at = choose.choice(HUGE)
        end = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 20, 20, 0, 0, *(number & (1 << 64) - 1 for number in numbers))
        locator = struct.pack("<4sLQL", b"PK\6\7", 0, at & (1 << 64) - 1, 1)
        return end + locator + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)

    return tail


# ---- what is put in place of what was there

HUGE = (0, 1, 0x7FFF, 0xFFFF, 1 << 20, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 40, 1 << 62, (1 << 63) - 1, (1 << 64) - 1)
NUMBERS: tuple[Any, ...] = (
    -1, 0, 1, 2, 3, 255, 1 << 20, 1 << 28, (1 << 31) - 1, 1 << 31, 1 << 40, 1 << 62, -(1 << 63), 1 << 70, 10**400,
    0.0, -0.0, 1e308, -1e308, math.inf, -math.inf, math.nan, 1e-320, True, False,
)  # fmt: skip
TEXTS = (
    "",
    "\x00",
    "\x1b[31mred\x1b]0;title\x07\x1b]8;;http://x\x1b\\",
    "\u202eevil\u2066\u200b",
    "\ud800\udfff lone surrogate",
    "</script><script>alert(1)</script><img src=x onerror=alert(1)>",
    "{{ 7 * 7 }}{% for x in range(10**9) %}{% endfor %}",
    "``` \n## heading\n[x](javascript:alert(1)) <!-- -->",
    '"""\nimport os; os.system("touch ' + MARK + '")\n"""',
    "'; touch " + MARK + "; '",
    "$(touch " + MARK + ")`touch " + MARK + "`",
    "../../../../etc/passwd",
    "a\nb\r\nc\u2028d\u2029e",
    "%s%n{0.__class__}" * 5,
    "x" * 5000,
    "é" * 300_000,
    "١٢٣",
    "--preload",
    "cuda:99",
    "nan",
    "float32",
    "query",
)
"""Texts that would do something where they are not taken as text."""


def _deep(levels: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(levels):
        found = [found]
    return found


def _value(choose: random.Random) -> Any:
    """Something else in place of a value."""
    return choose.choice(
        (
            lambda: choose.choice(NUMBERS),
            lambda: choose.choice(TEXTS),
            lambda: None,
            lambda: [],
            lambda: {},
            lambda: [choose.choice(NUMBERS) for _ in range(choose.randrange(20))],
            lambda: {choose.choice(TEXTS): choose.choice(NUMBERS)},
            lambda: _deep(choose.choice((5, 31, 40, 200))),
            lambda: torch.zeros(choose.choice((0, 1, 5, 160)), dtype=choose.choice(DTYPES)),
            lambda: (1, 2),
            lambda: list(range(choose.choice((3, 17, 65, 25_000)))),
        )
    )()


DTYPES = (torch.float32, torch.bfloat16, torch.bool, torch.uint8, torch.int64, torch.float64)


def _number(choose: random.Random, old: Any) -> Any:
    """Another number: near the old one, or an edge."""
    near = old if isinstance(old, int) and not isinstance(old, bool) else 1
    return choose.choice((near + 1, near - 1, near * 2, -near, near + 256, choose.choice(NUMBERS)))


# ---- the levels

Made = tuple[bytes, str]


def _bytes(choose: random.Random, whole: bytes) -> Made:
    """Bits turned, bytes cut out, put in, written over, moved; the end cut off."""
    data = bytearray(whole)
    how = choose.choice(("bits", "cut", "over", "out", "in", "twice", "zeros", "splice"))
    at = choose.randrange(len(data))
    size = choose.choice((1, 4, 16, 64, 512))
    if how == "bits":
        for _ in range(choose.choice((1, 1, 1, 4, 64))):
            data[choose.randrange(len(data))] ^= 1 << choose.randrange(8)
    elif how == "cut":
        del data[at:]
    elif how == "over":
        data[at : at + size] = choose.randbytes(len(data[at : at + size]))
    elif how == "out":
        del data[at : at + size]
    elif how == "in":
        data[at:at] = choose.randbytes(size)
    elif how == "twice":
        data[at:at] = data[at : at + size]
    elif how == "zeros":
        data[at : at + size] = bytes(len(data[at : at + size]))
    else:
        other = written(document(choose.randrange(len(CALLS))))
        data[at:] = other[min(at, len(other) - 1) :]
    return bytes(data), f"bytes: {how} at {at}"


NAMES = (
    b"archive/../../../tmp/x", b"../x", b"/etc/passwd", b"archive\\data\\0", b"archive/data/0\x00", b"", b"archive/",
    b"archive/data/" + b"9" * 300, b"other/data/0", b"archive/constants.pkl", b"archive/code/x.py", b"archive/data.pkl",
    b"ARCHIVE/DATA.PKL", "árchive/data/0".encode(), b"archive/data/00", b"archive/.data/serialization_id",
    b"archive/byteorder", b"archive/data/-1", b"archive/version/x",
)  # fmt: skip


def _zip(choose: random.Random, whole: bytes) -> Made:
    """Records that lie about themselves, and directories that lie about records."""
    parts = parts_of(whole)
    index = choose.randrange(len(parts))
    part = parts[index]
    how = choose.choice(tuple(ZIPS))
    if how == "end64":
        return zipped(parts, _end64(choose)), "zip: end64"
    if how == "many":
        parts += [Part(b"archive/data/%d" % number, b"") for number in range(100, 100 + choose.choice((60, 70_000)))]
    elif how == "twice":
        parts.insert(choose.randrange(len(parts)), replace(part, data=choose.choice((part.data, b"", evil(choose)))))
    elif how == "gone":
        del parts[index]
    elif how == "order":
        choose.shuffle(parts)
    elif how == "swapped":
        other = choose.randrange(len(parts))
        parts[index], parts[other] = replace(part, data=parts[other].data), replace(parts[other], data=part.data)
    else:
        parts[index] = ZIPS[how](choose, part)
    return zipped(parts), f"zip: {how} of {part.name.decode()}"


def _deflated(choose: random.Random, part: Part) -> Part:
    data = choose.choice((part.data, bytes(1 << 24)))
    press = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed = press.compress(data) + press.flush()
    return replace(part, data=packed, size=len(data), crc=zlib.crc32(data), method=choose.choice((8, 8, 0, 12, 99)))


def _wide_extra(choose: random.Random, part: Part) -> Part:
    """Sizes and place of all ones, with the true or false numbers in a 64-bit extra field."""
    numbers = [choose.choice((len(part.data), *HUGE)) for _ in range(choose.randrange(4))]
    values = b"".join(struct.pack("<Q", number) for number in numbers)
    extra = struct.pack("<2H", 1, choose.choice((len(values), 0, 8, 0xFFFF))) + values
    return replace(part, extra=extra, size=0xFFFFFFFF, packed=0xFFFFFFFF, at=choose.choice((None, 0xFFFFFFFF)))


def _nothing(choose: random.Random, part: Part) -> Part:
    return part


ZIPS: dict[str, Callable[[random.Random, Part], Part]] = {
    "end64": _nothing,
    "many": _nothing,
    "twice": _nothing,
    "gone": _nothing,
    "order": _nothing,
    "swapped": _nothing,
    "name": lambda choose, part: replace(part, name=choose.choice(NAMES)),
    "local name": lambda choose, part: replace(part, local_name=choose.choice((*NAMES, part.name[::-1]))),
    "crc": lambda choose, part: replace(part, crc=choose.getrandbits(32)),
    "deflated": _deflated,
    "size": lambda choose, part: replace(part, size=choose.choice(HUGE)),
    "packed": lambda choose, part: replace(part, packed=choose.choice(HUGE)),
    "both sizes": lambda choose, part: replace(part, size=(n := choose.choice(HUGE)), packed=n),
    "longer": lambda choose, part: replace(part, size=(n := len(part.data) + choose.randrange(-9, 200)), packed=n),
    "place": lambda choose, part: replace(part, at=choose.choice((*HUGE, 64, 100))),
    "wide": _wide_extra,
    "extra": lambda choose, part: replace(part, extra=choose.randbytes(choose.randrange(80))),
    "comment": lambda choose, part: replace(part, comment=b"PK\5\6" + bytes(18)),
    "flags": lambda choose, part: replace(part, flags=choose.choice((1, 8, 0x800, 0xFFFF))),
    "data": lambda choose, part: replace(part, data=choose.randbytes(len(part.data))),
    "more data": lambda choose, part: replace(part, data=part.data + bytes(choose.choice((1, 64, 1 << 20)))),
    "no data": lambda choose, part: replace(part, data=b""),
    "text": lambda choose, part: replace(part, data=choose.choice((b"big", b"little", b"3\n", b"\xff"))),
    "nested": lambda choose, part: replace(part, data=written({"format": "sdpa-repro"})),
}
"""What may be done to a record, or to the list of them."""


RUNS: tuple[tuple[str, str], ...] = (
    ("os", "system"),
    ("posix", "system"),
    ("builtins", "eval"),
    ("builtins", "exec"),
    ("subprocess", "Popen"),
    ("torch.serialization", "load"),
    ("torch", "load"),
    ("torch.storage", "_load_from_bytes"),
    ("pickle", "loads"),
    ("_codecs", "encode"),
    ("torch._utils", "_rebuild_parameter"),
    ("torch._utils", "_rebuild_wrapper_subclass"),
    ("torch.nn.parameter", "Parameter"),
    ("torch.jit", "load"),
    ("torch._tensor", "_rebuild_from_type_v2"),
    ("collections", "OrderedDict"),
)


def evil(choose: random.Random) -> bytes:
    """A pickle that would leave the mark when it is run by `pickle`, and the same thing hidden in another."""
    module, name = choose.choice(RUNS)
    text = {"eval": f"open({MARK!r}, 'w')", "exec": f"open({MARK!r}, 'w')"}.get(name, f"touch {MARK}")
    plain = (
        b"\x80\x02c" + f"{module}\n{name}\n".encode() + b"X" + struct.pack("<L", len(text)) + text.encode() + b"\x85R."
    )
    hidden = b"\x80\x02ctorch.storage\n_load_from_bytes\nB" + struct.pack("<L", len(plain)) + plain + b"\x85R."
    state = b"\x80\x02}cos\nsystem\nX" + struct.pack("<L", len(text)) + text.encode() + b"\x85Rb."
    return choose.choice((plain, hidden, state, b"\x80\x04\x8c\x02os\x8c\x06system\x93." + plain))


def _pickle(choose: random.Random, whole: bytes) -> Made:
    """The pickle changed, its record's checksum and size true again."""
    parts = parts_of(whole)
    index = next(index for index, part in enumerate(parts) if part.name.endswith(b"data.pkl"))
    old = parts[index].data
    data = bytearray(old)
    how = choose.choice(
        ("bits", "bytes", "evil", "evil inside", "global", "cut", "codes", "memo", "deep", "long", "protocol")
    )
    at = choose.randrange(2, len(data))
    if how == "bits":
        for _ in range(choose.choice((1, 2, 8))):
            data[choose.randrange(2, len(data))] ^= 1 << choose.randrange(8)
    elif how == "bytes":
        data[at : at + 4] = choose.randbytes(4)
    elif how == "evil":
        data = bytearray(evil(choose))
    elif how == "evil inside":
        data[2:2] = evil(choose)[2:-1] + b"0"
    elif how == "global":
        module, name = choose.choice(RUNS)
        target = choose.choice(
            (b"ctorch._utils\n_rebuild_tensor_v2\n", b"ctorch\nFloatStorage\n", b"ccollections\nOrderedDict\n")
        )
        data = bytearray(old.replace(target, f"c{module}\n{name}\n".encode()))
    elif how == "cut":
        del data[at:]
    elif how == "codes":
        for _ in range(choose.choice((1, 3))):
            data[choose.randrange(2, len(data))] = choose.choice(
                b"(.012FILMNPRSTUVX]abcdeghijlopqrstu}\x80\x81\x82\x85\x86\x88\x8a\x93\x94"
            )
    elif how == "memo":
        data[2:2] = b"]r" + struct.pack("<L", choose.choice((0xFFFFFFFF, 0x7FFFFFFF, 1 << 20))) + b"0"
    elif how == "deep":
        levels = choose.choice((100, 5_000, 200_000))
        data[2:2] = b"]" * levels + b"a" * (levels - 1) + b"0"
    elif how == "long":
        size = choose.choice((255, 200))
        data[2:2] = b"\x8a" + bytes([size]) + b"\x7f" * size + b"0"
    else:
        data[0:2] = b"\x80" + bytes([choose.choice((0, 1, 3, 4, 5, 200))])
    parts[index] = replace(parts[index], data=bytes(data))
    return zipped(parts), f"pickle: {how}"


DEEPEST = 6


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to every value of a document, which may hold itself by now."""
    found = [path] if path else []
    if len(path) > DEEPEST:
        return found
    if isinstance(value, dict):
        for key, item in value.items():
            found += _places(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            found += _places(item, (*path, index))
    return found


def _holder(found: Any, path: tuple[Any, ...]) -> Any:
    for step in path[:-1]:
        found = found[step]
    return found


def _document(choose: random.Random, found: Document) -> Made:
    """One to three values of the document replaced, swapped, left out."""
    said = []
    for _ in range(choose.choice((1, 1, 2, 3))):
        places = _places(found)
        path = choose.choice(places)
        holder = _holder(found, path)
        how = choose.choice(("value", "number", "number", "gone", "swap", "key", "same"))
        if how == "gone":
            del holder[path[-1]]
        elif how == "swap":
            other = choose.choice(places)
            if other[: len(path)] != path and path[: len(other)] != other:
                there = _holder(found, other)
                holder[path[-1]], there[other[-1]] = there[other[-1]], holder[path[-1]]
        elif how == "key" and isinstance(holder, dict):
            holder[choose.choice((*TEXTS, 5, None))] = holder.pop(path[-1])
        elif how == "same":
            holder[path[-1]] = _holder(found, (other := choose.choice(places)))[other[-1]]
        elif how == "number":
            holder[path[-1]] = _number(choose, holder[path[-1]])
        else:
            holder[path[-1]] = _value(choose)
        said.append(f"{how} {'.'.join(map(str, path))[:60]!r}")
    try:
        return written(found), f"document: {', '.join(said)}"
    except (RecursionError, ValueError, OverflowError):  # it holds itself, or what no pickle takes
        return written(None), "document: unwritable"


def _layout(choose: random.Random, found: Document) -> Made:
    """Shapes, strides, offsets, buffers and flags of the tensors, in ways that may just fit."""
    tensors = found["tensors"]
    said = []
    for _ in range(choose.choice((1, 2, 3))):
        name = choose.choice(tuple(tensors))
        entry = tensors[name]
        field = choose.choice(
            ("shape", "stride", "stride", "offset", "dtype", "packed", "span_of", "buffer", "room", "call")
        )
        if field in ("shape", "stride"):
            spot = choose.randrange(len(entry[field]) or 1)
            if spot < len(entry[field]):
                entry[field][spot] = choose.choice((0, 1, 2, 3, 5, 8, 16, 40, choose.choice(NUMBERS), 1 << 25, 1 << 33))
        elif field == "offset":
            entry["offset"] = choose.choice((0, 1, 2, 3, 4, 64, 512, choose.choice(NUMBERS)))
        elif field == "dtype":
            entry["dtype"] = choose.choice(
                ("float16", "bfloat16", "float64", "bool", "int8", "uint8", "uint16", "complex64")
            )
            if choose.random() < 0.5 and isinstance(entry.get("data"), torch.Tensor):
                entry["data"] = entry["data"].to(getattr(torch, entry["dtype"]))
        elif field == "packed":
            entry["packed"] = choose.choice((None, "bits", "memory", "zip"))
            if choose.random() < 0.7:
                entry["data"] = torch.zeros(choose.choice((1, 5, 32, 160, 320)), dtype=torch.uint8)
        elif field == "span_of":
            entry.pop("data", None)
            entry |= {"span_of": choose.choice(tuple(tensors)), "packed": None}
        elif field == "buffer":
            entry["buffer"] = choose.choice((0, 1, 2, -1, 64))
        elif field == "room":
            buffer = choose.choice(found["buffers"])
            buffer[choose.choice(("nbytes", "align"))] = choose.choice(
                (0, 1, 255, 256, 1 << 20, 1 << 29, 1 << 31, 1 << 40)
            )
        else:
            name = choose.choice(("scale", "is_causal", "enable_gqa", "dropout_p", "mask_rule"))
            rule = {"kind": "causal_bias", "variant": "LOWER_RIGHT", "shape": [choose.choice((0, 5, 9, 1 << 20)), 5]}
            found["call"][name] = choose.choice((True, False, rule, *NUMBERS))
        said.append(f"{name}.{field}")
    return written(found), f"layout: {', '.join(said)}"


def _texts(choose: random.Random, found: Document) -> Made:
    """Hostile text and numbers in everything that is only told: most of these are read."""
    said = []
    for _ in range(choose.choice((1, 2, 6))):
        part = choose.choice(("origin", "context", "environment", "live", "recipe", "preloaded"))
        if part == "preloaded":
            found[part] = [{"name": choose.choice(TEXTS), "sha256": choose.choice(TEXTS)} for _ in range(3)]
        else:
            told = found[part] = found[part] or {}
            keys = (
                *told,
                *TEXTS,
                "total_length",
                "module",
                "device",
                "rows",
                "ratio",
                "max_abs",
                "ran",
                "threads",
                "tensors",
            )
            told[choose.choice(keys)] = _value(choose) if choose.random() < 0.5 else choose.choice(TEXTS)
        said.append(part)
    return written(found), f"texts: {', '.join(said)}"


LEVELS = ("bytes", "zip", "pickle", "document", "layout", "texts")


def mutant(seed: int, index: int) -> Made:
    """The bytes of a mutant and what was done, the same ones for the same numbers; levels take turns."""
    choose = random.Random(f"{seed}:{index}")
    level = LEVELS[index % len(LEVELS)]
    which = choose.randrange(len(CALLS))
    if level in ("bytes", "zip", "pickle"):
        change = {"bytes": _bytes, "zip": _zip, "pickle": _pickle}[level]
        return change(choose, written(document(which)))
    return {"document": _document, "layout": _layout, "texts": _texts}[level](choose, document(which))
