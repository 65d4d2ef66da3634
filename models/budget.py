"""How much of each layer to keep: costs from shapes, and sizes within a budget, uniform or most loss-neutral first."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rzoo.core import RzooError
from rzoo.models.deepseek import DeepSeekConfig
from rzoo.models.prune import Sizes, config_of, sizes_of
from rzoo.models.registry import abstract_weights

UNITS = ("parameters", "bytes", "flops")
SHARES = 64  # sixty-fourths of their channels that uniformly pruned layers may keep, rounded up to a multiple of 8


@dataclass(frozen=True)
class LayerCost:
    """Parameters of a layer: those that stay as long as a part does, those of each group, channel and expert,
    and (route) the router's of each expert.
    """

    attention: int = 0
    group: int = 0
    ffn: int = 0
    channel: int = 0
    expert: int = 0
    route: int = 0

    def parameters(self, sizes: Sizes, active: int | None = None) -> int:
        """Of a layer of these sizes; with `active`, of no more experts than a token goes to."""
        experts = sizes.experts if active is None else min(sizes.experts, active)
        attention = self.attention + self.group * sizes.groups if sizes.groups or not self.group else 0
        gone = (self.channel and not sizes.channels) or (self.expert and not sizes.experts)
        ffn = self.ffn + self.channel * sizes.channels + self.expert * experts + self.route * sizes.experts
        return attention + (0 if gone else ffn)


@dataclass(frozen=True)
class Costs:
    """What models of a parent's shapes cost, in one of UNITS. bytes: of weights of `itemsize` bytes each. flops: of a
    token, 2 for each weight that it is multiplied with; attention scores are left out.
    """

    unit: str
    config: Any
    layers: tuple[LayerCost, ...]
    outside: int
    itemsize: float = 4.0

    def of(self, sizes: Sequence[Sizes]) -> int:
        """The cost of a model whose layers have these sizes."""
        return int(self.scale * self.outside + sum(self.layer(i, own) for i, own in enumerate(sizes)))

    @property
    def scale(self) -> float:
        """The cost of one parameter."""
        return {"parameters": 1.0, "bytes": self.itemsize, "flops": 2.0}[self.unit]

    def layer(self, number: int, sizes: Sizes) -> float:
        """What one layer adds."""
        experts = getattr(self.config, "experts", None)
        active = experts.active if experts and self.unit == "flops" else None
        return self.scale * self.layers[number].parameters(sizes, active)

    def saved(self, sizes: Sequence[Sizes], move: "Move") -> float:
        """By how much a move lowers the cost."""
        return sum(self.layer(i, sizes[i]) - self.layer(i, move.smaller(sizes[i])) for i in move.layers)


def costs_of(config: Any, unit: str = "parameters", itemsize: float = 4.0) -> Costs:
    """The costs of models cut from one of this config. Raises RzooError for a unit that is not among UNITS."""
    if unit not in UNITS:
        raise RzooError(f"unit ({unit}) must be one of {', '.join(UNITS)}", field="unit", value=unit)
    sizes = sizes_of(config)
    found: list[dict[str, int]] = [{} for _ in sizes]
    outside = 0
    for path, (axes, shape) in abstract_weights(config).items():
        kind, _, rest = path.partition(".")
        count = math.prod(shape.shape)
        if kind == "layers":
            number, _, name = rest.partition(".")
            part, share = _share(name, axes, sizes[int(number)])
            own = found[int(number)]
            own[part] = own.get(part, 0) + count // share
        elif kind != "mtp_module":  # pruning leaves it out
            outside += 0 if unit == "flops" and path == "embed" and not config.tied else count
    return Costs(unit, config, tuple(LayerCost(**own) for own in found), outside, itemsize)


def _share(name: str, axes: Sequence[str], sizes: Sizes) -> tuple[str, int]:
    """The field of LayerCost that a weight counts in, and among how many its entries are shared."""
    if name.startswith("attention"):
        return ("group", sizes.groups) if sizes.groups and {"h", "k"} & set(axes) else ("attention", 1)
    if sizes.experts and "e" in axes:
        return "route" if name.startswith("mlp.router") else "expert", sizes.experts
    if sizes.channels and "f" in axes:
        return "channel", sizes.channels
    return "ffn", 1


@dataclass(frozen=True)
class Move:
    """One part made smaller: in these layers, the numbers that `fields` names become `size`, where they are larger.
    Moves of the same part replace each other.
    """

    part: str
    layers: tuple[int, ...]
    fields: tuple[str, ...]
    size: int

    def applied(self, sizes: Sequence[Sizes]) -> tuple[Sizes, ...]:
        """The sizes after it."""
        return tuple(self.smaller(own) if i in self.layers else own for i, own in enumerate(sizes))

    def smaller(self, own: Sizes) -> Sizes:
        """One of its layers after it."""
        return replace(own, **{field: min(getattr(own, field), self.size) for field in self.fields})


def width_step(width: int) -> int:
    """The unit in which feed-forward widths shrink: multiples of 256, which Hugging Face's nemotron-nas can say, where
    these leave a choice; about a sixteenth.
    """
    return -(-width // 4096) * 256 if width % 256 == 0 and width >= 1024 else max(2, width // 32 * 2)


def moves_of(config: Any) -> tuple[Move, ...]:
    """All that greedy allocation chooses from: channels and attention of each layer by themselves, or where a family
    has one number for all layers, that number, and whole layers (but the first and the last).
    """
    sizes = sizes_of(config)
    if not isinstance(config, DeepSeekConfig):
        return tuple(move for i, own in enumerate(sizes) for move in _layer_moves(i, own))
    dense = tuple(i for i, own in enumerate(sizes) if own.channels)
    mixed = tuple(i for i, own in enumerate(sizes) if own.experts)
    found = [Move("channels", dense, ("channels",), w) for w in _widths(config.ffn_width) if dense and w]
    if config.experts is not None:
        counts = _expert_counts(config)
        found += [Move("experts", mixed, ("experts",), count) for count in counts]
    if config.experts is None or config.experts.every == 1:
        gone = ("groups", "channels", "experts")
        found += [Move(f"layer {i}", (i,), gone, 0) for i in range(1, config.layers - 1)]
    return tuple(found)


def _layer_moves(layer: int, sizes: Sizes) -> Iterator[Move]:
    if sizes.groups:
        yield Move(f"attention {layer}", (layer,), ("groups",), 0)
    for width in _widths(sizes.channels) if sizes.channels else ():
        yield Move(f"ffn {layer}", (layer,), ("channels",), width)


def _widths(width: int) -> list[int]:
    """Smaller widths, the largest first, 0 the last."""
    step = width_step(width)
    return [*range((width - 1) // step * step, 0, -step), 0]


def _expert_counts(config: DeepSeekConfig) -> list[int]:
    """Smaller numbers of experts that the router's groups and the active ones allow, the largest first."""
    experts = config.experts
    assert experts is not None
    groups, kept = experts.routing.groups, experts.routing.kept_groups
    each = max(-(-experts.active // kept), 2 if groups > 1 else 1)
    return list(range(experts.count - groups, groups * each - 1, -groups))


def shares_of_heads(config: Any) -> list[tuple[Sizes, ...]]:
    """Sizes in which all layers keep the same smaller share of their KV groups, the largest first."""
    sizes = sizes_of(config)
    counts = [own.groups for own in sizes if own.groups]
    if isinstance(config, DeepSeekConfig) or not counts:
        return []
    unit = math.gcd(*counts)
    part = lambda n: tuple(replace(own, groups=own.groups * n // unit) for own in sizes)  # noqa: E731
    return [part(n) for n in range(unit - 1, 0, -1)]


def greedy(
    costs: Costs, losses: Mapping[Move, float], limit: int, start: Sequence[Sizes] | None = None
) -> tuple[tuple[Sizes, ...], float]:
    """(sizes within `limit`, their loss): moves in the order of loss per saved unit, then those taken back that the
    budget still has room for, the costliest first.

    losses: of each move alone, in nats a token; they are added up. start: sizes to begin with. Raises RzooError with
    the nearest feasible value where all moves together are not enough.
    """
    sizes = base = tuple(start or sizes_of(costs.config))
    taken: dict[str, Move] = {}
    while costs.of(sizes) > limit:
        best = min(_steps(costs, losses, sizes, taken), default=None, key=lambda step: step[:2])
        if best is None:
            raise infeasible(limit, costs.of(sizes), costs.unit)
        taken[best[2].part] = best[2]
        sizes = best[2].applied(sizes)
    _take_back(costs, losses, base, taken, limit)
    return _after(base, taken.values()), sum((losses[move] for move in taken.values()), 0.0)


def _after(base: Sequence[Sizes], moves: Iterable[Move]) -> tuple[Sizes, ...]:
    sizes = tuple(base)
    for move in moves:
        sizes = move.applied(sizes)
    return sizes


def _steps(
    costs: Costs, losses: Mapping[Move, float], sizes: Sequence[Sizes], taken: Mapping[str, Move]
) -> Iterator[tuple[float, float, Move]]:
    """(loss per saved unit, minus what it saves, move) of each move that saves something and leaves attention
    somewhere.
    """
    attending = {i for i, own in enumerate(sizes) if own.groups}
    for move, loss in losses.items():
        before = taken.get(move.part)
        if before is not None and before.size <= move.size:
            continue
        if "groups" in move.fields and not move.size and attending <= set(move.layers):
            continue
        saved = costs.saved(sizes, move)
        if saved > 0:
            more = max(loss - (losses[before] if before else 0.0), 1e-12)
            yield more / saved, -saved, move


def _take_back(
    costs: Costs, losses: Mapping[Move, float], base: Sequence[Sizes], taken: dict[str, Move], limit: int
) -> None:
    for move in sorted(taken.values(), key=lambda m: -losses[m]):
        others = [m for p, m in taken.items() if p != move.part]
        milder = sorted((m for m in losses if m.part == move.part and m.size > move.size), key=lambda m: -m.size)
        for option in (None, *milder):
            if costs.of(_after(base, [*others, *([option] if option else [])])) <= limit:
                taken.pop(move.part)
                taken.update({option.part: option} if option else {})
                break


def infeasible(limit: int, nearest: int, unit: str) -> RzooError:
    """The refusal of a budget that can't be reached."""
    words = f"a budget of {limit:,} {unit} can't be reached by pruning: the smallest model has {nearest:,}"
    return RzooError(words, field=unit, value=limit, fix=f"ask for at least {nearest:,}")


def uniform(costs: Costs, limit: int) -> tuple[Sizes, ...]:
    """Sizes that are alike in all layers, as large as `limit` lets them be.

    Every feed-forward keeps the same share of its channels. A DeepSeek model with experts keeps fewer of these, and
    where they come in coarse steps it loses whole layers, too, as few as bring it within 3 % of the budget. Raises
    RzooError with the nearest feasible value.
    """
    config = costs.config
    options = _uniform_mixtures(config) if getattr(config, "experts", None) else _uniform_widths(config)
    fitting = [(costs.of(sizes), dropped, sizes) for dropped, sizes in options]
    allowed = [option for option in fitting if option[0] <= limit]
    if not allowed:
        raise infeasible(limit, min(cost for cost, _, _ in fitting), costs.unit)
    near = [option for option in allowed if option[0] >= 0.97 * limit] or allowed
    fewest = min(dropped for _, dropped, _ in near)
    return max((cost, sizes) for cost, dropped, sizes in near if dropped == fewest)[1]


def _uniform_widths(config: Any) -> Iterator[tuple[int, tuple[Sizes, ...]]]:
    sizes = sizes_of(config)
    for n in range(SHARES, 0, -1):
        width = lambda own, n=n: min(own.channels, -(-own.channels * n // (8 * SHARES)) * 8)  # noqa: E731
        yield 0, tuple(replace(own, channels=width(own)) for own in sizes)


def _uniform_mixtures(config: Any) -> Iterator[tuple[int, tuple[Sizes, ...]]]:
    """(layers dropped, sizes) for each number of experts and of layers, half of them at most."""
    sizes, whole = sizes_of(config), config.experts.count
    most = config.layers // 2 if config.experts.every == 1 else 0
    for dropped in range(most + 1):
        gone = set(_spread(config, dropped))
        for count in (whole, *_expert_counts(config)):
            yield (
                dropped,
                tuple(
                    Sizes(0) if i in gone else replace(own, experts=min(own.experts, count))
                    for i, own in enumerate(sizes)
                ),
            )


def _spread(config: Any, count: int) -> list[int]:
    """`count` layers with mixtures, evenly apart, without the first and the last layer."""
    inner = [i for i in range(1, config.layers - 1) if config.is_mixture(i)]
    return [inner[(2 * n + 1) * len(inner) // (2 * count)] for n in range(min(count, len(inner)))]


def planned(config: Any, limit: int, unit: str = "parameters", itemsize: float = 4.0) -> Any:
    """The config of a uniformly pruned model within a budget, from shapes alone."""
    return config_of(config, uniform(costs_of(config, unit, itemsize), limit))
