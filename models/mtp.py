"""Multi-token prediction: one more block that guesses the token after the next one.

Source: DeepSeek-V3 (2024), section 2.2; the order of the two halves is that of the published weights. From the hidden
state of position i after the final norm and the embedding of the token at i+1, it makes a state whose logits, by the
model's own head, are those of the token at i+2.
"""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from rzoo.models.forms import Forms
from rzoo.models.layers import RMSNorm
from rzoo.models.names import WeightName
from rzoo.models.rope import Rotation
from rzoo.models.weights import weight


class MTPModule(nnx.Module):
    """norm(block(join([norm(embedding), norm(hidden)]))); the block is one of the model's."""

    def __init__(self, width: int, *, block: nnx.Module, eps: float, forms: Forms, rngs: nnx.Rngs | None):
        norm = lambda: RMSNorm(width, eps=eps, forms=forms, rngs=rngs)  # noqa: E731
        self.embed_norm, self.hidden_norm, self.norm = norm(), norm(), norm()
        self.join = weight("dj", (width, 2 * width), rngs)
        self.block: Any = block
        self.forms = forms

    def __call__(
        self,
        hidden: Float[Array, "b t d"],
        embedded: Float[Array, "b t d"],
        at: Rotation,
        starts: Int[Array, " b"],
        slot: Any = None,
    ) -> tuple[Float[Array, "b t d"], Any]:
        """States after the module's own norm; embedded: of the token that follows each position."""
        both = jnp.concatenate([self.embed_norm(embedded), self.hidden_norm(hidden)], axis=-1)
        x = self.forms.place(self.join.contract("btj,dj->btd", both, self.forms.numerics), "btd")
        x, slot = self.block(x, at, starts, slot)
        return self.norm(x), slot


# The module is the layer after the last one in files, with these and with a block's own weights.
MTP_NAMES = (
    WeightName("mtp_module.embed_norm.scale", "model.layers.{}.enorm.weight", None),
    WeightName("mtp_module.hidden_norm.scale", "model.layers.{}.hnorm.weight", None),
    WeightName("mtp_module.join", "model.layers.{}.eh_proj.weight", None),
    WeightName("mtp_module.norm.scale", "model.layers.{}.shared_head.norm.weight", None),
)
# That layer's copies of weights that it shares with the model: name in the file -> our path.
MTP_COPIES = {"model.layers.{}.embed_tokens.weight": "embed", "model.layers.{}.shared_head.head.weight": "head"}


def with_mtp_names(*rows: WeightName) -> tuple[WeightName, ...]:
    """A family's names with those of the module, whose block has the names of a layer."""
    of_layers = [row for row in rows if row.path.startswith("layers.")]
    of_block = [replace(row, path=row.path.replace("layers.{}", "mtp_module.block")) for row in of_layers]
    return (*rows, *MTP_NAMES, *of_block)
