"""FP8 checkpoints of DeepSeek: E4M3 codes in blocks of 128 x 128, and a float32 scale a block.

The matrix `w` [m, n] is stored as codes of dtype F8_E4M3 and, under its name with "_scale_inv", as scales
[ceil(m/128), ceil(n/128)]; value = code * scale, despite the "inv". Blocks at the far edges may be partial. A scale may
lie in another file of the checkpoint than its codes. Source: DeepSeek-V3 (2024), section 3.3, and its weights' readme.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from rzoo.checkpoint.huggingface import HFFolder
from rzoo.checkpoint.safetensors_file import TensorInfo, few
from rzoo.core import RzooError
from rzoo.models.config import HFConfig
from rzoo.models.weights import Quantized

CODES = "F8_E4M3"  # as safetensors names it
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
LARGEST = 448.0  # of E4M3
SCALE = "_scale_inv"
BLOCK = (128, 128)
QUANTIZATION = {  # of config.json, for what quantize_blocks makes
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": list(BLOCK),
}
PIECE = 1 << 22  # codes turned into numbers at a time

VALUES = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32)  # of each code; a table is faster than a cast


def scale_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """The shape of the scales of a matrix; partial blocks count."""
    return -(-shape[0] // BLOCK[0]), -(-shape[1] // BLOCK[1])


def quantize_blocks(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(codes, scales) of a matrix [m, n]: the largest magnitude of a block becomes 448; zeros have the scale 1."""
    w = np.asarray(w, np.float32)
    (rows, columns), (m, n) = scale_shape(w.shape), w.shape
    padded = np.pad(np.abs(w), ((0, rows * BLOCK[0] - m), (0, columns * BLOCK[1] - n)))
    largest = padded.reshape(rows, BLOCK[0], columns, BLOCK[1]).max(axis=(1, 3))
    scale = np.where(largest > 0, largest / np.float32(LARGEST), np.float32(1))
    codes = np.clip(w / _spread(scale, w.shape), -LARGEST, LARGEST)  # rounding may have made the scale too small
    return codes.astype(E4M3), scale


def dequantize_blocks(codes: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The matrix in float32."""
    return VALUES[codes.view(np.uint8)] * _spread(scale, codes.shape)


def _spread(scale: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """One scale a block -> one an element of a matrix of `shape`."""
    return np.repeat(np.repeat(scale, BLOCK[0], axis=0)[: shape[0]], BLOCK[1], axis=1)[:, : shape[1]]


def check_quantization(config: Mapping[str, Any]) -> None:
    """RzooError for a config.json that states another quantization than E4M3 in blocks of 128 x 128."""
    given = config.get("quantization_config")
    if given is None:
        return
    if not isinstance(given, Mapping):
        raise HFConfig(config).wrong("quantization_config", given, "must be an object or null")
    hf = HFConfig(given, "config.json: quantization_config")
    hf.refuse("quant_method", allowed=("fp8",))
    hf.refuse("fmt", allowed=("e4m3", None))
    hf.refuse("weight_block_size", allowed=(list(BLOCK), None))


def check_scales(tensors: Mapping[str, TensorInfo], where: str) -> None:
    """Raises one RzooError with every FP8 tensor that lacks its scales, and all scales that fit no FP8 tensor."""
    problems = [words for info in tensors.values() for words in _problems(info, tensors)]
    if problems:
        raise RzooError(f"{where}: {len(problems)} FP8 scales do not fit: {few(problems)}", field="tensors")


def _problems(info: TensorInfo, tensors: Mapping[str, TensorInfo]) -> Iterator[str]:
    if info.dtype == CODES:
        scale = tensors.get(info.name + SCALE)
        if len(info.shape) != 2:
            yield f"{info.name} is {list(info.shape)}, FP8 blocks need a matrix"
        elif scale is None:
            yield f"{info.name} is FP8 and has no {info.name + SCALE}"
        elif (scale.dtype, scale.shape) != ("F32", scale_shape(info.shape)):
            yield f"{scale.name} is {scale.dtype} {list(scale.shape)}, not F32 {list(scale_shape(info.shape))}"
    elif info.name.endswith(SCALE):
        codes = tensors.get(info.name.removesuffix(SCALE))
        if codes is None or codes.dtype != CODES:
            yield f"{info.name} is the scale of no FP8 tensor"


def read_values(folder: HFFolder, name: str, out: np.ndarray) -> None:
    """Reads an FP8 tensor into `out`, [m, n] of any float type; a few rows of blocks are held beside it."""
    scale = folder.read(name + SCALE)
    blocks = max(1, PIECE // (BLOCK[0] * out.shape[1]))  # rows of blocks
    for first in range(0, len(scale), blocks):
        rows = slice(first * BLOCK[0], (first + blocks) * BLOCK[0])
        out[rows] = dequantize_blocks(folder.read_slice(name, (rows,)), scale[first : first + blocks])


def as_weight(
    codes: np.ndarray, scale: np.ndarray, shape: tuple[int, ...], part: tuple[int, int] | None = None
) -> Quantized:
    """Codes and scales of a tensor [..., m, n] as the value of a weight of logical `shape`.

    part: the weight is these rows of each of shape[0] heads; its blocks become as low as makes them end at its borders.
    """
    low = BLOCK[0]
    if part is not None:
        heads, (start, stop) = shape[0], part
        a_head, width = codes.shape[0] // heads, codes.shape[1]
        low = math.gcd(start, stop, a_head, BLOCK[0])
        scale = scale[np.arange(0, codes.shape[0], low) // BLOCK[0]].reshape(heads, a_head // low, -1)
        scale = scale[:, start // low : stop // low].reshape(-1, scale.shape[-1])
        codes = codes.reshape(heads, a_head, width)[:, start:stop].reshape(-1, width)
    block = (low, BLOCK[1])
    return Quantized(codes=jnp.asarray(codes), scale=jnp.asarray(scale), offset=None, block=block, shape=shape)


def as_tensor(parts: Sequence[Quantized]) -> tuple[np.ndarray, np.ndarray]:
    """The inverse: codes and scales of the tensor that holds these weights, side by side in each head."""
    if len(parts) == 1:
        return np.asarray(parts[0].codes), np.asarray(parts[0].scale)
    heads = parts[0].shape[0]

    def joined(arrays: list[Any]) -> np.ndarray:
        by_head = [np.asarray(a).reshape(heads, -1, a.shape[-1]) for a in arrays]
        return np.concatenate(by_head, axis=1).reshape(-1, arrays[0].shape[-1])

    return joined([p.codes for p in parts]), joined([p.scale for p in parts])[:: BLOCK[0] // parts[0].block[0]]
