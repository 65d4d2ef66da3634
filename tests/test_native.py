"""Weights in GGUF blocks: the file's numbers, XLA's form and each form of the kernels beside exact decoding."""

import platform
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rzoo.checkpoint.blocks import BLOCK_NAMED, decode
from rzoo.compile import blocks, native
from rzoo.compile.blocks import KINDS, BlockQuantized
from rzoo.compile.kernels import attend_native
from rzoo.models.attention import attend
from rzoo.models.weights import Numerics

N, K = 40, 512  # the last tile is partial
COMPILER = shutil.which("c++")
compiled = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
QUICK = ("-std=c++17", "-O1", "-fPIC", "-shared", "-Wno-psabi")


def file_rows(kind: str) -> np.ndarray:
    """Random blocks of N rows of K columns with scales as models have, as bytes of a file."""
    rng, nbytes = np.random.default_rng(0), KINDS[kind].nbytes
    rows = rng.integers(0, 256, (N, K // KINDS[kind].values, nbytes), dtype=np.uint8)
    scales = rng.uniform(0.001, 0.01, (*rows.shape[:2], 2)).astype(np.float16).view(np.uint8)
    if kind == "Q6_K":
        rows[..., -2:] = scales[..., :2]
    elif kind in ("Q4_1", "Q4_K"):
        rows[..., :4] = scales
    else:
        rows[..., :2] = scales[..., :2]
    return rows.reshape(N, -1)


def exact(kind: str) -> np.ndarray:
    return decode(kind, file_rows(kind).tobytes(), (N, K), np.empty((N, K), np.float32))


def held(kind: str, integer: bool = False) -> BlockQuantized:
    return jax.tree.map(jnp.asarray, BlockQuantized.of_file(kind, file_rows(kind), (N, K), integer))


def inputs(m: int) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(m, K)).astype(np.float32)


def error(found, kind: str, m: int) -> float:
    """Largest difference from exact decoding, relative to the largest product."""
    wanted = inputs(m).astype(np.float64) @ exact(kind).T.astype(np.float64)
    return float(np.abs(np.asarray(found) - wanted).max() / np.abs(wanted).max())


@pytest.mark.parametrize("kind", KINDS)
def test_tiles_hold_the_bytes_of_the_file_and_no_more(kind):
    rows = file_rows(kind)
    tiles = blocks.tiled(kind, rows)
    assert np.array_equal(blocks.untiled(kind, tiles, N), rows)
    assert tiles.nbytes == rows.nbytes // N * 48 and KINDS[kind].nbytes == BLOCK_NAMED[kind].nbytes


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_those_of_the_file_bit_for_bit(kind):
    weight = held(kind)
    ids = np.array([[3, 39], [17, 0]])
    dense, rows = jax.jit(lambda w, ids: (w.dense(), w.rows(ids, Numerics())))(weight, ids)
    assert np.array_equal(dense, exact(kind)) and np.array_equal(rows, exact(kind)[ids])


@pytest.mark.parametrize("kind", KINDS)
def test_a_product_in_xlas_form_is_that_of_the_decoded_file(kind, monkeypatch):
    monkeypatch.setattr(native, "unavailable", lambda: "not here")
    found = jax.jit(lambda w, x: w.product("bd,nd->bn", x, Numerics()))(held(kind), inputs(3))
    assert error(found, kind, 3) < 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("native")


X86 = {"AVX-512": "-march=skylake-avx512 -mavx512vnni", "AVX2": "-march=haswell", "portable": "-march=x86-64"}
OF_FLAG = {"AVX-512": "avx512_vnni", "AVX2": "avx2", "portable": ""}


@pytest.fixture(scope="module", params=X86 if platform.machine() == "x86_64" else ["portable"])
def kernel(request, folder):
    """The suffix of the kernels' names as compiled for one kind of processor."""
    if COMPILER is None:
        pytest.skip("needs a C++ compiler")
    if OF_FLAG[request.param] not in native.cpu_fact("flags"):
        pytest.skip(f"this processor has no {request.param}")
    march = X86[request.param].split() if platform.machine() == "x86_64" else []
    native.register(native.library(folder, COMPILER, (*QUICK, *march)), f" {request.param}")
    return f" {request.param}"


def products(weights: list[BlockQuantized], x: np.ndarray, kernel: str) -> list[jax.Array]:
    return blocks.by_kernel(jnp.asarray(x), [w.tiles for w in weights], weights, kernel)


def test_kernels_with_exact_activations_are_exact_decoding_to_rounding(kernel):
    for m in (1, 15):
        found = products([held(kind) for kind in KINDS], inputs(m), kernel)
        for kind, product in zip(KINDS, found, strict=True):
            assert error(product, kind, m) < 2e-6, (kind, m)


def test_kernels_with_8_bit_activations_differ_by_their_rounding(kernel):
    found = products([held(kind, integer=True) for kind in KINDS], inputs(15), kernel)
    for kind, product in zip(KINDS, found, strict=True):
        assert 1e-4 < error(product, kind, 15) < 1e-2, kind


def test_activations_that_are_no_numbers_are_not_hidden(kernel):
    x = inputs(2)
    x[1, 7] = np.inf
    x[1, 200] = np.nan
    for integer in (False, True):
        (found,) = products([held("Q4_1", integer)], x, kernel)
        assert np.isfinite(found[0]).all() and not np.isfinite(found[1]).any()


def test_a_kernels_derivative_by_its_input_and_its_vectorized_form_are_those_of_the_numbers():
    weight, x = held("Q4_1"), jnp.asarray(inputs(2))
    by_row = jax.vmap(lambda row: weight.product("d,nd->n", row, Numerics()))
    found, pull = jax.vjp(jax.jit(by_row), x)
    assert error(found, "Q4_1", 2) < 1e-5
    np.testing.assert_allclose(pull(found)[0], np.asarray(found) @ exact("Q4_1"), rtol=1e-4, atol=1e-4)


def test_attention_by_kernel_is_the_reference(kernel):
    draw = lambda *shape: jnp.asarray(np.random.default_rng(3).normal(size=shape), jnp.float32)  # noqa: E731
    q, keys, values, starts = draw(3, 1, 6, 16), draw(3, 2, 40, 16), draw(3, 2, 40, 32), jnp.array([0, 17, 39])
    keys = keys.at[1, :, 18:].set(jnp.nan)  # what the cache holds past a row's end does not count
    found = attend_native(q, keys, values, starts, 3.0, Numerics(), kernel)
    wanted = attend(q, jnp.nan_to_num(keys), values, starts, 3.0, Numerics())
    np.testing.assert_allclose(found, wanted, atol=1e-5)


@compiled
def test_a_corrupted_library_is_not_loaded_but_built_again(tmp_path, monkeypatch):
    monkeypatch.setattr(native, "_source", lambda: b'extern "C" int rzoo_multiply() { return 0; }')
    path = native.library(tmp_path, COMPILER, QUICK)
    assert native.is_sound(path)
    assert native.library(tmp_path, COMPILER, QUICK) == path
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert not native.is_sound(path)
    assert native.is_sound(native.library(tmp_path, COMPILER, QUICK))
    assert [file.suffix for file in tmp_path.iterdir()] == [".so"]


@compiled
def test_a_library_that_others_could_have_written_is_not_loaded(tmp_path, monkeypatch):
    data = b"any bytes"
    path = tmp_path / f"made-{native._digest(data)}.so"
    path.write_bytes(data)
    for mode, sound in ((0o700, True), (0o720, False), (0o702, False)):
        path.chmod(mode)
        assert native.is_sound(path) == sound
    path.chmod(0o700)
    link = tmp_path / "link" / path.name
    link.parent.mkdir()
    link.symlink_to(path)
    assert not native.is_sound(link)
    monkeypatch.setattr("os.getuid", lambda: 12345)
    assert not native.is_sound(path)


@compiled
def test_other_flags_or_another_source_make_another_library(monkeypatch):
    names = {native._made_from(COMPILER, QUICK), native._made_from(COMPILER, (*QUICK, "-O0"))}
    monkeypatch.setattr(native, "_source", lambda: b"another")
    names.add(native._made_from(COMPILER, QUICK))
    assert len(names) == 3


@pytest.fixture
def asked_anew():
    native.unavailable.cache_clear()
    yield
    native.unavailable.cache_clear()


def test_kernels_can_be_turned_off(asked_anew, monkeypatch):
    monkeypatch.setenv("RZOO_NO_NATIVE", "1")
    assert native.unavailable() == "native kernels are turned off by RZOO_NO_NATIVE"


def test_without_a_compiler_one_line_says_so(asked_anew, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("RZOO_CACHE", str(tmp_path))
    assert native.unavailable() == "native kernels need a C++ compiler (c++, g++, clang++); going on without them"
    found = jax.jit(lambda w, x: w.product("bd,nd->bn", x, Numerics()))(held("Q4_1"), inputs(3))
    assert error(found, "Q4_1", 3) < 1e-5


def test_a_compiler_that_fails_is_named_with_its_first_line(asked_anew, monkeypatch, tmp_path):
    fake = tmp_path / "c++"
    fake.write_text("#!/bin/sh\n[ $# = 1 ] && echo 1.0 || { echo out of order >&2; exit 1; }\n")
    fake.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("RZOO_CACHE", str(tmp_path / "cache"))
    assert native.unavailable() == f"native kernels can't be built by {fake}: out of order"
