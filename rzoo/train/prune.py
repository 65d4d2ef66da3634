"""Pruning a loaded model: calibration on text, the loss that each cut causes, the smaller model.

Importance comes from activations, allocation from measured loss: each part is silenced alone in the parent's own
program, and KL(parent ‖ child) of the logits says what it is worth (Puzzle's best score).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from rzoo.compile.gates import divergence
from rzoo.compile.storage import plain
from rzoo.core import RzooError
from rzoo.handle import LM
from rzoo.models.budget import Costs, Move, costs_of, greedy, moves_of, shares_of_heads, uniform
from rzoo.models.prune import (
    Importance,
    Kept,
    Sizes,
    at_random,
    config_of,
    cut,
    dense_params,
    refitted,
    select,
    sizes_of,
    zeroed,
)
from rzoo.models.registry import abstract_weights
from rzoo.models.stacking import unstack
from rzoo.train.step import cross_entropy

LENGTH = 128  # tokens of a calibration row, or the context where that is shorter
LEAST_ROWS = 8  # to calibrate with, and as many to judge by
CALIBRATION_ROWS = 64  # that importance comes from
MEASURED_ROWS = 2  # rows on which the loss of each cut is measured
AT_ONCE = 4  # rows that run together
METHODS = ("greedy", "uniform", "random")

Say = Callable[[str, int, int], None]  # what, done, of


@dataclass(frozen=True)
class Calibration:
    """What text says of a model. rows: the token ids [n, t]. importance: of each layer. moments: path of an output
    weight -> second moments of its inputs, for prune.refitted.
    """

    rows: np.ndarray
    importance: tuple[Importance, ...]
    moments: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Pruned:
    """A pruned model, what it kept of each layer of its parent, and the loss that was added up (nats a token)."""

    lm: LM
    kept: tuple[Kept, ...]
    loss: float | None

    @property
    def sizes(self) -> tuple[Sizes, ...]:
        """The sizes of the parent's layers, now."""
        return tuple(kept.sizes for kept in self.kept)


def rows_of(lm: LM, text: str) -> np.ndarray:
    """Text as rows of token ids [n, t], what is left over dropped. Raises RzooError for a model without a tokenizer."""
    if lm.tokenizer is None:
        raise RzooError("pruning reads text, and this model has no tokenizer", field="lm", fix="calibrate with its ids")
    ids, length = lm.tokenizer.encode(text), min(LENGTH, lm.config.context)
    count = len(ids) // length
    return np.asarray(ids[: count * length], np.int32).reshape(count, length)


def split_rows(rows: np.ndarray, judging: int = 16) -> tuple[np.ndarray, np.ndarray]:
    """(rows to learn from, rows to judge by) without a common one; the second are the last of the text.

    Raises RzooError where there are fewer than twice LEAST_ROWS, with the number of tokens that would do.
    """
    if len(rows) < 2 * LEAST_ROWS:
        least = 2 * LEAST_ROWS * (rows.shape[1] or LENGTH)
        words = f"the calibration text has {rows.size:,} tokens in whole rows of {rows.shape[1]}; at least {least:,}"
        fix = f"give a longer text: half of {2 * LEAST_ROWS} rows calibrate, the others judge"
        raise RzooError(f"{words} are needed", field="calibrate", value=rows.size, fix=fix)
    judging = max(LEAST_ROWS, min(judging, len(rows) // 4))
    return rows[:-judging], rows[-judging:]


def spread(rows: np.ndarray, most: int = CALIBRATION_ROWS) -> np.ndarray:
    """At most `most` rows, from all over the text."""
    return rows[np.unique(np.linspace(0, len(rows) - 1, most).astype(int))]


def prunable(lm: LM) -> LM:
    """The model with per-layer dense weights. Raises RzooError for one on a mesh, whose parts lie apart, and for
    weights that are held in blocks.
    """
    if lm.mesh is not None:
        raise RzooError("a model on a mesh can't be pruned", field="mesh", value=lm.mesh, fix="load it on one device")
    params = dense_params(lm.config, plain(unstack(lm.config, lm.params)))
    return replace(lm, params=params, forms=replace(lm.forms, stacked=False), record=None)


def calibrate(lm: LM, rows: np.ndarray, say: Say = lambda *_: None) -> Calibration:
    """Importance and second moments from rows of token ids [n, t]; holds n^2 floats for each n channels of a layer."""
    lm = prunable(lm)
    totals: dict[str, Any] = {}
    for first in range(0, len(rows), AT_ONCE):
        say("calibrating", first, len(rows))
        ids = rows[first : first + AT_ONCE]
        observed = lm(ids, capture=("hidden", "channels", "heads", "router"))[1]
        _add(totals, _sums(observed), ids.size)
    say("calibrating", len(rows), len(rows))
    found = jax.tree.map(lambda total: np.asarray(total) / rows.size, totals)
    return Calibration(rows, _importance(lm, found), _moments(lm.config, found))


@jax.jit
def _sums(observed: Mapping[str, Sequence[Array]]) -> dict[str, list[Array]]:
    """Sums over tokens of what is observed of each layer that has it."""
    flat = lambda a: a.astype(jnp.float32).reshape(-1, int(np.prod(a.shape[2:])))  # noqa: E731
    square = lambda a: jnp.einsum("nf,ng->fg", flat(a), flat(a), precision=jax.lax.Precision.HIGHEST)  # noqa: E731
    x = [flat(hidden) for hidden in observed["hidden"]]
    return {
        "channels": [jnp.abs(flat(a)).sum(0) for a in observed["channels"]],
        "heads": [jnp.abs(flat(a)).sum(0) for a in observed["heads"]],
        "router": [flat(a).sum(0) for a in observed["router"]],
        "turn": [(1 - _cosine(a, b)).sum() for a, b in pairwise(x[:-1])],  # the last is normed
        "channel_moments": [square(a) for a in observed["channels"]],
        "head_moments": [square(a) for a in observed["heads"]],
    }


def _cosine(a: Float[Array, "n d"], b: Float[Array, "n d"]) -> Float[Array, " n"]:
    norms = jnp.linalg.norm(a, axis=-1) * jnp.linalg.norm(b, axis=-1)
    return (a * b).sum(-1) / jnp.maximum(norms, 1e-30)


def _add(totals: dict[str, Any], sums: Mapping[str, list[Array]], count: int) -> None:
    for name, values in sums.items():
        totals[name] = [a + b for a, b in zip(totals[name], values, strict=True)] if name in totals else values


def _holders(config: Any, *names: str) -> list[str]:
    """The paths of weights with one of these names within their layers, in the order of layers."""
    paths = [f"layers.{i}.{name}" for i in range(config.layers) for name in names]
    return [path for path in paths if path in abstract_weights(config)]


def _of_paths(config: Any, found: Mapping[str, list[Any]], kind: str) -> dict[str, Any]:
    """What was observed, by the path of the weight that reads it; heads are those of grouped attention."""
    if kind.startswith("head"):
        readers = [path for path in _holders(config, "attention.output") if found[kind]]
        readers = [p for p in readers if p.replace("output", "k") in abstract_weights(config)]
    else:
        readers = _holders(config, "mlp.router.weight" if kind == "router" else "mlp.down", "mlp.shared.down")
        readers = [p for p in readers if kind != "router" or not p.endswith("shared.down")]
    return dict(zip(readers, found[kind], strict=True))


def _moments(config: Any, found: Mapping[str, list[Any]]) -> dict[str, np.ndarray]:
    both = {**_of_paths(config, found, "channel_moments"), **_of_paths(config, found, "head_moments")}
    return {path: value for path, value in both.items() if not path.endswith("shared.down")}


def _importance(lm: LM, found: Mapping[str, list[Any]]) -> tuple[Importance, ...]:
    channels, heads, router = (_of_paths(lm.config, found, kind) for kind in ("channels", "heads", "router"))
    turns = [*(float(turn) for turn in found["turn"]), float("inf")]
    layers = []
    for i, sizes in enumerate(sizes_of(lm.config)):
        mlp, output = f"layers.{i}.mlp", f"layers.{i}.attention.output"
        groups = np.ones(sizes.groups)
        if output in heads:
            groups = (heads[output] * _reading(lm.params[output])).reshape(sizes.groups, -1).sum(axis=1)
        own = f"{mlp}.down"
        width = channels[own] * _reading(lm.params[own]) if sizes.channels else np.zeros(0)
        experts = router[f"{mlp}.router.weight"] if sizes.experts else np.zeros(0)
        layers.append(Importance(groups, width, experts, turns[i]))
    return tuple(layers)


def _reading(weight: Any) -> np.ndarray:
    """The norm of what each input of a weight [out, in...] is multiplied with, flat."""
    return np.linalg.norm(np.asarray(weight, np.float32).reshape(weight.shape[0], -1), axis=0)


_divergence = jax.jit(lambda of, to: divergence(of, to).mean())


def mean_divergence(of: Float[Array, "b t v"], to: Float[Array, "b t v"]) -> float:
    """KL between the distributions of two logits, in nats a token; never below 0."""
    return max(0.0, float(_divergence(of, to)))


_mean_loss = jax.jit(lambda logits, ids: cross_entropy(logits[:, :-1], ids[:, 1:], jnp.ones(ids[:, 1:].shape)))


def log_perplexity(lm: LM, rows: Int[np.ndarray, "n t"]) -> float:
    """Mean loss in nats of predicting each token of rows from those before it in its row."""
    parts = [rows[i : i + AT_ONCE] for i in range(0, len(rows), AT_ONCE)]
    return float(np.average([float(_mean_loss(lm(part), part)) for part in parts], weights=[len(p) for p in parts]))


def losses_of(
    lm: LM, calibration: Calibration, moves: Sequence[Move], *, refit: bool = True, say: Say = lambda *_: None
) -> dict[Move, float]:
    """KL(parent ‖ child) in nats a token of each move made alone; three sizes of a part are measured, those between
    interpolated.
    """
    lm, ids = prunable(lm), calibration.rows[:MEASURED_ROWS]
    wanted, measured = lm(ids), _to_measure(moves)
    found: dict[Move, float] = {}
    for number, move in enumerate(measured):
        say("measuring cuts", number, len(measured))
        kept = select(lm.config, calibration.importance, move.applied(sizes_of(lm.config)))
        params = silenced(lm, calibration, {i: kept[i] for i in move.layers}, refit)
        found[move] = mean_divergence(wanted, lm.with_params(params)(ids))
    say("measuring cuts", len(measured), len(measured))
    return {move: _between(lm.config, move, found) for move in moves}


def promising(moves: Sequence[Move], importance: Sequence[Importance]) -> list[Move]:
    """The moves that are worth measuring: of those that drop whole layers the half that turns the residual least."""
    middle = float(np.median([own.turn for own in importance]))
    return [move for move in moves if len(move.fields) == 1 or importance[move.layers[0]].turn <= middle]


def silenced(lm: LM, calibration: Calibration, kept: Mapping[int, Kept], refit: bool) -> Any:
    """The parent's parameters with what these layers do not keep silenced, and perhaps the rest fitted."""
    if refit:
        return refitted(lm.config, lm.params, kept, calibration.moments)
    return zeroed(lm.config, lm.params, kept)


def _to_measure(moves: Sequence[Move]) -> list[Move]:
    parts: dict[str, list[Move]] = {}
    for move in moves:
        parts.setdefault(move.part, []).append(move)
    thirds = lambda n: sorted({max(0, -(-n * k // 3) - 1) for k in (1, 2, 3)})  # noqa: E731
    return [own[i] for own in parts.values() for i in thirds(len(own))]


def _between(config: Any, move: Move, measured: Mapping[Move, float]) -> float:
    """The loss of a move from the measured ones of its part: it grows with the square of what is gone up to the first
    of these, and as a power from one to the next.
    """
    whole = getattr(sizes_of(config)[move.layers[0]], move.fields[0])
    points = sorted((whole - m.size, max(loss, 1e-9)) for m, loss in measured.items() if m.part == move.part)
    gone, (first, least) = whole - move.size, points[0]
    if gone <= first:
        return least * (gone / first) ** 2
    return float(np.exp(np.interp(np.log(gone), *np.log(np.asarray(points)).T)))


def prune(
    lm: LM,
    calibration: Calibration,
    limit: int,
    *,
    unit: str = "parameters",
    method: str = "greedy",
    losses: Mapping[Move, float] | None = None,
    refit: bool = True,
    seed: int = 0,
    say: Say = lambda *_: None,
) -> Pruned:
    """The model within a budget of `limit` `unit` (budget.UNITS; bytes in the types that it is held in).

    method: "greedy" gives up first what costs the least loss a unit, "uniform" the same share of every layer, "random"
    the same shapes as greedy with what stays drawn by `seed`. losses: of losses_of, measured here where they are not
    given. refit: what stays is fitted to what the whole gave. Raises RzooError for an unknown method and a budget that
    can't be reached, with the nearest that can.
    """
    lm = prunable(lm)
    costs = checked_costs(lm, limit, unit, method)
    if method == "uniform":
        return pruned_to(lm, calibration, uniform(costs, limit), refit=refit)
    sizes, loss = _allocated(lm, calibration, costs, limit, losses, refit, say)
    drawn = replace(calibration, importance=at_random(lm.config, seed)) if method == "random" else calibration
    return replace(pruned_to(lm, drawn, sizes, refit=refit), loss=loss)


def checked_costs(lm: LM, limit: int, unit: str, method: str) -> Costs:
    """The costs of models cut from this one. Raises RzooError, without any work, for what `prune` refuses."""
    if method not in METHODS:
        raise RzooError(f"method ({method}) must be one of {', '.join(METHODS)}", field="method", value=method)
    costs = costs_of(lm.config, unit, itemsize=float(jax.tree.leaves(lm.params["embed"])[0].dtype.itemsize))
    whole = costs.of(sizes_of(lm.config))
    if limit >= whole:
        words = f"a budget of {limit:,} {unit} prunes nothing: the model has {whole:,}"
        raise RzooError(words, field=unit, value=limit, fix="ask for less")
    if method == "uniform":
        config_of(lm.config, uniform(costs, limit))
    else:
        config_of(lm.config, greedy(costs, {move: 1.0 for move in moves_of(lm.config)}, limit)[0])
    return costs


def _allocated(
    lm: LM, calibration: Calibration, costs: Costs, limit: int, losses: Any, refit: bool, say: Say
) -> tuple[tuple[Sizes, ...], float]:
    """Greedy sizes and their loss: the best over the shares of KV groups that all layers can keep."""
    moves = promising(moves_of(lm.config), calibration.importance)
    found = losses_of(lm, calibration, moves, refit=refit, say=say) if losses is None else losses
    best = greedy(costs, found, limit)
    for start in shares_of_heads(lm.config):
        first = _loss_of(lm, calibration, start, refit)
        if first < best[1]:
            sizes, loss = greedy(costs, found, limit, start)
            best = min(best, (sizes, first + loss), key=lambda option: option[1])
    return best


def _loss_of(lm: LM, calibration: Calibration, sizes: Sequence[Sizes], refit: bool) -> float:
    ids = calibration.rows[:MEASURED_ROWS]
    kept = dict(enumerate(select(lm.config, calibration.importance, sizes)))
    return mean_divergence(lm(ids), lm.with_params(silenced(lm, calibration, kept, refit))(ids))


def pruned_to(lm: LM, calibration: Calibration, sizes: Sequence[Sizes], *, refit: bool = True) -> Pruned:
    """The model whose layers have these sizes, made of what calibration found important."""
    lm = prunable(lm)
    kept = select(lm.config, calibration.importance, sizes)
    config, params = cut(lm.config, silenced(lm, calibration, dict(enumerate(kept)), refit), kept)
    about = replace(lm.about, source=f"{lm.about.source}, pruned")
    return Pruned(replace(lm, config=config, params=params, about=about), kept, None)
