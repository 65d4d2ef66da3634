"""Dynamic sparse attention over latents: a light indexer chooses the positions that each query attends to.

Source: DeepSeek-V3.2-Exp (2025). The score of position s for query t is the weighted sum over index heads i of
relu(q[t, i] · key[s]); all attention heads of a query share the `keep` positions of the largest scores. `chosen`
[b, t, n] below holds them in any order; entries past a query's own position, or past the last one, are void. Ties go to
the lowest position. The published code turns index queries and keys by a Hadamard matrix, which is orthogonal, and
rounds them to FP8: in exact arithmetic the scores are those computed here.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from rzoo.models.attention import attend, attend_to_blocks, block_of, visible
from rzoo.models.config import HFConfig, positive
from rzoo.models.latent import absorbed_queries, expanded, expanded_block
from rzoo.models.weights import Numerics, Stored

QUERY_TILE = 8  # queries whose rows attend_gathered holds at once: 8 x 2048 x 576 values are 38 MB


@dataclass(frozen=True, kw_only=True)
class IndexerConfig:
    """heads, width: of the index queries. keep: positions that a query attends to at most."""

    heads: int
    width: int
    keep: int

    def __post_init__(self) -> None:
        positive(self, "heads", "width", "keep")

    @classmethod
    def from_hf(cls, hf: HFConfig) -> "IndexerConfig":
        """The indexer of a config.json; RzooError where not every layer is to have it."""
        kinds = hf.get("layer_types", None)
        layers = hf.count("num_hidden_layers")  # no list of this length is made: the number is the file's word alone
        if kinds is not None and not (
            isinstance(kinds, list) and len(kinds) == layers and all(kind == "indexed_attention" for kind in kinds)
        ):
            raise hf.wrong("layer_types", kinds, "must be indexed_attention for each of num_hidden_layers")
        heads, width, keep = (hf.count(name) for name in ("index_n_heads", "index_head_dim", "index_topk"))
        return cls(heads=heads, width=width, keep=keep)

    def to_hf(self) -> dict[str, int]:
        """The inverse of from_hf."""
        return {"index_n_heads": self.heads, "index_head_dim": self.width, "index_topk": self.keep}


def index_scores(
    q: Float[Array, "b t i x"], keys: Float[Array, "b 1 s x"], weights: Float[Array, "b t i"], numerics: Numerics
) -> Float[Array, "b t s"]:
    """The indexer's score of each position for each query, causal or not."""
    products = numerics.dot_accumulated("btix,bsx->btis", q, keys[:, 0]) * q.shape[-1] ** -0.5
    scores = jnp.einsum("btis,bti->bts", rectified(products), weights, precision=jax.lax.Precision.HIGHEST)
    return jnp.where(scores == 0, 0.0, scores)  # top_k ranks -0 below 0: they would be no tie


def rectified(products: Array) -> Array:
    """A head that disagrees says nothing."""
    return jax.nn.relu(products)


def causal(
    scores: Float[Array, "b t s"], starts: Int[Array, " b"], key_positions: Int[Array, " s"]
) -> Float[Array, "b t s"]:
    """Scores with -inf for positions past a query's own."""
    return jnp.where(visible(starts, scores.shape[1], key_positions), scores, -jnp.inf)


def choose(
    q: Float[Array, "b t i x"],
    keys: Float[Array, "b 1 s x"],
    weights: Float[Array, "b t i"],
    starts: Int[Array, " b"],
    keep: int,
    numerics: Numerics,
) -> Int[Array, "b t n"]:
    """The reference: all scores at once."""
    scores = causal(index_scores(q, keys, weights, numerics), starts, jnp.arange(keys.shape[2]))
    return jax.lax.top_k(scores, min(keep, keys.shape[2]))[1]


def choose_in_blocks(
    q: Float[Array, "b t i x"],
    keys: Float[Array, "b 1 s x"],
    weights: Float[Array, "b t i"],
    starts: Int[Array, " b"],
    keep: int,
    numerics: Numerics,
) -> Int[Array, "b t n"]:
    """The same, a block of keys at a time against the best so far; blocks past the last query are not read."""
    (b, t), s = q.shape[:2], keys.shape[2]
    keep, size = min(keep, s), block_of(t, s)

    def step(j, carry):
        best, chosen = carry
        own = j * size + jnp.arange(size)
        part = jax.lax.dynamic_slice_in_dim(keys, j * size, size, axis=2)
        scores = causal(index_scores(q, part, weights, numerics), starts, own)
        positions = jnp.concatenate([chosen, jnp.broadcast_to(own, (b, t, size))], axis=-1)
        best, at = jax.lax.top_k(jnp.concatenate([best, scores], axis=-1), keep)  # earlier positions come first
        return best, jnp.take_along_axis(positions, at, axis=-1)

    none = (jnp.full((b, t, keep), -jnp.inf, jnp.dtype(numerics.accumulate)), jnp.full((b, t, keep), s))
    used = jnp.minimum((jnp.max(starts) + t + size - 1) // size, s // size)
    return jax.lax.fori_loop(0, used, step, none)[1]


def valid(chosen: Int[Array, "b t n"], starts: Int[Array, " b"]) -> Bool[Array, "b t n"]:
    """Which entries are no void ones: the causal mask once more, after the choice."""
    return chosen <= (starts[:, None] + jnp.arange(chosen.shape[1]))[:, :, None]


def mask_of(chosen: Int[Array, "b t n"], s: int) -> Bool[Array, "b t s"]:
    """The chosen positions as a mask over all; void ones may be set in it."""
    b, t, _ = chosen.shape
    rows, queries = jnp.arange(b)[:, None, None], jnp.arange(t)[:, None]
    return jnp.zeros((b, t, s), bool).at[rows, queries, chosen].set(True, mode="drop")


def imitation_loss(
    scores: Float[Array, "b t s"], probabilities: Float[Array, "b h t s"], seen: Bool[Array, "b t s"]
) -> Float[Array, "b t"]:
    """What an indexer is trained on (section 2.1.1): the KL divergence, in nats, of its softmax over the positions seen
    from what all heads together attend to there.
    """
    target = jnp.where(seen, probabilities.sum(axis=1), 0.0)
    target = target / jnp.maximum(target.sum(axis=-1, keepdims=True), 1e-30)
    own = jnp.where(seen, jax.nn.log_softmax(jnp.where(seen, scores, -jnp.inf), axis=-1), 0.0)
    return jnp.where(target > 0, target * (jnp.log(jnp.maximum(target, 1e-30)) - own), 0.0).sum(axis=-1)


def attend_masked(
    q: Float[Array, "b t h w"],
    latents: Float[Array, "b 1 s m"],
    key_up: Stored,
    value_up: Stored,
    chosen: Int[Array, "b t n"],
    starts: Int[Array, " b"],
    scale: float,
    numerics: Numerics,
) -> Float[Array, "b t h z"]:
    """The reference: attention to all positions, those not chosen masked out. Arguments as in latent.py."""
    keys, values = expanded(latents, key_up, value_up, numerics)
    return attend(q, keys, values, starts, scale, numerics, mask_of(chosen, latents.shape[2]))


def attend_masked_in_blocks(
    q: Float[Array, "b t h w"],
    latents: Float[Array, "b 1 s m"],
    key_up: Stored,
    value_up: Stored,
    chosen: Int[Array, "b t n"],
    starts: Int[Array, " b"],
    scale: float,
    numerics: Numerics,
) -> Float[Array, "b t h z"]:
    """The same, a block of keys and values expanded at a time. No reverse gradient."""
    heads, value_width, _ = value_up.shape
    s, block = latents.shape[2], expanded_block(latents, key_up, value_up, numerics)
    seen = mask_of(chosen, s)
    return attend_to_blocks(q, block, heads, s, value_width, starts, scale, numerics, seen=seen)


def attend_gathered(
    q: Float[Array, "b t h w"],
    latents: Float[Array, "b 1 s m"],
    key_up: Stored,
    value_up: Stored,
    chosen: Int[Array, "b t n"],
    starts: Int[Array, " b"],
    scale: float,
    numerics: Numerics,
) -> Float[Array, "b t h z"]:
    """The same from the chosen latents alone: work and memory do not grow with s. Differentiable."""
    (b, t), n = q.shape[:2], chosen.shape[2]
    tile = QUERY_TILE if t % QUERY_TILE == 0 else t
    in_tiles = lambda a: a.reshape(b, t // tile, tile, *a.shape[2:]).swapaxes(0, 1)  # noqa: E731

    def attend_tile(given: tuple[Array, Array, Array]) -> Array:
        queries, positions, real = given
        flat = positions.reshape(b, tile * n, 1)
        rows = jnp.take_along_axis(latents[:, 0], flat, axis=1, mode="clip").reshape(b, tile, n, -1)
        scores = numerics.dot_accumulated("bthm,btnm->bthn", queries, rows) * scale
        shares = jax.nn.softmax(jnp.where(real[:, :, None], scores, -jnp.inf), axis=-1)
        return numerics.dot("bthn,btnm->bthm", shares, rows)

    given = (absorbed_queries(q, key_up, numerics), chosen, valid(chosen, starts))
    mixed = jax.lax.map(attend_tile, jax.tree.map(in_tiles, given)).swapaxes(0, 1).reshape(b, t, q.shape[2], -1)
    return value_up.contract("bthr,hzr->bthz", mixed[..., : value_up.shape[-1]], numerics)
