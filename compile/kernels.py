"""Forms of the hot operations: which functions a model runs on where no tuning record says otherwise."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from rzoo.compile import native
from rzoo.compile.precision import numerics_by_kind
from rzoo.compile.sums import attend_in_sums, experts_in_sums
from rzoo.core import RzooError, closest
from rzoo.models.attention import attend, attend_in_blocks
from rzoo.models.covering import AttendCovering, LatentAttendCovering
from rzoo.models.dynamic import attend_gathered, attend_masked, attend_masked_in_blocks, choose, choose_in_blocks
from rzoo.models.forms import Forms
from rzoo.models.latent import attend_absorbed, attend_absorbed_in_blocks, attend_naive, attend_naive_in_blocks
from rzoo.models.moe import experts_in_tiles, experts_one_by_one, experts_ragged, experts_reference
from rzoo.models.registry import abstract_weights
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
        choose_cached=choose_in_blocks,
        sparse_attend_cached=sparse_by_length,
        experts_cached=ExpertsByCount(ONE_BY_ONE),
    )


def policy_forms(policy: str, dtype: Any) -> Forms:
    """The default forms in the types that `policy` prescribes for weights held in `dtype`.

    Raises RzooError for an unknown policy.
    """
    by_kind = numerics_by_kind(policy, dtype)
    plain = by_kind["projection"]
    return default_forms(plain, tuple((kind, own) for kind, own in by_kind.items() if own != plain))


@dataclass(frozen=True)
class ExpertsByCount:
    """experts_one_by_one for up to `most` tokens, experts_in_tiles for more: unrolled over the tokens of a prompt, the
    former compiles for minutes. Signature in moe.py.

    V3-mini on 2 Zen 5 cores, tokens/s at batch 1: 106 one by one, 85 in tiles; at batch 2: 81, 102.
    """

    most: int

    def __call__(self, x: Array, *arguments: Any) -> Array:
        return (experts_one_by_one if x.shape[0] <= self.most else experts_in_tiles)(x, *arguments)


def sparse_by_length(q: Array, latents: Array, key_up: Any, value_up: Any, chosen: Array, *arguments: Any) -> Array:
    """Gathered where that is less work than all keys masked; signature in dynamic.py.

    A key that is expanded takes c+p+z products a head, one that is met as a latent m+r (3.4 times as many for V3).
    """
    (_, nope, rank), value_width, m = key_up.shape, value_up.shape[1], latents.shape[-1]
    masked, gathered = (nope + m - rank + value_width) * latents.shape[2], (m + rank) * chosen.shape[2]
    form = attend_gathered if q.shape[1] == 1 or gathered < masked else attend_masked_in_blocks
    return form(q, latents, key_up, value_up, chosen, *arguments)


@dataclass(frozen=True)
class AttendInBlocks:
    """attend_in_blocks with `size` keys a block."""

    size: int

    def __call__(self, q: Array, keys: Array, values: Array, starts: Array, scale: float, numerics: Numerics) -> Array:
        return attend_in_blocks(q, keys, values, starts, scale, numerics, self.size)


@dataclass(frozen=True)
class LibraryAttention:
    """jax.nn.dot_product_attention by one of its implementations: "cudnn" on NVIDIA GPUs, for 16-bit types."""

    implementation: str

    def __call__(self, q: Array, keys: Array, values: Array, starts: Array, scale: float, numerics: Numerics) -> Array:
        seen = jnp.arange(keys.shape[2]) <= (starts[:, None] + jnp.arange(q.shape[1]))[:, :, None]
        q, keys, values = (a.astype(numerics.compute) for a in (q, keys.swapaxes(1, 2), values.swapaxes(1, 2)))
        library: Any = self.implementation
        return jax.nn.dot_product_attention(q, keys, values, mask=seen[:, None], scale=scale, implementation=library)


def attend_native(
    q: Array, keys: Array, values: Array, starts: Array, scale: float, numerics: Numerics, suffix: str = ""
) -> Array:
    """attend_in_blocks, for one query a row in float32 by the kernel of native.cc where it can be had."""
    in_blocks = partial(attend_in_blocks, scale=scale, numerics=numerics)
    b, t, h, c = q.shape
    types = {a.dtype for a in (q, keys, values)} | {jnp.dtype(numerics.compute)}
    fits = t == 1 and types == {jnp.dtype("float32")} and c % 16 == values.shape[-1] % 16 == 0
    if not fits or native.unavailable():
        return in_blocks(q, keys, values, starts)
    result = jax.ShapeDtypeStruct((b, h, values.shape[-1]), jnp.float32)
    call = jax.ffi.ffi_call(f"rzoo_attend{suffix}", result, vmap_method="sequential")
    kernel = lambda q, *rest: call(q[:, 0], *rest, scale=np.float32(scale))[:, None]  # noqa: E731
    return jax.lax.platform_dependent(q, keys, values, starts, cpu=kernel, default=in_blocks)  # type: ignore[no-any-return]


# Field of Forms -> name in records -> what it can be. The first of each field is its reference.
FORMS: Mapping[str, Mapping[str, Any]] = {
    "attend_prefill": {"reference": attend, **{f"blocks of {n}": AttendInBlocks(n) for n in (128, 256, 1024)}},
    "attend_decode": {
        "reference": attend,
        **{f"blocks of {n}": AttendInBlocks(n) for n in (32, 128, 256)},
        "native": attend_native,
    },
    "latent_attend_prefill": {
        "reference": attend_naive,
        "naive in blocks": attend_naive_in_blocks,
        "absorbed in blocks": attend_absorbed_in_blocks,
    },
    "latent_attend_decode": {
        "reference": attend_absorbed,
        "naive in blocks": attend_naive_in_blocks,
        "absorbed in blocks": attend_absorbed_in_blocks,
    },
    "choose_cached": {"reference": choose, "in blocks": choose_in_blocks},
    "sparse_attend_cached": {
        "reference": attend_masked,
        "masked in blocks": attend_masked_in_blocks,
        "gathered": attend_gathered,
    },
    "experts_cached": {
        "reference": experts_reference,
        "one by one up to 8": ExpertsByCount(8),
        "in tiles": experts_in_tiles,
        "ragged": experts_ragged,
    },
    "stacked": {"unrolled": False, "stacked": True},
}
GPU_FORMS: Mapping[str, Mapping[str, Any]] = {
    "attend_prefill": {"cudnn": LibraryAttention("cudnn")},
    "attend_decode": {"cudnn": LibraryAttention("cudnn"), "in sums": attend_in_sums},
    "experts_cached": {"in sums": experts_in_sums},
}


# Forms that change results beyond rounding: no tuner tries them, they are asked for by name or by `covering`.
_COVERING = {f"covering {share}": AttendCovering(share=share) for share in (0.9, 0.95, 0.99, 1.0)}
_LATENT_COVERING = {name: LatentAttendCovering(form) for name, form in _COVERING.items()}
LOSSY_FORMS: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(("attend", "attend_prefill", "attend_decode"), _COVERING),
    **dict.fromkeys(("latent_attend", "latent_attend_prefill", "latent_attend_decode"), _LATENT_COVERING),
}


def covering(lm: Any, share: float, *, size: int = 64, most: int | None = None, estimate: str = "spread") -> Any:
    """The handle with attention that reads blocks of keys until they cover a share of it (models/covering.py).

    It is a handle of policy fast: results differ from exact. Attention that an indexer chooses for stays as it is.
    Raises RzooError for values out of range, and for a handle that lies on a mesh.
    """
    if lm.mesh is not None:
        words = "covering: this model lies on a mesh, whose forms would be lost"
        raise RzooError(words, field="mesh", fix="take a handle on one device")
    form = AttendCovering(share=share, size=size, most=most, estimate=estimate)
    names = ("attend", "attend_prefill", "attend_decode")
    changed: dict[str, Any] = dict.fromkeys(names, form)
    changed |= dict.fromkeys((f"latent_{name}" for name in names), LatentAttendCovering(form))
    return replace(lm, forms=replace(lm.forms, **changed), policy="fast", record=None)


def form_named(field: str, name: str) -> Any:
    """The form of a field that a record names. Raises RzooError with close names for an unknown one."""
    known = {**FORMS.get(field, {}), **GPU_FORMS.get(field, {}), **LOSSY_FORMS.get(field, {})}
    if name not in known:
        what = f"form {field} ({name})"
        raise RzooError(f"{what} is unknown; {closest(name, [*known] or [*FORMS])}", field=field, value=name)
    return known[name]


def candidate_forms(config: Any, numerics: Numerics, platform: str) -> dict[str, dict[str, Any]]:
    """Those of FORMS that a model of this config has a use for on a platform; cuDNN's serve 16-bit types alone, in the
    cache, too.
    """
    names = {path.rpartition(".")[2] for path in abstract_weights(config)}
    used = {"attend_": "k" in names, "latent_": "key_up" in names, "experts_": "expert_gate" in names}
    used |= dict.fromkeys(("choose", "sparse_"), "head_weight" in names)
    found = {
        field: dict(forms)
        for field, forms in FORMS.items()
        if next((there for prefix, there in used.items() if field.startswith(prefix)), True)
    }
    if platform == "gpu" and numerics.compute != "float32" and numerics.cache != "int8":
        for field in found.keys() & GPU_FORMS.keys():
            found[field] |= GPU_FORMS[field]
    return found
