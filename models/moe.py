"""Mixture of experts: which experts a token goes to, and the forms in which their outputs are computed.

Sources: DeepSeekMoE (2024); DeepSeek-V2 (2024), section 2.2; DeepSeek-V3 (2024), section 2.1.2. An expert is a gated
feed-forward, down(silu(gate(x)) * up(x)); the weights of all are stacked, gate and up [e, f, d], down [e, d, f]. In the
functions below n counts tokens and k the experts of each; those called experts_* take the same arguments.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rzoo.models.weights import Numerics, Stored, contract_together

TILE = 64  # most tokens of one expert that experts_in_tiles computes at once; 32 and 128 were slower on V3-mini


@dataclass(frozen=True, kw_only=True)
class SigmoidRouting:
    """DeepSeek-V3: sigmoid scores, chosen with a bias that takes no part in the weights.

    Only the `kept_groups` best of `groups` equal groups of consecutive experts are open to a token.
    normalize: weights of a token add up to 1 before they are scaled.
    """

    groups: int = 1
    kept_groups: int = 1
    normalize: bool = True
    scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class SoftmaxRouting:
    """DeepSeek-V2: softmax over all experts; weights are scaled and not renormalised."""

    groups: int = 1
    kept_groups: int = 1
    scale: float = 1.0


Routing = SigmoidRouting | SoftmaxRouting


def route(
    routing: Routing, logits: Float[Array, "n e"], bias: Float[Array, " e"] | None, active: int
) -> tuple[Int[Array, "n k"], Float[Array, "n k"]]:
    """The `active` experts of each token and their weights, from float32 logits; ties go to the lower index."""
    if isinstance(routing, SigmoidRouting):
        scores = sigmoid_scores(logits)
        choice, rank_groups = (scores if bias is None else scores + bias), best_two
    else:
        scores = choice = jax.nn.softmax(logits, axis=-1)
        rank_groups = best_one
    if routing.groups > 1:
        choice = within_best_groups(choice, rank_groups, routing.groups, routing.kept_groups)
    _, indices = jax.lax.top_k(choice, active)
    weights = weights_of(scores, choice, indices)
    if isinstance(routing, SigmoidRouting) and routing.normalize:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    return indices, weights * routing.scale


def sigmoid_scores(logits: Float[Array, "n e"]) -> Float[Array, "n e"]:
    """Each expert is scored by itself (V3)."""
    return jax.nn.sigmoid(logits)


def best_two(grouped: Float[Array, "n groups size"]) -> Float[Array, "n groups"]:
    """A group is worth the sum of its two best experts (V3)."""
    return jax.lax.top_k(grouped, 2)[0].sum(axis=-1)


def best_one(grouped: Float[Array, "n groups size"]) -> Float[Array, "n groups"]:
    """A group is worth its best expert (V2)."""
    return grouped.max(axis=-1)


def within_best_groups(choice: Float[Array, "n e"], rank_groups, groups: int, kept: int) -> Float[Array, "n e"]:
    """`choice` with closed_score() outside of the best `kept` groups of each token."""
    grouped = choice.reshape(choice.shape[0], groups, -1)
    _, best = jax.lax.top_k(rank_groups(grouped), kept)
    is_open = jax.nn.one_hot(best, groups, dtype=bool).any(axis=1)
    return jnp.where(is_open[:, :, None], grouped, closed_score()).reshape(choice.shape)


def closed_score() -> float:
    """The choice of an expert outside of the kept groups: below every score, also below those that a bias makes
    negative.
    """
    return -jnp.inf


def weights_of(
    scores: Float[Array, "n e"], choice: Float[Array, "n e"], indices: Int[Array, "n k"]
) -> Float[Array, "n k"]:
    """Weights come from the scores: the bias in `choice` selects and does nothing else."""
    return jnp.take_along_axis(scores, indices, axis=-1)


def shares(indices: Int[Array, "n k"], weights: Float[Array, "n k"], experts: int) -> Float[Array, "n e"]:
    """The weight that each token gives to each expert, 0 where it was not chosen."""
    rows = jnp.arange(indices.shape[0])[:, None]
    return jnp.zeros((indices.shape[0], experts), weights.dtype).at[rows, indices].add(weights)


def experts_reference(
    x: Float[Array, "n d"],
    indices: Int[Array, "n k"],
    weights: Float[Array, "n k"],
    gate: Stored,
    up: Stored,
    down: Stored,
    numerics: Numerics,
) -> Float[Array, "n d"]:
    """Every expert on every token, then the weighted sum; differentiable."""
    gates, ups = contract_together("nd,efd->nef", x, (gate, up), numerics)
    outputs = down.contract("nef,edf->end", jax.nn.silu(gates) * ups, numerics)
    share = shares(indices, weights, outputs.shape[0])
    return jnp.einsum("end,ne->nd", outputs, share, precision=numerics.precision).astype(x.dtype)


def experts_one_by_one(
    x: Float[Array, "n d"],
    indices: Int[Array, "n k"],
    weights: Float[Array, "n k"],
    gate: Stored,
    up: Stored,
    down: Stored,
    numerics: Numerics,
) -> Float[Array, "n d"]:
    """For few tokens: each chosen expert is read once for each token that chose it, and no other is read."""
    rows = []
    for token in range(x.shape[0]):
        row = x[token : token + 1]
        outputs = [_expert(row, i, gate, up, down, numerics) for i in indices[token]]
        rows.append(sum(w * y.astype(w.dtype) for w, y in zip(weights[token], outputs, strict=True)))
    return jnp.concatenate(rows).astype(x.dtype)


def experts_in_tiles(
    x: Float[Array, "n d"],
    indices: Int[Array, "n k"],
    weights: Float[Array, "n k"],
    gate: Stored,
    up: Stored,
    down: Stored,
    numerics: Numerics,
) -> Float[Array, "n d"]:
    """For many tokens: pairs of token and expert sorted by expert, then tiles of pairs of one expert at a time.

    Experts that no token chose are not read. The number of tiles is data dependent: no reverse-mode gradient.
    """
    n, k = indices.shape
    experts = gate.shape[0]
    tile = min(TILE, n)  # no expert has more than n tokens
    flat = indices.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    counts = jnp.bincount(flat, length=experts)
    first_pair = jnp.cumsum(counts) - counts
    tiles_before = jnp.cumsum(-(-counts // tile))  # of this expert and those before it
    tokens = jnp.pad(order // k, (0, tile))

    def step(j, out):
        expert = jnp.searchsorted(tiles_before, j, side="right")
        within = j - jnp.where(expert > 0, tiles_before[expert - 1], 0)
        start = first_pair[expert] + within * tile
        rows = x[jax.lax.dynamic_slice_in_dim(tokens, start, tile)]
        y = _expert(rows, expert, gate, up, down, numerics)
        # Rows past the expert's last pair are rubbish; the next tile starts there and writes over them.
        return jax.lax.dynamic_update_slice_in_dim(out, y, start, axis=0)

    room = jnp.zeros((n * k + tile, x.shape[1]), x.dtype)
    by_expert = jax.lax.fori_loop(0, tiles_before[-1], step, room)
    by_token = by_expert[jnp.argsort(order)].reshape(n, k, -1)
    return jnp.einsum("nkd,nk->nd", by_token, weights, precision=numerics.precision).astype(x.dtype)


def experts_ragged(
    x: Float[Array, "n d"],
    indices: Int[Array, "n k"],
    weights: Float[Array, "n k"],
    gate: Stored,
    up: Stored,
    down: Stored,
    numerics: Numerics,
) -> Float[Array, "n d"]:
    """The same order through jax.lax.ragged_dot, which GPU and TPU have kernels for; differentiable."""
    n, k = indices.shape
    order = jnp.argsort(indices.reshape(-1), stable=True)
    counts = jnp.bincount(indices.reshape(-1), length=gate.shape[0])
    rows = x[order // k]
    hidden = jax.nn.silu(_ragged(rows, gate, counts, numerics)) * _ragged(rows, up, counts, numerics)
    by_token = _ragged(hidden, down, counts, numerics)[jnp.argsort(order)].reshape(n, k, -1)
    return jnp.einsum("nkd,nk->nd", by_token, weights, precision=numerics.precision).astype(x.dtype)


def _ragged(
    rows: Float[Array, "m i"], weight: Stored, counts: Int[Array, " e"], numerics: Numerics
) -> Float[Array, "m o"]:
    out = jax.lax.ragged_dot(
        rows.astype(numerics.compute),
        weight.dense().astype(numerics.compute).swapaxes(1, 2),
        counts,
        precision=numerics.precision,
        preferred_element_type=jnp.dtype(numerics.accumulate),
    )
    return out.astype(numerics.compute)


def _expert(
    rows: Float[Array, "n d"], i: Int[Array, ""], gate: Stored, up: Stored, down: Stored, numerics: Numerics
) -> Float[Array, "n d"]:
    """Expert i on some rows."""
    gates = gate.contract_entry(i, "nd,fd->nf", rows, numerics)
    ups = up.contract_entry(i, "nd,fd->nf", rows, numerics)
    return down.contract_entry(i, "nf,df->nd", jax.nn.silu(gates) * ups, numerics)
