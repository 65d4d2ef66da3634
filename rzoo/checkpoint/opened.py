"""Checkpoints whose headers were read and checked, of either form: a folder in Hugging Face form, a GGUF file."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rzoo.checkpoint.gguf import GGUFFile, check_supported, open_gguf
from rzoo.checkpoint.huggingface import HFFolder, open_folder
from rzoo.checkpoint.names import Match, match
from rzoo.core import RzooError
from rzoo.models.llama import LlamaConfig
from rzoo.models.nemotron import NemotronConfig
from rzoo.models.registry import abstract_weights, config_from_hf
from rzoo.tokenizer import Tokenizer

# dtype in safetensors -> the type to hold it in.
HELD = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float32"}

# general.architecture -> reader of its metadata. In TURNED ones, q and k have rotary pairs interleaved.
ARCHITECTURES: dict[str, Callable[..., Any]] = {
    "llama": LlamaConfig.from_gguf,
    "qwen2": LlamaConfig.from_gguf,
    "deci": NemotronConfig.from_gguf,
}
TURNED = ("llama", "deci")


@dataclass(frozen=True)
class Opened:
    """A checkpoint whose headers were read and checked, and none of its weights.

    read(path, dtype) gives a weight in its logical shape. bits: how most of the file is stored. dtype: the type to
    hold it in where float32 does not fit.
    """

    config: Any
    matched: Match
    read: Callable[[str, Any], np.ndarray]
    read_raw: Callable[[str], np.ndarray]
    bits: str
    dtype: str
    tokenizer: Any
    stops: tuple[int, ...]
    recommended: dict[str, Any]
    warnings: tuple[str, ...] = ()


def open_checkpoint(path: Path) -> Opened:
    """Reads and checks everything but the weights."""
    return opened_gguf(path) if path.suffix == ".gguf" else opened_folder(path)


def opened_folder(path: Path) -> Opened:
    """Reads config.json, headers and tokenizer of a folder and checks that they fit together."""
    folder = open_folder(path)
    config = config_from_hf(folder.config)
    shapes = {name: info.shape for name, info in folder.tensors.items()}
    matched = match(config, shapes, kind="hf", where=str(path))

    def read(weight: str, dtype: Any) -> np.ndarray:
        return folder.read(matched.tensors[weight][1], dtype).reshape(abstract_weights(config)[weight][1].shape)

    stored = dominant_dtype(folder)
    tokenizer = Tokenizer.from_file(path) if (path / "tokenizer.json").is_file() else None
    return Opened(
        config=config,
        matched=matched,
        read=read,
        read_raw=folder.read,
        bits=stored,
        dtype=HELD.get(stored, "bfloat16"),
        tokenizer=tokenizer,
        stops=_stops(folder, tokenizer),
        recommended={k: v for k, v in folder.generation_config.items() if k in ("temperature", "top_p", "top_k")},
        warnings=folder.warnings,
    )


def dominant_dtype(folder: HFFolder) -> str:
    """The dtype, as safetensors names it, that takes the most bytes."""
    total: dict[str, int] = {}
    for info in folder.tensors.values():
        total[info.dtype] = total.get(info.dtype, 0) + info.nbytes
    return max(total, key=lambda name: total[name])


def _stops(folder: HFFolder, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Every id that any of the files calls an end: they add to each other, none replaces another."""
    stops = set(tokenizer.eos_ids) if tokenizer else set()
    for fields in (folder.config, folder.generation_config):
        given = fields.get("eos_token_id")
        stops |= {i for i in (given if isinstance(given, list) else [given]) if isinstance(i, int)}
    return tuple(sorted(stops))


def opened_gguf(path: Path) -> Opened:
    """Reads and checks the header of a GGUF file."""
    file = open_gguf(path)
    check_supported(file)
    config = _config(file)
    shapes = {name: info.shape for name, info in file.tensors.items()}
    matched = match(config, shapes, kind="gguf", where=str(path))
    turned = file.metadata["general.architecture"] in TURNED

    def read(weight: str, dtype: Any) -> np.ndarray:
        row, name = matched.tensors[weight]
        shape = abstract_weights(config)[weight][1].shape
        array = file.read(name, dtype).reshape(shape)
        return unturned(array) if turned and row.turned else array

    tokenizer = Tokenizer.from_gguf(file.metadata)
    stops = {file.metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot")} | set(tokenizer.eos_ids)
    return Opened(
        config=config,
        matched=matched,
        read=read,
        read_raw=file.read,
        bits=file.dominant_type or "F32",
        dtype="bfloat16",
        tokenizer=tokenizer,
        stops=tuple(sorted(i for i in stops if isinstance(i, int))),
        recommended={},
    )


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
