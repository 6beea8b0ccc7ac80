"""Files that are no dump, are damaged, or are made to harm: one clear line, at once, nothing run, no memory taken."""

from __future__ import annotations

import io
import os
import pickle
import random
import resource
import stat
import struct
import subprocess
import sys
import time
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sdpa_repro import dump
from sdpa_repro.attention import AttentionCall
from sdpa_repro.errors import InputError
from tests.calls import make_call
from tests.make_sample import in_one_arena

SECONDS = 10.0
"""Of this process, whatever else the machine does."""

MEBIBYTES = 64

Document = dict[str, Any]


def peak() -> int:
    """Most memory this process has held, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def refused(path: Path | str) -> str:
    """The line with which a file is refused; quickly, and without taking memory."""
    start, before = time.process_time(), peak()
    with pytest.raises(InputError) as caught:
        dump.load(path)
    assert time.process_time() - start < SECONDS
    assert peak() - before < MEBIBYTES
    line = str(caught.value)
    assert "\n" not in line
    assert len(line) < 600
    return line


def good_document() -> Document:
    call = make_call(heads=2, rows=5, width=8)
    call = call.with_tensors(in_one_arena(call.tensors))
    return dump.snapshot(call, call.query.clone(), origin={"module": "m"}, context={"grad": False})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.pt"


# ---- not a dump at all


def test_a_missing_file_is_named(path: Path) -> None:
    assert "No such file" in refused(path)
    assert str(path) in refused(path)


def test_a_folder_is_named_as_one(tmp_path: Path) -> None:
    assert "it is a folder: give one of the dumps in it" in refused(tmp_path)


def test_an_empty_file_is_named_as_one(path: Path) -> None:
    path.touch()
    assert "it is empty" in refused(path)


def test_a_pipe_is_not_waited_for(path: Path) -> None:
    os.mkfifo(path)
    assert "not a regular file" in refused(path)


def test_a_device_is_not_read() -> None:
    assert "not a regular file" in refused("/dev/zero")


def test_a_file_without_access_rights_says_so(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dump.save(good_document(), path)
    path.chmod(0)
    if os.geteuid() == 0:  # root reads everything: have the system's answer given to it
        real = Path.open

        def deny(self: Path, *args: Any, **words: Any) -> Any:
            if not stat.S_IMODE(self.stat().st_mode):
                raise PermissionError(13, "Permission denied", str(self))
            return real(self, *args, **words)

        monkeypatch.setattr(Path, "open", deny)
    assert "Permission denied" in refused(path)


def test_a_path_with_control_characters_stays_one_line(tmp_path: Path) -> None:
    assert "\\n" in refused(tmp_path / "a\nb\x1b[31m.pt")
    refused("a\0b")


def test_a_path_that_torch_cannot_open_is_to_be_renamed(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"x\xff.pt")
    try:
        dump.save(good_document(), path)
    except OSError:
        pytest.skip("this file system takes UTF-8 only")
    assert "rename" in refused(path)


FOREIGN: dict[str, bytes] = {
    "text": b"hello world\n" * 100,
    "one byte": b"P",
    "picture": b"\x89PNG\r\n\x1a\n" + bytes(200),
    "zip magic alone": b"PK\x03\x04",
    "zip end alone": b"PK\x05\x06" + bytes(18),
    "pickle": pickle.dumps({"format": "sdpa-repro", "version": 1}),
    "safetensors": struct.pack("<Q", 2) + b"{}",
    "zeros": bytes(4096),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_foreign_file_is_refused(kind: str, path: Path) -> None:
    path.write_bytes(FOREIGN[kind])
    assert "cannot use" in refused(path)


@pytest.mark.parametrize("content", [{"a": torch.zeros(3)}, [1], torch.zeros(3), 5, None, {"format": torch.zeros(3)}])
def test_another_file_of_torch_is_refused(content: object, path: Path) -> None:
    torch.save(content, path)
    assert "it is not a dump of sdpa-repro" in refused(path)


def test_a_module_of_torch_is_refused(path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), path)
    assert "torch.nn.modules.linear.Linear" in refused(path)


def test_a_script_module_is_refused(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        for name in ("data.pkl", "constants.pkl", "code/x.py"):
            file.writestr(f"x/{name}", pickle.dumps({}, protocol=2))
    assert "not a file that torch.save wrote" in refused(path)


def test_the_old_file_format_of_torch_is_refused(path: Path) -> None:
    torch.save(good_document(), path, _use_new_zipfile_serialization=False)
    assert "cannot use" in refused(path)


def test_a_newer_format_is_named_with_what_to_do(path: Path) -> None:
    torch.save(good_document() | {"version": 2, "buffers": "something else"}, path)
    line = refused(path)
    assert "format version 2" in line
    assert "upgrade sdpa-repro" in line


# ---- damaged


def test_a_file_cut_short_anywhere_is_refused(path: Path) -> None:
    dump.save(good_document(), path)
    whole = path.read_bytes()
    for length in [*range(1, len(whole), 97), *range(len(whole) - 120, len(whole))]:
        path.write_bytes(whole[:length])
        refused(path)


def test_a_file_with_something_appended_is_refused(path: Path) -> None:
    dump.save(good_document(), path)
    path.write_bytes(path.read_bytes() + b"x")
    assert "follows its end" in refused(path)


def test_a_damaged_byte_is_noticed_or_harmless(path: Path) -> None:
    document = good_document()
    dump.save(document, path)
    whole = path.read_bytes()
    expected = dump.load(path)
    chosen = random.Random(0)
    noticed = 0
    for _ in range(400):
        at = chosen.randrange(len(whole))
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << chosen.randrange(8)]) + whole[at + 1 :])
        try:
            read = dump.load(path)
        except InputError:
            noticed += 1
            continue
        assert dump.layout_differences(expected.call, read.call) == []
        assert all(torch.equal(read.call.tensors[name], tensor) for name, tensor in expected.call.tensors.items())
        assert read.origin == expected.origin
    assert noticed > 100


def test_a_damaged_element_is_noticed(path: Path) -> None:
    document = good_document()
    dump.save(document, path)
    element = bytes(document["tensors"]["key"]["data"].view(torch.uint8).flatten().tolist()[:16])
    whole = bytearray(path.read_bytes())
    whole[whole.index(element)] ^= 1
    path.write_bytes(whole)
    assert "checksum" in refused(path)


# ---- the zip around the document


def parts(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as file:
        return {name: file.read(name) for name in file.namelist()}


def rezip(path: Path, content: list[tuple[str, bytes]], method: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path, "w", method) as file:
        for name, data in content:
            file.writestr(name, data)


def test_a_dump_that_was_zipped_again_without_compression_is_read(path: Path) -> None:
    dump.save(good_document(), path)
    rezip(path, list(parts(path).items()))
    assert dump.load(path).origin == {"module": "m"}


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_compressed_parts_are_refused(method: int, path: Path) -> None:
    dump.save(good_document(), path)
    rezip(path, list(parts(path).items()), method)
    assert "compressed" in refused(path)


def test_a_bomb_of_zeros_is_refused_unread(path: Path) -> None:
    dump.save(good_document(), path)
    content = list(parts(path).items())
    with zipfile.ZipFile(path, "w") as file:
        for name, data in content:
            file.writestr(name, data)
        file.writestr("archive/data/99", bytes(200 << 20), zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 1 << 20
    assert "compressed" in refused(path)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_parts_of_one_name_are_refused(path: Path) -> None:
    dump.save(good_document(), path)
    content = list(parts(path).items())
    rezip(path, [*content, content[0]])
    assert "two parts of one name" in refused(path)


@pytest.mark.parametrize(
    "name", ["archive/../../x", "archive/a\\b", "/data/0", "archive/data/0/1/2", "other/data/9", "x"]
)
def test_names_that_torch_never_gives_are_refused(name: str, path: Path) -> None:
    dump.save(good_document(), path)
    rezip(path, [*parts(path).items(), (name, b"")])
    assert "cannot use" in refused(path)


def test_very_many_parts_are_refused(path: Path) -> None:
    dump.save(good_document(), path)
    rezip(path, [*parts(path).items(), *((f"archive/data/{i}", b"") for i in range(100, 20_100))])
    assert "more parts" in refused(path)


def directory_entry(data: bytes | bytearray, name: bytes) -> int:
    """Where the directory's entry for a name begins."""
    return data.rindex(name) - 46


def test_sizes_that_lie_are_refused(path: Path) -> None:
    dump.save(good_document(), path)
    whole = path.read_bytes()
    at = directory_entry(whole, b"archive/data/0")
    for first, last in [(20, 24), (24, 28), (20, 28), (42, 46)]:
        lie = bytearray(whole)
        lie[at + first : at + last] = b"\x00\x00\x00\x70" * ((last - first) // 4)
        path.write_bytes(lie)
        assert "cannot use" in refused(path)


def test_sizes_of_64_bits_that_lie_are_refused(path: Path) -> None:
    dump.save(good_document(), path)
    whole = path.read_bytes()
    end = len(whole) - 98
    for field in (24, 32, 40, 48):
        for value in (0, 1, 1 << 40, (1 << 64) - 1):
            lie = bytearray(whole)
            lie[end + field : end + field + 8] = struct.pack("<Q", value)
            path.write_bytes(lie)
            refused(path)


def test_parts_that_overlap_are_refused(path: Path) -> None:
    dump.save(good_document(), path)
    with zipfile.ZipFile(path) as file:
        first, second = (file.getinfo(name) for name in ("archive/data/0", "archive/data/1"))
    whole = bytearray(path.read_bytes())
    at = directory_entry(whole, b"archive/data/0")
    length = second.header_offset - first.header_offset
    whole[at + 20 : at + 28] = struct.pack("<2L", length, length)
    path.write_bytes(whole)
    assert "overlap" in refused(path)


# ---- the pickle


class Runs:
    """Leaves a mark where it is unpickled."""

    def __init__(self, mark: Path, function: Callable[..., Any] = os.system) -> None:
        self.mark, self.function = mark, function

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, (f"touch {self.mark}",)


class Sets:
    """Restores itself from a state, which runs `__setstate__` of whatever it names."""

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (), {"x": 1}


PLACES: dict[str, Callable[[Document, Any], Any]] = {
    "instead of the document": lambda document, harm: harm,
    "beside the document": lambda document, harm: document | {"extra": harm},
    "in the origin": lambda document, harm: document | {"origin": {"module": harm}},
    "as a key": lambda document, harm: document | {"origin": {harm: 1}},
    "as a tensor": lambda document, harm: document | {"tensors": {"query": harm}},
    "nested": lambda document, harm: document | {"recipe": [[[{"a": (harm,)}]]]},
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("function", [os.system, eval, exec, os.popen, __import__], ids=lambda f: f.__name__)
def test_a_pickle_that_would_run_code_runs_nothing(function: Callable[..., Any], place: str, tmp_path: Path) -> None:
    mark, path = tmp_path / "mark", tmp_path / "x.pt"
    torch.save(PLACES[place](good_document(), Runs(mark, function)), path)
    line = refused(path)
    assert "nothing was run" in line
    assert function.__name__ in line
    assert not mark.exists()


@pytest.mark.parametrize(
    "harm",
    [
        Sets(),
        torch.Size([1]),
        torch.float32,
        torch.device("cpu"),
        bytearray(10),
        {1, 2},
        b"bytes",
        torch.nn.Parameter(torch.zeros(1)),
        torch.zeros(3, device="meta"),
        torch.eye(3).to_sparse(),
        slice(1),
    ],
    ids=lambda harm: type(harm).__name__,
)
def test_objects_that_no_dump_needs_are_refused(harm: object, path: Path) -> None:
    torch.save(good_document() | {"extra": harm}, path)
    assert "no dump needs" in refused(path)


def with_pickle(path: Path, operations: bytes) -> None:
    """A dump whose pickle is replaced."""
    dump.save(good_document(), path)
    content = parts(path) | {"archive/data.pkl": operations}
    rezip(path, list(content.items()))


OPERATIONS: dict[str, bytes] = {
    "nothing": b"",
    "no stop": b"\x80\x02}",
    "stop alone": b".",
    "unknown operation": b"\x80\x02\xff.",
    "pop of an empty stack": b"\x80\x02a.",
    "append to a number": b"\x80\x02K\x01K\x02a.",
    "unknown memo": b"\x80\x02h\x05.",
    "10 GB of bytearray": b"\x80\x02cbuiltins\nbytearray\n\x8a\x05\x00\x00\x00\x00\x02\x85R.",
    "10 GB of storage": b"\x80\x02ctorch\nFloatStorage\n\x8a\x05\x00\x00\x00\x00\x02\x85R.",
    "string longer than the file": b"\x80\x02X\xff\xff\xff\x7fabc.",
    "integer longer than the file": b"\x80\x02\x8b\xff\xff\xff\x7fabc.",
    "text integer": b"\x80\x02I" + b"9" * 5000 + b"\n.",
    "string that is no text": b"\x80\x02X\x02\x00\x00\x00\xff\xfe.",
    "framed": pickle.dumps({"a": 1}, protocol=4),
    "out of band": pickle.dumps(bytearray(5), protocol=5),
    "persistent name of nothing": b"\x80\x02K\x01Q.",
    "persistent name of a text": b"\x80\x02X\x01\x00\x00\x00aQ.",
    "call of a number": b"\x80\x02K\x01)R.",
    "rebuild of nothing": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)R.",
    "rebuild of numbers": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(K\x01K\x01K\x01K\x01K\x01K\x01tR.",
    "deep lists": b"\x80\x02" + b"]" * 300_000 + b"a" * 299_999 + b".",
    "deep tuples": b"\x80\x02)" + b"\x85" * 300_000 + b".",
    "many marks": b"\x80\x02" + b"(" * 4_000_000 + b".",
    "two pickles": b"\x80\x02}.\x80\x02cos\nsystem\nX\x02\x00\x00\x00ls\x85R.",
}


@pytest.mark.parametrize("kind", OPERATIONS)
def test_an_odd_pickle_is_refused(kind: str, path: Path) -> None:
    with_pickle(path, OPERATIONS[kind])
    assert "cannot use" in refused(path)


def test_a_pickle_of_many_operations_is_refused_quickly(path: Path) -> None:
    with_pickle(path, b"\x80\x02" + b"N0" * (3 << 20) + b".")
    assert "too long" in refused(path)


def test_a_list_that_contains_itself_many_times_over_is_refused(path: Path) -> None:
    tree: list[Any] = ["x"]
    for _ in range(30):
        tree = [tree, tree]
    loop: list[Any] = []
    loop.append(loop)
    for value in (tree, loop):
        torch.save(good_document() | {"origin": {"module": value}}, path)
        assert "origin" in refused(path)


def test_a_storage_that_claims_more_than_the_file_is_refused(path: Path) -> None:
    dump.save(good_document(), path)
    content = parts(path)
    data = content["archive/data.pkl"]
    count = good_document()["tensors"]["query"]["data"].numel()
    claim = b"K" + bytes([count])
    at = data.index(claim, data.index(b"cpu"))
    content["archive/data.pkl"] = data[:at] + b"\x8a\x05\x00\x00\x00\x00\x02" + data[at + 2 :]
    rezip(path, list(content.items()))
    assert "cannot use" in refused(path)


# ---- the document


def entry(document: Document, name: str = "query", **changes: Any) -> Document:
    document["tensors"][name].update(changes)
    return document


def call(document: Document, **changes: Any) -> Document:
    document["call"].update(changes)
    return document


def without(document: Document, key: str) -> Document:
    del document[key]
    return document


def spans(document: Document, name: str, owner: Any) -> Document:
    document["tensors"][name].pop("data")
    return entry(document, name, span_of=owner, packed=None)


def moved(document: Document, name: str, nbytes: int) -> Document:
    return entry(document, name, offset=document["tensors"][name]["offset"] + nbytes)


def room(document: Document, **changes: Any) -> Document:
    for buffer in document["buffers"]:
        buffer.update(changes)
    return document


def tiny(shape: list[int], stride: list[int], data: Tensor, **more: Any) -> Callable[[Document], Document]:
    """The query replaced by one in a buffer of its own, with all the room it could want."""

    def change(document: Document) -> Document:
        document["buffers"].append({"nbytes": 1 << 30, "align": 0})
        fresh = {"buffer": len(document["buffers"]) - 1, "dtype": "float32", "shape": shape, "stride": stride}
        document["tensors"]["query"] = fresh | {"offset": 0, "data": data, "packed": None} | more
        return document

    return change


BIG = 1 << 62
DOCUMENTS: dict[str, Callable[[Document], Any]] = {
    "no version": lambda d: without(d, "version"),
    "version 0": lambda d: d | {"version": 0},
    "version as text": lambda d: d | {"version": "1"},
    "version as float": lambda d: d | {"version": 1.0},
    "version as bool": lambda d: d | {"version": True},
    "huge version": lambda d: d | {"version": 1 << 200},
    "another format": lambda d: d | {"format": "sdpa-repro\n2"},
    "no buffers": lambda d: without(d, "buffers"),
    "buffers as dict": lambda d: d | {"buffers": {0: {"nbytes": 1}}},
    "empty buffers": lambda d: d | {"buffers": []},
    "many buffers": lambda d: d | {"buffers": d["buffers"] * 100},
    "buffer as number": lambda d: d | {"buffers": [5]},
    "negative buffer": lambda d: room(d, nbytes=-1),
    "buffer as float": lambda d: room(d, nbytes=1e9),
    "buffer of 10 GB": lambda d: room(d, nbytes=10_000_000_000),
    "buffer of 2**62": lambda d: room(d, nbytes=BIG),
    "no alignment": lambda d: room(d, align=None),
    "alignment 256": lambda d: room(d, align=256),
    "alignment -1": lambda d: room(d, align=-1),
    "no tensors": lambda d: without(d, "tensors"),
    "tensors as list": lambda d: d | {"tensors": [1, 2]},
    "query missing": lambda d: d | {"tensors": {k: v for k, v in d["tensors"].items() if k != "query"}},
    "tensor as list": lambda d: d | {"tensors": d["tensors"] | {"key": [1]}},
    "tensor as tensor": lambda d: d | {"tensors": d["tensors"] | {"key": torch.zeros(3)}},
    "unknown dtype": lambda d: entry(d, dtype="float31"),
    "dtype of another kind": lambda d: entry(d, dtype="complex64"),
    "dtype an attribute of torch": lambda d: entry(d, dtype="load"),
    "dtype as number": lambda d: entry(d, dtype=5),
    "dtype that does not fit the data": lambda d: entry(d, dtype="float16"),
    "shape as text": lambda d: entry(d, shape="1234"),
    "shape as dict": lambda d: entry(d, shape={"a": 1}),
    "shape of floats": lambda d: entry(d, shape=[1.0, 2.0, 5.0, 8.0]),
    "shape of bools": lambda d: entry(d, shape=[True, 2, 5, 8]),
    "shape of None": lambda d: entry(d, shape=None),
    "shape as tensor": lambda d: entry(d, shape=torch.tensor([1, 2, 5, 8])),
    "negative size": lambda d: entry(d, shape=[1, 2, 5, -8]),
    "size 2**62": lambda d: entry(d, shape=[1, 2, 5, BIG]),
    "sizes whose product overflows": lambda d: entry(d, shape=[1 << 33, 1 << 33, 1, 8]),
    "size of 2**200": lambda d: entry(d, shape=[1, 2, 5, 1 << 200]),
    "rank 1000": lambda d: entry(d, shape=[1] * 1000, stride=[1] * 1000),
    "rank of shape and stride differ": lambda d: entry(d, stride=[1, 1]),
    "stride as float": lambda d: entry(d, stride=[1.0, 8.0, 16.0, 1.0]),
    "stride as text": lambda d: entry(d, stride=["a"] * 4),
    "negative stride": lambda d: entry(d, stride=[80, 8, 16, -1]),
    "stride outside the buffer": lambda d: entry(d, stride=[80, 8, 1 << 26, 1]),
    "stride 2**62": lambda d: entry(d, stride=[80, 8, BIG, 1]),
    "stride whose product overflows": lambda d: entry(d, shape=[1, 2, 5, 8], stride=[80, 1 << 39, 1 << 39, 1 << 39]),
    "offset outside the buffer": lambda d: moved(d, "query", 1 << 28),
    "offset one byte too far": lambda d: entry(d, "output", offset=1),
    "negative offset": lambda d: entry(d, offset=-2),
    "offset as float": lambda d: entry(d, offset=0.5),
    "offset 2**63": lambda d: entry(d, offset=1 << 63),
    "empty tensor outside the buffer": lambda d: entry(
        d, shape=[1, 2, 5, 0], offset=1 << 39, data=torch.zeros(1, 2, 5, 0)
    ),
    "buffer number out of range": lambda d: entry(d, buffer=99),
    "buffer number negative": lambda d: entry(d, buffer=-1),
    "buffer number as text": lambda d: entry(d, buffer="0"),
    "no data": lambda d: entry(d, data=None),
    "data as list": lambda d: entry(d, data=[1.0] * 80),
    "data of another shape": lambda d: entry(d, data=torch.zeros(80, dtype=torch.bfloat16)),
    "data of another dtype": lambda d: entry(d, data=torch.zeros(1, 2, 5, 8)),
    "data transposed": lambda d: entry(d, data=torch.zeros(1, 2, 8, 5, dtype=torch.bfloat16).mT),
    "data expanded": lambda d: entry(d, data=torch.zeros(1, dtype=torch.bfloat16).expand(1, 2, 5, 8)),
    "data with offset": lambda d: entry(d, data=torch.zeros(2, 2, 5, 8, dtype=torch.bfloat16)[1:]),
    "data with bytes behind": lambda d: entry(d, data=torch.zeros(2, 2, 5, 8, dtype=torch.bfloat16)[:1]),
    "data and span_of": lambda d: entry(d, span_of="key"),
    "packed unknown": lambda d: entry(d, packed="zstd"),
    "packed as number": lambda d: entry(d, packed=5),
    "packed bits of floats": lambda d: entry(d, packed="bits"),
    "packed bits too few": lambda d: entry(d, "attn_mask", data=torch.zeros(1, dtype=torch.uint8)),
    "packed bits too many": lambda d: entry(d, "attn_mask", data=torch.zeros(1000, dtype=torch.uint8)),
    "packed bits as bool": lambda d: entry(d, "attn_mask", data=torch.zeros(4, dtype=torch.bool)),
    "packed memory too short": lambda d: entry(d, packed="memory", data=torch.zeros(159, dtype=torch.uint8)),
    "packed memory too long": lambda d: entry(d, packed="memory", data=torch.zeros(161, dtype=torch.uint8)),
    "packed memory of two dimensions": lambda d: entry(d, packed="memory", data=torch.zeros(2, 80, dtype=torch.uint8)),
    "span of itself": lambda d: spans(d, "key", "key"),
    "span of nothing": lambda d: spans(d, "key", "nothing"),
    "span as number": lambda d: spans(d, "key", 5),
    "span of each other": lambda d: spans(spans(d, "key", "value"), "value", "key"),
    "span of a tensor that stores other elements": lambda d: spans(d, "value", "key"),
    "view that overlaps itself": tiny([8, 8], [1, 1], torch.zeros(8, 8)),
    "10 GB in strides": tiny([2, 2], [2_500_000_000, 1], torch.zeros(2, 2)),
    "strides that reach each element often": tiny(
        [1 << 14, 1 << 13, 1 << 12], [3, 5, 7], torch.zeros(5, dtype=torch.uint8), packed="memory"
    ),
    "strides that leave wide gaps": tiny(
        [2, 2, 2], [(1 << 28) - 9, 3, 1], torch.zeros(5, dtype=torch.uint8), packed="memory"
    ),
    "one element for 2**50": tiny([1 << 20, 1 << 10, 1 << 20], [0, 0, 0], torch.zeros(1, 1, 1)),
    "one element for 2**40": tiny([1 << 40], [0], torch.zeros(1)),
    "no call": lambda d: without(d, "call"),
    "call as list": lambda d: d | {"call": []},
    "is_causal as number": lambda d: call(d, is_causal=1),
    "is_causal as text": lambda d: call(d, is_causal="False"),
    "scale as text": lambda d: call(d, scale="1"),
    "scale as tensor": lambda d: call(d, scale=torch.zeros(1)),
    "scale as huge integer": lambda d: call(d, scale=10**400),
    "dropout missing": lambda d: call(d, dropout_p=None),
    "enable_gqa missing": lambda d: call(d, enable_gqa=None),
    "rule beside a mask": lambda d: call(
        d, mask_rule={"kind": "causal_bias", "variant": "UPPER_LEFT", "shape": [5, 5]}
    ),
    "rule unknown": lambda d: call(d, mask_rule={"kind": "alibi"}),
    "rule as text": lambda d: call(d, mask_rule="causal"),
    "rule with tensor": lambda d: call(d, mask_rule={"kind": torch.zeros(2), "variant": 1}),
    "rule with huge shape": lambda d: call(
        d, mask_rule={"kind": "causal_bias", "variant": "LOWER_RIGHT", "shape": [1 << 30, 1 << 30]}
    ),
    "context as list": lambda d: d | {"context": [1]},
    "context with tensor": lambda d: d | {"context": {"a": torch.zeros(3)}},
    "context with number as key": lambda d: d | {"context": {1: 2}},
    "context with huge integer": lambda d: d | {"context": {"a": 1 << 2000}},
    "origin too deep": lambda d: d | {"origin": {"a": eval("[" * 60 + "]" * 60)}},
    "origin too long": lambda d: d | {"origin": {"a": "x" * (2 << 20)}},
    "origin of many": lambda d: d | {"origin": {"a": list(range(25_000))}},
    "origin with control characters": lambda d: d | {"origin": {"a\n\x1b[31m": {"b\n": torch.zeros(1)}}},
    "live as number": lambda d: d | {"live": 5},
    "recipe as text": lambda d: d | {"recipe": "x"},
    "preloaded as dict": lambda d: d | {"preloaded": {"name": "x"}},
    "preloaded of numbers": lambda d: d | {"preloaded": [1]},
    "preloaded without hash": lambda d: d | {"preloaded": [{"name": "x"}]},
}


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_a_document_that_does_not_add_up_is_refused(kind: str, path: Path) -> None:
    torch.save(DOCUMENTS[kind](good_document()), path)
    assert "cannot use" in refused(path)


def test_a_reader_that_was_lied_to_about_memory_never_shows_uninitialised_bytes(path: Path) -> None:
    document = spans(good_document(), "value", "key")
    document["tensors"]["value"]["offset"] = document["tensors"]["key"]["offset"] + 8
    torch.save(document, path)
    assert "cannot use" in refused(path)


@pytest.mark.slow
def test_claims_take_no_memory_and_no_time_in_a_fresh_process(tmp_path: Path) -> None:
    """A process that has held little before: what a claim takes would show."""
    kinds = [
        kind for kind in DOCUMENTS if any(word in kind for word in ("2**", "10 GB", "strides", "one element", "huge"))
    ]
    assert len(kinds) > 10
    for index, kind in enumerate(kinds):
        torch.save(DOCUMENTS[kind](good_document()), tmp_path / f"{index}.pt")
    program = (
        "import resource, sys, time; from sdpa_repro import dump; from sdpa_repro.errors import InputError\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10\n"
        "for name in sys.argv[1:]:\n"
        "    start, before = time.process_time(), peak()\n"
        "    try: dump.load(name)\n"
        "    except InputError: print(peak() - before, round(time.process_time() - start, 2))\n"
    )
    command = [sys.executable, "-c", program, *(str(tmp_path / f"{index}.pt") for index in range(len(kinds)))]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1])
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == len(kinds)
    for kind, (mebibytes, seconds) in zip(kinds, lines, strict=True):
        assert int(mebibytes) < MEBIBYTES, kind
        assert float(seconds) < SECONDS, kind


# ---- devices


@pytest.mark.parametrize("device", ["cuda:77", "nonsense", "xpu", "meta:3:4"])
def test_a_device_that_is_not_there_is_named_in_one_line(device: str, path: Path) -> None:
    dump.save(good_document(), path)
    with pytest.raises(InputError, match="choose another device") as caught:
        dump.load(path, device=device)
    assert "\n" not in str(caught.value)
    assert device in str(caught.value)


def test_a_machine_without_enough_memory_says_how_much_is_needed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sdpa_repro.dumping import packing

    def full(*_: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    dump.save(good_document(), path)
    monkeypatch.setattr(packing, "empty_aligned", full)
    with pytest.raises(InputError, match=r"MiB\): CUDA out of memory") as caught:
        dump.load(path)
    assert "\n" not in str(caught.value)


def test_a_good_file_still_loads_from_any_kind_of_path(path: Path) -> None:
    dump.save(good_document(), path)
    assert isinstance(dump.load(str(path)).call, AttentionCall)
    odd = path.with_name("ünusual name 1.pt")
    torch.save(torch.load(path, weights_only=True), odd)
    assert isinstance(dump.load(odd).call, AttentionCall)
    assert io.BytesIO(odd.read_bytes()).read(2) == b"PK"
