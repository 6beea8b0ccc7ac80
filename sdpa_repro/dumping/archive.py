"""The file around a document: written whole or not at all, and looked through by hand before torch opens it.

Dumps come from strangers. The zip directory is checked, the pickle inside is listed but not run, and only what
`torch.save` writes for plain data and dense tensors gets through to `torch.load(weights_only=True, mmap=True)`.
"""

from __future__ import annotations

import mmap
import os
import pickletools
import secrets
import stat
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch

from sdpa_repro.dumping import NoDump, Refused
from sdpa_repro.dumping.directory import records

MAX_PICKLE = 4 << 20
MAX_OPERATIONS = 500_000
"""Bytes and operations of the pickle, which holds everything but the tensors. The limits on metadata stay below."""

PROTOCOL = 2
"""Of the pickle: what `torch.save` uses unasked and `torch.load(weights_only=True)` reads without a warning."""

_STORAGES = "Double Float Half BFloat16 Bool Byte Char Short Int Long"
_GLOBALS = {
    "collections OrderedDict",
    "torch._utils _rebuild_tensor_v2",
    *(f"torch {name}Storage" for name in _STORAGES.split()),
}
_OPCODES = """
PROTO STOP MARK EMPTY_DICT EMPTY_LIST EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 APPEND APPENDS SETITEM SETITEMS
BINUNICODE BININT BININT1 BININT2 LONG1 BINFLOAT NONE NEWTRUE NEWFALSE GLOBAL REDUCE BINPERSID
BINPUT LONG_BINPUT BINGET LONG_BINGET
"""
_ALLOWED = frozenset(_OPCODES.split())
"""What pickle protocol 2 needs for plain data and dense tensors of `schema.STORAGE_DTYPES`."""


def read(path: Path) -> object:
    """The object in a dump file, with its tensors mapped from the file rather than read.

    Raises Refused when the file is not an archive of plain data and dense tensors, OSError when it cannot be read.
    The tensors' bytes are not looked at: see `verify`.
    """
    with _mapped(path) as data:
        found = {record.name: record for record in records(data)}
        if "data.pkl" not in found or any(name == "constants.pkl" or name.startswith("code/") for name in found):
            raise NoDump("it is not a file that torch.save wrote")
        order = found.get("byteorder")
        if order is not None and data[order.start : order.stop] != sys.byteorder.encode():
            raise Refused("it was written on a machine of another byte order")
        pickle = found["data.pkl"]
        if pickle.stop - pickle.start > MAX_PICKLE:
            raise Refused("what it says besides its tensors is too long")
        _check_pickle(data[pickle.start : pickle.stop])
    try:
        return torch.load(os.fspath(path), map_location="cpu", weights_only=True, mmap=True)
    except UnicodeEncodeError as error:
        raise Refused("torch opens no file whose path is not UTF-8 (rename it)") from error
    except Exception as error:  # whatever torch trips over, the file is at fault: it is not what torch.save writes
        raise Refused(f"torch cannot read it ({type(error).__name__})") from error


def verify(path: Path) -> None:
    """Compare the checksums, which `torch.load` leaves out when it maps a file. Raises Refused, OSError."""
    with _mapped(path) as data:
        for record in records(data):
            with memoryview(data) as whole, whole[record.start : record.stop] as part:
                if zlib.crc32(part) != record.crc:
                    raise Refused(f"it is damaged: the checksum of its part {record.name} is wrong")


@contextmanager
def _mapped(path: Path) -> Iterator[mmap.mmap]:
    status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        raise Refused("it is a folder")
    if not stat.S_ISREG(status.st_mode):
        raise NoDump("it is not a regular file")
    if not status.st_size:
        raise Refused("it is empty")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        yield data


def _check_pickle(pickle: bytes) -> None:
    """Go through the operations of a pickle without running one; only those that a dump needs may occur."""
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(pickle)):
            if count > MAX_OPERATIONS:
                raise Refused("what it says besides its tensors is too long")
            if opcode.name == "GLOBAL" and argument not in _GLOBALS:
                raise Refused(
                    f"it would load {str(argument).replace(' ', '.')[:80]}, which no dump needs; nothing was run"
                )
            if opcode.name not in _ALLOWED:
                raise Refused(f"its pickle uses {opcode.name}, which no dump needs; nothing was run")
            if opcode.name == "PROTO" and argument != PROTOCOL:  # torch warns about it
                raise Refused(f"its pickle has protocol {argument}, a dump {PROTOCOL}; nothing was run")
    except Refused:
        raise
    except Exception as error:  # genops raises ValueError, but also what int() and codecs raise
        raise Refused("its pickle is damaged") from error


def write(document: dict[str, Any], path: Path, *, synced: bool = True) -> int:
    """Write a document under a temporary name in the same folder, then rename it; returns the file's size in bytes.

    synced: wait until the disk has it, which takes longer than everything else; without, a power cut may lose it.
    Raises OSError when that fails; whatever happens, Ctrl-C included, no temporary file stays and an older file of
    that name is untouched until the new one is whole (and, when synced, safe on the disk).
    """
    temporary = path.with_name(f".sdpa-repro-{secrets.token_hex(8)}.tmp")
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
        with open(handle, "wb") as file:
            with _checksums():
                _save(document, file)
            file.flush()
            if synced:
                os.fsync(file.fileno())
            size = file.tell()
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    if synced:
        with suppress(OSError):
            _sync_folder(path.parent)
    return size


def _save(document: dict[str, Any], file: BinaryIO) -> None:
    """`torch.save`, which hides what stopped a write behind an error about its own position in the file."""
    try:
        torch.save(document, file, pickle_protocol=PROTOCOL)
    except RuntimeError as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, (OSError, KeyboardInterrupt)):
                raise cause from None
            cause = cause.__context__
        raise


@contextmanager
def _checksums() -> Iterator[None]:
    """Have `torch.save` write true checksums, which a program may have switched off (torch 2.6 and later)."""
    switch = getattr(torch.serialization, "set_crc32_options", None)
    if switch is None:
        yield
        return
    before = torch.serialization.get_crc32_options()
    switch(True)
    try:
        yield
    finally:
        switch(before)


def _sync_folder(folder: Path) -> None:
    """Make the rename itself survive a power cut, where the system can."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
