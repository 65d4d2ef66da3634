"""Which tensors of a file become which weight: one table a family, every mismatch in one error."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rzoo.core import RzooError
from rzoo.models.mtp import MTP_COPIES
from rzoo.models.names import WeightName, file_shape, named, pattern
from rzoo.models.registry import abstract_weights, family_of

# Tensors that some files carry and no model needs: buffers that are computed from the config.
IGNORED = ("rotary_emb.inv_freq", "rope_freqs.weight", ".attn_rot_embd", ".attention.masked_bias", ".attention.bias")


@dataclass(frozen=True)
class Source:
    """Where a weight lies in a file.

    names: one tensor, or one for each entry of the weight's first axis (`stacked`). shape: of each of them in the file.
    part: [start, stop) of the rows of each head where the tensor holds several weights. transposed: the last two axes.
    """

    row: WeightName
    names: tuple[str, ...]
    shape: tuple[int, ...]
    stacked: bool = False
    part: tuple[int, int] | None = None
    transposed: bool = False

    def taken(self, tensor: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """This weight, of logical `shape`, from the one tensor that holds it."""
        if self.part is not None:
            tensor = tensor.reshape(shape[0], -1, *shape[2:])[:, slice(*self.part)]
        return np.ascontiguousarray(tensor.swapaxes(-1, -2) if self.transposed else tensor).reshape(shape)


@dataclass(frozen=True)
class Match:
    """tensors: our path -> where it lies. copies: tensor -> the weight that it repeats."""

    tensors: dict[str, Source]
    copies: dict[str, str] = field(default_factory=dict)


def sources(config: Any, kind: str, *, apart: bool = False) -> dict[str, Source]:
    """Our path -> where it lies in a file of `kind` "hf" or "gguf"; apart: the layout of GGUF in which weights that
    share a tensor elsewhere have tensors of their own.
    """
    table = family_of(config).names
    order = {row.path: i for i, row in enumerate(table)}
    rows = {path: named(table, path, config.layers) for path in abstract_weights(config)}
    sharing: dict[str, list[str]] = defaultdict(list)
    for path in sorted(rows, key=lambda path: order[pattern(path)]):
        if not (apart and rows[path].apart):
            sharing[getattr(rows[path], kind)].append(path)
    return {path: _source(config, path, row, kind, sharing) for path, row in rows.items()}


def _source(config: Any, path: str, row: WeightName, kind: str, sharing: Mapping[str, list[str]]) -> Source:
    axes, weight = abstract_weights(config)[path]
    shape, name = tuple(weight.shape), str(getattr(row, kind))
    if "{e}" in name:
        names = tuple(name.replace("{e}", str(i)) for i in range(shape[0]))
        return Source(row, names, file_shape(axes[1:], shape[1:]), stacked=True)
    together = sharing[name] if path in sharing.get(name, ()) else []
    if len(together) > 1:
        widths = {other: abstract_weights(config)[other][1].shape[1] for other in together}
        start = sum(widths[other] for other in together[: together.index(path)])
        whole = file_shape(axes, (shape[0], sum(widths.values()), *shape[2:]))
        return Source(row, (name,), whole, part=(start, start + widths[path]))
    if not together:
        own = (*shape[:-2], shape[-1], shape[-2]) if row.transposed else shape
        return Source(row, (str(row.apart),), own, transposed=row.transposed)
    return Source(row, (name,), file_shape(axes, shape))


def match(config: Any, shapes: Mapping[str, tuple[int, ...]], *, kind: str, where: str) -> Match:
    """Pairs every weight of a model with tensors of a file of `kind` "hf" or "gguf", given the shapes in the file.

    Either name of a tied pair serves for both. Raises one RzooError with all missing, unexpected and wrong-shaped
    tensors.
    """
    _check_counts(config, len(shapes), kind, where)
    table = family_of(config).names
    owns = {row.apart.split("{}")[-1] for row in table if row.apart}
    found = sources(config, kind, apart=kind == "gguf" and any(n.endswith(own) for own in owns for n in shapes))
    head = getattr(named(table, "head"), kind)
    embed = found["embed"]
    if embed.names[0] not in shapes and config.tied and head in shapes:
        found["embed"] = Source(embed.row, (head,), embed.shape)
    expected = {name: source.shape for source in found.values() for name in source.names}
    missing = [name for name in expected if name not in shapes]
    wrong = [
        f"{name} is {list(shapes[name])}, the config says {list(shape)}"
        for name, shape in expected.items()
        if name in shapes and tuple(shapes[name]) != shape
    ]
    unused = [n for n in shapes if n not in expected and not any(n.endswith(i) or i in n for i in IGNORED)]
    repeated = {head: "embed"} if config.tied else {}
    repeated |= mtp_copies(config)
    copies = {n: repeated[n] for n in unused if n in repeated}
    unexpected = [n for n in unused if n not in copies]
    if missing or wrong or unexpected:
        rows, *rest = shapes.get(embed.names[0]) or (None,)
        padded = rows != config.vocab_size and (*rest,) == embed.shape[1:]
        raise _mismatch(where, missing, wrong, unexpected, head, rows if padded else None)
    return Match(found, copies)


def mtp_copies(config: Any) -> dict[str, str]:
    """Tensor -> our path of the weight that it repeats, of those in the layer of multi-token prediction."""
    if not getattr(config, "mtp", False):
        return {}
    shared = {path: "embed" if config.tied else path for path in MTP_COPIES.values()}
    return {name.format(config.layers): shared[path] for name, path in MTP_COPIES.items()}


def _check_counts(config: Any, tensors: int, kind: str, where: str) -> None:
    """Refuses a config that names more layers or experts than the file has tensors, before lists of them are made."""
    counts = {"layers": config.layers}
    if kind == "hf" and getattr(config, "experts", None) is not None:
        counts["experts"] = config.experts.count
    for what, count in counts.items():
        if count > tensors:
            raise RzooError(
                f"{where}: the config says {count} {what}, but the file has {tensors} tensors",
                field=what,
                value=count,
            )


def without_mtp(config: Any, names: Iterable[str]) -> tuple[list[str], tuple[str, ...]]:
    """`names` without the tensors of layers past the model's last that predict further tokens, and a warning that
    counts them. Only families that know such layers have them. The first one stays where the model has a use for it.
    """
    names = list(names)
    extra = getattr(config, "mtp_layers", None)
    if extra is None:
        return names, ()
    found = {name: layer for name in names if (layer := layer_of(name)) is not None}
    first = config.layers + config.mtp
    skipped = {n: i for n, i in found.items() if first <= i < config.layers + max(extra, 1)}
    of = ", ".join(str(layer) for layer in sorted(set(skipped.values())))
    words = f"skipped {len(skipped)} tensors of layer {of} (multi-token prediction, no part of the model)"
    return [name for name in names if name not in skipped], (words,) if skipped else ()


def layer_of(name: str) -> int | None:
    """The layer that a tensor belongs to by its name, with or without a prefix."""
    found = re.search(r"(?:^|\.)(?:layers|blk)\.(\d{1,9})\.", name)
    return int(found[1]) if found else None


def _mismatch(
    where: str, missing: list[str], wrong: list[str], unexpected: list[str], head: str, rows: int | None
) -> RzooError:
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
    elif rows is not None:
        fix = f"where all else is right, set vocab_size to {rows}: rows that no token uses pad the embedding"
    return RzooError("\n  ".join(parts), field="tensors", value=[*missing, *unexpected], fix=fix)
