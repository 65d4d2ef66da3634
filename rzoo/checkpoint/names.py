"""Which tensor of a file becomes which weight: one table a family, every mismatch in one error."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rzoo.core import RzooError
from rzoo.models.names import WeightName, file_shape, named
from rzoo.models.registry import abstract_weights, family_of

# Tensors that some files carry and no model needs: buffers that are computed from the config.
IGNORED = ("rotary_emb.inv_freq", "rope_freqs.weight", ".attn_rot_embd", ".attention.masked_bias", ".attention.bias")


@dataclass(frozen=True)
class Match:
    """tensors: our path -> (row of the table, name in the file). copies: tensors that repeat the embedding of a tied
    model.
    """

    tensors: dict[str, tuple[WeightName, str]]
    copies: tuple[str, ...] = ()


def match(config: Any, shapes: Mapping[str, tuple[int, ...]], *, kind: str, where: str) -> Match:
    """Pairs every weight of a model with a tensor of a file of `kind` "hf" or "gguf", given the shapes in the file.

    Either name of a tied pair serves for both. Raises one RzooError with all missing, unexpected and wrong-shaped
    tensors.
    """
    table = family_of(config).names
    tensors: dict[str, tuple[WeightName, str]] = {}
    wrong, missing = [], []
    head = getattr(named(table, "head"), kind)
    for path, (axes, weight) in abstract_weights(config).items():
        row = named(table, path)
        name = getattr(row, kind)
        if path == "embed" and name not in shapes and config.tied and head in shapes:
            name = head
        if name not in shapes:
            missing.append(name)
            continue
        tensors[path] = (row, name)
        expected = file_shape(axes, weight.shape)
        if tuple(shapes[name]) != expected:
            wrong.append(f"{name} is {list(shapes[name])}, the config says {list(expected)}")
    used = {name for _, name in tensors.values()}
    unused = [n for n in shapes if n not in used and not any(n.endswith(i) or i in n for i in IGNORED)]
    copies = tuple(n for n in unused if config.tied and n == head)
    unexpected = [n for n in unused if n not in copies]
    if missing or wrong or unexpected:
        raise _mismatch(where, missing, wrong, unexpected, head)
    return Match(tensors, copies)


def _mismatch(where: str, missing: list[str], wrong: list[str], unexpected: list[str], head: str) -> RzooError:
    parts = [f"{where}: the tensors do not fit the config"]
    for title, names in (("missing", missing), ("wrong shape", wrong), ("not part of this model", unexpected)):
        if names:
            more = f" and {len(names) - 8} more" if len(names) > 8 else ""
            parts.append(f"{title} ({len(names)}): {', '.join(names[:8])}{more}")
    fix = None
    if missing == [head]:
        fix = (
            "the config says tie_word_embeddings false: set it to true if the model shares its embedding with its head"
        )
    return RzooError("\n  ".join(parts), field="tensors", value=[*missing, *unexpected], fix=fix)
