"""The policy "exact": every dot asks for the highest precision itself, and no global setting of JAX is touched."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rzoo
from rzoo.compile.programs import WHOLE
from rzoo.core import RzooError
from rzoo.models import step
from rzoo.models.forms import Forms
from tests.goldens import GOLDEN

DOTS = re.compile(r"stablehlo\.dot_general[^\n]*")


@pytest.fixture(scope="module")
def lm():
    """A tiny model in float32."""
    return rzoo.load(str(GOLDEN / "llama_llama3rope"), quiet=True)


def programs(lm):
    """name -> (function, arguments): the programs that the handle and the engine run."""
    ids, counts = jnp.zeros((2, 32), jnp.int32), jnp.full(2, 32, jnp.int32)
    cache = lm.blueprint.empty_cache(2, 1024)
    logits, stops = jnp.zeros((2, lm.config.vocab_size)), jnp.zeros(1, jnp.int32)
    key = jax.random.key(0)
    return {
        "forward": (lambda p: step.forward(lm.blueprint, p, ids), (lm.params,)),
        "prefill": (lambda p, c: step.prefill_chunk(lm.blueprint, p, ids, counts, c), (lm.params, cache)),
        "decode": (
            lambda p, c: step.decode(lm.blueprint, p, logits, c, key, counts, stops, steps=4),
            (lm.params, cache),
        ),
    }


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["forward", "prefill", "decode"])
def test_every_dot_asks_for_the_highest_precision(lm, name, platform):
    function, arguments = programs(lm)[name]
    text = jax.jit(function).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()
    dots = DOTS.findall(text)
    assert len(dots) >= 9 * lm.config.layers
    assert [dot for dot in dots if dot.count("HIGHEST") != 2] == []


def test_no_global_setting_is_touched(lm):
    lm(np.asarray([[1, 2, 3]]))
    assert jax.config.values["jax_default_matmul_precision"] is None
    assert jax.config.values["jax_enable_x64"] is False


def test_the_empty_record_gives_the_program_of_no_record(lm):
    ids = jnp.zeros((1, 16), jnp.int32)
    lower = lambda b: jax.jit(step.forward, static_argnums=0).lower(b, lm.params, ids).as_text()  # noqa: E731
    assert lower(step.Blueprint(lm.config)) == lower(step.Blueprint(lm.config, Forms()))


def test_what_is_not_captured_is_not_computed(lm):
    """The program without capture is the one of a model that observes nothing at all."""
    ids = jnp.zeros((1, 16), jnp.int32)
    lower = lambda forms: (  # noqa: E731
        jax.jit(step.forward, static_argnums=0).lower(step.Blueprint(lm.config, forms), lm.params, ids).as_text()
    )

    class Blind(Forms):
        def observe(self, module, name, value):
            pass

    assert lower(Forms()) == lower(Blind())
    observing = jax.jit(step.forward_captured, static_argnums=0).lower(
        step.Blueprint(lm.config, Forms(capture=("attention",))), lm.params, ids
    )
    assert observing.as_text().count("dot_general") > lower(Forms()).count("dot_general")


def test_two_loads_share_one_program():
    ids = np.asarray([[1, 2, 3, 4]])
    first, second = (rzoo.load(str(GOLDEN / "qwen2"), quiet=True) for _ in range(2))
    first(ids)
    rzoo.generate(first, [1, 2, 3], max_new_tokens=3)
    sizes = [f._cache_size() for f in (WHOLE.forward, WHOLE.prefill_chunk, WHOLE.decode)]
    second(ids[:, :3])
    rzoo.generate(second, [4, 5], max_new_tokens=9)
    assert [f._cache_size() for f in (WHOLE.forward, WHOLE.prefill_chunk, WHOLE.decode)] == sizes


def test_stored_computes_in_the_held_type_close_to_exact(lm):
    stored = rzoo.load(str(GOLDEN / "llama_llama3rope"), dtype="bf16", policy="stored", quiet=True)
    ids = np.asarray([[1, 2, 3, 4]])
    text = jax.jit(step.forward, static_argnums=0).lower(stored.blueprint, stored.params, ids).as_text()
    assert all(dot.count("bf16") == 2 for dot in DOTS.findall(text) if "97x64" in dot)
    logits = stored(ids)
    assert logits.dtype == jnp.float32
    difference = np.abs(logits - lm(ids))
    assert 1e-4 < difference.mean() < 0.05


def test_exact_on_bfloat16_weights_computes_in_float32(lm):
    held = rzoo.load(str(GOLDEN / "llama_llama3rope"), dtype="bfloat16", quiet=True)
    ids = np.asarray([[1, 2, 3, 4]])
    widened = held.with_params({path: v.astype("float32") for path, v in held.params.items()})
    np.testing.assert_allclose(held(ids), widened(ids), atol=1e-5)


def test_unknown_policies_and_types_are_refused():
    with pytest.raises(RzooError, match=r"policy \(exakt\) is unknown; did you mean exact"):
        rzoo.load(str(GOLDEN / "qwen2"), policy="exakt")
    with pytest.raises(RzooError, match=r"dtype \(int3\) must be one of float32, bfloat16, float16"):
        rzoo.load(str(GOLDEN / "qwen2"), dtype="int3")
