"""Makes the committed hostile files: `python -m tests.make_hostile`. Each is a dump made to harm, in one way.

`refused-*.pt` are refused in one line; `harmless-*.pt` are read, and what they say is shown as text.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.mutants import MARK, TEXTS, Part, document, parts_of, written, zipped

FOLDER = Path(__file__).resolve().parent / "hostile"
COMMAND = f"touch {MARK}".encode()


def pickled(*instead: bytes) -> bytes:
    """A good file with other bytes for its pickle, checksums true."""
    parts = parts_of(written(document(0)))
    return zipped([replace(p, data=b"".join(instead)) if p.name.endswith(b"data.pkl") else p for p in parts])


def inside(codes: bytes) -> bytes:
    """A good file with operations put at the beginning of its pickle that leave nothing on the stack."""
    good = next(part.data for part in parts_of(written(document(0))) if part.name.endswith(b"data.pkl"))
    return pickled(good[:2], codes, good[2:])


def records(**changes: Any) -> bytes:
    """A good file whose record `data/0` has fields of its own."""
    parts = parts_of(written(document(0)))
    return zipped([replace(p, **changes) if p.name == b"archive/data/0" else p for p in parts])


def tensor(name: str, which: int = 0, **fields: Any) -> bytes:
    """A good file with other entries for one tensor."""
    found = document(which)
    found["tensors"][name] |= fields
    return written(found)


def told(**parts: dict[str, Any]) -> bytes:
    """A good file with other metadata."""
    found = document(0)
    for name, values in parts.items():
        found[name] = {**(found[name] or {}), **values}
    return written(found)


def text(data: bytes) -> bytes:
    """The operation that pushes a string."""
    return b"X" + struct.pack("<L", len(data)) + data


def pickles() -> Iterator[tuple[str, bytes]]:
    """Code, other protocols, and pickles that take memory or the stack."""
    run = b"cos\nsystem\n" + text(COMMAND) + b"\x85R"
    yield "refused-runs-a-command", pickled(b"\x80\x02", run, b".")
    yield "refused-runs-a-command-before-the-document", inside(run + b"0")
    yield "refused-runs-by-building-a-state", inside(b"ccollections\nOrderedDict\n)R" + run + b"b0")
    yield "refused-names-a-function-without-calling-it", inside(b"cbuiltins\neval\n0")
    nested = b"\x80\x02" + run + b"."
    load = b"ctorch.storage\n_load_from_bytes\n"
    yield "refused-pickle-in-a-pickle", inside(load + b"U" + bytes([len(nested)]) + nested + b"\x85R0")
    yield "refused-instance-of-a-class", inside(b"(" + text(COMMAND) + b"iposix\nsystem\n0")
    yield "refused-protocol-4-global-from-the-stack", pickled(b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x94.")
    yield "refused-protocol-200", pickled(b"\x80\xc8", b"}.")
    yield "refused-lists-in-lists", pickled(b"\x80\x02", b"]" * 2500, b"a" * 2499, b".")
    yield "refused-memo-of-gigabytes", pickled(b"\x80\x02}r\xff\xff\xff\x7f.")
    yield "refused-number-of-255-bytes", pickled(b"\x80\x02\x8a\xff", b"\x7f" * 255, b".")
    yield "refused-a-dict-that-holds-itself", pickled(b"\x80\x02}q\x00", text(b"format"), b"h\x00s.")


def archives() -> Iterator[tuple[str, bytes]]:
    """Zip files that show one thing to the reader who checks and another to the one who reads."""
    parts = parts_of(written(document(0)))
    yield "refused-two-records-of-one-name", zipped([*parts, parts[0]])
    yield "refused-name-that-climbs-out", zipped([*parts, Part(b"archive/../../../tmp/x", b"x")])
    yield "refused-absolute-name", zipped([*parts, Part(b"/etc/passwd", b"x")])
    yield "refused-local-name-differs", records(local_name=b"archive/data/9")
    yield "refused-wrong-checksum", records(crc=1)
    yield "refused-record-that-reaches-into-the-next", records(size=640, packed=640)
    yield "refused-size-of-four-gigabytes", records(size=0xFFFFFFFE, packed=0xFFFFFFFE)
    wide = struct.pack("<2H2Q", 1, 16, 1 << 62, 1 << 62)
    yield "refused-64-bit-size-of-a-record", records(size=0xFFFFFFFF, packed=0xFFFFFFFF, extra=wide)
    yield "refused-64-bit-field-without-numbers", records(size=0xFFFFFFFF, packed=0xFFFFFFFF, extra=b"\1\0\0\0")
    press = zlib.compressobj(9, zlib.DEFLATED, -15)
    bomb = press.compress(bytes(4 << 20)) + press.flush()
    yield "refused-bomb-of-zeros", records(data=bomb, size=4 << 20, crc=zlib.crc32(bytes(4 << 20)), method=8)
    yield "refused-bomb-that-says-it-is-stored", records(data=bomb, size=4 << 20, crc=zlib.crc32(bytes(4 << 20)))
    yield "refused-encrypted", records(flags=1)
    yield "refused-a-script-module", zipped([*parts, Part(b"archive/constants.pkl", b"\x80\x02).")])

    def huge(count: int, nbytes: int, first: int) -> bytes:
        numbers = struct.pack("<4Q", 1 << 60, 1 << 60, nbytes, first)
        end = struct.pack("<4sQ2H2L", b"PK\6\6", 44, 20, 20, 0, 0) + numbers
        locator = struct.pack("<4sLQL", b"PK\6\7", 0, first + nbytes, 1)
        return end + locator + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)

    yield "refused-64-bit-number-of-records", zipped(parts, huge)
    yield (
        "refused-byte-order-of-another-machine",
        zipped([replace(p, data=b"big") if p.name.endswith(b"byteorder") else p for p in parts]),
    )


def layouts() -> Iterator[tuple[str, bytes]]:
    """Tensors and numbers that claim what is not there."""
    yield "refused-strides-out-of-the-buffer", tensor("key", stride=[0, 0, 1 << 30, 1])
    yield "refused-negative-stride", tensor("key", stride=[0, 0, -8, 1])
    yield "refused-offset-behind-the-buffer", tensor("value", offset=1 << 40)
    yield (
        "refused-one-row-repeated-into-terabytes",
        tensor("query", shape=[1 << 20, 1 << 20, 5, 8], stride=[0, 0, 8, 1], data=torch.zeros(1, 1, 5, 8)),
    )
    yield "refused-mask-of-few-bits", tensor("attn_mask", data=torch.zeros(1, dtype=torch.uint8))
    found = document(0)
    found["buffers"][0]["nbytes"] = 1 << 40
    yield "refused-buffer-of-a-terabyte", written(found)
    found = document(0)
    found["tensors"]["key"] = {**found["tensors"]["key"], "span_of": "value"}
    found["tensors"]["value"] = {**found["tensors"]["value"], "span_of": "key"}
    for name in ("key", "value"):
        found["tensors"][name].pop("data")
    yield "refused-tensors-that-lie-in-each-other", written(found)
    found = document(0)
    found["call"]["scale"] = 10**400
    yield "refused-scale-beyond-floats", written(found)
    yield "refused-key-of-another-type", told(context={5: "x"})  # type: ignore[dict-item]


def texts() -> Iterator[tuple[str, bytes]]:
    """Documents that are in order but for what they say."""
    short = [line for line in TEXTS if len(line) < 200]
    yield (
        "harmless-texts-everywhere",
        told(
            origin={line: line for line in short},
            environment={"torch": short[2], "python": short[5]},
            live={"ran": short[6]},
        ),
    )
    yield (
        "harmless-numbers-out-of-range",
        told(
            origin={"total_length": -(1 << 62), "call_index": math.nan, "padding": math.inf},
            live={"ratio": math.nan, "max_abs": -math.inf, "rows": [[1 << 62, -1, 0], "x", None], "wrong_rows": [[]]},
            context={"threads": 1 << 40, "device": "cuda:99", "matmul_precision": "\x1b[2J", "autocast": ["x"]},
        ),
    )
    found = document(0)
    found["call"] |= {"scale": math.nan, "dropout_p": math.inf}
    yield "harmless-scale-that-is-no-number", written(found)
    recipe = {
        "kind": "zeros",
        "shape": [1 << 16, 1 << 15],
        "dtype": "float64",
        "strided": [[1, 2, 5, 8], [0, 0, 8, 1], 0],
    }
    yield "harmless-recipe-of-gigabytes", told(recipe={"query": recipe, "key": recipe, "value": {"kind": short[6]}})


def files() -> dict[str, bytes]:
    """Name without suffix → content."""
    return {name: whole for kind in (pickles, archives, layouts, texts) for name, whole in kind()}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.pt"):
        old.unlink()
    made = files()
    for name, whole in made.items():
        (FOLDER / f"{name}.pt").write_bytes(whole)
    print(f"{len(made)} files, {sum(map(len, made.values()))} bytes")
