"""The report: counts against numbers by hand, the reading of a program's text, both groups of a tuned handle."""

import math
from dataclasses import replace

import jax.numpy as jnp
import pytest

from rzoo.compile.record import Choice, Record, apply, key_of
from rzoo.compile.report import bytes_of, flops_of, report, table
from rzoo.compile.workload import HELD, Case, Work
from rzoo.models.weights import Quantized
from tests.test_every_model import tiny


def work(lm, case):
    """The program of a case."""
    return Work(lm.blueprint, lm.params, case, ())


def test_costs_of_a_step_are_those_by_hand():
    lm = tiny("llama")
    step = work(lm, Case("decode", 3, 2))
    matrices = 2 * (32 * 32 + 2 * 16 * 32 + 32 * 32 + 3 * 32 * 48) + 97 * 32
    attention = 2 * 2 * 4 * 8 * (HELD + 1)
    assert flops_of(step) == 2 * 3 * (matrices + attention)
    weights = sum(v.size for path, v in lm.params.items() if path != "embed")
    assert bytes_of(step) == 4 * (weights + 3 * 2 * 2 * 2 * 8 * HELD)


def test_only_chosen_experts_count():
    lm = tiny("deepseek-v3")
    one, many = (work(lm, Case("decode", rows, 1)) for rows in (1, 8))
    experts = sum(v.nbytes for path, v in lm.params.items() if "expert_" in path)
    of_rows = sum(leaf.nbytes for leaf in (slot.latents for slot in one.cache.slots)) * HELD / one.cache.capacity
    assert bytes_of(many) - bytes_of(one) == pytest.approx(experts * (1 - 2 / 8) + 7 * of_rows)


def test_an_indexer_sees_all_keys_and_attention_those_that_it_keeps():
    lm = tiny("deepseek-v32")
    plain = replace(lm, config=replace(lm.config, kind="deepseek_v3", indexer=None))
    plain = plain.with_params({path: value for path, value in lm.params.items() if ".indexer." not in path})
    ours, theirs = (work(m, Case("decode", 1, 2)) for m in (lm, plain))
    keep, indexer = lm.config.indexer.keep, sum(v.size for p, v in lm.params.items() if p.endswith(INDEX_MATRICES))
    attention = 2 * 2 * 4 * 20 * (HELD + 1 - keep)  # layers, keys and values, heads, width of a latent
    assert flops_of(ours) - flops_of(theirs) == 2 * (indexer + 2 * 32 * 8 * (HELD + 1) - attention)


INDEX_MATRICES = ("indexer.query_up", "indexer.key", "indexer.head_weight")


def test_a_tuned_handle_is_reported_beside_the_untuned():
    lm = tiny("llama")
    tuned = apply(Record(key_of(lm), Choice(joined=("layers.{}.attention.q",))), lm)
    found = report(tuned, batches=(1,), prompt=32)
    assert set(found["phases"]) == set(found["untuned"]) == {"decode 1", "prefill 1"}
    one = found["phases"]["decode 1"]
    assert one["counted"] == found["untuned"]["decode 1"]["counted"]
    assert one["counted"]["intensity"] == one["counted"]["flops"] / one["counted"]["bytes"]
    assert 0 < one["measured"]["share_of_bandwidth"] < math.inf
    assert one["compiled"]["launches"] > 0
    assert "untuned decode 1" in table(found)


def test_codes_and_scales_are_the_bytes_of_a_quantized_weight():
    lm = tiny("llama")
    codes, scale = jnp.zeros((48, 32), jnp.int8), jnp.zeros((48, 1), jnp.float32)
    small = Quantized(codes=codes, scale=scale, offset=None, block=(1, 32), shape=(48, 32))
    case = Case("decode", 1, 1)
    less = bytes_of(work(lm, case)) - bytes_of(work(lm.with_params({**lm.params, "layers.0.mlp.up": small}), case))
    assert less == 48 * 32 * 3 - 48 * 4
