"""The directory of a zip file as `torch.save` writes it, read with nothing trusted.

Layout: PKWARE's APPNOTE.TXT, sections 4.3.7 (local header), 4.3.12 (entry), 4.3.14 to 4.3.16 (ends), 4.5.3 (64 bit).
`zipfile` is more forgiving than that: it accepts leading and trailing bytes, two records of one name, records that
overlap, and headers that contradict each other, each a way to show torch another file than the one that was checked.
"""

from __future__ import annotations

import mmap
import re
import struct
from dataclasses import dataclass

from sdpa_repro.dumping import NoDump, Refused

MAX_RECORDS = 64
MAX_DIRECTORY = 64 << 10
"""Bytes of directory; a dump has about fifteen records and one KiB."""

_END = struct.Struct("<4s4H2LH")
_END64_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_ALL16, _ALL32 = 0xFFFF, 0xFFFFFFFF

_NAME = re.compile(r"([^/\\\x00-\x1f]{1,255})/((?:[A-Za-z0-9_.-]{1,64}/)?[A-Za-z0-9_.-]{1,64})")


@dataclass(frozen=True)
class Record:
    """One file in the zip: its name without the common root, where its bytes are, and their CRC-32."""

    name: str
    start: int
    stop: int
    crc: int


def records(data: mmap.mmap) -> list[Record]:
    """The records of the zip: stored as they are, inside the file, not overlapping, each name once."""
    count, start, stop = _directory(data)
    if count > MAX_RECORDS or stop - start > MAX_DIRECTORY:
        raise Refused("it has more parts than a dump has")
    found: list[Record] = []
    roots: set[str] = set()
    position = start
    for _ in range(count):
        position = _entry(data, position, stop, start, found, roots)
    if position != stop or len(roots) != 1:
        raise Refused("its zip directory is damaged")
    if len({record.name for record in found}) != count:
        raise Refused("it has two parts of one name")
    reach = 0
    for record in sorted(found, key=lambda record: (record.start, record.stop)):
        if record.start < reach:
            raise Refused("parts of it overlap")
        reach = record.stop
    return found


def _unpack(layout: struct.Struct, data: mmap.mmap, position: int, signature: bytes) -> tuple[int, ...] | None:
    """The fields after the signature, or None when they are not there."""
    if position < 0 or position + layout.size > len(data):
        return None
    found, *fields = layout.unpack_from(data, position)
    return tuple(fields) if found == signature else None


def _directory(data: mmap.mmap) -> tuple[int, int, int]:
    """Number of records, first byte and end of the zip directory. It ends the file, as torch writes it."""
    at = len(data) - _END.size
    end = _unpack(_END, data, at, b"PK\5\6")
    if end is None:
        if data[:4] == b"PK\3\4":
            raise Refused("it is cut short, or something follows its end")
        raise NoDump("it is not a file that torch.save wrote")
    count, nbytes, first, comment = end[3:7]
    if comment:
        raise Refused("its zip directory is damaged")
    locator = _unpack(_END64_LOCATOR, data, at - _END64_LOCATOR.size, b"PK\6\7")
    if locator is not None:
        at = locator[1]
        end64 = _unpack(_END64, data, at, b"PK\6\6")
        if end64 is None or at + _END64.size + _END64_LOCATOR.size + _END.size != len(data):
            raise Refused("its zip directory is damaged")
        for short, long, none in zip((count, nbytes, first), end64[6:9], (_ALL16, _ALL32, _ALL32), strict=True):
            if short not in (long, none):
                raise Refused("its zip directory contradicts itself")
        count, nbytes, first = end64[6:9]
    if first + nbytes != at:
        raise Refused("its zip directory is damaged")
    return count, first, at


def _entry(data: mmap.mmap, position: int, stop: int, limit: int, found: list[Record], roots: set[str]) -> int:
    """Read one entry of the directory, append its record, return where the next entry begins."""
    entry = _unpack(_ENTRY, data, position, b"PK\1\2")
    if entry is None:
        raise Refused("its zip directory is damaged")
    _, _, flags, method, _, _, crc, packed, nbytes, long_name, long_extra, long_comment = entry[:12]
    first = entry[15]
    after = position + _ENTRY.size + long_name + long_extra + long_comment
    if after > stop:
        raise Refused("its zip directory is damaged")
    name_at = position + _ENTRY.size
    name = data[name_at : name_at + long_name]
    extra = data[name_at + long_name : name_at + long_name + long_extra]
    nbytes, packed, first = _wide(extra, nbytes, packed, first)
    if method != 0 or packed != nbytes or flags & 1:
        raise Refused("parts of it are compressed or encrypted, which torch.save never does")
    matched = _NAME.fullmatch(name.decode("latin-1"))
    if matched is None or ".." in matched[0].split("/"):
        raise Refused("parts of it have names that torch.save never gives")
    local = _unpack(_LOCAL, data, first, b"PK\3\4")
    if local is None or local[2] != 0 or local[8] != long_name:
        raise Refused("its zip directory is damaged")
    begin = first + _LOCAL.size
    if data[begin : begin + long_name] != name:
        raise Refused("its zip directory contradicts itself")
    begin += long_name + local[9]
    if begin + nbytes > limit:
        raise Refused("it claims more bytes than it has")
    roots.add(matched[1])
    found.append(Record(matched[2], begin, begin + nbytes, crc))
    return after


def _wide(extra: bytes, *fields: int) -> list[int]:
    """Replace fields of all ones by their 64-bit values, which follow one another in extra field 1."""
    values = b""
    position = 0
    while position + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, position)
        if kind == 1:
            values = extra[position + 4 : position + 4 + length]
            break
        position += 4 + length
    wide = []
    for value in fields:
        if value == _ALL32:
            if len(values) < 8:
                raise Refused("its zip directory is damaged")
            value, values = int.from_bytes(values[:8], "little"), values[8:]
        wide.append(value)
    return wide
