"""From a name to a model: families by config class and by model_type, parameters by path, exact counts from shapes
alone.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from flax import nnx
from jax import ShapeDtypeStruct

from rzoo.core import RzooError, closest
from rzoo.models import deepseek, llama, nemotron
from rzoo.models.forms import Forms
from rzoo.models.names import WeightName
from rzoo.models.presets import PRESETS, Preset
from rzoo.models.weights import FrozenWeight, SelectionBias, Storage, Weight

Params = dict[str, Any]  # our path -> array or Storage
STORED = nnx.Any(Weight, FrozenWeight, SelectionBias)


@dataclass(frozen=True)
class Family:
    """What a family's file offers: config class, module, weight names, and a function that makes an empty cache."""

    config: Any
    model: Callable[..., nnx.Module]
    names: tuple[WeightName, ...]
    empty_cache: Callable[..., Any]
    model_types: tuple[str, ...]


FAMILIES = (
    Family(llama.LlamaConfig, llama.Llama, llama.NAMES, llama.empty_cache, ("llama", "qwen2")),
    Family(deepseek.DeepSeekConfig, deepseek.DeepSeek, deepseek.NAMES, deepseek.empty_cache, tuple(deepseek.KINDS)),
    Family(nemotron.NemotronConfig, nemotron.Nemotron, nemotron.NAMES, nemotron.empty_cache, ("nemotron-nas",)),
)


def family_of(config: Any) -> Family:
    """The family that a config object belongs to."""
    return next(f for f in FAMILIES if isinstance(config, f.config))


def config_from_hf(fields: Mapping[str, Any]) -> Any:
    """The config object for the fields of a config.json; RzooError where its model_type is unknown or absent."""
    kind = fields.get("model_type")
    if kind == "llama" and fields.get("block_configs") is not None:  # ModelOpt keeps the model_type of the parent
        kind = "nemotron-nas"
    for family in FAMILIES:
        if kind in family.model_types:
            return family.config.from_hf(fields)
    known = [name for f in FAMILIES for name in f.model_types]
    raise RzooError(
        f"config.json: model_type ({kind!r}) is not supported; supported: {', '.join(known)}",
        field="model_type",
        value=kind,
    )


def preset(name: str) -> tuple[str, Preset]:
    """(full name, preset) for a preset's name or alias, in any case; RzooError with close names for another."""
    wanted = name.lower()
    for full, entry in PRESETS.items():
        if wanted in (full, entry.alias):
            return full, entry
    known = [*PRESETS, *(p.alias for p in PRESETS.values() if p.alias)]
    raise RzooError(f"preset ({name}) is unknown; {closest(wanted, known)}", field="preset", value=name)


@lru_cache(maxsize=64)
def abstract_weights(config: Any) -> Mapping[str, tuple[tuple[str, ...], ShapeDtypeStruct]]:
    """Our path -> (logical axes, shape) of every weight of a model, made without allocating anything."""
    module = family_of(config).model(config, rngs=None)
    flat = nnx.to_flat_state(nnx.state(module, STORED))
    return {path_name(path): (leaf.out_sharding, leaf.get_value()) for path, leaf in flat}


@lru_cache(maxsize=64)
def always_float32(config: Any) -> frozenset[str]:
    """Paths of the weights that keep float32 whatever type the others are held in."""
    flat = nnx.to_flat_state(nnx.state(family_of(config).model(config, rngs=None), SelectionBias))
    return frozenset(path_name(path) for path, _ in flat)


def path_name(path: tuple[Any, ...]) -> str:
    """("layers", 7, "attention", "q") -> "layers.7.attention.q"."""
    return ".".join(str(part) for part in path)


def count_parameters(config: Any) -> int:
    """Exact number of parameters; a tied head counts once."""
    return sum(math.prod(shape.shape) for _, shape in abstract_weights(config).values())


def assemble(config: Any, forms: Forms, params: Params) -> nnx.Module:
    """The family's module over `params`: the same arrays (or tracers), each in the Variable type of its storage."""
    module = family_of(config).model(config, forms=forms, rngs=None)
    for path, (axes, _) in abstract_weights(config).items():
        if path not in params:
            raise RzooError(f"the weight {path} is not there", field=path, fix="load the whole model, without only=")
        set_weight(module, path, forms.place(params[path], "".join(axes)), axes)
    return module


def set_weight(module: nnx.Module, path: str, value: Any, axes: tuple[str, ...]) -> None:
    """Puts `value` into the place of the weight at `path` below `module`, in the Variable type of its storage."""
    *parents, name = path.split(".")
    parent: Any = module
    for part in parents:
        parent = parent[int(part)] if part.isdigit() else getattr(parent, part)
    kind = FrozenWeight if isinstance(value, Storage) else type(getattr(parent, name))
    setattr(parent, name, kind(value, out_sharding=axes, eager_sharding=False))


def flatten(module: nnx.Module) -> Params:
    """The inverse of assemble: path -> value of every weight of a module."""
    flat = nnx.to_flat_state(nnx.state(module, STORED))
    return {path_name(path): leaf.get_value() for path, leaf in flat}


def initialize(config: Any, seed: int = 0, dtype: Any = "float32") -> Params:
    """Random parameters, as the modules draw them."""
    module = family_of(config).model(config, rngs=nnx.Rngs(seed))
    wide = always_float32(config)
    return {path: value if path in wide else value.astype(dtype) for path, value in flatten(module).items()}
