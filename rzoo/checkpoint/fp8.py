"""FP8 checkpoints of DeepSeek: E4M3 codes in blocks of 128 x 128, and a float32 scale a block.

The matrix `w` [m, n] is stored as codes of dtype F8_E4M3 and, under its name with "_scale_inv", as scales
[ceil(m/128), ceil(n/128)]; value = code * scale, despite the "inv". Blocks at the far edges may be partial. A scale may
lie in another file of the checkpoint than its codes. Source: DeepSeek-V3 (2024), section 3.3, and its weights' readme.
"""

import math
from collections.abc import Mapping
from typing import Any

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


def scale_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
    """The shape of the scales of a matrix; partial blocks count."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def quantize_blocks(w: np.ndarray, block: tuple[int, int] = BLOCK) -> tuple[np.ndarray, np.ndarray]:
    """(codes, scales) of a matrix [m, n]: the largest magnitude of each block becomes 448. A block of zeros has scale 1."""
    w = np.asarray(w, np.float32)
    (rows, columns), (m, n) = scale_shape(w.shape, block), w.shape
    padded = np.pad(np.abs(w), ((0, rows * block[0] - m), (0, columns * block[1] - n)))
    largest = padded.reshape(rows, block[0], columns, block[1]).max(axis=(1, 3))
    scale = np.where(largest > 0, largest / np.float32(LARGEST), np.float32(1)).astype(np.float32)
    codes = np.clip(w / spread(scale, block, (m, n)), -LARGEST, LARGEST)  # rounding may have made the scale too small
    return codes.astype(E4M3), scale


def dequantize_blocks(codes: np.ndarray, scale: np.ndarray, block: tuple[int, int] = BLOCK) -> np.ndarray:
    """The matrix in float32."""
    return VALUES[codes.view(np.uint8)] * spread(scale, block, codes.shape)


def spread(scale: np.ndarray, block: tuple[int, int], shape: tuple[int, ...]) -> np.ndarray:
    """One scale a block -> one an element of a matrix of `shape`."""
    return np.repeat(np.repeat(scale, block[0], axis=0)[: shape[0]], block[1], axis=1)[:, : shape[1]]


def block_of(config: Mapping[str, Any]) -> tuple[int, int]:
    """The block shape that a config.json states; RzooError for another quantization than E4M3 in blocks."""
    given = config.get("quantization_config")
    if given is None:
        return BLOCK
    if not isinstance(given, Mapping):
        raise HFConfig(config).wrong("quantization_config", given, "must be an object or null")
    hf = HFConfig(given, "config.json: quantization_config")
    hf.refuse("quant_method", allowed=("fp8",))
    hf.refuse("fmt", allowed=("e4m3", None))
    block = hf.get("weight_block_size", list(BLOCK))
    if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and 0 < n <= 2**20 for n in block):
        raise hf.wrong("weight_block_size", block, "must be two positive integers")
    return block[0], block[1]


def check_scales(tensors: Mapping[str, TensorInfo], block: tuple[int, int], where: str) -> None:
    """Raises one RzooError with every FP8 tensor that lacks its scales, and all scales that fit no FP8 tensor."""
    problems = []
    for name, info in tensors.items():
        if info.dtype == CODES:
            scale = tensors.get(name + SCALE)
            if len(info.shape) != 2:
                problems.append(f"{name} is {list(info.shape)}, FP8 blocks need a matrix")
            elif scale is None:
                problems.append(f"{name} is FP8 and has no {name + SCALE}")
            elif scale.dtype != "F32" or scale.shape != (expected := scale_shape(info.shape, block)):
                found = f"{scale.dtype} {list(scale.shape)}"
                problems.append(f"{scale.name} is {found}, blocks of {list(block)} need F32 {list(expected)}")
        elif name.endswith(SCALE):
            codes = tensors.get(name.removesuffix(SCALE))
            if codes is None or codes.dtype != CODES:
                problems.append(f"{name} is the scale of no FP8 tensor")
    if problems:
        raise RzooError(f"{where}: {len(problems)} FP8 scales do not fit: {few(problems)}", field="tensors")


def read_values(folder: HFFolder, name: str, block: tuple[int, int], out: np.ndarray) -> None:
    """Reads an FP8 tensor into `out`, [m, n] of any float type; a few rows of blocks are held beside it."""
    scale = folder.read(name + SCALE)
    m, n = out.shape
    step = max(1, PIECE // (block[0] * n)) * block[0]
    for row in range(0, m, step):
        codes = folder.read_slice(name, (slice(row, row + step),))
        first = row // block[0]
        out[row : row + step] = dequantize_blocks(codes, scale[first : first + step // block[0]], block)


def quantized(
    codes: np.ndarray, scale: np.ndarray, block: tuple[int, int], shape: tuple[int, ...], part: tuple[int, int] | None
) -> Quantized:
    """Codes and scales of a tensor [..., m, n] as the value of a weight of logical `shape`.

    part: the weight is these rows of each of shape[0] heads. Its blocks become as low as makes them end at its borders.
    """
    if part is not None:
        heads, (start, stop) = shape[0], part
        a_head = codes.shape[0] // heads
        low = math.gcd(start, stop, a_head, block[0])
        scale = scale[np.arange(0, codes.shape[0], low) // block[0]]
        codes = codes.reshape(heads, a_head, -1)[:, start:stop].reshape(heads * (stop - start), -1)
        scale = scale.reshape(heads, a_head // low, -1)[:, start // low : stop // low].reshape(-1, scale.shape[-1])
        block = (low, block[1])
    return Quantized(codes=codes, scale=scale, offset=None, block=block, shape=shape)


def side_by_side(parts: list[Quantized]) -> Quantized:
    """The inverse of taking parts: one matrix of weights that share a tensor, in the blocks of the file."""
    heads = parts[0].shape[0]
    by_head = lambda arrays: np.concatenate([np.asarray(a).reshape(heads, -1, a.shape[-1]) for a in arrays], axis=1)  # noqa: E731
    codes, scale = by_head([p.codes for p in parts]), by_head([p.scale for p in parts])
    codes, scale = codes.reshape(-1, codes.shape[-1]), scale.reshape(-1, scale.shape[-1])
    low, columns = parts[0].block
    return Quantized(codes=codes, scale=scale[:: BLOCK[0] // low], offset=None, block=(BLOCK[0], columns), shape=codes.shape)
