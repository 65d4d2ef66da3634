"""The weights and the cache of a model as shapes: what planning and compiling for other machines take as arguments."""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from rzoo.compile.quantize import EXAMPLES, is_scheme, quantized_shape, scheme_named, schemes_for
from rzoo.compile.storage import input_axes
from rzoo.core import RzooError, closest
from rzoo.models.registry import Params, abstract_weights, always_float32
from rzoo.models.stacking import long_runs
from rzoo.models.weights import Quantized

# Kind of weights, beside the schemes of quantize.py -> (type of codes, block of one scale). None: the whole of that
# axis, one scale for each output.
KINDS: Mapping[str, tuple[str, tuple[int, int | None]] | None] = {
    "bf16": None,
    "int8": ("int8", (1, None)),
    "int4": ("int4", (1, None)),
    "fp8": ("float8_e4m3fn", (128, 128)),
}
ROUTER = ("router.weight",)  # small, and decides what is computed: never quantized
DENSE: Mapping[str, tuple[str, ...]] = {"fp8": ("embed", "head", *ROUTER)}  # as DeepSeek publishes them


def checked_kind(kind: str) -> str:
    """The same; RzooError with the known ones for one that is neither of KINDS nor a scheme of quantize.py."""
    if kind not in KINDS and not is_scheme(kind):
        close = closest(str(kind), list(KINDS))
        fix = f"or a scheme such as {EXAMPLES}"
        raise RzooError(f"weights ({kind}) is unknown; {close}", field="weights", value=kind, fix=fix)
    return kind


def code_type(kind: str) -> Any:
    """The type that the weights of a kind or scheme are in."""
    found = KINDS.get(kind)
    return jnp.dtype(scheme_named(kind).codes if kind not in KINDS else found[0] if found else "bfloat16")


def weight_shapes(config: Any, kind: str) -> Params:
    """Our path -> the value of every weight as `kind` stores it, of shapes alone: norms and biases in bfloat16."""
    wide, schemes = always_float32(config), {} if kind in KINDS else schemes_for(config, kind)
    params: Params = {}
    for path, (axes, weight) in abstract_weights(config).items():
        dense = len(axes) < 2 or path.endswith(DENSE.get(kind, ROUTER))
        if path in schemes:
            params[path] = quantized_shape(config, path, schemes[path])
        elif path in wide or dense or KINDS.get(kind) is None:
            params[path] = jax.ShapeDtypeStruct(weight.shape, jnp.float32 if path in wide else jnp.bfloat16)
        else:
            params[path] = _quantized(axes, weight.shape, kind)
    return params


def _quantized(axes: Sequence[str], shape: tuple[int, ...], kind: str) -> Quantized:
    """Codes and scales of one weight; experts are a stack of matrices."""
    codes, (rows, columns) = KINDS[kind]  # type: ignore[misc]
    lead = shape[:1] if axes[0] == "e" else ()
    inner = input_axes(axes[len(lead) :])
    m, n = math.prod(shape[len(lead) : -inner]), math.prod(shape[-inner:])
    block = (rows, columns or n)
    scales = (*lead, -(-m // block[0]), -(-n // block[1]))
    of = jax.ShapeDtypeStruct
    return Quantized(of((*lead, m, n), jnp.dtype(codes)), of(scales, jnp.float32), None, block, shape)


def placed(params: Params, config: Any, place: Any) -> Params:
    """The same shapes, each with the sharding in which it is stored; place: a Placement or a Pipeline.

    Raises RzooError where a quantized weight would be cut within a block.
    """
    out = {}
    for path, value in params.items():
        weights = abstract_weights(config)
        axes, placement = weights[path if path in weights else "embed"][0], place.of(path)
        if isinstance(value, Quantized):
            placement.check_blocks(path, value, axes)
        on = placement.weight(value, axes)
        out[path] = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), value, on)
    return out


def stacked(params: Params, config: Any) -> Params:
    """Shapes as stacking.stack would make them of arrays: the weights of each run with l in front, split as before."""
    out = dict(params)
    for run in long_runs(config):
        for name, _, _ in run.weights:
            alike = [out.pop(f"layers.{i}.{name}") for i in run.layers]
            out[f"layers.{run.label}.{name}"] = jax.tree.map(partial(_with_layers, len(alike)), alike[0])
    return out


def _with_layers(count: int, array: Any) -> Any:
    sharding = array.sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
    return jax.ShapeDtypeStruct((count, *array.shape), array.dtype, sharding=sharding)


def on_one(values: Any, sharding: Any) -> Any:
    """The same shapes, all on one device."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), values)


def device_bytes(values: Any) -> int:
    """Bytes that each device holds of arrays given by shape and sharding; 4-bit numbers lie two in a byte."""
    return sum(_bytes(leaf) for leaf in jax.tree.leaves(values))


def _bytes(leaf: Any) -> int:
    shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
    bits = 4 if leaf.dtype.name in ("int4", "uint4") else 8 * leaf.dtype.itemsize
    return -(-math.prod(shape) * bits // 8)


def by_stage(params: Params, pipeline: Any) -> Iterator[Params]:
    """The weights of each stage of a pipeline, in order."""
    for number in range(len(pipeline.stages)):
        yield pipeline.params_of(params, number)


def with_copy(params: Params, config: Any, name: str) -> Params:
    """The same with what the last stage of a tied model holds, under `name`."""
    return params | {name: params["embed"]} if config.tied else params
