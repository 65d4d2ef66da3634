"""Policies: how far a program may stray from float32, as one table of types and one of bounds.

exact   computes in float32 whatever the weights are stored in; every dot asks for HIGHEST itself, no global setting.
stored  computes in the type of the stored weights, dots and softmax accumulate in float32.
fast    whatever stays within a stated KL divergence from exact; until it is tuned, the types of stored at the precision
        that the hardware is fastest with.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from rzoo.core import RzooError, closest, dtype_named
from rzoo.models.forms import KINDS
from rzoo.models.weights import Numerics

HELD = "held"  # stands for the type that weights are held in


@dataclass(frozen=True, kw_only=True)
class Types:
    """One cell: the types of an operation. The weights themselves stay as they are held."""

    compute: str
    accumulate: str = "float32"
    precision: jax.lax.Precision = jax.lax.Precision.HIGHEST
    cache: str = HELD

    def numerics(self, held: str) -> Numerics:
        """The same for weights held in `held`."""
        named = lambda name: held if name == HELD else name  # noqa: E731
        return Numerics(
            compute=named(self.compute),
            accumulate=named(self.accumulate),
            precision=self.precision,
            cache=named(self.cache),
        )


@dataclass(frozen=True, kw_only=True)
class Bound:
    """What a program of a policy may differ by from float32: a logit, or in nats the KL divergence of next tokens, mean
    and 99th percentile.
    """

    logit: float | None = None
    kl_mean: float | None = None
    kl_99th: float | None = None


FLOAT32 = Types(compute="float32", cache="float32")
AS_HELD = Types(compute=HELD)
FASTEST = Types(compute=HELD, precision=jax.lax.Precision.DEFAULT)

# Policy -> kind of operation (forms.KINDS) -> types.
TYPES: Mapping[str, Mapping[str, Types]] = {
    "exact": dict.fromkeys(KINDS, FLOAT32),
    "stored": dict.fromkeys(KINDS, AS_HELD),
    "fast": dict.fromkeys(KINDS, FASTEST),
}
BOUNDS: Mapping[str, Bound] = {
    "exact": Bound(logit=1e-4),
    "stored": Bound(kl_mean=2e-3, kl_99th=2e-2),
    "fast": Bound(kl_mean=1e-2, kl_99th=1e-1),
}
POLICIES = tuple(TYPES)


def numerics_by_kind(policy: str, dtype: Any) -> dict[str, Numerics]:
    """Kind of operation -> types, for weights held in `dtype`. Raises RzooError for an unknown policy."""
    _check(policy)
    held = dtype_named(dtype).name
    return {kind: types.numerics(held) for kind, types in TYPES[policy].items()}


def bound_of(policy: str, kl: float | None = None) -> Bound:
    """What a program of `policy` may differ by; kl states another mean for "fast", its 99th percentile is ten times it.

    Raises RzooError for an unknown policy, for a kl that is no positive number, and for one beside another policy.
    """
    _check(policy)
    if kl is None:
        return BOUNDS[policy]
    if policy != "fast":
        raise RzooError(f"kl ({kl}) is the bound of policy fast, not of {policy}", field="kl", value=kl)
    if not 0 < kl < float("inf"):
        raise RzooError(f"kl ({kl}) must be a positive number of nats", field="kl", value=kl)
    return Bound(kl_mean=kl, kl_99th=10 * kl)


def _check(policy: str) -> None:
    if policy not in POLICIES:
        raise RzooError(
            f"policy ({policy}) is unknown; {closest(policy, list(POLICIES))}", field="policy", value=policy
        )
