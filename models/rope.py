"""Rotary position embedding and its context-extension variants.

Sources: RoPE (Su et al. 2021), position interpolation (Chen et al. 2023), YaRN (Peng et al. 2023), the Llama 3.1
release. A rotary config is one of the small dataclasses below; `frequencies` gives the rotation per position and pair,
`rotation` the cosines and sines at positions, and `rotate_half_split` / `rotate_interleaved` apply them for the two
ways of pairing.
"""

import math
from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@dataclass(frozen=True, kw_only=True)
class DefaultRope:
    """Pair i turns by theta^(-2i/width) a position."""

    theta: float = 10000.0


@dataclass(frozen=True, kw_only=True)
class LinearRope:
    """Position interpolation: every frequency divided by `factor`."""

    theta: float = 10000.0
    factor: float


@dataclass(frozen=True, kw_only=True)
class DynamicRope:
    """Dynamic NTK: theta grows once a row is longer than `original_context`."""

    theta: float = 10000.0
    factor: float
    original_context: int


@dataclass(frozen=True, kw_only=True)
class Llama3Rope:
    """Llama 3.1: long wavelengths divided by `factor`, short ones kept, a linear ramp between."""

    theta: float = 500000.0
    factor: float
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True, kw_only=True)
class YarnRope:
    """YaRN: a ramp over pairs between kept and interpolated frequencies; `magnitude` scales cosines and sines."""

    theta: float = 10000.0
    factor: float
    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True

    @property
    def magnitude(self) -> float:
        """Factor on cosines and sines: given, or the ratio of the two mscales, or 0.1 ln(factor) + 1."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return yarn_mscale(self.factor, self.mscale) / yarn_mscale(self.factor, self.mscale_all_dim)
        return yarn_mscale(self.factor, 1.0)

    @property
    def softmax_factor(self) -> float:
        """Factor on the softmax scale of latent attention, m² (DeepSeek-V2's code); 1 without mscale_all_dim."""
        return yarn_mscale(self.factor, self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0


@dataclass(frozen=True, kw_only=True)
class DividedRope:
    """Frequencies divided by a list read from the checkpoint, one divisor a pair (GGUF's rope_freqs tensor)."""

    theta: float = 10000.0
    divisors: tuple[float, ...]


Rope = DefaultRope | LinearRope | DynamicRope | Llama3Rope | YarnRope | DividedRope


def depends_on_length(rope: Rope) -> bool:
    """Whether frequencies change with the length of a row: then it may be neither padded nor read in chunks unsaid."""
    return isinstance(rope, DynamicRope)


def yarn_mscale(factor: float, coefficient: float) -> float:
    """YaRN's 0.1 * coefficient * ln(factor) + 1, and 1 where nothing is extended."""
    return 0.1 * coefficient * math.log(factor) + 1.0 if factor > 1 else 1.0


def frequencies(rope: Rope, width: int, length: Int[Array, " b"]) -> Float[Array, "b half"]:
    """Radians a position for each of width/2 pairs; `length` is the number of tokens of each row (dynamic NTK needs
    it).
    """
    match rope:
        case DynamicRope():
            return _dynamic(rope, width, length)
        case LinearRope():
            per_pair = _plain(rope.theta, width) / rope.factor
        case Llama3Rope():
            per_pair = _llama3(rope, _plain(rope.theta, width))
        case YarnRope():
            per_pair = _yarn(rope, width)
        case DividedRope():
            per_pair = _plain(rope.theta, width) / jnp.asarray(rope.divisors, jnp.float32)
        case DefaultRope():
            per_pair = _plain(rope.theta, width)
    return jnp.broadcast_to(per_pair, (length.shape[0], width // 2))


def _plain(theta: float, width: int) -> Float[Array, " half"]:
    return 1.0 / theta ** (jnp.arange(0, width, 2, dtype=jnp.float32) / width)


def _dynamic(rope: DynamicRope, width: int, length: Int[Array, " b"]) -> Float[Array, "b half"]:
    stretch = rope.factor * length.astype(jnp.float32) / rope.original_context - (rope.factor - 1.0)
    theta = rope.theta * jnp.maximum(stretch, 1.0) ** (width / (width - 2))
    return 1.0 / theta[:, None] ** (jnp.arange(0, width, 2, dtype=jnp.float32) / width)


def _llama3(rope: Llama3Rope, plain: Float[Array, " half"]) -> Float[Array, " half"]:
    turns = rope.original_context * plain / (2 * math.pi)  # full turns within the original context
    share = (turns - rope.low_frequency_factor) / (rope.high_frequency_factor - rope.low_frequency_factor)
    share = jnp.clip(share, 0.0, 1.0)  # 0: interpolate, 1: keep
    return (1 - share) * plain / rope.factor + share * plain


def _yarn(rope: YarnRope, width: int) -> Float[Array, " half"]:
    plain = _plain(rope.theta, width)

    def pair_with_turns(turns: float) -> float:
        """The (fractional) pair index that makes `turns` full turns within the original context."""
        return width * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_with_turns(rope.beta_fast), pair_with_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    ramp = (jnp.arange(width // 2, dtype=jnp.float32) - low) / max(high - low, 0.001)
    ramp = jnp.clip(ramp, 0.0, 1.0)  # 0: keep, 1: interpolate
    return plain / rope.factor * ramp + plain * (1 - ramp)


@dataclass(frozen=True)
class Rotation:
    """Cosines and sines [b, t, width/2] in float32 for the tokens at hand."""

    cos: Float[Array, "b t half"]
    sin: Float[Array, "b t half"]


def rotation(rope: Rope, width: int, positions: Int[Array, "b t"], length: Int[Array, " b"]) -> Rotation:
    """Cosines and sines at integer positions; angles are float32 (bfloat16 rounds 257 to 256)."""
    angle = positions[:, :, None].astype(jnp.float32) * frequencies(rope, width, length)[:, None, :]
    magnitude = rope.magnitude if isinstance(rope, YarnRope) else 1.0
    return Rotation(jnp.cos(angle) * magnitude, jnp.sin(angle) * magnitude)


def rotate_half_split(x: Float[Array, "b t n c"], by: Rotation) -> Float[Array, "b t n c"]:
    """Turns the pairs (i, i + c/2) of every head: Llama, Qwen2, Nemotron."""
    cos, sin = by.cos[:, :, None, :], by.sin[:, :, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def rotate_interleaved(x: Float[Array, "b t n c"], by: Rotation) -> Float[Array, "b t n c"]:
    """Turns the pairs (2i, 2i + 1) of every head: DeepSeek's latent attention."""
    cos, sin = by.cos[:, :, None, :], by.sin[:, :, None, :]
    even, odd = x.astype(jnp.float32)[..., ::2], x.astype(jnp.float32)[..., 1::2]
    return jnp.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1).reshape(x.shape).astype(x.dtype)
