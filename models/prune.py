"""Structured pruning: which heads, channels, experts and layers a model keeps, and the smaller model that they make.

Sources: Puzzle (Bercovich et al. 2024), section 3; ShortGPT (Men et al. 2024) for whole layers. What is cut is cut for
good: the result is an ordinary config with ordinary weights. A Llama whose layers no longer agree becomes nemotron-nas,
where query heads are one number for all layers, so that all of them keep the same share of their KV groups, or none.
A DeepSeek model keeps its kind: its mixtures have one number of experts, its dense layers one width. Its module for
multi-token prediction is left out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rzoo.core import RzooError
from rzoo.models.deepseek import DeepSeekConfig
from rzoo.models.llama import LlamaConfig
from rzoo.models.nemotron import BlockSpec, FeedForwardSpec, GroupedAttentionSpec, NemotronConfig
from rzoo.models.registry import Params, abstract_weights


@dataclass(frozen=True, order=True)
class Sizes:
    """What a layer has: KV groups (heads, of latent attention), channels of a dense feed-forward, experts; 0 for none.
    A part of another kind (a linear map) counts as none and stays. All 0 where pruning left nothing: no layer.
    """

    groups: int
    channels: int = 0
    experts: int = 0


@dataclass(frozen=True)
class Kept:
    """Indices of what a layer keeps of each, ascending."""

    groups: tuple[int, ...]
    channels: tuple[int, ...] = ()
    experts: tuple[int, ...] = ()

    @property
    def sizes(self) -> Sizes:
        """How many."""
        return Sizes(len(self.groups), len(self.channels), len(self.experts))


def sizes_of(config: Any) -> tuple[Sizes, ...]:
    """The sizes of each layer of a model."""
    if isinstance(config, LlamaConfig):
        return (Sizes(config.kv_heads, config.ffn_width),) * config.layers
    if isinstance(config, NemotronConfig):
        return tuple(_block_sizes(block) for block in config.blocks)
    mixture = Sizes(config.heads, 0, config.experts.count if config.experts else 0)
    dense = Sizes(config.heads, config.ffn_width)
    return tuple(mixture if config.is_mixture(i) else dense for i in range(config.layers))


def _block_sizes(block: BlockSpec) -> Sizes:
    groups = block.attention.kv_heads if isinstance(block.attention, GroupedAttentionSpec) else 0
    return Sizes(groups, block.ffn.width if isinstance(block.ffn, FeedForwardSpec) else 0)


def remaining(config: Any, sizes: Sequence[Sizes]) -> tuple[int, ...]:
    """The layers that are still there: all but those from which pruning took everything."""
    if not isinstance(config, NemotronConfig):
        return tuple(i for i, own in enumerate(sizes) if own != Sizes(0))
    left = [_spec(config, i, own) for i, own in enumerate(sizes)]
    nothing = BlockSpec(None, None)
    return tuple(i for i, spec in enumerate(left) if spec != nothing or config.blocks[i] == nothing)


def config_of(config: Any, sizes: Sequence[Sizes]) -> Any:
    """The config of a model whose layers have these sizes; the kind of the parent where it can say them.

    Raises RzooError where no kind can: layers that differ in a model with biases or of the DeepSeek family, groups
    that leave the layers with different numbers of query heads, no layer with attention.
    """
    layers = remaining(config, sizes)
    if not any(sizes[i].groups for i in layers):
        raise RzooError("pruning leaves no layer with attention", field="sizes", fix="keep more")
    if isinstance(config, DeepSeekConfig):
        return _deepseek(config, sizes, layers)
    heads = _query_heads(config, sizes)
    if isinstance(config, LlamaConfig):
        (first, *others) = {sizes[i] for i in layers}
        if not others and first.channels:
            return replace(config, layers=len(layers), heads=heads, kv_heads=first.groups, ffn_width=first.channels)
        if config.qkv_bias or config.output_bias or config.mlp_bias:
            words = f"a {config.kind} model with biases must have equal layers: nemotron-nas has none"
            raise RzooError(words, field="sizes", fix="prune it uniformly (--method uniform)")
    return as_blocks(config, blocks_of(config, sizes), heads)


def blocks_of(config: LlamaConfig | NemotronConfig, sizes: Sequence[Sizes]) -> tuple[BlockSpec, ...]:
    """The blocks of the layers that are left."""
    return tuple(_spec(config, i, sizes[i]) for i in remaining(config, sizes))


def as_blocks(config: LlamaConfig | NemotronConfig, blocks: tuple[BlockSpec, ...], heads: int) -> NemotronConfig:
    """A nemotron-nas model of these blocks, else as its parent."""
    shared = ("vocab_size", "width", "head_width", "rope", "norm_eps", "context", "tied")
    return NemotronConfig(blocks=blocks, heads=heads, **{name: getattr(config, name) for name in shared})


def _query_heads(config: Any, sizes: Sequence[Sizes]) -> int:
    """Query heads of the layers that keep attention: as many in each."""
    pairs = [(now.groups, was.groups) for now, was in zip(sizes, sizes_of(config), strict=True) if now.groups]
    counts = {config.heads * now // was for now, was in pairs if config.heads * now % was == 0}
    if len(counts) != 1 or any(config.heads * now % was for now, was in pairs):
        words = "nemotron-nas has one number of query heads: every layer must keep the same share of its KV groups"
        raise RzooError(words, field="groups", value=sorted({now for now, _ in pairs}))
    return counts.pop()


def _spec(config: Any, layer: int, sizes: Sizes) -> BlockSpec:
    before = sizes_of(config)[layer]
    spec = config.blocks[layer] if isinstance(config, NemotronConfig) else BlockSpec(None, None)
    attention: Any = spec.attention if sizes.groups == before.groups == 0 else None
    ffn: Any = spec.ffn if sizes.channels == before.channels == 0 else None
    return BlockSpec(
        GroupedAttentionSpec(sizes.groups) if sizes.groups else attention,
        FeedForwardSpec(sizes.channels) if sizes.channels else ffn,
    )


def _deepseek(config: DeepSeekConfig, sizes: Sequence[Sizes], layers: tuple[int, ...]) -> DeepSeekConfig:
    dense = {sizes[i].channels for i in layers if not config.is_mixture(i)}
    mixed = {sizes[i].experts for i in layers if config.is_mixture(i)}
    if len(dense) > 1 or len(mixed) > 1 or {sizes[i].groups for i in layers} != {config.heads}:
        words = f"a {config.kind} model has one number of heads, one of experts and one width of its dense layers"
        raise RzooError(words, field="sizes", fix="prune its layers alike, or drop whole ones")
    experts = config.experts
    if experts is not None and len(layers) < config.layers and experts.every > 1:
        words = f"layers of a model with a mixture in every {experts.every}th can't be dropped"
        raise RzooError(words, field="every", value=experts.every)
    if experts is not None:
        first = sum(not config.is_mixture(i) for i in layers) if experts.every == 1 else experts.dense_layers
        experts = replace(experts, count=mixed.pop(), dense_layers=first) if mixed else None
    width = dense.pop() if dense else config.ffn_width
    return replace(config, layers=len(layers), ffn_width=width, experts=experts, mtp=False, mtp_layers=0)


def everything(config: Any) -> tuple[Kept, ...]:
    """What an unpruned model keeps."""
    ranges = lambda s: (tuple(range(n)) for n in (s.groups, s.channels, s.experts))  # noqa: E731
    return tuple(Kept(*ranges(sizes)) for sizes in sizes_of(config))


def dense_params(config: Any, params: Params) -> Params:
    """The parameters, if all are arrays. Raises RzooError for weights that are held in blocks."""
    for path in abstract_weights(config):
        if path in params and not isinstance(params[path], jax.Array | np.ndarray):
            fix = "load the model with dtype float32 or bfloat16, and record=False"
            raise RzooError(f"{path} is held in blocks and can't be pruned", field=path, fix=fix)
    return params


def cut(config: Any, params: Params, kept: Sequence[Kept]) -> tuple[Any, Params]:
    """The smaller model: its config, and its weights as slices of the parent's (per-layer arrays)."""
    sizes = [k.sizes for k in kept]
    new, layers = config_of(config, sizes), remaining(config, sizes)
    out: Params = {}
    for path, (axes, shape) in abstract_weights(new).items():
        old, layer = of_parent(path, layers)
        indices = {} if layer is None else _indices(config, layer, kept[layer])
        out[path] = _sliced(params[old], axes, shape.shape, indices)
    return new, out


def of_parent(path: str, layers: Sequence[int]) -> tuple[str, int | None]:
    """Where a weight of a model that has only these `layers` of its parent lies in the parent: path and layer."""
    kind, _, rest = path.partition(".")
    if kind != "layers":
        return path, None
    number, _, name = rest.partition(".")
    return f"layers.{layers[int(number)]}.{name}", layers[int(number)]


def _sliced(value: Any, axes: Sequence[str], shape: Sequence[int], indices: Mapping[str, np.ndarray]) -> Any:
    """`value` with the axes that got shorter taken at `indices`."""
    for axis, letter in enumerate(axes):
        if value.shape[axis] != shape[axis]:
            value = jnp.take(value, indices[letter], axis=axis)
    return value


def _indices(config: Any, layer: int, kept: Kept) -> dict[str, np.ndarray]:
    """By letter of an axis what a layer keeps of it; query heads go with their KV group."""
    before = sizes_of(config)[layer].groups
    each = config.heads // before if before else 0
    heads = np.asarray(kept.groups, np.int32)[:, None] * each + np.arange(each, dtype=np.int32)
    return {
        "k": np.asarray(kept.groups, np.int32),
        "h": heads.reshape(-1),
        "f": np.asarray(kept.channels, np.int32),
        "e": np.asarray(kept.experts, np.int32),
    }


# The weight through which a part reaches the residual stream -> the axis that counts what is pruned of it.
OUTPUTS = {"attention.output": "h", "mlp.down": "f", "mlp.expert_down": "e"}
WHOLE = {"attention.output_bias": "h", "mlp.down_bias": "f", "mlp.shared.down": "e"}  # go when nothing of it is kept


def zeroed(config: Any, params: Params, kept: Mapping[int, Kept]) -> Params:
    """The parent's parameters with what these layers do not keep silenced: the function of the cut model in the
    parent's shapes, so in its compiled program. (But for experts: tokens still go to silent ones.)
    """
    out = dict(params)
    for layer, own in kept.items():
        indices = _indices(config, layer, own)
        for name, letter in {**OUTPUTS, **WHOLE}.items():
            path = f"layers.{layer}.{name}"
            axes = abstract_weights(config).get(path, ((), None))[0]
            if name in OUTPUTS and letter in axes:
                out[path] = _masked(out[path], axes.index(letter), indices[letter])
            elif axes and not indices[letter].size:
                out[path] = jnp.zeros_like(out[path])
    return out


def _masked(value: Any, axis: int, kept: np.ndarray) -> Any:
    mask = np.isin(np.arange(value.shape[axis]), kept)
    return value * mask.reshape([-1 if i == axis else 1 for i in range(value.ndim)]).astype(value.dtype)


def refitted(
    config: Any, params: Params, kept: Mapping[int, Kept], moments: Mapping[str, np.ndarray], ridge: float = 0.01
) -> Params:
    """As zeroed, with the outputs of what stays fitted by least squares to what the whole part gave.

    moments: path of an output weight -> second moments [n, n] of its inputs, heads flattened. What is fitted is the
    correction to the weights, and `ridge` (times the mean square of an input) keeps it small where data are few.
    """
    out = zeroed(config, params, kept)
    for layer, own in kept.items():
        indices = _indices(config, layer, own)
        for name, letter in OUTPUTS.items():
            path = f"layers.{layer}.{name}"
            if path in moments and indices[letter].size:
                out[path] = _fitted(params[path], moments[path], indices[letter], ridge)
    return out


def _fitted(value: Any, moments: np.ndarray, kept: np.ndarray, ridge: float) -> Any:
    """W[:, kept] + W[:, gone] M[gone, kept] (M[kept, kept] + ridge)^-1, and 0 for what is gone."""
    each = moments.shape[0] // value.shape[1]
    inside = (kept[:, None] * each + np.arange(each)).reshape(-1)
    outside = np.setdiff1d(np.arange(moments.shape[0]), inside)
    if not outside.size:
        return value
    flat = np.array(value, np.float32).reshape(value.shape[0], -1)
    inner = moments[np.ix_(inside, inside)] + ridge * np.diag(moments).mean() * np.eye(inside.size, dtype=np.float32)
    flat[:, inside] += flat[:, outside] @ np.linalg.solve(inner, moments[np.ix_(inside, outside)]).T
    flat[:, outside] = 0
    return jnp.asarray(flat.reshape(value.shape), value.dtype)


@dataclass(frozen=True)
class Importance:
    """What calibration says of a layer. groups, channels: mean |activation| of each times the norm of the weights that
    read it (Puzzle), summed over a group's heads. experts: the weight that tokens gave to each. turn: 1 - cosine
    between what enters the layer and what leaves it, mean over tokens; infinite for the last layer, which must stay.
    """

    groups: np.ndarray
    channels: np.ndarray
    experts: np.ndarray
    turn: float


def at_random(config: Any, seed: int) -> tuple[Importance, ...]:
    """Importance drawn from nothing, for a twin of the same shapes."""
    rng = np.random.default_rng(seed)
    draw = rng.random
    return tuple(Importance(draw(s.groups), draw(s.channels), draw(s.experts), 0.0) for s in sizes_of(config))


def select(config: Any, importance: Sequence[Importance], sizes: Sequence[Sizes]) -> tuple[Kept, ...]:
    """The most important groups, channels and experts of each layer, as many as `sizes` says; experts from each group
    of the router alike.
    """
    routing = getattr(getattr(config, "experts", None), "routing", None)
    router_groups = routing.groups if routing is not None else 1
    return tuple(
        Kept(
            _best(own.groups, wanted.groups, 1),
            _best(own.channels, wanted.channels, 1),
            _best(own.experts, wanted.experts, router_groups),
        )
        for own, wanted in zip(importance, sizes, strict=True)
    )


def _best(scores: np.ndarray, count: int, groups: int) -> tuple[int, ...]:
    """Indices of the `count` highest scores, the same number from each of `groups` equal groups; ties to the lower."""
    grouped = scores.reshape(groups, -1)
    best = np.argsort(-grouped, axis=1, kind="stable")[:, : count // groups]
    return tuple(int(i) for i in np.sort((best + np.arange(groups)[:, None] * grouped.shape[1]).reshape(-1)))
