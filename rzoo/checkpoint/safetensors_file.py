"""One safetensors file: its header read within bounds, its tensors read one at a time, new files written as a stream.

A file is 8 bytes of header length (little endian), a JSON header {name: {dtype, shape, data_offsets}} with an optional
`__metadata__`, then the data that the offsets count from. Files are taken as hostile: every number is checked against
the file's size before memory is allocated for it.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import reprlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from rzoo.core import RzooError

# Name in a header -> dtype of the bytes.
DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

MAX_JSON = 100_000_000  # bytes of a header or of another JSON file; the format's own library has the same limit
MAX_RANK = 64  # numpy's limit
MAX_BYTES = 2**63 - 1
CHUNK = 8 << 20  # bytes held at once while a tensor is cast or cut
SHORT = 512  # bytes of a piece below which reading it with its neighbours is cheaper than reading it alone
HEADER_ROOM = 64 << 10  # bytes left free for a header that is known only after the data; enough for about 500 tensors

_repr = reprlib.Repr()
_repr.maxstring, _repr.maxlist, _repr.maxother = 200, 16, 100
show = _repr.repr  # of a value from a file: shortened, control characters escaped


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies: `offset` in bytes from the start of `file`; `dtype` as the header names it ("BF16")."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: Path
    offset: int
    nbytes: int


def few(names: Iterable[str]) -> str:
    """The first five of `names`, and how many more there are."""
    listed = list(names)
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")


def _unique(what: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of `pairs`; raises RzooError for a key that stands twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise RzooError(f"{what}: the key {show(twice)} stands twice", field=twice, fix="Keep one of them.")
    return found


def parse_json(data: bytes, what: str) -> dict[str, Any]:
    """The JSON object in `data`; `what` names it in errors.

    Raises RzooError for what is no JSON or no object, for a key that stands twice, and for nesting too deep to parse.
    """
    try:
        value = json.loads(data.decode("utf-8-sig"), object_pairs_hook=partial(_unique, what))
    except RecursionError:
        raise RzooError(f"{what} is nested too deep to be read", fix="Fetch the file again from its source.") from None
    except ValueError as error:
        raise RzooError(f"{what} is not JSON: {error}", fix="Fetch the file again from its source.") from None
    if not isinstance(value, dict):
        raise RzooError(f"{what} must be a JSON object, not {type(value).__name__}", value=show(value))
    return value


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in `file`; raises RzooError as parse_json does, and for an unreadable or far too large file."""
    with reading(file), open(file, "rb") as handle:
        size = os.fstat(handle.fileno()).st_size
        if size > MAX_JSON:
            raise RzooError(
                f"{file} has {size} bytes: rzoo reads JSON of up to {MAX_JSON}", field=file.name, value=size
            )
        return parse_json(handle.read(size), str(file))


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Turns the operating system's errors on reading `file` into RzooError."""
    try:
        yield
    except OSError as error:
        raise RzooError(
            f"{file} could not be read: {error.strerror or error}", field="path", value=str(file)
        ) from error


@contextmanager
def writing(file: Path) -> Iterator[None]:
    """Turns the operating system's errors on writing `file` (a full disk, no permission) into RzooError."""
    try:
        yield
    except OSError as error:
        raise RzooError(
            f"{file} could not be written: {error.strerror or error}",
            field="path",
            value=str(file),
            fix="Free space there or choose another folder; what was at the target before is unchanged.",
        ) from error


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Every tensor of a safetensors file in the order of its data; reads the header alone.

    Raises RzooError for a file that cannot be read, is cut off, or breaks a rule of the format.
    """
    with reading(file), open(file, "rb") as handle:
        size = os.fstat(handle.fileno()).st_size
        header = _header_bytes(handle, file, size)
    start = 8 + len(header)
    entries = parse_json(header, f"the header of {file}")
    if not isinstance(entries.pop("__metadata__", {}), dict):
        raise _broken(file, "__metadata__ must be an object", "__metadata__")
    tensors = [_tensor_info(file, name, entry, start, size) for name, entry in entries.items()]
    tensors.sort(key=lambda info: (info.offset, info.nbytes))
    for before, after in itertools.pairwise(tensors):
        if after.offset < before.offset + before.nbytes:
            raise _broken(file, f"the data of {show(before.name)} and {show(after.name)} overlap", "data_offsets")
    end = tensors[-1].offset + tensors[-1].nbytes if tensors else start
    if end < size:
        raise _broken(file, f"{size - end} bytes follow its last tensor", "data_offsets")
    return {info.name: info for info in tensors}


def _header_bytes(handle: BinaryIO, file: Path, size: int) -> bytes:
    prefix = handle.read(8)
    if prefix == b"version ":
        raise RzooError(f"{file} is a Git LFS pointer, not the weights", field="file", fix="Run `git lfs pull` there.")
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > size - 8:
        raise _broken(file, f"says that its header has {length} bytes, but the file has {size}", "header", length)
    if length > MAX_JSON:
        raise RzooError(
            f"{file}: the header has {length} bytes, rzoo reads up to {MAX_JSON}",
            field="header",
            value=length,
            fix="The file may be sound: save it in more shards, each with fewer tensors.",
        )
    header = handle.read(length)
    if len(header) < length:
        raise _broken(file, "ended while its header was read", "header")
    return header


def _broken(file: Path, problem: str, field: str, value: Any = None) -> RzooError:
    fix = "The file is cut off or broken: fetch or export it again."
    return RzooError(f"{file}: {problem}", field=field, value=value, fix=fix)


def _tensor_info(file: Path, name: str, entry: Any, start: int, size: int) -> TensorInfo:
    """The checked entry of one tensor; data starts at `start` in a file of `size` bytes."""
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise _broken(file, f"tensor {show(name)} needs dtype, shape and data_offsets", name, show(entry))
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise RzooError(
            f"{file}: tensor {show(name)}: dtype ({show(dtype)}) must be one of {', '.join(DTYPES)}",
            field="dtype",
            value=dtype,
            fix="Convert that tensor to one of these.",
        )
    if not _sizes(shape) or len(shape) > MAX_RANK:
        problem = f"shape ({show(shape)}) must be a list of up to {MAX_RANK} whole numbers from 0"
        raise _broken(file, f"tensor {show(name)}: {problem}", "shape", shape)
    if not _sizes(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= size - start:
        problem = f"data_offsets ({show(offsets)}) must lie within the file's {size - start} bytes of data"
        raise _broken(file, f"tensor {show(name)}: {problem}", "data_offsets", offsets)
    expected, held = _nbytes(shape, DTYPES[dtype].itemsize), offsets[1] - offsets[0]
    if expected != held:
        takes = "more than any file" if expected is None else f"{expected} bytes"
        problem = f"shape {show(shape)} of {dtype} takes {takes}, but data_offsets hold {held}"
        raise _broken(file, f"tensor {show(name)}: {problem}", "data_offsets", offsets)
    return TensorInfo(name, tuple(shape), dtype, file, start + offsets[0], held)


def _sizes(value: Any) -> bool:
    """Whether this is a list of whole numbers from 0; JSON's true is none."""
    return isinstance(value, list) and all(type(number) is int and number >= 0 for number in value)


def _nbytes(shape: list[int], itemsize: int) -> int | None:
    """Bytes of an array, None where they pass 63 bits; numpy refuses [0, 2**62, 2**62] as well, though it is empty."""
    nbytes = itemsize
    for number in shape:
        nbytes *= number or 1
        if nbytes > MAX_BYTES:
            return None
    return 0 if 0 in shape else nbytes


def read_tensor(
    info: TensorInfo, index: tuple[slice, ...] = (), dtype: Any = None, into: np.ndarray | None = None
) -> np.ndarray:
    """The part `index` of a tensor (all of it by default) as a new array, cast to `dtype` unless that is None.

    into: a contiguous array of that part's shape and of any type, which is filled and returned instead of a new one.

    `index` has slices without a step for the leading axes, the others are whole. Only what it names is read, but for
    pieces of less than SHORT bytes: there the rows of axis 0 that hold them are. Beside the result at most 8 MiB (or
    one row) are held. Raises RzooError.
    """
    stored = DTYPES[info.dtype]
    ranges = _ranges(info, index)
    out = np.empty([b - a for a, b in ranges], stored if dtype is None else dtype) if into is None else into
    if out.size == 0:
        return out
    width = math.prod(info.shape[1:])
    start, stop = ranges[0] if ranges else (0, 1)
    with reading(info.file), open(info.file, "rb", buffering=0) as handle:
        if _run_bytes(info, ranges) >= SHORT and ranges[1:] != [(0, n) for n in info.shape[1:]]:
            _read_runs(handle, info, ranges, out)
        elif ranges[1:] != [(0, n) for n in info.shape[1:]]:
            cut = tuple(slice(*bounds) for bounds in ranges[1:])
            for row, piece in _pieces(handle, info, start, stop, width):
                rows = piece.reshape(-1, *info.shape[1:])[(slice(None), *cut)]
                out[row - start : row - start + len(rows)] = rows
        elif out.dtype == stored:
            _fill(handle, info, start * width * stored.itemsize, out.reshape(-1).view(np.uint8))
        else:
            flat, first = out.reshape(-1), start * width
            for element, piece in _pieces(handle, info, first, stop * width, 1):
                flat[element - first : element - first + len(piece)] = piece[:, 0]
    return out


def _last_cut(info: TensorInfo, ranges: list[tuple[int, int]]) -> int:
    """The last axis of which not all is named; 0 where there is none."""
    cut = [i for i, (bounds, n) in enumerate(zip(ranges, info.shape, strict=True)) if bounds != (0, n)]
    return cut[-1] if cut else 0


def _run_bytes(info: TensorInfo, ranges: list[tuple[int, int]]) -> int:
    """Bytes of the pieces that lie without a gap."""
    last = _last_cut(info, ranges)
    return math.prod(stop - start for start, stop in ranges[last:]) * DTYPES[info.dtype].itemsize


def _read_runs(handle: FileIO, info: TensorInfo, ranges: list[tuple[int, int]], out: np.ndarray) -> None:
    """Fills `out` piece by piece."""
    last, stored = _last_cut(info, ranges), DTYPES[info.dtype]
    strides = [math.prod(info.shape[i + 1 :]) for i in range(len(info.shape))]
    pieces = out.reshape(math.prod(out.shape[:last]), -1)
    buffer = np.empty(pieces.shape[1], stored)
    for piece, outer in zip(pieces, itertools.product(*(range(*bounds) for bounds in ranges[:last])), strict=True):
        first = sum(i * stride for i, stride in zip(outer, strides, strict=False)) + ranges[last][0] * strides[last]
        target = piece if piece.dtype == stored else buffer
        _fill(handle, info, first * stored.itemsize, target.view(np.uint8))
        piece[:] = target


def _ranges(info: TensorInfo, index: tuple[slice, ...]) -> list[tuple[int, int]]:
    """[start, stop) on every axis of the tensor, clipped to it as Python clips slices."""
    if len(index) > len(info.shape) or any(part.step not in (None, 1) for part in index):
        raise RzooError(
            f"index ({show(index)}) must have slices without a step for up to {len(info.shape)} axes of {info.name}",
            field="index",
            value=index,
        )
    whole = (slice(None),) * (len(info.shape) - len(index))
    bounds = [part.indices(n)[:2] for part, n in zip((*index, *whole), info.shape, strict=True)]
    return [(start, max(start, stop)) for start, stop in bounds]


def _pieces(handle: FileIO, info: TensorInfo, start: int, stop: int, width: int) -> Iterator[tuple[int, np.ndarray]]:
    """(row, [n, width] as stored) over rows start to stop of the tensor seen as [rows, width]; the buffer is reused."""
    stored = DTYPES[info.dtype]
    row_bytes = width * stored.itemsize
    step = max(1, CHUNK // row_bytes)
    buffer = np.empty(min(step, stop - start) * row_bytes, np.uint8)
    for row in range(start, stop, step):
        piece = buffer[: min(step, stop - row) * row_bytes]
        _fill(handle, info, row * row_bytes, piece)
        yield row, piece.view(stored).reshape(-1, width)


def _fill(handle: FileIO, info: TensorInfo, offset: int, into: np.ndarray) -> None:
    """Reads `into` (bytes) full, from `offset` bytes after the tensor's start."""
    handle.seek(info.offset + offset)
    left = into.data
    while left:
        count = handle.readinto(left)
        if not count:
            raise _broken(info.file, f"ended while tensor {show(info.name)} was read", info.name)
        left = left[count:]


def write_tensors(file: Path, tensors: Iterable[tuple[str, np.ndarray]]) -> dict[str, int]:
    """Writes (name, array) pairs to a new safetensors file as they come and syncs it; returns name -> bytes.

    Holds one array at a time. The data start on a multiple of 8 bytes and lie without gaps in the order given, as the
    format asks. Raises RzooError for a name given twice, a dtype that the format lacks, and errors of the disk.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    sizes: dict[str, int] = {}
    end = 0
    with writing(file):
        handle = open(file, "xb+", buffering=0)  # noqa: SIM115  closed below; an error of `tensors` is none of writing's
    with handle:
        handle.seek(HEADER_ROOM)
        for name, array in tensors:
            if name in entries:
                raise RzooError(
                    f"tensor {show(name)} is given twice, or its name is reserved", field="tensors", value=name
                )
            data = array_bytes(name, array)
            entries[name] = {
                "dtype": DTYPE_NAMES[array.dtype.newbyteorder("<")],
                "shape": list(array.shape),
                "data_offsets": [end, end + data.size],
            }
            sizes[name] = data.size
            end += data.size
            with writing(file):
                _write_all(handle, data)
            del array, data  # before the next one is made
        with writing(file):
            _write_header(handle, entries, end)
            os.fsync(handle.fileno())
    return sizes


def array_bytes(name: str, array: np.ndarray) -> np.ndarray:
    """The array's little-endian bytes in row-major order, [nbytes]; a view where they lie so already.

    Raises RzooError for a dtype that the format lacks.
    """
    dtype = array.dtype.newbyteorder("<")
    if dtype not in DTYPE_NAMES:
        known = ", ".join(str(dtype) for dtype in DTYPE_NAMES)
        raise RzooError(
            f"tensor {name}: dtype ({array.dtype}) must be one of {known}", field="dtype", value=array.dtype
        )
    return np.ascontiguousarray(array, dtype).reshape(-1).view(np.uint8)


def _write_all(handle: FileIO, data: Any) -> None:
    left = memoryview(data)
    while left:
        left = left[handle.write(left) :]


def _write_header(handle: FileIO, entries: dict[str, Any], data_bytes: int) -> None:
    """Puts the header before the data that stand at HEADER_ROOM, which move up where the room is too small."""
    header = json.dumps(entries, separators=(",", ":")).encode()
    room = max(HEADER_ROOM, -(-(8 + len(header)) // 8) * 8)
    if room - 8 > MAX_JSON:
        raise RzooError(
            f"{len(entries)} tensors need a header of {len(header)} bytes, the limit is {MAX_JSON}",
            field="max_shard_bytes",
            fix="Write smaller shards.",
        )
    if room > HEADER_ROOM:
        _move_data(handle, room, data_bytes)
    handle.seek(0)
    _write_all(handle, (room - 8).to_bytes(8, "little") + header.ljust(room - 8))


def _move_data(handle: FileIO, to: int, data_bytes: int) -> None:
    """Moves the data from HEADER_ROOM up to `to`, last bytes first since both places overlap."""
    for end in range(data_bytes, 0, -CHUNK):
        begin = max(0, end - CHUNK)
        handle.seek(HEADER_ROOM + begin)
        chunk = bytearray(end - begin)
        if handle.readinto(chunk) != len(chunk):
            raise OSError("short read of our own file")
        handle.seek(to + begin)
        _write_all(handle, chunk)
