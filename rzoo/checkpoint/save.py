"""`rzoo.export`: a handle as a folder in Hugging Face form that other programs read."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from rzoo.checkpoint.huggingface import write_folder
from rzoo.handle import LM
from rzoo.models.names import file_shape, named
from rzoo.models.registry import abstract_weights, family_of
from rzoo.models.stacking import unstack


def export(lm: LM, folder: str | Path, *, overwrite: bool = False, max_shard_bytes: int = 5 * 10**9) -> Path:
    """Writes config.json (readable by transformers 4 and 5), shards, index and tokenizer; returns the folder.

    Weights keep their bits. The folder appears when it is complete. Raises RzooError where it exists and is not empty,
    unless overwrite.
    """
    config = lm.config.to_hf() | {"dtype": next(iter(lm.params.values())).dtype.name}
    generation = {**lm.about.recommended, **({"eos_token_id": list(lm.about.stops)} if lm.about.stops else {})}
    extra = {"tokenizer.json": lm.tokenizer.to_json().encode()} if lm.tokenizer else {}
    if lm.about.template:
        extra["chat_template.jinja"] = lm.about.template.encode()
    write_folder(
        folder,
        config,
        _tensors(lm),
        generation_config=generation or None,
        extra_files=extra,
        max_shard_bytes=max_shard_bytes,
        overwrite=overwrite,
    )
    return Path(folder)


def _tensors(lm: LM) -> Iterator[tuple[str, np.ndarray]]:
    table, params = family_of(lm.config).names, unstack(lm.config, lm.params)
    for path, (axes, weight) in abstract_weights(lm.config).items():
        yield named(table, path).hf, np.asarray(params[path]).reshape(file_shape(axes, weight.shape))
