"""Parts that the families share: norm, gated feed-forward, mixture of experts, grouped and latent attention."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from rzoo.models.attention import attention_probabilities, entropy
from rzoo.models.cache import LatentSlot, Slot
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


class GatedMLP(nnx.Module):
    """down(silu(gate(x)) * up(x)), the SwiGLU of Llama, with optional biases."""

    def __init__(self, width: int, hidden: int, *, bias: bool, forms: Forms, rngs: nnx.Rngs | None):
        self.gate = weight("fd", (hidden, width), rngs)
        self.up = weight("fd", (hidden, width), rngs)
        self.down = weight("df", (width, hidden), rngs)
        self.gate_bias = weight("f", (hidden,), rngs, scale=0.0) if bias else None
        self.up_bias = weight("f", (hidden,), rngs, scale=0.0) if bias else None
        self.down_bias = weight("d", (width,), rngs, scale=0.0) if bias else None
        self.forms = forms

    def __call__(self, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        numerics = self.forms.numerics
        gate, up = contract_together("btd,fd->btf", x, (self.gate, self.up), numerics)
        gate, up = plus(gate, self.gate_bias), plus(up, self.up_bias)
        hidden = self.forms.place(jax.nn.silu(gate) * up, "btf")
        return plus(self.down.contract("btf,df->btd", hidden, numerics), self.down_bias)


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
        attend = self.forms.attend
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
        mixed = self.forms.place(attend(q, keys, values, starts, self.scale, own).astype(numerics.compute), "bthc")
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


class LatentAttention(nnx.Module):
    """Multi-head latent attention (latent.py). q_rank None: queries come from x directly (V2-Lite).

    scale: on the scores, with what YaRN adds. eps: of the norms of both latents.
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
        self.nope_width, self.kv_rank, self.scale, self.forms = nope_width, kv_rank, scale, forms

    def __call__(
        self, x: Float[Array, "b t d"], at: Rotation, starts: Int[Array, " b"], slot: LatentSlot | None = None
    ) -> tuple[Float[Array, "b t d"], LatentSlot | None]:
        """x: normed input whose first tokens stand at `starts`. With a slot, appends to it and attends to all of it."""
        forms, numerics = self.forms, self.forms.numerics
        q, latents = self.queries(x, at), self.latents(x, at)
        attend, slot_out = forms.latent_attend, None
        if slot is not None:
            slot_out = slot.append(latents, starts)
            latents = slot_out.latents
            attend = forms.latent_attend_decode if x.shape[1] == 1 else forms.latent_attend_prefill
        given = (q, latents, self.key_up, self.value_up, starts, self.scale, forms.types("attention"))
        forms.observe(self, "attention", lambda: latent_probabilities(*given))
        forms.observe(self, "entropy", lambda: entropy(latent_probabilities(*given)))
        mixed = forms.place(attend(*given).astype(numerics.compute), "bthz")
        return self.output.contract("bthz,dhz->btd", mixed, numerics), slot_out

    def queries(self, x: Float[Array, "b t d"], at: Rotation) -> Float[Array, "b t h c"]:
        """Queries: nope_width values without position, then rope_width rotated ones."""
        numerics = self.forms.numerics
        if self.q is not None:
            q = self.q.contract("btd,hcd->bthc", x, numerics)
        else:
            latent = self.q_norm(self.q_down.contract("btd,rd->btr", x, numerics))
            q = self.q_up.contract("btr,hcr->bthc", latent, numerics)
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
