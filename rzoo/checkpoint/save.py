"""`rzoo.export`: a handle as a folder in Hugging Face form that other programs read."""

import json
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rzoo.checkpoint import fp8 as blocks
from rzoo.checkpoint.huggingface import CONFIG, GENERATION_CONFIG, write_folder
from rzoo.checkpoint.names import mtp_copies, sources
from rzoo.compile.blocks import BlockQuantized
from rzoo.compile.programs import on_host
from rzoo.compile.storage import plain
from rzoo.core import RzooError
from rzoo.handle import LM
from rzoo.models.registry import family_of
from rzoo.models.stacking import unstack
from rzoo.models.weights import Quantized, Storage


def export(
    lm: LM, folder: str | Path, *, fp8: bool = False, overwrite: bool = False, max_shard_bytes: int = 5 * 10**9
) -> Path:
    """Writes config.json (readable by transformers 4 and 5), shards, index and tokenizer; returns the folder.

    Weights keep their bits, but integer codes are written as the numbers that they stand for; fp8 writes those that
    DeepSeek publishes in FP8 blocks so. The folder appears when it is complete. Raises RzooError where it exists and is
    not empty, unless overwrite, and for fp8 where the family is not published in it.
    """
    in_blocks = fp8 or any(map(_in_blocks, lm.params.values()))
    if fp8 and not any(row.blocks for row in family_of(lm.config).names):
        raise RzooError("fp8: models of this family are not published in FP8 blocks", field="fp8", value=fp8)
    files = about_files(lm)
    config = json.loads(files.pop(CONFIG))
    generation = json.loads(files.pop(GENERATION_CONFIG, b"null"))
    if in_blocks:
        config["quantization_config"] = blocks.QUANTIZATION
    tensors = _tensors(lm, fp8)
    if jax.process_index():  # the first process writes; parts that others hold are sent to it
        deque(tensors, maxlen=0)
        return Path(folder)
    write_folder(
        folder,
        config,
        tensors,
        generation_config=generation,
        extra_files=files,
        max_shard_bytes=max_shard_bytes,
        overwrite=overwrite,
    )
    return Path(folder)


def about_files(lm: LM) -> dict[str, bytes]:
    """File name -> content of all that belongs to a model beside its weights."""
    config = lm.config.to_hf() | {"dtype": _dtype(lm)}
    files = {CONFIG: json.dumps(config, indent=2).encode()}
    generation = {**lm.about.recommended, **({"eos_token_id": list(lm.about.stops)} if lm.about.stops else {})}
    if generation:
        files[GENERATION_CONFIG] = json.dumps(generation, indent=2).encode()
    if lm.tokenizer:
        files["tokenizer.json"] = lm.tokenizer.to_json().encode()
        files["tokenizer_config.json"] = json.dumps(lm.tokenizer.settings(), ensure_ascii=False, indent=2).encode()
    if lm.about.template:
        files["chat_template.jinja"] = lm.about.template.encode()
    return files


def _dtype(lm: LM) -> str:
    """The type of the embedding, or of whatever a part of a model holds beside codes."""
    arrays = {path: value for path, value in lm.params.items() if hasattr(value, "dtype")}
    name: str = jax.tree.leaves(arrays.get("embed", arrays or lm.params))[0].dtype.name
    return name


def _in_blocks(value: Any) -> bool:
    """Whether a weight is in the blocks that DeepSeek's files have."""
    return isinstance(value, Quantized) and value.codes.dtype == blocks.E4M3


def _tensors(lm: LM, fp8: bool) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor of the file; a weight in blocks gives two."""
    sharing: dict[tuple[str, ...], list[str]] = {}
    found, params = sources(lm.config, "hf"), plain(unstack(lm.config, lm.params))
    for path, source in found.items():
        sharing.setdefault(source.names, []).append(path)
    for names, paths in sharing.items():
        paths.sort(key=lambda path: found[path].part or (0, 0))
        source, values = found[paths[0]], [params[path] for path in paths]
        for i, name in enumerate(names):
            parts = [_entry(values[0], i)] if source.stacked else values
            yield from _written(
                name, [_as_in_files(part, lm) for part in parts], source.shape, fp8 and source.row.blocks
            )
    for name, path in mtp_copies(lm.config).items():
        yield from _written(name, [_as_in_files(params[path], lm)], found[path].shape, False)


def _as_in_files(value: Any, lm: LM) -> Any:
    """Integer codes and blocks of GGUF as the numbers that they stand for; all else as it is."""
    if isinstance(value, BlockQuantized):
        return value.dense().astype(_dtype(lm))
    plain_codes = isinstance(value, Quantized) and not _in_blocks(value)
    return value.dequantize(_dtype(lm)) if plain_codes else value


def _entry(stack: Any, i: int) -> Any:
    return stack.entry(i) if isinstance(stack, Storage) else stack[i]


def _written(name: str, parts: list[Any], shape: tuple[int, ...], fp8: bool) -> Iterator[tuple[str, np.ndarray]]:
    """One tensor of the weights that lie in it side by side, head by head: itself, or its codes and its scales."""
    if isinstance(parts[0], Quantized):
        codes, scale = blocks.as_tensor(parts)
    else:
        tensor = on_host(parts[0]) if len(parts) == 1 else np.concatenate([on_host(p) for p in parts], axis=1)
        tensor = tensor.reshape(shape)
        if not fp8:
            yield name, tensor
            return
        codes, scale = blocks.quantize_blocks(tensor)
    yield name, codes
    yield name + blocks.SCALE, scale
