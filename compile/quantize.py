"""Quantizing a model's weights: to which type, in which groups, and which weights.

A scheme is a type with the size of its groups: "int8", "int8:g128", "int4:g32" (32 inputs share a scale and an offset),
"int4:g128:sym" (a scale alone), "int8:channel" (one scale for each output), "w8a8" (int8 for both sides of a product).
Scales and offsets are fitted by least squares to the codes that each of some candidates gives; the best are kept.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rzoo.compile.storage import input_axes, of_every_layer, plain
from rzoo.core import RzooError
from rzoo.models.cache import LatentSlot
from rzoo.models.forms import Forms
from rzoo.models.registry import abstract_weights, family_of
from rzoo.models.stacking import unstack
from rzoo.models.weights import Quantized, Storage
from rzoo.sharding.place import held, put

BITS = {"int8": 8, "int4": 4, "int2": 2}
RANGE = {"int8": (-127, 127), "int4": (-8, 7), "int2": (-1, 1)}
# Where the furthest value of a group is put, in parts of the last code: past it, it is cut off for the others' sake.
FACTORS = {
    "int8": (1.0,),
    "int4": tuple(0.8 + 0.04 * i for i in range(16)),
    "int2": tuple(1.0 + 0.15 * i for i in range(16)),
}
PIECE = 1 << 24  # values of a weight that are fitted at a time
SCALE = "float16"  # of the scales of groups: one in float32 for 32 codes of 4 bits would be a fifth of the whole
HEAD = "int8:g32"  # one scale for each of 248,000 outputs was seen to cost a head much of its quality
KEPT = ("router.weight", "indexer.*")  # small, and they decide what is computed
GROUP = 32  # where a scheme states none
FORM = re.compile(r"(int8|int4|int2)(?::(channel|g[1-9]\d{0,5}))?(:sym)?")
EXAMPLES = "int8, int8:channel, int4, int4:g128, int4:g32:sym, w8a8"


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """codes: a type in BITS. group: most inputs that share a scale, None for all of an output. asymmetric: values are
    codes * scale + offset. activations: as in Quantized.
    """

    codes: str
    group: int | None = None
    asymmetric: bool = False
    activations: str | None = None

    def __str__(self) -> str:
        if self.activations is not None:
            return "w8a8"
        size = "channel" if self.group is None else f"g{self.group}"
        return f"{self.codes}:{size}{':sym' if self.codes == 'int4' and not self.asymmetric else ''}"

    def block_of(self, inputs: int) -> int:
        """Inputs of a group for `inputs` of them: the largest that divides where one is at least half of what was
        asked for (96 of 576 for 128), else what was asked for with a shorter last group.
        """
        if self.group is None or self.group >= inputs:
            return inputs
        return next((n for n in range(self.group, self.group // 2, -1) if inputs % n == 0), self.group)

    def bytes_of(self, shape: tuple[int, ...], inputs: int) -> int:
        """Bytes of the codes, scales and offsets of a weight with so many inputs an output."""
        size = math.prod(shape)
        blocks = size // inputs * -(-inputs // self.block_of(inputs))
        each = 4 if self.group is None else jnp.dtype(SCALE).itemsize
        return -(-size * BITS[self.codes] // 8) + blocks * each * (2 if self.asymmetric else 1)


Rules = Mapping[str, str | None]  # pattern of paths, * for any part -> scheme, or None to leave the weight as it is


def scheme_named(text: str) -> Scheme:
    """The scheme called `text`. Raises RzooError for what is none."""
    if text == "w8a8":
        return Scheme(codes="int8", activations="int8")
    found = FORM.fullmatch(str(text))
    if found is None:
        raise RzooError(f"weights ({text}) is no scheme; known: {EXAMPLES}", field="weights", value=text)
    codes, size, symmetric = found.groups(default="")
    group = None if size == "channel" else int(size[1:] or GROUP)
    return Scheme(codes=codes, group=group, asymmetric=codes == "int4" and not symmetric)


def is_scheme(text: Any) -> bool:
    """Whether scheme_named knows it."""
    return text == "w8a8" or FORM.fullmatch(str(text)) is not None


def schemes_for(config: Any, weights: Any) -> dict[str, Scheme]:
    """Path -> scheme of every weight that is to be quantized. A text means all matrices, the embedding and the head in
    HEAD, routers and indexers left out; Rules are patterns of paths, the last that fits decides.

    Raises RzooError for what is neither, an unknown scheme, and for a pattern that fits no weight.
    """
    if not isinstance(weights, str | Mapping):
        raise RzooError(f"weights ({weights!r}) must be a scheme or rules; known: {EXAMPLES}", field="weights")
    rules = {"*": weights, "embed": HEAD, "head": HEAD} if isinstance(weights, str) else dict(weights)
    schemes = {pattern: None if text is None else scheme_named(text) for pattern, text in rules.items()}
    matrices = [path for path, (axes, _) in abstract_weights(config).items() if len(axes) > 1]
    if not isinstance(weights, str):
        _check_patterns(config, rules, matrices)
    found = {}
    for path in matrices:
        fitting = [scheme for pattern, scheme in schemes.items() if _fits(path, pattern)]
        if fitting and fitting[-1] is not None and not _fits(path, *(f"*{name}" for name in KEPT)):
            found[path] = fitting[-1]
    return found


def _fits(path: str, *patterns: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns for name in (path, of_every_layer(path)))


def _check_patterns(config: Any, rules: Rules, matrices: list[str]) -> None:
    for pattern in rules:
        if pattern == "head" and "head" not in matrices:
            words, fix = "this model's head is its embedding, one matrix for both", 'give a rule for "embed"'
            raise RzooError(f"weights: {words}", field="weights", value=pattern, fix=fix)
        if not any(_fits(path, pattern) for path in matrices):
            fix = f"its matrices are such as {', '.join(dict.fromkeys(map(of_every_layer, matrices)))}"
            raise RzooError(f"weights: {pattern} fits no matrix", field="weights", value=pattern, fix=fix)


def quantize(lm: Any, weights: str | Rules, *, cache: str | None = None) -> Any:
    """The handle with its matrices as `weights` says, "int4:g128" or rules such as {"*": "int4:g32", "embed": None}.

    cache: "int8" holds keys and values in 8 bits, too. `lm` stays as it is, with its memory: rzoo.load(weights=…)
    quantizes one weight at a time. What is quantized already is left. Raises RzooError for an unknown scheme, a pattern
    that fits no weight, a weight that would grow or that a mesh would cut within a group.
    """
    schemes, params = schemes_for(lm.config, weights), dict(plain(unstack(lm.config, lm.params)))
    for path, own, axes in held(lm.config, lm.forms):
        if own in schemes and not isinstance(params[path], Storage):
            value = quantized(lm.config, own, params[path], schemes[own])
            params[path] = value if lm.mesh is None else put(lm.forms.place, path, axes, value)
    if cache is None:
        return replace(lm, params=params, record=None)
    if lm.mesh is not None:
        fix = "give cache to rzoo.load"
        raise RzooError("cache: this model lies on a mesh, which has its own", field="cache", value=cache, fix=fix)
    return replace(lm, params=params, forms=with_cache(lm.config, lm.forms, cache), policy="fast", record=None)


def with_cache(config: Any, forms: Forms, cache: str) -> Forms:
    """The forms with keys and values cached as "int8". Raises RzooError for other types and for latent attention."""
    if cache != "int8":
        raise RzooError(f"cache ({cache}) must be int8", field="cache", value=cache, fix="or leave it out")
    if any(isinstance(slot, LatentSlot) for slot in _cache(config).slots):
        words = "cache (int8): this model caches latents, which serve all heads and are held as they are"
        raise RzooError(words, field="cache", value=cache, fix="leave cache out")
    own = tuple((kind, replace(numerics, cache=cache)) for kind, numerics in forms.numerics_of)
    return replace(forms, numerics=replace(forms.numerics, cache=cache), numerics_of=own)


def _cache(config: Any) -> Any:
    return jax.eval_shape(lambda: family_of(config).empty_cache(config, 1, 1, "float32"))


def quantized(config: Any, path: str, value: Any, scheme: Scheme) -> Quantized:
    """A dense weight, or a stack of experts, in the storage that a scheme says. Raises RzooError where it would grow
    and for values that are not finite.
    """
    inputs = inputs_of(config, path)
    dense, held = value.size * value.dtype.itemsize, scheme.bytes_of(value.shape, inputs)
    if held >= dense:
        words = f"{path} would take {held:,} bytes as {scheme}, it takes {dense:,}"
        raise RzooError(words, field=path, value=str(scheme), fix="take larger groups, or leave it out")
    lead = value.shape[:1] if abstract_weights(config)[path][0][0] == "e" else ()
    coded = fitted(jnp.asarray(value).reshape(-1, inputs), scheme)
    if not bool(jnp.isfinite(value).all() & jnp.isfinite(coded[1]).all()):
        fix = f'leave it as it is, by rules with {{"{path}": None}}'
        raise RzooError(f"{path} holds values that are not finite", field=path, fix=fix)
    codes, scale, offset = (None if part is None else part.reshape(*lead, -1, part.shape[-1]) for part in coded)
    return Quantized(codes, scale, offset, (1, scheme.block_of(inputs)), value.shape, scheme.activations)


def quantized_shape(config: Any, path: str, scheme: Scheme) -> Quantized:
    """What quantized would give, of shapes alone."""
    inputs, (axes, weight) = inputs_of(config, path), abstract_weights(config)[path]
    lead = weight.shape[:1] if axes[0] == "e" else ()
    rows = math.prod(weight.shape[len(lead) :]) // inputs
    width = scheme.block_of(inputs)
    of = lambda columns, dtype: jax.ShapeDtypeStruct((*lead, rows, columns), jnp.dtype(dtype))  # noqa: E731
    scale = of(-(-inputs // width), "float32" if scheme.group is None else SCALE)
    offset = scale if scheme.asymmetric else None
    return Quantized(of(inputs, scheme.codes), scale, offset, (1, width), weight.shape, scheme.activations)


def quantized_bytes(config: Any, schemes: Mapping[str, Scheme], dtype: str) -> int:
    """Bytes of all weights, those without a scheme in `dtype`."""
    size = lambda path, shape: (  # noqa: E731
        schemes[path].bytes_of(shape, inputs_of(config, path))
        if path in schemes
        else math.prod(shape) * jnp.dtype(dtype).itemsize
    )
    return sum(size(path, weight.shape) for path, (_, weight) in abstract_weights(config).items())


def inputs_of(config: Any, path: str) -> int:
    """How many inputs each output of a matrix has."""
    axes, weight = abstract_weights(config)[path]
    return math.prod(weight.shape[-input_axes(axes[1:] if axes[0] == "e" else axes) :])


def fitted(matrix: Float[Array, "m n"], scheme: Scheme) -> tuple[Array, Array, Array | None]:
    """Codes [m, n], scales and offsets (or None) [m, groups] of a matrix, some rows at a time."""
    rows = max(1, PIECE // matrix.shape[1])
    pieces = [_fitted(matrix[first : first + rows], scheme) for first in range(0, matrix.shape[0], rows)]
    codes, scale, offset = (jnp.concatenate(parts) for parts in zip(*pieces, strict=True))
    return codes, scale, offset if scheme.asymmetric else None


@partial(jax.jit, static_argnames="scheme")
def _fitted(matrix: Float[Array, "m n"], scheme: Scheme) -> tuple[Array, Array, Array]:
    m, n = matrix.shape
    width = scheme.block_of(n)
    groups = jnp.pad(matrix.astype(jnp.float32), ((0, 0), (0, -n % width)), mode="edge").reshape(m, -1, width)
    real = jnp.arange(groups.shape[1] * width).reshape(1, -1, width) < n  # what fills up the last group has no weight
    mean = lambda a: (a * real).sum(axis=-1, keepdims=True) / real.sum(axis=-1, keepdims=True)  # noqa: E731
    apart = lambda a: (a - mean(a) if scheme.asymmetric else a) * real  # noqa: E731

    def step(i: Array, best: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        codes = _codes(groups, jnp.asarray(FACTORS[scheme.codes])[i], scheme)
        square, product = jnp.square(apart(codes)).sum(-1), (apart(groups) * apart(codes)).sum(-1)
        scale = product / jnp.where(square > 0, square, 1)
        gain = product * scale  # by how much less the squared error is than without any codes
        better = gain > best[0]
        return (
            jnp.maximum(gain, best[0]),
            jnp.where(better[..., None], codes, best[1]),
            jnp.where(better, scale, best[2]),
        )

    first = (jnp.full(groups.shape[:2], -1.0), jnp.zeros(groups.shape), jnp.zeros(groups.shape[:2]))
    _, codes, scale = jax.lax.fori_loop(0, len(FACTORS[scheme.codes]), step, first)
    kind = jnp.float32 if scheme.group is None else jnp.dtype(SCALE)
    scale = scale.astype(kind)
    offset = (mean(groups) - scale[..., None].astype(jnp.float32) * mean(codes))[..., 0]
    return codes.reshape(m, -1)[:, :n].astype(scheme.codes), scale, offset.astype(kind)


def _codes(groups: Float[Array, "m b w"], factor: Array, scheme: Scheme) -> Float[Array, "m b w"]:
    """Codes by the scale that puts the value furthest from zero at `factor` times the last code, or, asymmetric, both
    ends of the group that far out.
    """
    low, high = RANGE[scheme.codes]
    if scheme.asymmetric:
        least, most = groups.min(axis=-1, keepdims=True), groups.max(axis=-1, keepdims=True)
        scale = (most - least) / ((high - low) * factor)
        shifted = (groups - (most + least) / 2) / jnp.where(scale > 0, scale, 1) + (low + high) / 2
        return jnp.clip(jnp.round(shifted), low, high)
    furthest = jnp.take_along_axis(groups, jnp.abs(groups).argmax(axis=-1, keepdims=True), axis=-1)
    scale = furthest / (low * factor)
    return jnp.clip(jnp.round(groups / jnp.where(scale == 0, 1, scale)), low, high)
