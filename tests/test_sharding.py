"""Models on meshes: every family under every rule table gives what it gives on one device, and moves no more than told.

The meshes are of the 8 CPU devices that conftest.py forces.
"""

import re
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rzoo
from rzoo.compile.kernels import default_forms
from rzoo.core import RzooError
from rzoo.handle import LM
from rzoo.models import step
from rzoo.models.forms import Forms
from rzoo.models.moe import TILE, experts_in_tiles, experts_reference
from rzoo.models.nemotron import parse_layout
from rzoo.models.registry import FAMILIES, abstract_weights, config_from_hf, initialize
from rzoo.models.weights import Numerics, Quantized, Weight
from rzoo.sharding.choose import choose, factorings, implied_rules
from rzoo.sharding.collectives import SharedOut
from rzoo.sharding.fit import cache_bytes, copies
from rzoo.sharding.mesh import make_mesh, parse_mesh, spelled
from rzoo.sharding.pipeline import Pipeline, stage_stops
from rzoo.sharding.place import forms_for, place
from rzoo.sharding.placement import Placement, per_device
from rzoo.sharding.rules import RULES, resolve, table
from tests.goldens import GOLDEN, LLAMAS
from tests.tiny import DIVISIBLE, TINY

IDS = np.random.default_rng(0).integers(0, 96, (8, 16))
PROMPTS = [IDS[i, : 5 + i].tolist() for i in range(8)]
COLLECTIVES = r"= (?:\([^)]*\)|\S+) (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?\("


def tiny(config) -> LM:
    """A model with random weights on the default device."""
    return LM(config, initialize(config), default_forms(Numerics()))


class Alone:
    """A model on one device and what it gives there."""

    def __init__(self, config):
        self.lm = tiny(config)
        self.tokens = [answer.tokens for answer in rzoo.generate(self.lm, PROMPTS, max_new_tokens=6)]
        capture = ("router",) if getattr(config, "experts", None) else ()
        self.logits, self.seen = self.lm(IDS, capture=capture)


@pytest.fixture(scope="module")
def alone():
    """Name in DIVISIBLE -> Alone, each made once."""
    return cache(lambda name: Alone(DIVISIBLE[name]))


def test_every_family_has_a_config_that_divides():
    assert {family.config for family in FAMILIES} == {type(config) for config in DIVISIBLE.values()}


# Of each table the mesh of 8 devices runs always, the smaller ones with the extras.
MESHES = {
    "tensor": ({"tensor": 8}, {"tensor": 2}, {"tensor": 4}),
    "fsdp": ({"fsdp": 8}, {"fsdp": 2}, {"fsdp": 4}),
    "expert": ({"expert": 8}, {"expert": 2}, {"expert": 4}),
    "tensor×data": ({"data": 2, "tensor": 4}, {"data": 2}, {"data": 2, "tensor": 2}),
    "tensor×fsdp": ({"fsdp": 2, "tensor": 4}, {"tensor": 2}, {"fsdp": 2, "tensor": 2}),
    "expert×tensor": ({"expert": 4, "tensor": 2}, {"expert": 2}, {"expert": 2, "tensor": 2}),
    "tensor×pipe": ({"pipe": 4, "tensor": 2}, {"pipe": 2}, {"pipe": 2, "tensor": 2}),
}
NO_EXPERTS = ("llama", "nemotron")


def cases():
    """(model, rules, mesh) of all that works."""
    for name in DIVISIBLE:
        for rules, meshes in MESHES.items():
            for mesh in meshes:
                if not ("expert" in mesh and name in NO_EXPERTS):
                    small = np.prod(list(mesh.values())) < 8
                    yield pytest.param(name, rules, mesh, marks=[pytest.mark.extras] if small else [])


def expected_collectives(config, rules: str, mesh: dict[str, int]) -> dict[str, int]:
    """What one forward of a whole sequence exchanges."""
    ways = lambda axis: mesh.get(axis, 1) > 1 and axis in table(rules).mesh_axes  # noqa: E731
    weights = abstract_weights(config)
    mixtures = sum(path.endswith("expert_gate") for path in weights)
    found: Counter[str] = Counter()
    if ways("tensor"):
        outputs = ("attention.output", "mlp.down", "expert_down")
        found["all-reduce"] = 1 + sum(path.endswith(outputs) for path in weights)  # and the embedding's rows
        found["all-gather"] = sum(path.endswith(".linear") for path in weights)
    if ways("expert"):
        found["all-reduce"] += mixtures  # with tensor: routed and shared experts, over different devices
        found["all-gather"] += 2 * mixtures  # the router's scores and bias
    if ways("fsdp"):
        found["all-gather"] += sum("d" in axes for axes, _ in weights.values())  # each weight once
    return {kind: count for kind, count in found.items() if count}


def compiled(lm: LM) -> str:
    """The program of whole sequences as XLA runs it."""
    run = jax.jit(step.forward, static_argnames="blueprint")
    return str(run.lower(lm.blueprint, lm.params, IDS).compile().as_text())


@pytest.mark.parametrize(("name", "rules", "mesh"), list(cases()))
def test_a_model_on_a_mesh_gives_what_it_gives_on_one_device(alone, name, rules, mesh):
    single = alone(name)
    lm = place(single.lm, mesh, rules)
    check_bytes(lm)
    assert [answer.tokens for answer in rzoo.generate(lm, PROMPTS, max_new_tokens=6)] == single.tokens
    if "pipe" in rules:
        np.testing.assert_allclose(lm(IDS), single.logits, atol=5e-5)
        check_stages(lm)
        return
    logits, seen = lm(IDS, capture=tuple(single.seen))
    np.testing.assert_allclose(logits, single.logits, atol=5e-5)
    for kind, arrays in single.seen.items():
        for ours, theirs in zip(seen[kind], arrays, strict=True):
            np.testing.assert_array_equal(ours > 0, theirs > 0)
    assert Counter(re.findall(COLLECTIVES, compiled(lm))) == expected_collectives(lm.config, rules, mesh)


def check_bytes(lm: LM) -> None:
    """Each device holds its share of every weight that the rules split."""
    for path, (axes, weight) in abstract_weights(lm.config).items():
        placement = lm.forms.place.of(path)
        on = dict(placement.rules.weights)
        degree = int(np.prod([placement.degree(on[c]) for c in axes]))
        assert max(per_device(lm.params[path])) <= 1.1 * 4 * weight.size / degree
        assert placement.mesh.size % degree == 0


def check_stages(lm: LM) -> None:
    """Each device holds the weights of one stage and of no other."""
    stages_of: dict[object, set[int]] = {}
    for path, value in lm.params.items():
        stage = next(i for i, s in enumerate(lm.forms.place.stages) if s.placement == lm.forms.place.of(path))
        for device in value.sharding.device_set:
            stages_of.setdefault(device, set()).add(stage)
    assert len(stages_of) == lm.mesh.size
    assert {len(stages) for stages in stages_of.values()} == {1}


def test_flax_alone_reads_the_tables(alone):
    from flax import nnx

    from rzoo.models.registry import path_name

    lm = place(alone("llama").lm, {"tensor": 2, "fsdp": 4}, "tensorxfsdp")
    with nnx.logical_axis_rules(table("tensor×fsdp").weights):
        found = nnx.get_named_sharding(nnx.state(lm.module()), lm.mesh)
    specs = {path_name(path): leaf.get_value() for path, leaf in nnx.to_flat_state(found)}
    for path, value in lm.params.items():
        assert value.sharding.is_equivalent_to(specs[path], value.ndim)


def test_placing_again_starts_from_the_model_as_it_was(alone):
    lm = alone("llama").lm
    again = place(place(lm, {"tensor": 4}, "tensor"), {"fsdp": 2}, "fsdp")
    assert again.forms == place(lm, {"fsdp": 2}, "fsdp").forms
    for path, value in lm.params.items():
        np.testing.assert_array_equal(again.params[path], value)


@pytest.mark.report("D04")
def test_one_row_on_a_mesh_with_a_data_axis_is_computed_by_all(alone):
    lm = place(alone("llama").lm, {"data": 2, "tensor": 4}, "tensor×data")
    assert rzoo.generate(lm, PROMPTS[3], max_new_tokens=6).tokens == alone("llama").tokens[3]


def test_gradients_flow_on_a_mesh(alone):
    loss = lambda lm: jax.nn.logsumexp(lm(IDS)).mean()  # noqa: E731
    single = alone("deepseek-v3").lm
    expected = jax.jit(jax.grad(loss))(single).params
    found = jax.jit(jax.grad(loss))(place(single, {"expert": 4, "tensor": 2}, "expertxtensor")).params
    for path, value in expected.items():
        np.testing.assert_allclose(found[path], value, atol=5e-5)


GROUPED = replace(DIVISIBLE["llama"], kv_heads=2, layers=2)


@pytest.fixture(scope="module")
def grouped():
    """A model of 2 KV heads, to be put on 8 devices, and what it gives on one."""
    return Alone(GROUPED)


@pytest.mark.report("D06", "D07")
@pytest.mark.parametrize(("kv", "share"), [("split", 1), ("copied", 4)])
def test_kv_heads_fewer_than_devices_are_shared(grouped, kv, share):
    lm = place(grouped.lm, {"tensor": 8}, "tensor", kv=kv)
    assert dict(lm.mesh.shape) == {"tensor": 2, "group": 4}
    assert [answer.tokens for answer in rzoo.generate(lm, PROMPTS, max_new_tokens=6)] == grouped.tokens
    np.testing.assert_allclose(lm(IDS), grouped.logits, atol=5e-5)
    whole = cache_bytes(grouped.lm.blueprint, 8, 256)
    assert whole * share <= cache_bytes(lm.blueprint, 8, 256) < whole * share * 1.01
    extra = copies(lm.config, "float32", lm.forms.place)
    assert {"layers.*.attention.k", "layers.*.attention.v"} < set(extra)
    assert (
        extra["layers.*.attention.k"] == 2 * (4 - 1) * 2 * 8 * 32 * 4
    )  # layers, copies, heads, width of one, d, bytes


def test_a_split_cache_costs_two_small_exchanges_a_layer(grouped):
    lm = place(grouped.lm, {"tensor": 8}, "tensor")
    run = jax.jit(step.prefill_chunk, static_argnames="blueprint")
    empty = lm.blueprint.empty_cache(8, 256)
    text = run.lower(lm.blueprint, lm.params, IDS, np.full(8, 16, np.int32), empty).compile().as_text()
    found = Counter(re.findall(COLLECTIVES, text))
    assert found == {"all-reduce": 1 + 2 * 2, "all-gather": 2, "all-to-all": 2}  # queries out, partial softmaxes back


def test_long_chunks_are_written_across_the_borders_of_a_split_cache(grouped):
    lm = place(grouped.lm, {"tensor": 8}, "tensor")
    prompt = np.random.default_rng(1).integers(0, 96, 150).tolist()
    assert rzoo.generate(lm, [prompt], max_new_tokens=4) == rzoo.generate(grouped.lm, [prompt], max_new_tokens=4)


def mixture() -> tuple[Any, ...]:
    """x, indices, weights of 2048 tokens spread evenly, and the weights of 16 experts."""
    n, d, f, e, rng = 2048, 32, 16, 16, np.random.default_rng(0)
    indices = np.stack([np.arange(n) % e, (np.arange(n) * 3 + 1) % e], axis=1)
    stacks = [rng.normal(size=shape, scale=0.2) for shape in ((e, f, d), (e, f, d), (e, d, f))]
    axes = (("e", "f", "d"), ("e", "f", "d"), ("e", "d", "f"))
    made = [Weight(jnp.float32(s), out_sharding=a, eager_sharding=False) for s, a in zip(stacks, axes, strict=True)]
    return jnp.float32(rng.normal(size=(n, d))), jnp.int32(indices), jnp.float32(rng.uniform(size=(n, 2))), made


def test_experts_on_shards_compute_their_own_share_and_gather_no_weight():
    x, indices, weights, stacks = mixture()
    _, rules = resolve(DIVISIBLE["deepseek-v3"], {"expert": 8}, table("expert"))
    shared = SharedOut(experts_in_tiles, Placement(make_mesh({"expert": 8}), rules))
    gate, up, down = stacks
    values = [w.get_value() for w in stacks]

    def run(values):
        made = [
            Weight(v, out_sharding=w.out_sharding, eager_sharding=False) for v, w in zip(values, stacks, strict=True)
        ]
        gate, up, down = made
        return shared(x, indices, weights, gate, up, down, Numerics())

    program = jax.jit(run).lower(values).compile()
    np.testing.assert_allclose(
        jax.jit(run)(values), experts_reference(x, indices, weights, gate, up, down, Numerics()), atol=5e-5
    )
    assert Counter(re.findall(COLLECTIVES, program.as_text())) == {"all-reduce": 1}
    tiles = sum(-(-int(np.sum(np.asarray(indices) == expert)) // TILE) for expert in range(2))  # of the first device
    in_tile = 3 * 2 * TILE * 32 * 16
    dots = Counter(re.findall(r"f32\[(\S+)\]\S* dot\(", program.as_text()))
    assert dots == {f"{TILE},16": 2, f"{TILE},32": 1, "2048,32,1": 1}  # gate and up, down; the weighted sum
    assert tiles * in_tile <= 1.5 * (indices.size * 3 * 2 * 32 * 16) / 8


def test_a_quantized_weight_is_cut_on_block_borders_only():
    config = DIVISIBLE["llama"]
    quantized = lambda rows: Quantized(  # noqa: E731
        jnp.ones((64, 32), jnp.int8), jnp.ones((64 // rows, 1)), None, (rows, 32), (8, 8, 32)
    )
    lm = tiny(config)
    params = lm.params | {"layers.0.attention.q": quantized(16)}
    placed = place(lm.with_params(params), {"tensor": 4}, "tensor")
    parts = placed.params["layers.0.attention.q"]
    assert (parts.codes.sharding.shard_shape((64, 32)), parts.scale.sharding.shard_shape((4, 1))) == ((16, 32), (1, 1))
    np.testing.assert_allclose(placed(IDS), lm.with_params(params)(IDS), atol=5e-5)
    words = refused(lambda: place(lm.with_params(params), {"tensor": 8}, "tensor"))
    assert "layers.0.attention.q: 64 over tensor (8) cuts blocks of 16" in words


def test_a_tied_embedding_stands_at_both_ends_of_a_pipeline():
    single = tiny(replace(DIVISIBLE["llama"], tied=True))
    lm = place(single, {"pipe": 2}, "tensorxpipe")
    np.testing.assert_allclose(lm(IDS), single(IDS), atol=5e-5)


@pytest.mark.report("A37")
def test_stages_are_cut_by_bytes():
    assert stage_stops(replace(DIVISIBLE["llama"], layers=8), 4) == [2, 4, 6, 8]
    heavy_ends = replace(DIVISIBLE["llama"], vocab_size=96 * 40, layers=8)
    assert stage_stops(heavy_ends, 4) == [1, 4, 7, 8]
    assert stage_stops(replace(DIVISIBLE["llama"], layers=4), 4) == [1, 2, 3, 4]
    uneven = replace(DIVISIBLE["nemotron"], blocks=parse_layout("8/512 8/512 -/- -/- -/64 -/- -/64 8/512"))
    assert stage_stops(uneven, 3) == [1, 6, 8]  # by number, the first would hold two of the three heavy layers


def test_a_pipeline_refuses_what_needs_one_program(alone):
    lm = place(alone("llama").lm, {"pipe": 2}, "tensorxpipe")
    assert isinstance(lm.forms.place, Pipeline)
    assert "one program cannot hold a pipeline" in refused(lambda: jax.jit(lambda m: m(IDS))(lm))
    assert "capture is not possible under pipe" in refused(lambda: lm(IDS, capture=("hidden",)))


def refused(act) -> str:
    """The words with which something is refused."""
    with pytest.raises(RzooError) as error:
        act()
    return str(error.value)


@pytest.mark.report("D22")
def test_wrong_meshes_are_refused_in_words():
    place_on = lambda mesh, rules: forms_for(DIVISIBLE["llama"], mesh, rules, Forms())  # noqa: E731
    words = refused(lambda: place_on({"tensor": 16}, "tensor"))
    assert "tensor=16" in words and "nearest that works: tensor=8" in words
    words = refused(lambda: place_on({"data": 4, "tensor": 4}, "tensorxdata"))
    assert "mesh (data=4,tensor=4) needs 16 devices, this machine has 8 (cpu)" in words
    assert "xla_force_host_platform_device_count=16" in words
    assert "leave the mesh axis data (2) idle" in refused(lambda: place_on({"tensor": 4, "data": 2}, "tensor"))
    assert "mesh axis (tensr) is unknown; did you mean tensor?" in refused(lambda: place_on({"tensr": 4}, "tensor"))
    assert "mesh axis tensor (0) must be" in refused(lambda: place_on({"tensor": 0}, "tensor"))
    assert f"known: {', '.join(RULES)}" in refused(lambda: place_on({"tensor": 4}, "tensors"))
    assert "4 layers over pipe (8)" in refused(lambda: place_on({"pipe": 8}, "tensorxpipe"))
    assert "kv (both) must be split or copied" in refused(
        lambda: resolve(DIVISIBLE["llama"], {}, table("single"), "both")
    )


@pytest.mark.report("D01", "D03")
def test_all_that_does_not_divide_is_said_at_once():
    config = replace(TINY["deepseek-v3"], heads=6, vocab_size=98, ffn_width=50)
    words = refused(lambda: resolve(config, {"expert": 3, "tensor": 4}, table("expertxtensor")))
    assert ": experts (8) over expert (3)" in words
    assert "layers.0.attention.key_up [6, 8, 16]: query heads (6) over tensor (4)" in words
    assert "feed-forward width (50) over tensor (4)" in words
    assert "vocabulary (98) over tensor (4)" in words
    assert words.endswith("nearest that works: expert=2, tensor=2")


def test_a_mesh_is_written_as_text():
    assert parse_mesh("tensor=4, data=2") == {"data": 2, "tensor": 4}
    assert spelled(parse_mesh("tensor=4,data=2")) == "data=2,tensor=4"
    for text in ("tensor", "tensor=", "tensor=a", "tensor=2,tensor=2", "=2"):
        assert "must be sizes of different axes" in refused(lambda text=text: parse_mesh(text))
    assert implied_rules({"data": 2, "tensor": 4}) == "tensor×data"
    assert "no rules have all axes" in refused(lambda: implied_rules({"data": 2, "pipe": 4}))


# Of the golden checkpoints (vocabulary 97, 4 heads, 3 layers): what is refused on 2, 4 or 8 devices along every axis.
ALWAYS = {
    (rules, n) for rules in ("tensor", "tensor×data", "tensor×fsdp", "expert×tensor", "tensor×pipe") for n in (2, 4, 8)
}
NO_EXPERT = {("expert", n) for n in (2, 4, 8)}
REFUSED = {**{name: ALWAYS | NO_EXPERT for name in LLAMAS}, "deepseek_v3": ALWAYS}


@pytest.mark.report("D27")
@pytest.mark.parametrize("golden", REFUSED)
def test_goldens_that_do_not_divide_are_refused(golden):
    import json

    config = config_from_hf(json.loads((GOLDEN / golden / "config.json").read_text()))
    found = set()
    for rules in RULES[1:]:
        for n in (2, 4, 8):
            try:
                resolve(config, {axis: n for axis in table(rules).mesh_axes}, table(rules))
            except RzooError:
                found.add((rules, n))
    assert found == REFUSED[golden]


def test_the_choice_goes_by_bytes_and_traffic():
    dense, experts = DIVISIBLE["llama"], DIVISIBLE["deepseek-v3"]
    assert (choose(dense, 8).mesh, choose(dense, 8).rules) == ({"tensor": 8}, "tensor")
    assert choose(dense, 1).rules == "single"
    assert choose(replace(dense, heads=9, kv_heads=3, vocab_size=99, ffn_width=48), 8).mesh == {"tensor": 3}
    assert choose(experts, 8, rules="expert").mesh == {"expert": 8}
    assert "rules (expert) work on no mesh of up to 8 devices" in refused(lambda: choose(dense, 8, rules="expert"))
    assert str(choose(dense, 8)).startswith("mesh tensor=8, rules tensor: 0 MiB of weights a device")
    assert list(factorings(("data", "tensor"), 8)) == [
        *({"data": 2, "tensor": n} for n in (2, 3, 4)),
        {"data": 3, "tensor": 2},
        {"data": 4, "tensor": 2},
    ]
