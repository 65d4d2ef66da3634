"""Layouts of weights and forms of operations: each against its reference, and the bits come back."""

import ast
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import rzoo
from rzoo.compile.kernels import FORMS, AttendInBlocks, LibraryAttention, candidate_forms, form_named
from rzoo.compile.storage import LAYOUTS, Laid, lay_out, plain
from rzoo.core import RzooError
from rzoo.models import attention, registry
from rzoo.models.registry import abstract_weights
from rzoo.models.stacking import stack, unstack
from rzoo.models.weights import Numerics, Storage, dense_product
from tests.test_every_model import IDS, tiny
from tests.tiny import TINY

RNG = np.random.default_rng(0)
JOINED = ("layers.{}.attention.q", "layers.{}.mlp.gate")


def random(*shape):
    """Random numbers of unit size."""
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_laid_weight_gives_the_product_of_the_dense_one_and_its_bits_back(layout, rows):
    weight = random(3, 25, 70)
    laid = Laid(LAYOUTS[layout].lay(weight.reshape(75, 70)), layout, weight.shape, 1)
    x, spec = random(rows, 1, 70), "btd,hcd->bthc"
    assert isinstance(laid, Storage)
    np.testing.assert_array_equal(laid.dense(), weight)
    product = laid.product(spec, x, Numerics())
    np.testing.assert_allclose(product, dense_product(spec, x, weight, Numerics()), rtol=5e-6, atol=2e-5)
    half = Numerics(compute="bfloat16")
    expected = dense_product(spec, x, weight.astype("bfloat16"), half)
    low = jax.tree.map(lambda a: a.astype("bfloat16"), laid).product(spec, x, half)
    assert low.dtype == expected.dtype == jnp.float32
    np.testing.assert_allclose(low, expected, rtol=1e-3, atol=1e-3)


def test_an_embedding_is_laid_out_only_where_it_is_the_head_too_and_gives_its_rows():
    tied, untied = (tiny(name) for name in ("llama-tied", "llama"))
    found = lay_out(tied.config, tied.params, (), {"embed": "transposed"})["embed"]
    ids = jnp.asarray([[3, 0], [96, 3]])
    assert isinstance(found, Laid)
    np.testing.assert_array_equal(found.rows(ids, Numerics()), tied.params["embed"][ids])
    for model, layout in ((untied, "transposed"), (tied, "pieces")):
        assert isinstance(lay_out(model.config, model.params, (), {"embed": layout})["embed"], jax.Array)


@pytest.fixture(scope="module", params=["llama-biased", "deepseek-v3", "nemotron"])
def lm(request):
    """A tiny model."""
    return tiny(request.param)


def laid(lm, layout):
    """The model with every matrix laid out so, and groups joined."""
    layouts = {path: layout for path in lm.params}
    return lm.with_params(lay_out(lm.config, lm.params, JOINED, layouts))


@pytest.mark.parametrize("layout", ["rows", "reduced_pieces"])
def test_a_model_with_joined_and_laid_weights_gives_the_same_logits(lm, layout):
    other = laid(lm, layout)
    assert sum(isinstance(value, Storage) for value in other.params.values()) >= 8
    np.testing.assert_allclose(other(IDS), lm(IDS), atol=3e-5)


def test_laid_weights_stack_and_come_back_under_their_names_with_their_bits(lm):
    other = laid(lm, "pieces")
    back = plain(unstack(lm.config, stack(lm.config, other.params)))
    assert back.keys() == lm.params.keys()
    for path, value in lm.params.items():
        np.testing.assert_array_equal(back[path], value)


def test_stacked_and_joined_weights_give_the_same_logits():
    lm = tiny("llama")
    other = laid(lm, "rows")
    stacked = replace(other, params=stack(lm.config, other.params), forms=replace(lm.forms, stacked=True))
    np.testing.assert_allclose(stacked(IDS), lm(IDS), atol=3e-5)


def test_export_and_module_of_a_laid_handle_hold_the_original_bits(tmp_path):
    lm = tiny("llama")
    rzoo.export(laid(lm, "transposed"), tmp_path / "out")
    back = rzoo.load(str(tmp_path / "out"), quiet=True)
    for path, value in lm.params.items():
        np.testing.assert_array_equal(back.params[path], value)
    trained = nnx.to_flat_state(nnx.state(laid(lm, "pieces").module(), nnx.Param))
    assert {registry.path_name(path) for path, _ in trained} == set(lm.params)


def attention_inputs(t, s):
    """Queries, keys, values, starts: two rows at different places."""
    return random(2, t, 4, 8), random(2, 2, s, 8), random(2, 2, s, 8), jnp.asarray([3, s - t], jnp.int32)


@pytest.mark.parametrize("t", [1, 5])
@pytest.mark.parametrize("form", [AttendInBlocks(32), AttendInBlocks(128), LibraryAttention("xla")])
def test_forms_of_attention_give_what_the_reference_gives(form, t):
    q, keys, values, starts = attention_inputs(t, 128)
    expected = attention.attend(q, keys, values, starts, 0.3, Numerics())
    np.testing.assert_allclose(form(q, keys, values, starts, 0.3, Numerics()), expected, rtol=1e-5, atol=1e-5)


def test_only_forms_that_a_model_has_a_use_for_are_candidates():
    fields = {name: set(candidate_forms(TINY[name], Numerics(), "cpu")) for name in ("llama", "deepseek-v3")}
    assert fields["llama"] == {"attend_prefill", "attend_decode", "stacked"}
    assert fields["deepseek-v3"] == {"latent_attend_prefill", "latent_attend_decode", "experts_cached", "stacked"}
    half = Numerics(compute="bfloat16")
    assert "cudnn" in candidate_forms(TINY["llama"], half, "gpu")["attend_decode"]
    assert "cudnn" not in candidate_forms(TINY["llama"], Numerics(), "gpu")["attend_decode"]


def test_an_unknown_form_lists_close_names():
    with pytest.raises(RzooError, match=r"form attend_decode \(blocks of 12\) is unknown; did you mean blocks of 128"):
        form_named("attend_decode", "blocks of 12")


def test_models_never_ask_for_the_name_of_a_form():
    names = {"Laid", "Joined", "Beside", *LAYOUTS, *(name for forms in FORMS.values() for name in forms)} - {"rows"}
    for file in (Path(__file__).parent.parent / "models").glob("*.py"):
        conditions = [n.test for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.If | ast.IfExp)]
        asked = {
            n.value if isinstance(n, ast.Constant) else getattr(n, "id", None) for c in conditions for n in ast.walk(c)
        }
        assert not {word for word in asked if isinstance(word, str)} & names, file.name


def test_every_weight_that_is_laid_out_is_named_as_in_checkpoints(lm):
    assert set(laid(lm, "pieces").params) == set(abstract_weights(lm.config))
