"""`rzoo.export`: a handle as a folder in Hugging Face form that other programs read."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rzoo.checkpoint import fp8 as blocks
from rzoo.checkpoint.huggingface import write_folder
from rzoo.checkpoint.names import sources
from rzoo.compile.storage import plain
from rzoo.core import RzooError
from rzoo.handle import LM
from rzoo.models.registry import family_of
from rzoo.models.stacking import unstack
from rzoo.models.weights import Quantized


def export(
    lm: LM, folder: str | Path, *, fp8: bool = False, overwrite: bool = False, max_shard_bytes: int = 5 * 10**9
) -> Path:
    """Writes config.json (readable by transformers 4 and 5), shards, index and tokenizer; returns the folder.

    Weights keep their bits; fp8 writes those that DeepSeek publishes in FP8 blocks so. The folder appears when it is
    complete. Raises RzooError where it exists and is not empty, unless overwrite, and for fp8 where the family is not
    published in it.
    """
    in_blocks = fp8 or any(isinstance(value, Quantized) for value in lm.params.values())
    if fp8 and not any(row.blocks for row in family_of(lm.config).names):
        raise RzooError("fp8: models of this family are not published in FP8 blocks", field="fp8", value=fp8)
    config = lm.config.to_hf() | {"dtype": lm.params["embed"].dtype.name}
    if in_blocks:
        config["quantization_config"] = blocks.QUANTIZATION
    generation = {**lm.about.recommended, **({"eos_token_id": list(lm.about.stops)} if lm.about.stops else {})}
    extra = {"tokenizer.json": lm.tokenizer.to_json().encode()} if lm.tokenizer else {}
    if lm.about.template:
        extra["chat_template.jinja"] = lm.about.template.encode()
    write_folder(
        folder,
        config,
        _tensors(lm, fp8),
        generation_config=generation or None,
        extra_files=extra,
        max_shard_bytes=max_shard_bytes,
        overwrite=overwrite,
    )
    return Path(folder)


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
            yield from _written(name, parts, source.shape, fp8 and source.row.blocks)


def _entry(stack: Any, i: int) -> Any:
    return stack.entry(i) if isinstance(stack, Quantized) else stack[i]


def _written(name: str, parts: list[Any], shape: tuple[int, ...], fp8: bool) -> Iterator[tuple[str, np.ndarray]]:
    """One tensor of the weights that lie in it side by side, head by head: itself, or its codes and its scales."""
    if isinstance(parts[0], Quantized):
        codes, scale = blocks.as_tensor(parts)
    else:
        tensor = np.asarray(parts[0]) if len(parts) == 1 else np.concatenate([np.asarray(p) for p in parts], axis=1)
        tensor = tensor.reshape(shape)
        if not fp8:
            yield name, tensor
            return
        codes, scale = blocks.quantize_blocks(tensor)
    yield name, codes
    yield name + blocks.SCALE, scale
