"""The record of functions that a model runs on: the second of the two doors through which a choice reaches it.

Storage of a weight is the type of its value (weights.py); everything else that may be computed in several ways is a
field here, with the reference implementation as its default. Packages that know machines (compile, sharding) make
records and models never ask which one they got.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from rzoo.models.attention import attend
from rzoo.models.cache import Cache
from rzoo.models.dynamic import attend_masked, choose
from rzoo.models.latent import attend_absorbed, attend_naive
from rzoo.models.moe import experts_reference, route
from rzoo.models.weights import Numerics

# Kinds of operations that a policy may give types of their own.
KINDS = ("projection", "attention", "experts", "head")
CAPTURES = (
    "hidden",
    "router",
    "load",
    "attention",
    "entropy",
    "chosen",
    "touched",
    "indexer_loss",
    "channels",
    "heads",
    "gathered",
)


def rms_norm(x: Float[Array, "*batch d"], scale: Float[Array, " d"], eps: float) -> Float[Array, "*batch d"]:
    """x / rms(x) in float32, cast back, then times `scale` (the order of Llama's reference)."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return normed.astype(x.dtype) * scale.astype(x.dtype)


def keep_placement(x: Any, axes: str) -> Any:
    """Leaves an activation or a weight with logical `axes` where it is."""
    return x


def make_cache(make: Callable[[int], Cache], batch: int) -> Cache:
    """The empty cache for `batch` rows, on the default device."""
    return make(batch)


@dataclass(frozen=True, kw_only=True)
class Forms:
    """One function for each operation that has several forms; frozen and hashable, so that programs can be shared.

    numerics: the types of all operations, but of those kinds that numerics_of names with others.
    attend: whole sequences without a cache (differentiable). attend_prefill, attend_decode: several tokens, or one,
    against a cache; signatures in attention.py, those of the three for latent attention in latent.py. choose,
    choose_cached, sparse_attend, sparse_attend_cached: without and against a cache, signatures in dynamic.py. experts,
    experts_cached: the same two cases for a mixture of experts, route: which experts; signatures in moe.py. norm(x,
    scale, eps). place(x, axes): where an activation, or a weight in use, with these logical axes lives;
    new_cache(make, batch): the empty cache make(batch) where it lives. capture: which observations (CAPTURES) are
    passed to nnx.Module.sow; those not named are never traced. stacked: programs run equal neighbouring layers as one
    loop (stacking.py), but where something is captured.
    """

    numerics: Numerics = Numerics()
    numerics_of: tuple[tuple[str, Numerics], ...] = ()
    attend: Callable[..., Array] = attend
    attend_prefill: Callable[..., Array] = attend
    attend_decode: Callable[..., Array] = attend
    latent_attend: Callable[..., Array] = attend_naive
    latent_attend_prefill: Callable[..., Array] = attend_naive
    latent_attend_decode: Callable[..., Array] = attend_absorbed
    choose: Callable[..., Array] = choose
    choose_cached: Callable[..., Array] = choose
    sparse_attend: Callable[..., Array] = attend_masked
    sparse_attend_cached: Callable[..., Array] = attend_masked
    route: Callable[..., tuple[Array, Array]] = route
    experts: Callable[..., Array] = experts_reference
    experts_cached: Callable[..., Array] = experts_reference
    norm: Callable[..., Array] = rms_norm
    place: Callable[[Any, str], Any] = keep_placement
    new_cache: Callable[[Callable[[int], Cache], int], Any] = make_cache
    capture: tuple[str, ...] = ()
    stacked: bool = False

    def types(self, kind: str) -> Numerics:
        """The types of one of KINDS."""
        return dict(self.numerics_of).get(kind, self.numerics)

    def observe(self, module: nnx.Module, name: str, value: Callable[[], Array]) -> None:
        """Sows value() as the Intermediate `name` of `module` where `name` is to be captured."""
        if name in self.capture:
            module.sow(nnx.Intermediate, name, value())
