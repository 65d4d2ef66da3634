"""FFN fusion: a run of feed-forward layers without attention between them as one wide layer.

Source: FFN Fusion (Bercovich et al. 2025). A run x_{k+1} = x_k + F_k(norm_k(x_k)) becomes x + sum_k F_k(norm_k(x)), in
which every part reads the run's input. The sum is computed exactly, and only comes close to the run. In Ultra, 49
layers of the 405B model went into four.
"""

from collections.abc import Sequence
from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array

from rzoo.core import RzooError
from rzoo.models.nemotron import BlockSpec, FeedForwardSpec, NemotronConfig
from rzoo.models.registry import Params
from rzoo.models.weights import Storage

PARTS = ("mlp_norm.scale", "mlp.gate", "mlp.up", "mlp.down")


def fusable_runs(config: NemotronConfig) -> tuple[tuple[int, ...], ...]:
    """The longest runs of two or more feed-forward layers without attention; the paper leaves the last of each out."""
    found: list[tuple[int, ...]] = []
    for i, block in enumerate(config.blocks):
        if block.attention is None and isinstance(block.ffn, FeedForwardSpec):
            joined = found and found[-1][-1] == i - 1
            found[-1:] = [(*found[-1], i)] if joined else [*found[-1:], (i,)]
    return tuple(run for run in found if len(run) > 1)


def fuse_ffns(config: NemotronConfig, params: Params, runs: Sequence[Sequence[int]]) -> tuple[NemotronConfig, Params]:
    """The model with each of `runs` (numbers of neighbouring layers) as one layer that computes their parallel sum.

    It takes the place of the run's last layer, the others hold nothing: layers keep their numbers. Each norm's scale is
    folded into the columns of its gate and up, which is exact; the norm that stays has a scale of ones. Raises
    RzooError for layers that aren't neighbours, have attention or no feed-forward part, or are quantized.
    """
    out = dict(params)
    for run in runs:
        _check_run(config, run)
        parts = [[_dense(out.pop(f"layers.{i}.{name}"), i) for name in PARTS] for i in run]
        out |= {f"layers.{run[-1]}.{name}": value for name, value in zip(PARTS, _fused(parts), strict=True)}
        fused = BlockSpec(None, FeedForwardSpec(sum(gate.shape[0] for _, gate, _, _ in parts)))
        before, after = config.blocks[: run[0]], config.blocks[run[-1] + 1 :]
        nothing = (BlockSpec(None, None),) * (len(run) - 1)
        config = replace(config, blocks=(*before, *nothing, fused, *after))
    return config, out


def _check_run(config: NemotronConfig, run: Sequence[int]) -> None:
    numbers = list(run)
    if not numbers or numbers[0] < 0 or numbers != list(range(numbers[0], numbers[0] + len(numbers))):
        raise RzooError(f"run ({numbers}) must be numbers of neighbouring layers", field="runs", value=run)
    for i in numbers:
        block = config.blocks[i] if i < config.layers else None
        if block is None or block.attention is not None or not isinstance(block.ffn, FeedForwardSpec):
            raise RzooError(
                f"run ({numbers}): layer {i} is {block}, no feed-forward layer without attention",
                field="runs",
                value=run,
                fix=f"runs of this model: {', '.join(f'{r[0]}-{r[-1]}' for r in fusable_runs(config)) or 'none'}",
            )


def _dense(value: Array | Storage, layer: int) -> Array:
    if isinstance(value, Storage):
        raise RzooError(f"layer {layer} is quantized and cannot be fused", field="params", fix="fuse, then quantize")
    return value


def _fused(parts: list[list[Array]]) -> tuple[Array, Array, Array, Array]:
    """scale [d], gate and up [f, d], down [d, f] of the sum of several of them."""
    fold = lambda matrix, scale: (matrix * scale.astype(jnp.float32)).astype(matrix.dtype)  # noqa: E731
    gate = jnp.concatenate([fold(gate, scale) for scale, gate, _, _ in parts])
    up = jnp.concatenate([fold(up, scale) for scale, _, up, _ in parts])
    down = jnp.concatenate([down for _, _, _, down in parts], axis=1)
    return jnp.ones_like(parts[0][0]), gate, up, down
