"""Forms of the hot operations: which functions a model runs on where no tuning record says otherwise."""

from typing import Any

from jaxtyping import Array

from rzoo.compile.precision import numerics_by_kind
from rzoo.models.attention import attend_in_blocks
from rzoo.models.forms import Forms
from rzoo.models.latent import attend_absorbed_in_blocks, attend_naive_in_blocks
from rzoo.models.moe import experts_in_tiles, experts_one_by_one
from rzoo.models.weights import Numerics

ONE_BY_ONE = 1  # most tokens for which experts_one_by_one was measured to be the faster


def default_forms(numerics: Numerics, numerics_of: tuple[tuple[str, Numerics], ...] = ()) -> Forms:
    """References for whole sequences; against a cache attention in key blocks and only the chosen experts.

    For prefill, scores of all keys at once would grow with the square of the length. For decode, only the blocks in use
    are read: SmolLM2 at batch 1 takes 13.0 ms a token on 2 Zen 5 cores, 15.6 with the reference.
    """
    return Forms(
        numerics=numerics,
        numerics_of=numerics_of,
        attend_prefill=attend_in_blocks,
        attend_decode=attend_in_blocks,
        latent_attend_prefill=attend_naive_in_blocks,
        latent_attend_decode=attend_absorbed_in_blocks,
        experts_cached=experts_by_count,
    )


def policy_forms(policy: str, dtype: Any) -> Forms:
    """The default forms in the types that `policy` prescribes for weights held in `dtype`.

    Raises RzooError for an unknown policy.
    """
    by_kind = numerics_by_kind(policy, dtype)
    plain = by_kind["projection"]
    return default_forms(plain, tuple((kind, own) for kind, own in by_kind.items() if own != plain))


def experts_by_count(x: Array, *arguments: Any) -> Array:
    """The backend for this number of tokens; signature in moe.py.

    V3-mini on 2 Zen 5 cores, tokens/s at batch 1: 106 one by one, 85 in tiles; at batch 2: 81, 102.
    """
    return (experts_one_by_one if x.shape[0] <= ONE_BY_ONE else experts_in_tiles)(x, *arguments)
