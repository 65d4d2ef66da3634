"""Runtime pruning: a model run with fewer of its parameters, over the same arrays, chosen anew whenever it is called.

Source: Deja Vu (Liu et al. 2023) for contextual sparsity, here from the gate itself. A mode is another config, so
another executable, of the same weights: its feed-forwards gather the channels with the strongest gates of each token,
its mixtures ask fewer experts, skipped parts are not there. Nothing is computed and masked.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rzoo.core import RzooError
from rzoo.models.budget import Costs, LayerCost, Move, costs_of, moves_of
from rzoo.models.deepseek import DeepSeekConfig
from rzoo.models.llama import LlamaConfig
from rzoo.models.nemotron import BlockSpec, FeedForwardSpec
from rzoo.models.prune import Sizes, as_blocks, blocks_of, config_of, of_parent, remaining, sizes_of
from rzoo.models.registry import Params, abstract_weights


def full(config: Any) -> tuple[Sizes, ...]:
    """What each layer of the whole model touches for a token: as sizes_of, but for experts the active ones."""
    experts = getattr(config, "experts", None)
    sizes = sizes_of(config)
    return tuple(replace(own, experts=min(own.experts, experts.active)) for own in sizes) if experts else sizes


def mode_config(config: Any, sizes: Sequence[Sizes]) -> Any:
    """The config of a mode that touches `sizes` of each layer: channels and experts of each token; no groups: no
    attention. Raises RzooError for what a family can't run: fewer groups, biases, layers with different experts.
    """
    layers, whole = remaining(config, sizes), sizes_of(config)
    if any(sizes[i].groups not in (0, whole[i].groups) for i in layers):
        raise RzooError("a mode has all KV groups of a layer or none", field="groups", fix="skip the attention whole")
    if isinstance(config, DeepSeekConfig):
        active = {sizes[i].experts for i in layers if config.is_mixture(i)}
        if len(active) > 1:
            raise RzooError("all mixtures of a mode must ask as many experts", field="experts", value=sorted(active))
        same = [replace(own, experts=whole[i].experts) if i in layers else own for i, own in enumerate(sizes)]
        kept = config_of(config, same)
        return replace(kept, experts=replace(kept.experts, active=active.pop())) if active else kept
    if isinstance(config, LlamaConfig) and (config.qkv_bias or config.output_bias or config.mlp_bias):
        raise RzooError(f"a {config.kind} model with biases has no modes", field="model", fix="prune it uniformly")
    present = [replace(own, channels=whole[i].channels if own.channels else 0) for i, own in enumerate(sizes)]
    blocks = (_few(b, sizes[i].channels) for i, b in zip(layers, blocks_of(config, present), strict=True))
    return as_blocks(config, tuple(blocks), config.heads)


def _few(block: BlockSpec, channels: int) -> BlockSpec:
    """The block with a feed-forward, if it is wider, that reads so many channels."""
    if not isinstance(block.ffn, FeedForwardSpec) or channels >= block.ffn.width:
        return block
    return replace(block, ffn=replace(block.ffn, active=channels))


def borrowed(config: Any, params: Params, mode: Any, sizes: Sequence[Sizes]) -> Params:
    """The parameters of a mode: the parent's own arrays under its names."""
    layers = remaining(config, sizes)
    return {path: params[of_parent(path, layers)[0]] for path in abstract_weights(mode)}


def touched_costs(config: Any) -> Costs:
    """What modes cost: parameters that a token touches. Of a feed-forward with gathered channels the whole gate; of an
    embedding that is no head one row.
    """
    plain, width = costs_of(config), config.width
    outside = plain.outside - (0 if config.tied else (config.vocab_size - 1) * width)
    whole = sizes_of(config)
    contextual = not isinstance(config, DeepSeekConfig)
    layers = tuple(
        _touched(cost, own, width if contextual else 0) for cost, own in zip(plain.layers, whole, strict=True)
    )
    return Costs("parameters", config, layers, outside)


def _touched(cost: LayerCost, whole: Sizes, gate: int) -> LayerCost:
    """The router is always read whole; of each channel, `gate` parameters are."""
    fixed = cost.ffn + cost.route * whole.experts + gate * whole.channels
    return replace(cost, ffn=fixed, route=0, channel=cost.channel - gate if cost.channel else 0)


def mode_moves(config: Any) -> tuple[Move, ...]:
    """All that the allocator of modes chooses from: those of pruning, with active experts in the place of all, and
    without the widths of dense layers that a family can't gather from.
    """
    found = [move for move in moves_of(config) if move.part not in ("experts", "channels")]
    experts = getattr(config, "experts", None)
    if experts:
        mixed = tuple(i for i, own in enumerate(sizes_of(config)) if own.experts)
        found += [Move("experts", mixed, ("experts",), n) for n in range(experts.active - 1, 0, -1)]
    return tuple(found)
