"""Blocks of numbers as GGUF stores them, and the numbers that they stand for.

A tensor type packs a fixed number of values into a block: small integers, and scales and minima by which they are
multiplied and moved. The types that files of today's models hold are decoded here, bit for bit as the `gguf` package
does; the rare ones, whose values come from large tables of vectors, are left to that package.

Source: ggml's block layouts, through models' own files and the `gguf` package.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from rzoo.core import RzooError

SLICE = 1 << 17  # values decoded at a time: they and their temporaries stay in the processor's cache
Decoder = Callable[[np.ndarray], np.ndarray]  # blocks (uint8 [n, bytes]) -> their numbers [n, values]


class BlockType(NamedTuple):
    """How a tensor type is stored: `values` numbers in every block of `nbytes` bytes."""

    name: str
    values: int
    nbytes: int


BLOCK_TYPES: dict[int, BlockType] = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    15: BlockType("Q8_K", 256, 292),
    16: BlockType("IQ2_XXS", 256, 66),
    17: BlockType("IQ2_XS", 256, 74),
    18: BlockType("IQ3_XXS", 256, 98),
    19: BlockType("IQ1_S", 256, 50),
    20: BlockType("IQ4_NL", 32, 18),
    21: BlockType("IQ3_S", 256, 110),
    22: BlockType("IQ2_S", 256, 82),
    23: BlockType("IQ4_XS", 256, 136),
    28: BlockType("F64", 1, 8),
    29: BlockType("IQ1_M", 256, 56),
    30: BlockType("BF16", 1, 2),
    34: BlockType("TQ1_0", 256, 54),
    35: BlockType("TQ2_0", 256, 66),
    39: BlockType("MXFP4", 32, 17),
}
BLOCK_NAMED = {block.name: block for block in BLOCK_TYPES.values()}

# What the 16 codes of a 4-bit type stand for.
_IQ4_VALUES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)  # of IQ4_NL and IQ4_XS
_FP4_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)  # twice those of E2M1


def decode(kind: str, raw: bytes | memoryview | np.ndarray, shape: tuple[int, ...], out: np.ndarray) -> np.ndarray:
    """Decode the blocks `raw` of type `kind` ("Q4_1") into `out`, an array of `shape`; returns `out`.

    Numbers are computed in float32 and rounded once to out's dtype; a type stored in out's own dtype is copied bit for
    bit. Raises RzooError for a type that cannot be decoded and for sizes that do not fit each other.
    """
    decoder, block = decoder_of(kind), BLOCK_NAMED[kind]
    blocks = np.frombuffer(raw, np.uint8)
    values = math.prod(shape)
    fits = values % block.values == 0 and blocks.size == values // block.values * block.nbytes
    if not fits or out.shape != shape or not out.flags.c_contiguous:
        words = f"{blocks.size} bytes of {kind} do not fit shape {shape} and a contiguous output (found {out.shape})"
        raise RzooError(words, field="raw")
    flat, step = out.reshape(-1), SLICE // block.values
    blocks = blocks.reshape(-1, block.nbytes)
    with np.errstate(invalid="ignore", over="ignore"):
        for first in range(0, len(blocks), step):
            part = decoder(blocks[first : first + step])
            flat[first * block.values : (first + step) * block.values] = part.reshape(-1)
    return out


def decoder_of(kind: str, where: str = "") -> Decoder:
    """The decoder of the type `kind`. Raises RzooError where there is none; its words begin with `where`."""
    if kind in DECODERS:
        return DECODERS[kind]
    if kind not in BLOCK_NAMED:
        fix = f"types that can be decoded: {', '.join(BLOCK_NAMED)}"
        raise RzooError(f"{where}type {kind} cannot be decoded", field="kind", value=kind, fix=fix)
    try:
        import gguf
    except ImportError as error:
        words = f"{where}type {kind} needs the package gguf to be decoded"
        raise RzooError(words, field="kind", value=kind, fix="pip install rzoo[gguf]") from error
    return lambda blocks: gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])


def _floats(dtype: Any) -> Decoder:
    return lambda blocks: blocks.view(dtype)


def _scale(blocks: np.ndarray, first: int) -> np.ndarray:
    """The float16 at byte `first` of each block, as float32 [n, 1]."""
    return np.ascontiguousarray(blocks[:, first : first + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """The low halves of the 16 bytes of each block, then their high halves: float32 [n, 32]."""
    out = np.empty((len(packed), 32), np.float32)
    out[:, :16] = packed & 15
    out[:, 16:] = packed >> 4
    return out


def _fields(packed: np.ndarray, width: int, group: int) -> np.ndarray:
    """Integers of `width` bits: the lowest of each of `group` bytes, then the next of each, and so on by group.

    uint8 [n, bytes] -> uint8 [n, bytes * 8 / width]
    """
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    return (packed.reshape(len(packed), -1, 1, group) >> shifts & ((1 << width) - 1)).reshape(len(packed), -1)


def _scaled(q: np.ndarray, scale: np.ndarray, minimum: np.ndarray | None = None) -> np.ndarray:
    """q * scale - minimum, where q [n, values] has one scale and minimum [n, groups] for each of its equal groups."""
    out = q.reshape(*scale.shape, -1).astype(np.float32)
    out *= scale[..., None]
    if minimum is not None:
        out -= minimum[..., None]
    return out


def _q4_0(blocks: np.ndarray) -> np.ndarray:
    """(q - 8) * scale."""
    out = _nibbles(blocks[:, 2:])
    out -= 8
    out *= _scale(blocks, 0)
    return out


def _q4_1(blocks: np.ndarray) -> np.ndarray:
    """q * scale + minimum."""
    out = _nibbles(blocks[:, 4:])
    out *= _scale(blocks, 0)
    out += _scale(blocks, 2)
    return out


def _q5_0(blocks: np.ndarray) -> np.ndarray:
    """(q - 16) * scale; the fifth bits of all q come first."""
    out = _nibbles(blocks[:, 6:])
    out += 16 * _fields(blocks[:, 2:6], 1, 1)
    out -= 16
    out *= _scale(blocks, 0)
    return out


def _q5_1(blocks: np.ndarray) -> np.ndarray:
    """q * scale + minimum; the fifth bits of all q come first."""
    out = _nibbles(blocks[:, 8:])
    out += 16 * _fields(blocks[:, 4:8], 1, 1)
    out *= _scale(blocks, 0)
    out += _scale(blocks, 2)
    return out


def _q8_0(blocks: np.ndarray) -> np.ndarray:
    """q * scale."""
    out = blocks[:, 2:].view(np.int8).astype(np.float32)
    out *= _scale(blocks, 0)
    return out


def _q2_k(blocks: np.ndarray) -> np.ndarray:
    """16 groups of 16: scales and minima of 4 bits, themselves scaled."""
    scales, q = blocks[:, :16], _fields(blocks[:, 16:80], 2, 32)
    return _scaled(q, _scale(blocks, 80) * (scales & 15), _scale(blocks, 82) * (scales >> 4))


def _q3_k(blocks: np.ndarray) -> np.ndarray:
    """16 groups of 16: q - 4 by scales of 6 bits less 32; the third bits of all q come first."""
    q = _fields(blocks[:, 32:96], 2, 32) | _fields(blocks[:, :32], 1, 32) << 2
    scales = _fields(blocks[:, 96:104], 4, 8) | _fields(blocks[:, 104:108], 2, 4) << 4
    return _scaled(q.view(np.int8) - np.int8(4), _scale(blocks, 108) * (scales.view(np.int8) - np.int8(32)))


def _k_scales(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The scales and minima of the 8 groups of Q4_K and Q5_K: 6 bits each, the last four of which are in parts."""
    low, middle, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.hstack([low & 63, high & 15 | low >> 6 << 4])
    minima = np.hstack([middle & 63, high >> 4 | middle >> 6 << 4])
    return _scale(blocks, 0) * scales, _scale(blocks, 2) * minima


def _q4_k(blocks: np.ndarray) -> np.ndarray:
    """8 groups of 32."""
    return _scaled(_fields(blocks[:, 16:], 4, 32), *_k_scales(blocks))


def _q5_k(blocks: np.ndarray) -> np.ndarray:
    """8 groups of 32; the fifth bits of all q come first."""
    q = _fields(blocks[:, 48:], 4, 32) | _fields(blocks[:, 16:48], 1, 32) << 4
    return _scaled(q, *_k_scales(blocks))


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    """16 groups of 16: q - 32 by scales of 8 bits."""
    q = _fields(blocks[:, :128], 4, 64) | _fields(blocks[:, 128:192], 2, 32) << 4
    return _scaled(q.view(np.int8) - np.int8(32), _scale(blocks, 208) * blocks[:, 192:208].view(np.int8))


def _q8_k(blocks: np.ndarray) -> np.ndarray:
    """q by a float32 scale; sums of q at the end serve products of integers, and are passed over."""
    return _scaled(blocks[:, 4:260].view(np.int8), np.ascontiguousarray(blocks[:, :4]).view("<f4"))


def _iq4_nl(blocks: np.ndarray) -> np.ndarray:
    """A value of a table by its scale."""
    return _scaled(_IQ4_VALUES[_fields(blocks[:, 2:], 4, 16)], _scale(blocks, 0))


def _iq4_xs(blocks: np.ndarray) -> np.ndarray:
    """8 groups of 32: a value of a table by scales of 6 bits less 32."""
    scales = _fields(blocks[:, 4:8], 4, 1) | _fields(blocks[:, 2:4], 2, 1) << 4
    scale = _scale(blocks, 0) * (scales.view(np.int8) - np.int8(32))
    return _scaled(_IQ4_VALUES[_fields(blocks[:, 8:], 4, 16)], scale)


def _mxfp4(blocks: np.ndarray) -> np.ndarray:
    """A value of E2M1 by a power of two; the table's are doubled, so the power is halved."""
    scale = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)
    return _scaled(_FP4_VALUES[_fields(blocks[:, 1:], 4, 16)], scale)


DECODERS: dict[str, Decoder] = {
    "F64": _floats("<f8"),
    "F32": _floats("<f4"),
    "F16": _floats("<f2"),
    "BF16": _floats(ml_dtypes.bfloat16),
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "Q8_K": _q8_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
