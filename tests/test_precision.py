"""Policies: one table of types, one of bounds, and what reaches the program."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rzoo
from rzoo.compile.precision import BOUNDS, POLICIES, TYPES, bound_of, numerics_by_kind
from rzoo.core import RzooError
from rzoo.models import step
from rzoo.models.forms import KINDS
from rzoo.models.weights import Numerics
from tests.goldens import GOLDEN
from tests.test_every_model import IDS, tiny


def test_every_policy_has_types_for_every_kind_and_a_bound():
    assert set(TYPES) == set(BOUNDS) == set(POLICIES)
    assert all(set(kinds) == set(KINDS) for kinds in TYPES.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_exact_is_float32_whatever_is_held_and_stored_follows_it(dtype):
    assert set(numerics_by_kind("exact", dtype).values()) == {Numerics()}
    stored, fast = (numerics_by_kind(policy, dtype)["attention"] for policy in ("stored", "fast"))
    assert (stored.compute, stored.cache, stored.accumulate) == (dtype, dtype, "float32")
    assert fast == replace(stored, precision=jax.lax.Precision.DEFAULT)


def test_fast_is_loaded_with_its_bound_on_the_handle():
    lm = rzoo.load(str(GOLDEN / "llama_tied"), policy="fast", kl=0.03, quiet=True)
    assert (lm.policy, lm.bound.kl_mean, lm.bound.kl_99th) == ("fast", 0.03, pytest.approx(0.3))
    assert jax.tree.map(lambda a: a, lm).bound == lm.bound
    assert rzoo.load(str(GOLDEN / "llama_tied"), policy="fast", quiet=True).bound == BOUNDS["fast"]


@pytest.mark.parametrize(
    ("policy", "kl", "words"),
    [
        ("fst", None, r"policy \(fst\) is unknown; did you mean fast"),
        ("exact", 0.1, r"kl \(0\.1\) is the bound of policy fast, not of exact"),
        ("fast", -1.0, r"kl \(-1\.0\) must be a positive number of nats"),
        ("fast", float("nan"), r"kl \(nan\) must be a positive number"),
    ],
)
def test_bounds_that_mean_nothing_are_refused(policy, kl, words):
    with pytest.raises(RzooError, match=words):
        bound_of(policy, kl)


@pytest.mark.parametrize(("name", "kind"), [("llama", "attention"), ("llama", "head"), ("deepseek-v3", "experts")])
def test_the_types_of_one_kind_reach_its_operations_and_no_others(name, kind):
    lm = tiny(name)
    half = replace(lm, forms=replace(lm.forms, numerics_of=((kind, Numerics(compute="bfloat16")),)))
    text = jax.jit(step.forward, static_argnums=0).lower(half.blueprint, half.params, jnp.asarray(IDS)).as_text()
    dots = re.findall(r"stablehlo\.dot_general[^\n]*", text)
    in_half = [dot for dot in dots if "bf16" in dot]
    assert 0 < len(in_half) < len(dots) / 2
    assert 0 < np.abs(half(IDS) - lm(IDS)).max() < 0.5
