"""Quantized weights and caches: errors within half a step, products against dequantized ones, files, meshes, words."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rzoo
from rzoo.checkpoint.load import peak_bytes
from rzoo.checkpoint.opened import open_checkpoint, quantizing
from rzoo.compile.kernels import policy_forms
from rzoo.compile.quantize import fitted, quantize, quantized_bytes, scheme_named, schemes_for
from rzoo.compile.shapes import weight_shapes
from rzoo.core import RzooError
from rzoo.handle import LM
from rzoo.models import registry, weights
from rzoo.models.weights import Numerics, Quantized
from rzoo.sharding.fit import largest_weight_bytes
from rzoo.sharding.place import place
from tests.tiny import DIVISIBLE, TINY

RNG = np.random.default_rng(0)
IDS = np.asarray([[3, 14, 15, 92, 65, 35, 89, 79]])


@pytest.fixture(scope="module")
def lm() -> LM:
    """A model whose sizes split over 8 devices, its cache as an engine uses it."""
    config = DIVISIBLE["llama"]
    return LM(config, registry.initialize(config), policy_forms("exact", "float32"))


def as_quantized(matrix: np.ndarray, scheme: str) -> Quantized:
    """A matrix by itself."""
    found = scheme_named(scheme)
    return Quantized(*fitted(jnp.asarray(matrix), found), (1, found.block_of(matrix.shape[1])), matrix.shape)


@pytest.mark.report("G04", "G06")
@pytest.mark.parametrize("scheme", ["int8", "int8:channel", "int4", "int4:sym", "int4:g128", "int4:g7", "int8:g5"])
@pytest.mark.parametrize("inputs", [64, 96, 101])
def test_a_value_is_off_by_no_more_than_its_step(scheme, inputs):
    """Half a step, and what fitting and a 16-bit scale move it; more where values are cut off for the others' sake."""
    matrix = RNG.normal(size=(6, inputs)).astype(np.float32)
    q = as_quantized(matrix, scheme)
    step = np.repeat(np.abs(np.asarray(q.scale, np.float32)), q.block[1], axis=1)[:, :inputs]
    off = np.abs(np.asarray(q.dequantize()) - matrix)
    assert (off <= (0.65 if scheme.startswith("int8") else 2) * step).all()
    assert (off <= 0.65 * step).mean() > 0.9
    assert q.codes.dtype == scheme[:4]


@pytest.mark.report("G01", "G04")
def test_smaller_groups_lose_less():
    matrix = RNG.normal(size=(16, 256)) * RNG.lognormal(size=(1, 256))
    loss = lambda scheme: float(np.square(as_quantized(matrix, scheme).dequantize() - matrix).sum())  # noqa: E731
    names = ("int4:g16", "int4:g32", "int4:g64", "int4:g128", "int4:channel")
    losses = [loss(name) for name in names]
    assert losses == sorted(losses)
    assert loss("int4:g32") < loss("int4:g32:sym")


@pytest.mark.report("G07")
def test_a_grid_of_sixteen_values_is_found_again():
    """Asymmetric codes of what another format has rounded, Q4_1 say, lose nothing."""
    steps = RNG.uniform(0.5, 2, size=(8, 4, 1)).astype(np.float16)
    codes = RNG.integers(0, 16, size=(8, 4, 32))
    codes[..., :2] = 0, 15
    matrix = (codes * steps + RNG.normal(size=(8, 4, 1)).astype(np.float16)).astype(np.float32).reshape(8, 128)
    np.testing.assert_allclose(as_quantized(matrix, "int4:g32").dequantize(), matrix, atol=2e-2)


def test_zeros_and_single_values_stay():
    matrix = np.zeros((3, 64), np.float32)
    matrix[1, 5], matrix[2] = -3.0, 0.5
    for scheme in ("int8", "int4", "int4:sym"):
        np.testing.assert_allclose(as_quantized(matrix, scheme).dequantize(), matrix, rtol=2e-3)


@pytest.mark.report("G07")
@pytest.mark.parametrize("scheme", ["int8", "int8:channel", "int4", "int4:sym", "int4:g5"])
@pytest.mark.parametrize(
    ("spec", "shape", "x"),
    [
        ("btd,hcd->bthc", (2, 3, 64), (1, 3, 64)),
        ("btd,hcd->bthc", (2, 3, 64), (2, 9, 64)),  # in pieces
        ("bthc,dhc->btd", (6, 4, 16), (2, 1, 4, 16)),
        ("bthc,hcr->bthr", (2, 3, 64), (1, 3, 2, 3)),
        ("bsr,hcr->bhsc", (2, 3, 64), (1, 3, 64)),
    ],
)
def test_a_product_is_that_of_the_dequantized_weight(spec, shape, x, scheme, monkeypatch):
    monkeypatch.setattr(weights, "PIECE", 128)
    matrix = RNG.normal(size=(6, 64)).astype(np.float32)
    q = as_quantized(matrix, scheme)
    q = Quantized(q.codes, q.scale, q.offset, q.block, shape)
    inputs = RNG.normal(size=x).astype(np.float32)
    expected = np.einsum(spec, inputs, np.asarray(q.dequantize()))
    np.testing.assert_allclose(q.product(spec, jnp.asarray(inputs), Numerics()), expected, rtol=1e-4, atol=1e-4)


def test_both_sides_in_8_bits_stay_within_a_rounding_of_the_inputs():
    q = as_quantized(RNG.normal(size=(32, 64)).astype(np.float32), "int8:channel")
    both = Quantized(q.codes, q.scale, q.offset, q.block, q.shape, "int8")
    x = jnp.asarray(RNG.normal(size=(2, 5, 64)), jnp.float32)
    exact, found = (w.product("btd,fd->btf", x, Numerics()) for w in (q, both))
    bound = 0.5 / 127 * np.abs(x).max(-1, keepdims=True) * np.abs(q.dequantize()).sum(-1)
    assert (np.abs(found - exact) <= bound + 1e-5).all()
    text = jax.jit(lambda x: both.product("btd,fd->btf", x, Numerics())).lower(x).as_text()
    assert "xi8>" in text and "xi32>" in text and "dot_general" in text


@pytest.mark.parametrize("family", ["llama-tied", "deepseek-v3"])
@pytest.mark.report("G12", "G13")
def test_a_quantized_model_computes_as_its_dequantized_weights_do(family):
    """All matrices but routers are coded, experts and tied embeddings among them."""
    config = TINY[family]
    dense = LM(config, registry.initialize(config))
    q = quantize(dense, "int4:g16")
    coded = {path for path, value in q.params.items() if isinstance(value, Quantized)}
    matrices = {path for path, (axes, _) in registry.abstract_weights(config).items() if len(axes) > 1}
    assert coded == {path for path in matrices if "router" not in path}
    by_hand = {path: value.dense() if isinstance(value, Quantized) else value for path, value in q.params.items()}
    np.testing.assert_allclose(q(IDS), dense.with_params(by_hand)(IDS), atol=2e-3)


@pytest.mark.report("G06")
def test_the_file_of_a_step_gives_back_codes_and_scheme(lm, tmp_path):
    for scheme in ("int4:g16", "w8a8"):
        q = quantize(lm, scheme)
        back = rzoo.load(rzoo.save(q, tmp_path / scheme).path, quiet=True, record=False)
        same_bits(back.params, q.params)
        assert jax.tree.structure(back.params) == jax.tree.structure(q.params)
    assert "int8 for both sides in blocks" in back.source


def same_bits(found: dict, expected: dict) -> None:
    """Equal paths, types and bits."""
    assert found.keys() == expected.keys()
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_split_over_eight_devices_the_bits_are_the_same(lm):
    rules = {"*": "int4:g8", "layers.0.*": "int8:g8"}
    q = quantize(lm, rules)
    placed = place(q, {"tensor": 8}, "tensor")
    same_bits(placed.params, q.params)
    assert any(len({str(s.index) for s in leaf.addressable_shards}) == 8 for leaf in jax.tree.leaves(placed.params))
    np.testing.assert_allclose(placed(IDS), q(IDS), atol=1e-4)
    same_bits(quantize(place(lm, {"tensor": 8}, "tensor"), rules).params, q.params)


def test_a_mesh_that_would_cut_a_group_is_refused(lm):
    with pytest.raises(RzooError, match=r"64 over tensor \(8\) cuts blocks of 32"):
        place(quantize(lm, "int4:g32"), {"tensor": 8}, "tensor")


@pytest.mark.report("G10")
def test_loading_quantizes_one_weight_at_a_time_to_the_same_bits(lm, tmp_path, capsys):
    rzoo.export(lm, tmp_path / "model")
    wide = rzoo.load(tmp_path / "model", quiet=True, record=False)
    narrow = rzoo.load(tmp_path / "model", weights="int4:g16", record=False)
    same_bits(narrow.params, quantize(wide, "int4:g16").params)
    assert "int4:g16, int8:g32, the rest float32 in memory" in capsys.readouterr().err
    opened = quantizing(open_checkpoint(tmp_path / "model"), "int4:g16", None)
    one = largest_weight_bytes(lm.config, "float32")
    assert peak_bytes(opened, "float32", None) == quantized_bytes(lm.config, opened.schemes, "float32") + one
    split = rzoo.load(tmp_path / "model", weights="int4:g8", mesh={"tensor": 4}, quiet=True, record=False)
    same_bits(split.params, quantize(wide, "int4:g8").params)


def test_bytes_are_counted_before_anything_is_read(lm):
    schemes = schemes_for(lm.config, "int4:g16")
    counted = quantized_bytes(lm.config, schemes, "float32")
    leaves = jax.tree.leaves(quantize(lm, "int4:g16").params)
    assert counted == sum(leaf.size // 2 if leaf.dtype == "int4" else leaf.nbytes for leaf in leaves)


def test_the_shapes_that_are_planned_are_those_that_are_made():
    config = TINY["deepseek-v3"]
    planned = weight_shapes(config, "int4:g16")
    made = quantize(LM(config, registry.initialize(config)), "int4:g16").params
    assert jax.tree.structure(planned) == jax.tree.structure(made)
    for path in (path for path, value in made.items() if isinstance(value, Quantized)):
        found, expected = ([(a.shape, a.dtype) for a in jax.tree.leaves(one[path])] for one in (planned, made))
        assert found == expected


def test_an_export_holds_the_values_that_the_codes_stand_for(lm, tmp_path):
    q = quantize(lm, "int4:g16")
    back = rzoo.load(rzoo.export(q, tmp_path / "model"), quiet=True, record=False)
    assert {value.dtype.name for value in back.params.values()} == {"float32"}
    for path, value in q.params.items():
        expected = value.dense() if isinstance(value, Quantized) else value
        np.testing.assert_array_equal(back.params[path], expected)


@pytest.mark.report("G16")
def test_a_weight_that_would_grow_is_refused(lm):
    half = LM(lm.config, registry.initialize(lm.config, dtype="bfloat16"))
    with pytest.raises(RzooError, match=r"embed would take 9,216 bytes as int8:g1, it takes 6,144\n.*larger groups"):
        quantize(half, {"embed": "int8:g1"} | {"layers.0.mlp.up": None})


@pytest.mark.parametrize(
    ("scheme", "words"),
    [
        ("int3", r"weights \(int3\) is no scheme; known: int8, "),
        ("int4:g0", r"is no scheme"),
        (4, r"must be a scheme or rules"),
        ({"layers.*.mlp.gates": "int8"}, r"layers.\*.mlp.gates fits no matrix\n.*layers.\{\}.mlp.gate"),
        ({"norm.scale": "int8"}, r"norm.scale fits no matrix"),
    ],
)
def test_a_wrong_scheme_is_told(lm, scheme, words):
    with pytest.raises(RzooError, match=words):
        schemes_for(lm.config, scheme)


@pytest.mark.report("G15")
def test_a_tied_head_takes_no_rule_of_its_own():
    config = TINY["llama-tied"]
    with pytest.raises(RzooError, match="head is its embedding, one matrix for both"):
        quantize(LM(config, registry.initialize(config)), {"head": "int8"})


def test_values_that_are_not_finite_are_told(lm):
    broken = lm.with_params({**lm.params, "head": lm.params["head"].at[3, 4].set(jnp.nan)})
    with pytest.raises(RzooError, match="head holds values that are not finite"):
        quantize(broken, "int8")


def test_a_cache_in_8_bits_stays_close_also_on_a_mesh(lm, tmp_path):
    rzoo.export(lm, tmp_path / "model")
    load = lambda **more: rzoo.load(tmp_path / "model", quiet=True, record=False, **more)  # noqa: E731
    small, split = load(cache="int8"), load(cache="int8", mesh={"tensor": 8})
    caches = [jax.eval_shape(lambda one=one: one.blueprint.empty_cache(1, 64)).slots for one in (lm, small)]
    wide, narrow = (sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(c)) for c in caches)
    assert narrow == wide // 4 + wide // 8  # heads of 8 values, and a float32 scale for each
    scored = [rzoo.score(one, IDS[0].tolist(), IDS[0, :3].tolist()).logprobs for one in (lm, small, split)]
    np.testing.assert_allclose(scored[1], scored[0], atol=2e-2)
    np.testing.assert_allclose(scored[2], scored[1], atol=1e-3)  # a code may round the other way
    assert scored[0] != scored[1]
    with pytest.raises(RzooError, match="give cache to rzoo"):
        quantize(split, {}, cache="int8")


@pytest.mark.parametrize(
    ("family", "cache", "words"), [("deepseek-v3", "int8", "caches latents"), ("qwen2", "int4", "must be int8")]
)
def test_a_cache_that_is_not_there_is_refused(family, cache, words):
    config = TINY[family]
    with pytest.raises(RzooError, match=words):
        quantize(LM(config, registry.initialize(config)), {}, cache=cache)
