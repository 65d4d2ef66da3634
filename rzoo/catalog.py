"""`rzoo.presets`: what can be loaded by name."""

from dataclasses import dataclass
from typing import Any

import jax

from rzoo.checkpoint.sources import whereabouts
from rzoo.models.presets import PRESETS
from rzoo.models.registry import count_parameters, family_of, preset
from rzoo.models.stacking import Weights, runs


@dataclass(frozen=True)
class PresetInfo:
    """One published model. parameters: exact count. bytes: of its weights as published, in `bits`. found: where they
    are. thinking: how its thinking is switched, an entry of rzoo.formats.THINKING, or None.
    """

    name: str
    alias: str | None
    parameters: int
    bytes: int
    bits: str
    found: str
    thinking: str | None
    config: Any


# bytes a weight; Q4_1 as in the one file that has it, its embedding in Q8_0
BYTES = {"bfloat16": 2.0, "float32": 4.0}


def presets() -> list[PresetInfo]:
    """Every preset, with its exact number of parameters counted from shapes alone."""
    return [_info(name) for name in PRESETS]


def _info(name: str) -> PresetInfo:
    entry = PRESETS[name]
    count = count_parameters(entry.config)
    size = entry.file_bytes or int(count * BYTES[entry.dtype])
    return PresetInfo(name, entry.alias, count, size, entry.dtype, whereabouts(name), entry.thinking, entry.config)


@dataclass(frozen=True)
class Layout:
    """The layers of a preset. runs: (what each layer of it is made of, its layers), those without weights left out.

    kv_slots: how many layers keep keys and values.
    """

    name: str
    layers: int
    distinct_blocks: int
    kv_slots: int
    runs: tuple[tuple[str, tuple[int, ...]], ...]


def layout(name: str) -> Layout:
    """How a preset, by name or alias, is made of layers. Raises RzooError for an unknown name."""
    name, entry = preset(name)
    config = entry.config
    cache = jax.eval_shape(lambda: family_of(config).empty_cache(config, 1, 1, "float32"))
    found = runs(config)
    return Layout(
        name=name,
        layers=config.layers,
        distinct_blocks=len({run.weights for run in found}),
        kv_slots=sum(slot is not None for slot in cache.slots),
        runs=tuple((_described(run.weights), run.layers) for run in found),
    )


def _described(weights: Weights) -> str:
    """The parts of a layer by the sizes of their axes but d and c: "attention h=64 k=8, mlp f=28672"."""
    parts: dict[str, dict[str, int]] = {}
    for name, axes, shape in weights:
        part, _, weight = name.partition(".")
        if weight == "linear":
            parts[part] = {}
        elif not part.endswith("norm"):
            sizes = {axis: size for axis, size in zip(axes, shape, strict=True) if axis not in "dc"}
            parts[part] = parts.get(part, {}) | sizes
    return ", ".join(
        " ".join([part, *(f"{axis}={size}" for axis, size in sorted(sizes.items()))]) if sizes else f"{part} linear"
        for part, sizes in parts.items()
    )
