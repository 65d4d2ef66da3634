"""Parts that the families share: norms, gated feed-forward, mixture of experts, grouped and latent attention."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from rzoo.models.attention import attention_probabilities, entropy, visible
from rzoo.models.cache import LatentSlot, Slot
from rzoo.models.dynamic import IndexerConfig, imitation_loss, index_scores, mask_of, valid
from rzoo.models.forms import Forms
from rzoo.models.latent import latent_probabilities
from rzoo.models.moe import Routing, SigmoidRouting, shares
from rzoo.models.rope import Rotation, rotate_half_split, rotate_interleaved
from rzoo.models.weights import Numerics, contract_together, ones, selection_bias, weight


class RMSNorm(nnx.Module):
    """Root mean square norm with a learned scale."""

    def __init__(self, width: int, *, eps: float, forms: Forms, rngs: nnx.Rngs | None):
        self.scale = ones("d", (width,), rngs)
        self.eps, self.forms = eps, forms

    def __call__(self, x: Float[Array, "*batch d"]) -> Float[Array, "*batch d"]:
        return self.forms.norm(x, self.scale.dense(), self.eps)


class LayerNorm(nnx.Module):
    """(x - mean) / deviation, times a learned scale plus a learned bias, in float32 and cast back."""

    def __init__(self, axis: str, width: int, *, eps: float, rngs: nnx.Rngs | None):
        self.scale = ones(axis, (width,), rngs)
        self.bias = weight(axis, (width,), rngs, scale=0.0)
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        wide = x.astype(jnp.float32)
        centered = wide - jnp.mean(wide, axis=-1, keepdims=True)
        normed = centered * jax.lax.rsqrt(jnp.mean(jnp.square(centered), axis=-1, keepdims=True) + self.eps)
        return (normed * self.scale.dense() + self.bias.dense()).astype(x.dtype)


class GatedMLP(nnx.Module):
    """down(silu(gate(x)) * up(x)), the SwiGLU of Llama, with optional biases. active: how many channels of `hidden`
    each token uses, those with the strongest gate (contextual sparsity; None: all).
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        bias: bool,
        active: int | None = None,
        forms: Forms,
        rngs: nnx.Rngs | None,
    ):
        self.gate = weight("fd", (hidden, width), rngs)
        self.up = weight("fd", (hidden, width), rngs)
        self.down = weight("df", (width, hidden), rngs)
        self.gate_bias = weight("f", (hidden,), rngs, scale=0.0) if bias else None
        self.up_bias = weight("f", (hidden,), rngs, scale=0.0) if bias else None
        self.down_bias = weight("d", (width,), rngs, scale=0.0) if bias else None
        self.forms, self.active = forms, active

    def __call__(self, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        if self.active is not None:
            return self.by_few_channels(x, self.active)
        numerics = self.forms.numerics
        gate, up = contract_together("btd,fd->btf", x, (self.gate, self.up), numerics)
        gate, up = plus(gate, self.gate_bias), plus(up, self.up_bias)
        hidden = self.forms.place(jax.nn.silu(gate) * up, "btf")
        self.forms.observe(self, "channels", lambda: hidden)
        return plus(self.down.contract("btf,df->btd", hidden, numerics), self.down_bias)

    def by_few_channels(self, x: Float[Array, "b t d"], active: int) -> Float[Array, "b t d"]:
        """The part of the `active` channels with the strongest gate, token by token: of up and down no others are read.
        Without biases.
        """
        numerics, up, down = self.forms.numerics, self.up.dense(), self.down.dense()
        gate = jax.nn.silu(self.gate.contract("btd,fd->btf", x, numerics))
        chosen = jax.lax.top_k(jnp.abs(gate), active)[1]
        self.forms.observe(self, "gathered", lambda: chosen)

        def one(token: tuple[Array, Array, Array]) -> Array:
            x, gate, chosen = token
            hidden = gate[chosen] * numerics.dot("fd,d->f", up[chosen], x)
            return numerics.dot("df,f->d", down[:, chosen], hidden)

        tokens = (a.reshape(-1, a.shape[-1]) for a in (x, gate, chosen))
        return jax.lax.map(one, tuple(tokens)).reshape(x.shape)


def plus(x: Array, bias) -> Array:
    """x + bias, or x where there is none."""
    return x if bias is None else x + bias.dense().astype(x.dtype)


class GroupedAttention(nnx.Module):
    """Causal attention in which each key/value head serves h/k query heads (grouped-query attention).

    qkv_bias: on q, k, v (Qwen2). output_bias: on the projection back.
    """

    def __init__(
        self,
        width: int,
        *,
        heads: int,
        kv_heads: int,
        head_width: int,
        qkv_bias: bool,
        output_bias: bool,
        forms: Forms,
        rngs: nnx.Rngs | None,
    ):
        self.q = weight("hcd", (heads, head_width, width), rngs)
        self.k = weight("kcd", (kv_heads, head_width, width), rngs)
        self.v = weight("kcd", (kv_heads, head_width, width), rngs)
        self.output = weight("dhc", (width, heads, head_width), rngs, scale=(heads * head_width) ** -0.5)
        self.q_bias = weight("hc", (heads, head_width), rngs, scale=0.0) if qkv_bias else None
        self.k_bias = weight("kc", (kv_heads, head_width), rngs, scale=0.0) if qkv_bias else None
        self.v_bias = weight("kc", (kv_heads, head_width), rngs, scale=0.0) if qkv_bias else None
        self.output_bias = weight("d", (width,), rngs, scale=0.0) if output_bias else None
        self.scale, self.forms = head_width**-0.5, forms

    def __call__(
        self, x: Float[Array, "b t d"], at: Rotation, starts: Int[Array, " b"], slot: Slot | None = None
    ) -> tuple[Float[Array, "b t d"], Slot | None]:
        """x: normed input whose first tokens stand at `starts`. With a slot, appends to it and attends to all of it."""
        q, k, v = self.project(x, at)
        attend: Any = self.forms.attend
        if slot is None:
            slot_out, keys, values = None, k, v
        else:
            slot_out = slot.append(k, v, starts)
            keys, values = slot_out.keys, slot_out.values
            attend = self.forms.attend_decode if x.shape[1] == 1 else self.forms.attend_prefill
        numerics, own = self.forms.numerics, self.forms.types("attention")
        seen = lambda: attention_probabilities(q, keys, starts, self.scale, own)  # noqa: E731
        self.forms.observe(self, "attention", seen)
        self.forms.observe(self, "entropy", lambda: entropy(seen()))
        if hasattr(attend, "touched"):
            self.forms.observe(self, "touched", lambda: attend.touched(q, keys, values, starts, self.scale, own))
        mixed = self.forms.place(attend(q, keys, values, starts, self.scale, own).astype(numerics.compute), "bthc")
        self.forms.observe(self, "heads", lambda: mixed)
        out = self.output.contract("bthc,dhc->btd", mixed, numerics)
        return plus(out, self.output_bias), slot_out

    def project(
        self, x: Float[Array, "b t d"], at: Rotation
    ) -> tuple[Float[Array, "b t h c"], Float[Array, "b k t c"], Float[Array, "b k t c"]]:
        """Rotated queries, rotated keys and values of x; keys and values in the order of the cache."""
        q, k, v = contract_together("btd,hcd->bthc", x, (self.q, self.k, self.v), self.forms.numerics)
        q = rotate_half_split(plus(q, self.q_bias), at)
        k = rotate_half_split(plus(k, self.k_bias), at)
        v = plus(v, self.v_bias)
        place = self.forms.place
        return place(q, "bthc"), place(k.swapaxes(1, 2), "bktc"), place(v.swapaxes(1, 2), "bktc")


class Indexer(nnx.Module):
    """Index queries, their weights and index keys of V3.2's sparse attention (dynamic.py).

    The first rope_width values of queries and keys are rotated, in half-split pairs: in latent attention it is the last
    ones, interleaved.
    """

    def __init__(
        self,
        width: int,
        *,
        config: IndexerConfig,
        q_rank: int,
        rope_width: int,
        forms: Forms,
        rngs: nnx.Rngs | None,
    ):
        self.query_up = weight("ixr", (config.heads, config.width, q_rank), rngs)
        self.key = weight("xd", (config.width, width), rngs)
        self.key_norm = LayerNorm("x", config.width, eps=1e-6, rngs=rngs)
        self.head_weight = weight("id", (config.heads, width), rngs)
        self.config, self.rope_width, self.forms = config, rope_width, forms

    def __call__(
        self, x: Float[Array, "b t d"], query_latent: Float[Array, "b t r"], at: Rotation
    ) -> tuple[Float[Array, "b t i x"], Float[Array, "b 1 t x"], Float[Array, "b t i"]]:
        """Queries, keys in the order of the cache, and float32 weights of the heads."""
        numerics = self.forms.numerics
        q = self.rotated(self.query_up.contract("btr,ixr->btix", query_latent, numerics), at)
        keys = self.rotated(self.key_norm(self.key.contract("btd,xd->btx", x, numerics))[:, :, None], at)
        weights = self.head_weight.contract("btd,id->bti", x, Numerics()) * self.config.heads**-0.5
        return q, keys.swapaxes(1, 2), weights

    def rotated(self, x: Float[Array, "b t n x"], at: Rotation) -> Float[Array, "b t n x"]:
        """Index queries or keys at their positions."""
        turned = rotate_half_split(x[..., : self.rope_width], at)
        return jnp.concatenate([turned, x[..., self.rope_width :]], axis=-1)


class LatentAttention(nnx.Module):
    """Multi-head latent attention (latent.py). q_rank None: queries come from x directly (V2-Lite).

    scale: on the scores, with what YaRN adds. eps: of the norms of both latents. indexer: of sparse attention, which
    needs a q_rank; where no more keys than it keeps are there, attention is the dense one.
    """

    def __init__(
        self,
        width: int,
        *,
        heads: int,
        nope_width: int,
        rope_width: int,
        value_width: int,
        q_rank: int | None,
        kv_rank: int,
        scale: float,
        eps: float,
        indexer: IndexerConfig | None = None,
        forms: Forms,
        rngs: nnx.Rngs | None,
    ):
        self.q_down: Any = None if q_rank is None else weight("rd", (q_rank, width), rngs)
        self.q_norm: Any = None if q_rank is None else RMSNorm(q_rank, eps=eps, forms=forms, rngs=rngs)
        key_width = nope_width + rope_width
        self.q_up: Any = None if q_rank is None else weight("hcr", (heads, key_width, q_rank), rngs)
        self.q = weight("hcd", (heads, key_width, width), rngs) if q_rank is None else None
        self.kv_down = weight("rd", (kv_rank + rope_width, width), rngs)
        self.kv_norm = RMSNorm(kv_rank, eps=eps, forms=forms, rngs=rngs)
        self.key_up = weight("hcr", (heads, nope_width, kv_rank), rngs)
        self.value_up = weight("hzr", (heads, value_width, kv_rank), rngs)
        self.output = weight("dhz", (width, heads, value_width), rngs, scale=(heads * value_width) ** -0.5)
        own: dict[str, Any] = {"config": indexer, "q_rank": q_rank, "rope_width": rope_width}
        self.indexer: Any = None if indexer is None else Indexer(width, **own, forms=forms, rngs=rngs)
        self.nope_width, self.kv_rank, self.scale, self.forms = nope_width, kv_rank, scale, forms

    def __call__(
        self, x: Float[Array, "b t d"], at: Rotation, starts: Int[Array, " b"], slot: LatentSlot | None = None
    ) -> tuple[Float[Array, "b t d"], LatentSlot | None]:
        """x: normed input whose first tokens stand at `starts`. With a slot, appends to it and attends to all of it."""
        forms, numerics = self.forms, self.forms.numerics
        query_latent = self.query_latent(x)
        q, latents = self.queries(query_latent, at), self.latents(x, at)
        index_q, index_keys, index_weights = (
            self.indexer(x, query_latent, at) if self.indexer is not None else (None,) * 3
        )
        slot_out = None if slot is None else slot.append(latents, starts, index_keys)
        if slot_out is not None:
            latents, index_keys = slot_out.latents, slot_out.index_keys
        chosen = self._chosen(index_q, index_keys, index_weights, starts, cached=slot is not None)
        if self.indexer is not None and slot is None:
            given = (x, query_latent, at, q, latents, chosen, starts)
            forms.observe(self, "indexer_loss", lambda: self._indexer_loss(*given))
        mixed = self._attend(q, latents, chosen, starts, cached=slot is not None)
        mixed = forms.place(mixed.astype(numerics.compute), "bthz")
        return self.output.contract("bthz,dhz->btd", mixed, numerics), slot_out

    def _indexer_loss(
        self, x: Array, query_latent: Array, at: Rotation, q: Array, latents: Array, chosen: Any, starts: Array
    ) -> Float[Array, "b t"]:
        """imitation_loss over the chosen positions (None: all), from which gradients reach the indexer alone."""
        t, types = x.shape[1], self.forms.types("attention")
        seen = visible(starts, t, jnp.arange(t))
        seen = seen if chosen is None else seen & mask_of(chosen, t)
        heads = latent_probabilities(q, latents, self.key_up, self.value_up, starts, self.scale, types, seen)
        index_q, keys, weights = self.indexer(*jax.lax.stop_gradient((x, query_latent)), at)
        return imitation_loss(index_scores(index_q, keys, weights, types), jax.lax.stop_gradient(heads), seen)

    def _chosen(
        self, q: Array | None, keys: Any, weights: Any, starts: Int[Array, " b"], *, cached: bool
    ) -> Int[Array, "b t n"] | None:
        """The positions that each query attends to; None for all."""
        if q is None or keys.shape[2] <= self.indexer.config.keep:
            return None
        form, own = self.forms.choose_cached if cached else self.forms.choose, self.forms.types("attention")
        chosen = form(q, keys, weights, starts, self.indexer.config.keep, own)
        self.forms.observe(self, "chosen", lambda: jnp.where(valid(chosen, starts), chosen, -1))
        return chosen

    def _attend(
        self, q: Array, latents: Array, chosen: Array | None, starts: Int[Array, " b"], *, cached: bool
    ) -> Float[Array, "b t h z"]:
        """Attention to the chosen positions, or to all."""
        forms = self.forms
        inputs, rest = (q, latents, self.key_up, self.value_up), (starts, self.scale, forms.types("attention"))
        seen = None if chosen is None else mask_of(chosen, latents.shape[2])
        forms.observe(self, "attention", lambda: latent_probabilities(*inputs, *rest, seen))
        forms.observe(self, "entropy", lambda: entropy(latent_probabilities(*inputs, *rest, seen)))
        if chosen is not None:
            return (forms.sparse_attend_cached if cached else forms.sparse_attend)(*inputs, chosen, *rest)
        cached_form = forms.latent_attend_decode if q.shape[1] == 1 else forms.latent_attend_prefill
        attend: Any = cached_form if cached else forms.latent_attend
        if hasattr(attend, "touched"):
            forms.observe(self, "touched", lambda: attend.touched(*inputs, *rest))
        return attend(*inputs, *rest)  # type: ignore[no-any-return]

    def query_latent(self, x: Float[Array, "b t d"]) -> Array:
        """What queries are made from: the normed latent, or x itself in a model without one."""
        if self.q is not None:
            return x
        normed: Array = self.q_norm(self.q_down.contract("btd,rd->btr", x, self.forms.numerics))
        return normed

    def queries(self, query_latent: Array, at: Rotation) -> Float[Array, "b t h c"]:
        """Queries: nope_width values without position, then rope_width rotated ones."""
        spec, up = ("btr,hcr->bthc", self.q_up) if self.q is None else ("btd,hcd->bthc", self.q)
        q = up.contract(spec, query_latent, self.forms.numerics)
        rotated = rotate_interleaved(q[..., self.nope_width :], at)
        return self.forms.place(jnp.concatenate([q[..., : self.nope_width], rotated], axis=-1), "bthc")

    def latents(self, x: Float[Array, "b t d"], at: Rotation) -> Float[Array, "b 1 t m"]:
        """What the cache holds of x: the normed latent, then the rotated shared key, which is not normed."""
        both = self.kv_down.contract("btd,rd->btr", x, self.forms.numerics)
        latent, shared_key = both[..., : self.kv_rank], both[..., None, self.kv_rank :]
        shared_key = rotate_interleaved(shared_key, at)[:, :, 0]
        return jnp.concatenate([self.kv_norm(latent), shared_key], axis=-1)[:, None]


class Router(nnx.Module):
    """Chooses experts: float32 throughout, whatever the model computes in."""

    def __init__(self, width: int, *, experts: int, active: int, routing: Routing, forms: Forms, rngs: nnx.Rngs | None):
        self.weight = weight("ed", (experts, width), rngs)
        self.bias = selection_bias(experts, rngs) if isinstance(routing, SigmoidRouting) else None
        self.routing, self.active, self.forms = routing, active, forms

    def __call__(self, x: Float[Array, "n d"]) -> tuple[Int[Array, "n k"], Float[Array, "n k"]]:
        """Indices of the chosen experts of each token, and their weights."""
        logits = self.weight.contract("nd,ed->ne", x, Numerics())
        bias = None if self.bias is None else self.bias.dense()
        return self.forms.route(self.routing, logits, bias, self.active)


class MixtureOfExperts(nnx.Module):
    """The weighted sum of the chosen experts, plus shared ones that see every token (one gated feed-forward)."""

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        experts: int,
        active: int,
        shared: int,
        routing: Routing,
        forms: Forms,
        rngs: nnx.Rngs | None,
    ):
        self.router = Router(width, experts=experts, active=active, routing=routing, forms=forms, rngs=rngs)
        self.expert_gate = weight("efd", (experts, hidden, width), rngs)
        self.expert_up = weight("efd", (experts, hidden, width), rngs)
        self.expert_down = weight("edf", (experts, width, hidden), rngs)
        self.shared = GatedMLP(width, shared * hidden, bias=False, forms=forms, rngs=rngs) if shared else None
        self.forms, self.experts = forms, experts

    def __call__(self, x: Float[Array, "b t d"], *, cached: bool) -> Float[Array, "b t d"]:
        """cached: the tokens run against a cache, where no gradient is asked for."""
        b, t, d = x.shape
        tokens = x.reshape(b * t, d)
        indices, weights = self.router(tokens)
        share = lambda: shares(indices, weights, self.experts)  # noqa: E731
        self.forms.observe(self, "router", lambda: share().reshape(b, t, self.experts))
        self.forms.observe(self, "load", lambda: jnp.bincount(indices.reshape(-1), length=self.experts))
        run = self.forms.experts_cached if cached else self.forms.experts
        stacks = (self.expert_gate, self.expert_up, self.expert_down)
        out = run(tokens, indices, weights, *stacks, self.forms.types("experts")).reshape(b, t, d)
        return out if self.shared is None else out + self.shared(x)
