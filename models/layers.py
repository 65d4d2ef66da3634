"""Parts that the families share: embedding, norm, gated feed-forward, grouped attention."""

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from rzoo.models.attention import attention_probabilities
from rzoo.models.cache import Slot
from rzoo.models.forms import Forms
from rzoo.models.rope import Rotation, rotate_half_split
from rzoo.models.weights import contract_together, ones, weight


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
        numerics = self.forms.numerics
        self.forms.observe(self, "attention", lambda: attention_probabilities(q, keys, starts, self.scale, numerics))
        mixed = self.forms.place(attend(q, keys, values, starts, self.scale, numerics), "bthc")
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
