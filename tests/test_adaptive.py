"""Precision that adapts: the brief's rule, calibrated maps, overflows that move one module, switches that compile
nothing.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rzoo.compile.adaptive import AdaptiveModel, MixedPrecisionScheduler, calibrate, held_in
from rzoo.compile.programs import programs_of
from rzoo.compile.quantize import quantize
from rzoo.core import RzooError
from rzoo.handle import LM
from rzoo.models import registry
from tests.tiny import TINY

IDS = jnp.asarray([[1, 2, 3, 4, 5, 6, 7, 8]])


class Net(nnx.Module):
    """Two layers in Flax itself, the second of which makes large values of inputs above 1."""

    def __init__(self, gain: float):
        ones = nnx.initializers.ones
        self.small, self.large = (nnx.Linear(4, 4, kernel_init=ones, rngs=nnx.Rngs(0)) for _ in range(2))
        self.gain = gain

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.large(jnp.tanh(self.small(x)) * self.gain) / self.gain


@pytest.fixture(scope="module")
def lm() -> LM:
    """A tiny model of one layer."""
    config = replace(TINY["llama"], layers=1)
    return LM(config, registry.initialize(config))


def test_the_rule_is_that_of_the_brief():
    scheduler = MixedPrecisionScheduler(threshold=1e-3)
    assert scheduler.precision_map == {"matmul": "bf16", "activation": "fp16"}
    assert [scheduler.adjust_precision(op, 1.0) for op in ("matmul", "activation", "norm")] == ["bf16", "fp16", "bf16"]
    norms = (1e-4, 1e-3, 1.1e-3, 1e-4, float("nan"))
    assert [scheduler.adjust_precision("norm", norm) for norm in norms] == ["fp16", "fp16", "bf16", "fp16", "bf16"]
    with pytest.raises(RzooError, match="must be positive"):
        MixedPrecisionScheduler(threshold=0.0)


def test_with_patience_a_number_about_the_threshold_flips_nothing():
    scheduler = MixedPrecisionScheduler(threshold=1e-3, patience=3)
    about = [scheduler.adjust_precision("norm", norm) for norm in (1.1e-3, 0.9e-3) * 20]
    assert set(about) == {"bf16"}
    assert [scheduler.adjust_precision("norm", 1e-4) for _ in range(4)] == ["bf16", "bf16", "fp16", "fp16"]


def test_calibration_names_modules_and_what_they_hold():
    ranges = calibrate(Net(1e6), jnp.ones((2, 4)))
    assert set(ranges) == {"top", "small", "large"}
    assert ranges["small"].largest < 10 and ranges["small"].above == 0
    assert ranges["large"].above > 0.5
    tiny = calibrate(Net(1e-6), jnp.ones((2, 4)))["large"]
    assert tiny.below > 0.5 and tiny.above == 0
    scheduler = MixedPrecisionScheduler()
    scheduler.calibrate(Net(1e6), jnp.ones((2, 4)))
    assert scheduler.precision_map == {"top": "bf16", "small": "fp16", "large": "bf16"}


def test_an_overflow_moves_one_module_and_is_counted():
    net, x = Net(3e4), jnp.ones((2, 4))
    scheduler = MixedPrecisionScheduler()
    scheduler.calibrate(net, x * 1e-3)
    assert scheduler.precision_map["large"] == "fp16"  # the inputs that it was calibrated on are small
    before, model = dict(scheduler.precision_map), AdaptiveModel(net, scheduler)
    np.testing.assert_allclose(model(x * 1e-3), net(x * 1e-3), atol=1e-2)
    assert scheduler.overflows == {}
    output = model(x)
    assert bool(jnp.isfinite(output).all())
    np.testing.assert_allclose(output, net(x), atol=5e-2)
    moved = {name for name, kind in scheduler.precision_map.items() if kind != before[name]}
    assert moved == {"large", "top"}  # what the one gives the other divides
    assert scheduler.overflows == {"large": 1, "top": 1}
    compiled = model.compiles
    model(x)
    assert (model.compiles, sum(scheduler.overflows.values())) == (compiled, len(moved))


def test_a_language_model_runs_by_its_map_and_switches_compile_nothing(lm):
    scheduler = MixedPrecisionScheduler()
    ranges = scheduler.calibrate(lm, IDS)
    assert {"top", "norm", "layers.0.mlp", "layers.0.attention"} <= set(ranges)
    model, policies = AdaptiveModel(lm, scheduler), []
    for kind in ("bf16", "fp16"):
        policies.append(dict.fromkeys(ranges, kind))
        scheduler.precision_map = policies[-1]
        assert float(jnp.abs(model(IDS) - lm(IDS)).max()) < {"bf16": 0.2, "fp16": 0.03}[kind]
    for i in range(100):
        scheduler.precision_map = policies[i % 2]
        model(IDS)
    assert model.compiles == 2
    held = {kind: held_in(lm.params, dict.fromkeys(ranges, kind)) for kind in ("bf16", "fp16", "fp32")}
    sizes = {kind: sum(array.nbytes for array in params.values()) for kind, params in held.items()}
    assert sizes["bf16"] == sizes["fp16"] == sizes["fp32"] // 2


def test_switching_between_levels_of_quantization_compiles_nothing(lm):
    """Each level has its program from its first use on, also for the loop of decode."""
    levels = [lm, quantize(lm, "int8"), quantize(lm, "int4:g16")]
    logits = [level(np.asarray(IDS)) for level in levels]
    program = programs_of(lm.blueprint).forward
    compiled = program._cache_size()
    for i in range(100):
        found = levels[i % 3](np.asarray(IDS))
        assert i > 2 or np.array_equal(found, logits[i % 3])
    assert program._cache_size() == compiled
