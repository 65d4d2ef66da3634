"""Policies: how far a program may stray from float32, as one table of types.

exact   computes in float32 whatever the weights are stored in; every dot asks for HIGHEST itself, no global setting.
stored  computes in the type of the stored weights, dots and softmax accumulate in float32.
"""

from typing import Any

from rzoo.core import RzooError, closest, dtype_named
from rzoo.models.weights import Numerics

POLICIES = ("exact", "stored")


def numerics_of(policy: str, dtype: Any) -> Numerics:
    """The types that `policy` prescribes for weights held in `dtype`. Raises RzooError for an unknown policy."""
    if policy not in POLICIES:
        raise RzooError(
            f"policy ({policy}) is unknown; {closest(policy, list(POLICIES))}", field="policy", value=policy
        )
    if policy == "exact":
        return Numerics()
    name = dtype_named(dtype).name
    return Numerics(compute=name, cache=name)
