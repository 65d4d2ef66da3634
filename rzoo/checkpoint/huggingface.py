"""Checkpoint folders as the Hugging Face libraries write them: config.json, generation_config.json, safetensors.

Opening a folder reads its JSON files and the headers of its weights; tensors are read one by one when asked for.
Which files hold the weights, in this order: those that model.safetensors.index.json lists, model.safetensors, every
*.safetensors there. rzoo never unpickles, so .bin, .pt and .pth files are refused.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import secrets
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

import numpy as np

from rzoo.checkpoint.safetensors_file import (
    TensorInfo,
    few,
    read_header,
    read_json,
    read_tensor,
    reading,
    show,
    write_tensors,
    writing,
)
from rzoo.core import RzooError

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth")
CONVERT = (
    "Convert it where you trust its source: open it with the library that wrote it and save it as safetensors, for"
    " example transformers' save_pretrained."
)


@dataclass(frozen=True)
class HFFolder:
    """An open checkpoint folder: its configs, where each tensor lies, and what looked odd on the way (`warnings`)."""

    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]  # empty where the folder has none
    tensors: dict[str, TensorInfo]
    warnings: tuple[str, ...]

    def read(self, name: str, dtype: Any = None) -> np.ndarray:
        """The tensor `name`, cast to `dtype` unless that is None; reads its bytes alone. Raises RzooError."""
        return self.read_slice(name, (), dtype)

    def read_into(self, name: str, out: np.ndarray) -> None:
        """Fills `out`, a contiguous array of the tensor's shape, casting to its type. Raises RzooError."""
        read_tensor(self._info(name), into=out)

    def read_slice(self, name: str, index: tuple[slice, ...], dtype: Any = None) -> np.ndarray:
        """The part `index` of the tensor `name`: slices without a step for its leading axes.

        Reads only the rows of axis 0 that `index` names. Raises RzooError.
        """
        return read_tensor(self._info(name), index, dtype)

    def _info(self, name: str) -> TensorInfo:
        info = self.tensors.get(name)
        if info is None:
            fix = f"It has {len(self.tensors)}: {few(map(show, self.tensors))}."
            raise RzooError(f"{self.path} has no tensor {show(name)}", field="name", value=name, fix=fix)
        return info


def open_folder(path: str | Path) -> HFFolder:
    """Opens the checkpoint folder at `path`; no tensor is read yet.

    Raises RzooError when the folder, config.json or the weights are absent, partly downloaded, pickled or broken.
    """
    folder = Path(path)
    _check_folder(folder)
    if not os.path.isfile(folder / CONFIG):
        fix = "Put the model's config.json beside its weights."
        raise RzooError(f"{folder} has no {CONFIG}", field="path", value=str(folder), fix=fix)
    config = read_json(folder / CONFIG)
    generation = folder / GENERATION_CONFIG
    generation_config = read_json(generation) if os.path.isfile(generation) else {}
    tensors, warnings = _find_tensors(folder)
    return HFFolder(folder, config, generation_config, tensors, warnings)


def _check_folder(folder: Path) -> None:
    problem = None
    if os.path.isfile(folder):
        problem, fix = "is a file, not a checkpoint folder", "Give the folder that holds config.json and the weights."
    elif not os.path.isdir(folder):
        problem, fix = "does not exist", "Check the path; a relative one counts from the current folder."
    else:
        with reading(folder):
            if not os.listdir(folder):
                problem, fix = "is empty", "Put config.json and the *.safetensors there, or give another folder."
    if problem:
        raise RzooError(f"{folder} {problem}", field="path", value=str(folder), fix=fix)


def _find_tensors(folder: Path) -> tuple[dict[str, TensorInfo], tuple[str, ...]]:
    """Every tensor of the folder, and warnings."""
    if not os.path.isfile(folder / INDEX):
        return _merged(_unindexed_files(folder)), ()
    weight_map = _weight_map(folder / INDEX)
    listed = sorted(set(weight_map.values()))
    absent = [file for file in listed if not os.path.isfile(folder / file)]
    if not absent:
        return _indexed(folder, weight_map)
    if len(absent) < len(listed) or not _safetensors(folder):
        raise RzooError(
            f"{folder} is partly downloaded: {len(absent)} of the {len(listed)} files that {INDEX} lists are absent:"
            f" {few(map(show, absent))}",
            field="path",
            value=str(folder),
            fix="Fetch the absent files.",
        )
    files = _unindexed_files(folder)
    tensors = _merged(files)
    return tensors, (_stale(files, weight_map.keys() - tensors.keys()),)


def _stale(files: list[Path], lost: set[str]) -> str:
    warning = f"stale index: no file that {INDEX} lists is there; read {few(file.name for file in files)} instead"
    return warning + (f", without {few(map(show, sorted(lost)))} of the index" if lost else "")


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> file name inside the folder. Raises RzooError for names that lead out of it, or to a pickle."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        problem = "weight_map must be an object of tensor name to file name, with one tensor at least"
        raise RzooError(f"{index}: {problem}", field="weight_map", value=show(weight_map), fix="Fetch the index again.")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not _stays_inside(file):
            problem = f"the file of {show(name)} ({show(file)}) must be a name inside the folder"
            raise RzooError(f"{index}: {problem}", field="weight_map", value=file, fix="Correct the index.")
        if file.endswith(PICKLES):
            problem = f"{show(file)} is a pickle, and rzoo never unpickles"
            raise RzooError(f"{index}: {problem}", field="weight_map", value=file, fix=CONVERT)
    return weight_map


def _stays_inside(file: str) -> bool:
    """Whether `file` is a plain relative path, read as POSIX or as Windows."""
    path = PurePosixPath(file.replace("\\", "/"))
    return path.name != "" and not path.is_absolute() and ".." not in path.parts and not re.search(r"[\0:]", file)


def _indexed(folder: Path, weight_map: dict[str, str]) -> tuple[dict[str, TensorInfo], tuple[str, ...]]:
    headers = {file: read_header(folder / file) for file in sorted(set(weight_map.values()))}
    lost = [name for name, file in weight_map.items() if name not in headers[file]]
    if lost:
        first = weight_map[lost[0]]
        raise RzooError(
            f"{folder}: {INDEX} lists tensors that their files lack: {few(map(show, lost))} (the first should be in"
            f" {show(first)})",
            field=lost[0],
            value=first,
            fix="The index and the files are of different versions: fetch both again.",
        )
    tensors = {
        name: info for file, header in headers.items() for name, info in header.items() if weight_map.get(name) == file
    }
    warnings = []
    unlisted = sorted({name for header in headers.values() for name in header} - tensors.keys())
    if unlisted:
        warnings.append(f"ignored {len(unlisted)} tensors that {INDEX} does not list: {few(map(show, unlisted))}")
    if SINGLE not in headers and os.path.isfile(folder / SINGLE):
        warnings.append(f"ignored {SINGLE}: {INDEX} lists other files, and all of them are there")
    return tensors, tuple(warnings)


def _safetensors(folder: Path) -> list[Path]:
    with reading(folder):
        return sorted(file for file in folder.iterdir() if file.name.endswith(".safetensors") and file.is_file())


def _unindexed_files(folder: Path) -> list[Path]:
    """The files that hold the weights where no index says so: model.safetensors, or all *.safetensors."""
    if os.path.isfile(folder / SINGLE):
        return [folder / SINGLE]
    files = _safetensors(folder)
    if files:
        _check_counts(files)
        return files
    with reading(folder):
        names = sorted(os.listdir(folder))
    pickles = [name for name in names if name.endswith(PICKLES)]
    if pickles:
        problem = f"has its weights only as pickles ({few(pickles)}), and rzoo never unpickles"
        raise RzooError(f"{folder} {problem}", field="path", value=str(folder), fix=CONVERT)
    raise RzooError(
        f"{folder} has no *.safetensors, only {few(names)}",
        field="path",
        value=str(folder),
        fix="Fetch the weights; a .gguf file is given by its own path.",
    )


def _check_counts(files: list[Path]) -> None:
    """Refuses files whose own names ("…-00001-of-00003…") say that others belong to them, where those are absent."""
    sets: dict[tuple[str, ...], set[int]] = defaultdict(set)
    for file in files:
        if match := re.fullmatch(r"(.*?)(\d{1,9})-of-(\d{1,9})(.*)", file.name, re.DOTALL):
            before, number, count, after = match.groups()
            sets[before, count, after].add(int(number))
    for (before, count, after), numbers in sets.items():
        absent = int(count) - len(numbers)
        if absent > 0:
            raise RzooError(
                f"{files[0].parent} is partly downloaded: {absent} of {int(count)} files are absent from the set"
                f" {show(f'{before}*-of-{count}{after}')}",
                field="path",
                value=str(files[0].parent),
                fix="Fetch the absent files.",
            )


def _merged(files: list[Path]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        header = read_header(file)
        if both := tensors.keys() & header.keys():
            name = min(both)
            raise RzooError(
                f"{file.parent}: tensor {show(name)} is in {tensors[name].file.name} and in {file.name}",
                field=name,
                fix=f"Remove the files of the other model, or add the {INDEX} that says which ones count.",
            )
        tensors |= header
    return tensors


def write_folder(
    path: str | Path,
    config: dict[str, Any],
    tensors: Iterable[tuple[str, np.ndarray]],
    *,
    generation_config: dict[str, Any] | None = None,
    extra_files: Mapping[str, bytes] = MappingProxyType({}),
    max_shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
) -> None:
    """Writes a checkpoint folder at `path` that the Hugging Face libraries read; `tensors` is consumed as a stream.

    Weights go to model.safetensors, or to shards of up to `max_shard_bytes` (more where one tensor is larger) with an
    index. All is written to a hidden sibling folder, synced, then renamed: after an error, a full disk or Ctrl-C
    nothing is under the new name and a checkpoint that was there is intact. `overwrite` replaces such a checkpoint as a
    whole; POSIX has no call that swaps two folders, so for a moment between two renames neither is at `path`.
    Raises RzooError.
    """
    target = Path(os.path.realpath(path))
    _check_target(target, overwrite)
    files = _small_files(config, generation_config, extra_files)
    partial = _sibling(target, "partial")
    with writing(partial):
        partial.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
    try:
        files |= _write_weights(partial, tensors, max_shard_bytes)
        for name, data in files.items():
            with writing(partial / name), open(partial / name, "xb") as handle:
                handle.write(data)
                handle.flush()
                os.fsync(handle.fileno())
        with writing(target):
            _sync_folder(partial)
            _put_in_place(partial, target, overwrite)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _check_target(target: Path, overwrite: bool) -> None:
    """Refuses a target that holds anything, but for a checkpoint when `overwrite` is given."""
    problem = fix = None
    if os.path.isdir(target):
        with reading(target):
            names = os.listdir(target)
        if names and not overwrite:
            problem, fix = "is not empty", "Give another folder, or overwrite=True to replace the checkpoint there."
        elif names and CONFIG not in names:
            problem, fix = f"is not empty and no checkpoint (it has no {CONFIG})", "Give another folder."
    elif os.path.lexists(target):
        problem, fix = "is not a folder", "Give another path."
    if problem:
        raise RzooError(f"{target} {problem}", field="path", value=str(target), fix=fix)


def _small_files(
    config: dict[str, Any], generation_config: dict[str, Any] | None, extra_files: Mapping[str, bytes]
) -> dict[str, bytes]:
    """File name -> content of all that is no weight."""
    files = {CONFIG: _json("config", config)}
    if generation_config is not None:
        files[GENERATION_CONFIG] = _json("generation_config", generation_config)
    for name, data in extra_files.items():
        if not _stays_inside(name) or "/" in name or name in (*files, INDEX) or name.endswith(".safetensors"):
            problem = f"extra file ({show(name)}) must be a plain file name, of no file that is written anyway"
            raise RzooError(problem, field="extra_files", value=name, fix="Rename it.")
        files[name] = data
    return files


def _json(field: str, value: dict[str, Any]) -> bytes:
    try:
        return (json.dumps(value, indent=2) + "\n").encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise RzooError(f"{field} cannot be written as JSON: {error}", field=field) from error


def _write_weights(folder: Path, tensors: Iterable[tuple[str, np.ndarray]], limit: int) -> dict[str, bytes]:
    """Writes the shards; returns the index as file name -> content, empty where one shard holds all."""
    shards: list[dict[str, int]] = []
    seen: set[str] = set()
    for number, group in itertools.groupby(tensors, key=_shard_counter(limit)):
        shards.append(write_tensors(_unnumbered(folder, number), group))
        if twice := seen & shards[-1].keys():
            name = min(twice)
            raise RzooError(f"tensor {show(name)} is given twice", field="tensors", value=name)
        seen |= shards[-1].keys()
    if not shards:
        raise RzooError("there are no tensors to write", field="tensors")
    names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    if len(names) == 1:
        names = [SINGLE]
    for number, name in enumerate(names):
        with writing(folder / name):
            os.rename(_unnumbered(folder, number), folder / name)
    if len(names) == 1:
        return {}
    weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    total = sum(sum(shard.values()) for shard in shards)
    return {INDEX: _json("index", {"metadata": {"total_size": total}, "weight_map": weight_map})}


def _unnumbered(folder: Path, number: int) -> Path:
    """A shard's file until the number of shards is known."""
    return folder / f"shard-{number}.partial"


def _shard_counter(limit: int) -> Callable[[tuple[str, np.ndarray]], int]:
    """A function that gives each tensor of a stream its shard: a new one begins where `limit` bytes would be passed."""
    shard = used = 0

    def shard_of(tensor: tuple[str, np.ndarray]) -> int:
        nonlocal shard, used
        if used and used + tensor[1].nbytes > limit:
            shard, used = shard + 1, 0
        used += tensor[1].nbytes
        return shard

    return shard_of


def _sibling(target: Path, purpose: str) -> Path:
    """An unused hidden name beside `target`, so that a rename stays within one file system."""
    return target.with_name(f".{target.name}.{purpose}-{secrets.token_hex(4)}")


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _put_in_place(partial: Path, target: Path, overwrite: bool) -> None:
    """Renames `partial` to `target`; a checkpoint at `target` is removed once the new one has its name."""
    old = _sibling(target, "old")
    try:
        os.rename(partial, target)  # succeeds over an empty folder
    except OSError as error:
        if not overwrite or error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        os.rename(target, old)
        try:
            os.rename(partial, target)
        except BaseException:
            os.rename(old, target)
            raise
    _sync_folder(target.parent)
    shutil.rmtree(old, ignore_errors=True)
