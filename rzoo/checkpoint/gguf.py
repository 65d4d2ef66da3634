"""GGUF files: a bounded reader of the header, and tensors decoded one at a time.

A GGUF file is a header (metadata, then one record per tensor) followed by the tensors' blocks. `open_gguf` reads the
header alone; every length, count and size in it is held against the size of the file before anything is allocated,
so that a broken or hostile file costs no more than its own bytes. `GGUFFile.read` then reads the bytes of one tensor.

Source: the GGUF specification of ggml (versions 2 and 3, little-endian).
"""

from __future__ import annotations

import math
import os
import re
import struct
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np

from rzoo.checkpoint.blocks import BLOCK_NAMED, BLOCK_TYPES, decode, decoder_of
from rzoo.core import RzooError, closest, dtype_named

VERSIONS = (2, 3)
MAX_DIMS = 4
FIRST_READ = 16 << 20  # bytes; more than the headers of the models we know
HEADER_LIMIT = 256 << 20
PIECE = 4 << 20  # bytes of a tensor read at a time


# Metadata type id -> numpy's spelling of it. 7 is bool, 8 string, 9 array.
_NUMBERS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8", 12: "<f8"}
_BOOL, _STRING, _ARRAY = 7, 8, 9

# What else a file called .gguf may turn out to be: its first bytes -> words.
_LOOKALIKES = {
    b"version https://git-lfs": "a git-LFS pointer: the file itself was not fetched (git lfs pull)",
    b"<": "HTML or XML, perhaps an error page saved by a download",
    b"{": "JSON",
    b"PK": "a zip archive, perhaps a PyTorch checkpoint",
    b"\x1f\x8b": "a gzip archive",
    b"lmgg": "the older GGML format",
    b"fmgg": "the older GGMF format",
    b"tjgg": "the older GGJT format",
}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a GGUF file: `shape` in numpy's order, `offset` in bytes from the start of `file`."""

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    nbytes: int
    file: Path


@dataclass(frozen=True)
class GGUFFile:
    """The header of a GGUF file, or those of all its parts; `read` fetches a tensor. `data_bytes`: of all tensors."""

    path: Path
    version: int
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    data_bytes: int

    @property
    def dominant_type(self) -> str | None:
        """The type that holds most of the bytes, as a label for the file ("Q4_1"); None without tensors."""
        sizes: Counter[str] = Counter()
        for info in self.tensors.values():
            sizes[info.type] += info.nbytes
        return max(sizes, key=sizes.__getitem__) if sizes else None

    def read(self, name: str, dtype: Any = "float32") -> np.ndarray:
        """The tensor `name`, decoded to `dtype`: reads its bytes only, a few MB at a time.

        Raises RzooError for a name that the file lacks, a type that rzoo cannot decode, and a file that has shrunk.
        """
        info = self._info(name)
        block = BLOCK_NAMED[info.type]
        out = np.empty(info.shape, dtype_named(dtype))
        flat = out.reshape(-1)
        with info.file.open("rb", buffering=0) as file:
            for first, count in _pieces(info):
                part = flat[first * block.values : (first + count) * block.values]
                decode(info.type, _blocks(file, info, first, count), part.shape, part)
        return out

    def read_blocks(self, name: str) -> np.ndarray:
        """The bytes of the tensor `name`: uint8 [rows, bytes], a row for each of its last axis. Raises as `read`."""
        info = self._info(name)
        out = np.empty((math.prod(info.shape[:-1]), info.nbytes // math.prod(info.shape[:-1])), np.uint8)
        flat, nbytes = out.reshape(-1), BLOCK_NAMED[info.type].nbytes
        with info.file.open("rb", buffering=0) as file:
            for first, count in _pieces(info):
                place = flat[first * nbytes : (first + count) * nbytes]
                place[...] = np.frombuffer(_blocks(file, info, first, count), np.uint8)
        return out

    def _info(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            known = textwrap.shorten(closest(name, list(self.tensors)), 300)
            raise RzooError(f"{self.path}: there is no tensor {name}", field="name", value=name, fix=known)
        return self.tensors[name]


def _pieces(info: TensorInfo) -> Iterator[tuple[int, int]]:
    """The first block and the count of each PIECE of a tensor."""
    nbytes = BLOCK_NAMED[info.type].nbytes
    blocks, step = info.nbytes // nbytes, PIECE // nbytes
    return ((first, min(step, blocks - first)) for first in range(0, blocks, step))


def _blocks(file: FileIO, info: TensorInfo, first: int, count: int) -> bytes:
    nbytes = BLOCK_NAMED[info.type].nbytes
    raw = os.pread(file.fileno(), count * nbytes, info.offset + first * nbytes)
    if len(raw) != count * nbytes:
        raise RzooError(f"{info.file}: ends inside tensor {info.name}; did it change?", field=info.name)
    return raw


def open_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Read the header of the GGUF file at `path`; where that is one of several parts, of all of them.

    Raises RzooError for a file that is missing, of another format or version, cut short, or at odds with itself.
    """
    file = _open_one(Path(path))
    count = file.metadata.get("split.count", 1)
    return file if count in (0, 1) else _whole(file, count)


def parts_of(path: Path, count: Any) -> list[Path]:
    """The files of a model in `count` parts, of which `path` is one: "x-00001-of-00003.gguf" and so on; [] for none."""
    found = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", path.name, re.DOTALL)
    if found is None or int(found[2]) != count:
        return []
    return [path.with_name(f"{found[1]}-{number:05}-of-{found[2]}.gguf") for number in range(1, count + 1)]


def _whole(part: GGUFFile, count: Any) -> GGUFFile:
    """All parts of the model of which `part` is one; the first has the metadata."""
    paths = parts_of(part.path, count)
    absent = [path.name for path in paths if not path.is_file()]
    if absent or not paths:
        listed = textwrap.shorten(", ".join(absent), 200, placeholder=" …")
        words = f"{len(absent)} are absent: {listed}" if paths else "its name does not say which ones"
        fix = f"put all parts into one folder under the names that they came with (…-00001-of-{count!s:.20}.gguf)"
        raise RzooError(
            f"{part.path}: is one of {count!r:.20} parts, {words}", field="split.count", value=count, fix=fix
        )
    tensors: dict[str, TensorInfo] = {}
    files = [_open_one(path) for path in paths]
    for file in files:
        both = tensors.keys() & file.tensors.keys()
        if both or file.metadata.get("split.count") != count:
            words = f"tensor {min(both)} is in an earlier part, too" if both else f"does not say that it is of {count}"
            raise RzooError(f"{file.path}: {words}", field="split.count", fix="fetch all parts of one version")
        tensors |= file.tensors
    total = files[0].metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        words = f"split.tensors.count says {total!r:.20} tensors, the parts hold {len(tensors)}"
        raise RzooError(f"{files[0].path}: {words}", field="split.tensors.count", value=total)
    return GGUFFile(files[0].path, files[0].version, files[0].metadata, tensors, sum(f.data_bytes for f in files))


def _open_one(path: Path) -> GGUFFile:
    try:
        size = path.stat().st_size
        if not path.is_file():
            raise RzooError(f"{path}: is not a file", field="path", value=str(path))
        length = FIRST_READ
        while True:
            with path.open("rb") as file:
                data = file.read(min(length, size))
            try:
                return _parse(_Cursor(path, data, size))
            except _NeedsMoreError:
                if length >= HEADER_LIMIT:
                    raise RzooError(
                        f"{path}: the header is longer than {HEADER_LIMIT >> 20} MiB", field="header", value=length
                    ) from None
                length *= 4
    except OSError as error:
        raise RzooError(f"{path}: cannot be read: {error.strerror}", field="path", value=str(path)) from error


def check_supported(file: GGUFFile) -> None:
    """Raise RzooError when `file` holds a tensor that cannot be decoded here. For loaders, before anything is read."""
    for kind, name in {info.type: info.name for info in file.tensors.values()}.items():
        decoder_of(kind, f"{file.path}: tensor {name}: ")


class _NeedsMoreError(Exception):
    """The bytes read so far end before the header does."""


@dataclass
class _Cursor:
    """A position in the first bytes of a file of `size` bytes."""

    path: Path
    data: bytes
    size: int
    at: int = field(default=0)

    def refuse(self, words: str, **details: Any) -> RzooError:
        return RzooError(f"{self.path}: {words}", **details)

    def skip(self, nbytes: int, what: str) -> int:
        """Step over `nbytes` bytes and return where they begin; refuses what the file has no room for."""
        start, self.at = self.at, self.at + nbytes
        if self.at > self.size:
            raise self.refuse(
                f"{what} needs {nbytes} bytes at byte {start}, but the file ends at byte {self.size}",
                field=what,
                value=nbytes,
                fix="the file is cut short or damaged: fetch it again",
            )
        if self.at > len(self.data):
            raise _NeedsMoreError
        return start

    def integer(self, code: str, what: str) -> int:
        start = self.skip(struct.calcsize(code), what)
        return struct.unpack_from(code, self.data, start)[0]

    def count(self, code: str, least: int, what: str) -> int:
        """A number of things that take at least `least` bytes each."""
        count = self.integer(code, what)
        if count * least > self.size - self.at:
            raise self.refuse(
                f"{what} ({count}) is more than the {self.size - self.at} bytes that follow can hold",
                field=what,
                value=count,
                fix="the file is damaged: fetch it again",
            )
        return count

    def text(self, what: str) -> str:
        length = self.count("<Q", 1, f"the length of {what}")
        start = self.skip(length, what)
        return self._utf8(start, self.at, what)

    def _utf8(self, start: int, end: int, what: str) -> str:
        try:
            return str(self.data[start:end], "utf-8")
        except UnicodeDecodeError as error:
            raise self.refuse(f"{what} at byte {start} is not UTF-8", field=what) from error

    def texts(self, count: int, what: str) -> list[str]:
        """`count` strings: one tight loop, since vocabularies hold hundreds of thousands."""
        data, at, end, length_at = self.data, self.at, len(self.data), struct.Struct("<Q").unpack_from
        out: list[str] = []
        try:
            for _ in range(count):
                start = at + 8
                at = start + length_at(data, at)[0]
                if at > end:
                    break
                out.append(str(data[start:at], "utf-8"))
        except struct.error:
            at += 8
        except UnicodeDecodeError as error:
            raise self.refuse(f"{what}[{len(out)}] is not UTF-8", field=what) from error
        self.skip(at - self.at, what)
        return out

    def numbers(self, code: str, count: int, what: str) -> list[Any]:
        start = self.skip(np.dtype(code).itemsize * count, what)
        return np.frombuffer(self.data, code, count, start).tolist()

    def booleans(self, count: int, what: str) -> list[bool]:
        values = self.numbers("<u1", count, what)
        if any(value > 1 for value in values):
            raise self.refuse(f"{what} must be 0 or 1, found {max(values)}", field=what, value=max(values))
        return [value == 1 for value in values]

    def value(self, what: str) -> Any:
        """One metadata value: its type id, then the value."""
        kind = self.integer("<I", f"the type of {what}")
        if kind == _STRING:
            return self.text(what)
        if kind != _ARRAY:
            return self.values(kind, 1, what)[0]
        kind = self.integer("<I", f"the element type of {what}")
        code = _NUMBERS.get(kind, "<u1")
        least = 8 if kind == _STRING else np.dtype(code).itemsize
        return self.values(kind, self.count("<Q", least, f"the length of {what}"), what)

    def values(self, kind: int, count: int, what: str) -> list[Any]:
        if kind in _NUMBERS:
            return self.numbers(_NUMBERS[kind], count, what)
        if kind == _BOOL:
            return self.booleans(count, what)
        if kind == _STRING:
            return self.texts(count, what)
        words = "an array of arrays" if kind == _ARRAY else f"of unknown metadata type {kind}"
        raise self.refuse(f"{what} is {words}, which rzoo does not read", field=what, value=kind)


def _parse(cursor: _Cursor) -> GGUFFile:
    version = _version(cursor)
    # At least: length, dimension count, a dimension, type, offset for a tensor; length, type, one byte for a pair.
    tensor_count = cursor.count("<Q", 32, "the tensor count")
    pair_count = cursor.count("<Q", 13, "the metadata count")
    metadata: dict[str, Any] = {}
    for index in range(pair_count):
        key = cursor.text(f"metadata key {index}")
        if key in metadata:
            raise cursor.refuse(f"metadata key {key} appears twice", field=key)
        metadata[key] = cursor.value(key)
    alignment = _alignment(cursor, metadata)
    tensors: dict[str, TensorInfo] = {}
    for index in range(tensor_count):
        info = _tensor(cursor, index, alignment)
        if info.name in tensors:
            raise cursor.refuse(f"tensor {info.name} appears twice", field=info.name)
        tensors[info.name] = info
    data_start = -(-cursor.at // alignment) * alignment
    placed = {name: _placed(cursor, info, data_start) for name, info in tensors.items()}
    return GGUFFile(cursor.path, version, metadata, placed, sum(info.nbytes for info in placed.values()))


def _version(cursor: _Cursor) -> int:
    if not cursor.data.startswith(b"GGUF"):
        raise cursor.refuse(
            f"is not a GGUF file: it begins with {cursor.data[:8]!r}", field="magic", fix=_looks_like(cursor.data)
        )
    cursor.skip(4, "the magic")
    version = cursor.integer("<I", "the version")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        words = "the file is big-endian" if swapped in VERSIONS else f"GGUF version {version}"
        fix = f"supported: little-endian GGUF of version {' or '.join(map(str, VERSIONS))}"
        raise cursor.refuse(f"{words}, which rzoo does not read", field="version", value=version, fix=fix)
    return version


def _looks_like(data: bytes) -> str:
    if not data:
        return "the file is empty"
    if data[8:9] == b"{":
        return "it looks like safetensors: give the folder that holds it"
    start = data[:64].lstrip()
    return next((f"it looks like {words}" for magic, words in _LOOKALIKES.items() if start.startswith(magic)), "") or (
        "give a file that was written as GGUF"
    )


def _alignment(cursor: _Cursor, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise cursor.refuse(
            f"general.alignment ({alignment!r:.40}) must be a power of two", field="general.alignment", value=alignment
        )
    return alignment


def _tensor(cursor: _Cursor, index: int, alignment: int) -> TensorInfo:
    """The record of one tensor, its offset still counted from the start of the data."""
    name = cursor.text(f"the name of tensor {index}")
    dims = cursor.integer("<I", f"the number of dimensions of {name}")
    if not 1 <= dims <= MAX_DIMS:
        raise cursor.refuse(
            f"tensor {name} has {dims} dimensions; 1 to {MAX_DIMS} are possible", field=name, value=dims
        )
    sizes = [cursor.integer("<Q", f"a dimension of {name}") for _ in range(dims)]
    kind = cursor.integer("<I", f"the type of {name}")
    if kind not in BLOCK_TYPES:
        known = ", ".join(f"{block.name} ({number})" for number, block in BLOCK_TYPES.items())
        raise cursor.refuse(f"tensor {name} has unknown type {kind}", field=name, value=kind, fix=f"known: {known}")
    block = BLOCK_TYPES[kind]
    if 0 in sizes or sizes[0] % block.values:
        words = f"dimensions {sizes}, the first of which must be a positive multiple of {block.values} for {block.name}"
        raise cursor.refuse(f"tensor {name} has {words}", field=name, value=sizes)
    offset = cursor.integer("<Q", f"the offset of {name}")
    if offset % alignment:
        words = f"offset ({offset}) of tensor {name} must be a multiple of the alignment ({alignment})"
        raise cursor.refuse(words, field=name, value=offset)
    nbytes = math.prod(sizes) // block.values * block.nbytes
    return TensorInfo(name, tuple(sizes[::-1]), block.name, offset, nbytes, cursor.path)


def _placed(cursor: _Cursor, info: TensorInfo, data_start: int) -> TensorInfo:
    """`info` with its offset counted from the start of the file; refuses a tensor that the file does not hold."""
    offset = data_start + info.offset
    if offset + info.nbytes > cursor.size:
        raise cursor.refuse(
            f"tensor {info.name} {info.shape} takes {info.nbytes} bytes at byte {offset}, "
            f"but the file ends at byte {cursor.size}",
            field=info.name,
            value=info.nbytes,
            fix="the file is cut short or damaged: fetch it again",
        )
    return replace(info, offset=offset)
