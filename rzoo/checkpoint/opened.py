"""Checkpoints whose headers were read and checked, of either form: a folder in Hugging Face form, a GGUF file."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rzoo.checkpoint import fp8
from rzoo.checkpoint.gguf import GGUFFile, check_supported, open_gguf
from rzoo.checkpoint.huggingface import HFFolder, open_folder
from rzoo.checkpoint.names import Match, Source, layer_of, match, without_mtp
from rzoo.checkpoint.safetensors_file import TensorInfo
from rzoo.checkpoint.training import find_step, open_step, read_step, target_for
from rzoo.compile.blocks import KINDS, TILE, BlockQuantized
from rzoo.compile.quantize import Rules, Scheme, quantized, schemes_for
from rzoo.core import DTYPES, RzooError
from rzoo.models.deepseek import DeepSeekConfig
from rzoo.models.llama import LlamaConfig
from rzoo.models.names import file_slices
from rzoo.models.nemotron import NemotronConfig
from rzoo.models.registry import Params, abstract_weights, config_from_hf
from rzoo.models.weights import Quantized
from rzoo.tokenizer import Tokenizer

# dtype in safetensors -> the type to hold it in.
HELD = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float32"}

# general.architecture -> reader of its metadata. In TURNED ones, q and k have rotary pairs interleaved.
ARCHITECTURES: dict[str, Callable[..., Any]] = {
    "llama": LlamaConfig.from_gguf,
    "qwen2": LlamaConfig.from_gguf,
    "deepseek2": DeepSeekConfig.from_gguf,
    "deci": NemotronConfig.from_gguf,
}
TURNED = ("llama", "deci")


@dataclass(frozen=True)
class Opened:
    """A checkpoint whose headers were read and checked, and none of its weights.

    read(path, dtype) gives a weight in its logical shape. kept: the names to give for dtype to have the file's own
    blocks, and the bytes that all weights take so: with "fp8" weights in FP8 blocks are Quantized and all others in
    `dtype`, with "file" those in blocks of GGUF are BlockQuantized. bits: how most of the file is stored. dtype: the
    type to hold it in where float32 does not fit.
    read_part(path, index, dtype): the part of a weight that slices of its logical axes name, reading little more; None
    where the file can be read by whole tensors only. read_all(paths, dtype, forms): the weights called so where the
    forms place them, dtype None as stored; only a step of training has it, and it alone. schemes: the weights that
    read gives as Quantized, and how.
    """

    config: Any
    matched: Match
    read: Callable[[str, Any], Any]
    read_raw: Callable[[str], np.ndarray]
    bits: str
    dtype: str
    tokenizer: Any
    stops: tuple[int, ...]
    recommended: dict[str, Any]
    warnings: tuple[str, ...] = ()
    kept: Mapping[str, int] = field(default_factory=dict)
    read_part: Callable[[str, tuple[slice, ...], Any], np.ndarray] | None = None
    read_all: Callable[[Sequence[str], Any, Any], Params] | None = None
    schemes: Mapping[str, Scheme] = field(default_factory=dict)


def open_checkpoint(path: Path, *, mtp: bool = False) -> Opened:
    """Reads and checks everything but the weights. mtp: with the module of multi-token prediction, which only folders
    in Hugging Face form have; a step has it where it was saved with it.
    """
    if path.suffix == ".gguf":
        if mtp:
            raise _without_mtp_module(path)
        return opened_gguf(path)
    step, warnings = find_step(path)
    if step is None:
        return opened_folder(path, mtp=mtp)
    opened = opened_step(step, warnings)
    if mtp and not getattr(opened.config, "mtp", False):
        raise _without_mtp_module(path)
    return opened


def _without_mtp_module(path: Path) -> RzooError:
    words = f"mtp: {path} has no module for multi-token prediction that rzoo reads"
    return RzooError(words, field="mtp", value=True, fix="leave mtp out")


def opened_folder(path: Path, *, mtp: bool = False) -> Opened:
    """Reads config.json, headers and tokenizer of a folder and checks that they fit together."""
    folder = open_folder(path)
    config = config_from_hf(folder.config)
    if mtp:
        if not getattr(config, "mtp_layers", 0) or config.layers not in map(layer_of, folder.tensors):
            raise _without_mtp_module(path)
        config = replace(config, mtp=True)
    fp8.check_quantization(folder.config)
    kept, skipped = without_mtp(config, folder.tensors)
    used = {name: folder.tensors[name] for name in kept}
    fp8.check_scales(used, str(path))
    shapes = {name: info.shape for name, info in used.items() if not name.endswith(fp8.SCALE)}
    matched = match(config, shapes, kind="hf", where=str(path))
    has_blocks = any(info.dtype == fp8.CODES for info in used.values())

    def read(weight: str, dtype: Any) -> Any:
        shape, source = abstract_weights(config)[weight][1].shape, matched.tensors[weight]
        stored = folder.tensors[source.names[0]].dtype
        if dtype == "fp8" and stored == fp8.CODES:
            return _read_blocks(folder, source, shape)
        return _read_dense(folder, source, shape, HELD.get(stored, "bfloat16") if dtype == "fp8" else dtype)

    def read_part(weight: str, index: tuple[slice, ...], dtype: Any) -> np.ndarray:
        axes, shape = abstract_weights(config)[weight]
        return _read_part(folder, matched.tensors[weight], axes, shape.shape, index, dtype)

    tokenizer = Tokenizer.from_file(path) if (path / "tokenizer.json").is_file() else None
    return Opened(
        config=config,
        matched=matched,
        read=read,
        read_raw=folder.read,
        bits=dominant_dtype(used.values()),
        dtype=HELD.get(dominant_dtype(i for n, i in used.items() if n in shapes and i.dtype != fp8.CODES), "bfloat16"),
        tokenizer=tokenizer,
        stops=_stops(folder.config, folder.generation_config, tokenizer),
        recommended=_recommended(folder.generation_config),
        warnings=(*folder.warnings, *skipped),
        kept={"fp8": sum(info.nbytes for info in used.values())} if has_blocks else {},
        read_part=None if has_blocks else read_part,
    )


def _read_dense(folder: HFFolder, source: Source, shape: tuple[int, ...], dtype: Any) -> Any:
    """A weight in `dtype`, each of its tensors read straight into its place."""
    out = np.empty((len(source.names), *source.shape), dtype)
    for name, place in zip(source.names, out, strict=True):
        if folder.tensors[name].dtype == fp8.CODES:
            fp8.read_values(folder, name, place)
        else:
            folder.read_into(name, place)
    return out.reshape(shape) if source.stacked else source.taken(out[0], shape)


def _read_part(
    folder: HFFolder, source: Source, axes: Sequence[str], shape: tuple[int, ...], index: tuple[slice, ...], dtype: Any
) -> np.ndarray:
    """The part of a weight of logical `shape` that `index` names."""
    bounds = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
    size = tuple(stop - start for start, stop in bounds)
    if source.stacked:
        names = source.names[slice(*bounds[0])]
        inner = file_slices(axes[1:], shape[1:], bounds[1:])
        return np.stack([folder.read_slice(name, inner, dtype) for name in names]).reshape(size)
    if source.part is None:
        return folder.read_slice(source.names[0], file_slices(axes, shape, bounds), dtype).reshape(size)
    heads, per_head = slice(*bounds[0]), source.shape[0] // shape[0]
    rows = folder.read_slice(source.names[0], (slice(heads.start * per_head, heads.stop * per_head),), dtype)
    own = rows.reshape(size[0], per_head, *shape[2:])[:, slice(*source.part)]
    return own[(slice(None), *(slice(*b) for b in bounds[1:]))]


def _read_blocks(folder: HFFolder, source: Source, shape: tuple[int, ...]) -> Quantized:
    """A weight as the codes and scales of the file."""
    codes = np.empty((len(source.names), *source.shape), fp8.E4M3)
    scale = np.empty((len(source.names), *fp8.scale_shape(source.shape)), np.float32)
    for name, codes_place, scale_place in zip(source.names, codes, scale, strict=True):
        folder.read_into(name, codes_place)
        folder.read_into(name + fp8.SCALE, scale_place)
    if source.stacked:
        return fp8.as_weight(codes, scale, shape)
    return fp8.as_weight(codes[0], scale[0], shape, source.part)


def dominant_dtype(tensors: Iterable[TensorInfo]) -> str:
    """The dtype, as safetensors names it, that takes the most bytes."""
    total: dict[str, int] = {}
    for info in tensors:
        total[info.dtype] = total.get(info.dtype, 0) + info.nbytes
    return max(total, key=lambda name: total[name])


def _recommended(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in generation_config.items() if k in ("temperature", "top_p", "top_k")}


def opened_step(path: Path, warnings: tuple[str, ...] = ()) -> Opened:
    """Reads and checks the small files of a step of training (training.py), and the checksums of the large ones."""
    step = open_step(path)
    tokenizer = Tokenizer.from_file(path) if (path / "tokenizer.json").is_file() else None
    sizes = Counter[str]()
    for array in jax.tree.leaves(step.stored):
        sizes[array.dtype.name] += array.size * array.dtype.itemsize
    main = sizes.most_common(1)[0][0]

    def read_all(paths: Sequence[str], dtype: Any, forms: Any) -> Params:
        return read_step(step, target_for(step, dtype, forms, paths))

    return Opened(
        config=step.config,
        matched=Match({}),
        read=no_single_reads,
        read_raw=no_single_reads,
        bits=main,
        dtype=main if main in DTYPES else "bfloat16",
        tokenizer=tokenizer,
        stops=_stops({}, step.generation, tokenizer),
        recommended=_recommended(step.generation),
        warnings=warnings,
        read_all=read_all,
    )


def quantizing(opened: Opened, weights: str | Rules | None, dtype: Any) -> Opened:
    """The same checkpoint, whose read gives the weights quantized that rzoo.quantize would; a step stays as it is.

    Raises RzooError for unknown schemes and patterns, and beside blocks of the file that are to be kept.
    """
    if weights is None:
        return opened
    if dtype in opened.kept:
        fix = "leave one of the two out"
        raise RzooError(f"weights ({weights}): dtype {dtype} keeps the file's own codes", field="weights", fix=fix)
    schemes = schemes_for(opened.config, weights)

    def read(path: str, dtype: Any) -> Any:
        value = opened.read(path, dtype)
        if path not in schemes:
            return value
        return jax.tree.map(np.asarray, quantized(opened.config, path, value, schemes[path]))

    whole = opened if opened.read_all is not None else replace(opened, read=read, read_part=None)
    return replace(whole, schemes=schemes)


def no_single_reads(*_: Any) -> Any:
    """Steps are read at once, by read_all."""
    raise NotImplementedError


def _stops(
    config: Mapping[str, Any], generation_config: Mapping[str, Any], tokenizer: Tokenizer | None
) -> tuple[int, ...]:
    """Every id that any of the files calls an end: they add to each other, none replaces another."""
    stops = set(tokenizer.eos_ids) if tokenizer else set()
    for fields in (config, generation_config):
        given = fields.get("eos_token_id")
        stops |= {i for i in (given if isinstance(given, list) else [given]) if isinstance(i, int)}
    return tuple(sorted(stops))


def opened_gguf(path: Path) -> Opened:
    """Reads and checks the header of a GGUF file."""
    file = open_gguf(path)
    check_supported(file)
    config = _config(file)
    kept, skipped = without_mtp(config, file.tensors)
    shapes = {name: file.tensors[name].shape for name in kept}
    matched = match(config, shapes, kind="gguf", where=str(path))
    weights, turned = abstract_weights(config), file.metadata["general.architecture"] in TURNED

    def read(weight: str, dtype: Any) -> Any:
        source, shape = matched.tensors[weight], weights[weight][1].shape
        rows_turned = turned and source.row.turned
        if dtype == "file" and _in_blocks(file, source):
            return _read_file_blocks(file, source, shape, rows_turned)
        kind = file.tensors[source.names[0]].type
        array = source.taken(file.read(source.names[0], HELD.get(kind, "float32") if dtype == "file" else dtype), shape)
        return unturned(array) if rows_turned else array

    tokenizer = Tokenizer.from_gguf(file.metadata)
    stops = {file.metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot")} | set(tokenizer.eos_ids)
    return Opened(
        config=config,
        matched=matched,
        read=read,
        read_raw=file.read,
        bits=file.dominant_type or "F32",
        dtype="bfloat16",
        kept={"file": sum(_kept_bytes(file, matched.tensors[path], w.size) for path, (_, w) in weights.items())},
        tokenizer=tokenizer,
        stops=tuple(sorted(i for i in stops if isinstance(i, int))),
        recommended={},
        warnings=skipped,
    )


def _in_blocks(file: GGUFFile, source: Source) -> bool:
    """Whether a weight can be held in the blocks of the file: whole rows of a type that has a form for products."""
    return file.tensors[source.names[0]].type in KINDS and not source.transposed


def _kept_bytes(file: GGUFFile, source: Source, values: int) -> int:
    """What a weight of so many values takes held as "file": blocks for whole tiles of rows, else its own type or
    float32.
    """
    kind, columns = file.tensors[source.names[0]].type, source.shape[-1]
    if not _in_blocks(file, source):
        return values * np.dtype(HELD.get(kind, "float32")).itemsize
    rows = -(-values // columns // TILE) * TILE
    return rows * columns // KINDS[kind].values * KINDS[kind].nbytes


def _read_file_blocks(file: GGUFFile, source: Source, shape: tuple[int, ...], turned: bool) -> BlockQuantized:
    """A weight of logical `shape` in the blocks of the file."""
    rows = file.read_blocks(source.names[0])
    if source.part is not None:
        rows = rows.reshape(shape[0], -1, rows.shape[1])[:, slice(*source.part)].reshape(-1, rows.shape[1])
    if turned:
        rows = unturned(rows.reshape(*shape[:2], -1)).reshape(rows.shape)
    return BlockQuantized.of_file(file.tensors[source.names[0]].type, rows, shape)


def _config(file: GGUFFile) -> Any:
    kind = file.metadata.get("general.architecture")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise RzooError(
            f"{file.path}: general.architecture ({kind!r}) is not supported; supported: {', '.join(ARCHITECTURES)}",
            field="general.architecture",
            value=kind,
        )
    name = "rope_freqs.weight"
    divisors = tuple(file.read(name).ravel().tolist()) if name in file.tensors else None
    return ARCHITECTURES[kind](file.metadata, tensors=frozenset(file.tensors), rope_divisors=divisors)


def unturned(heads: np.ndarray) -> np.ndarray:
    """Rows [heads, width, ...] with rotary pairs (2i, 2i+1) side by side -> pairs (i, i + width/2)."""
    n, width = heads.shape[:2]
    return np.ascontiguousarray(heads.reshape(n, width // 2, 2, *heads.shape[2:]).swapaxes(1, 2)).reshape(heads.shape)
