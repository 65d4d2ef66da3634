"""What the decode steps do that are compiled for a GPU which is not there, read from their scheduled programs.

Models of a few layers at the sizes of the published ones, one row, room for 4096 tokens, an H100. The differences
between n and n + 1 layers are one layer's. Goals of a dense layer and of one of experts were 16 and 24 launches.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import rzoo
from rzoo.compile import deviceless, hlo, modelled
from rzoo.compile.hlo_facts import Facts, facts, overlaps

pytestmark = pytest.mark.extras
SMALL = 2**20  # bytes of what may be moved or widened: an eighth of one layer's keys
MISTAKES = Path(__file__).with_name("planted_mistakes.py")
SUMS = {"attend_decode": "in sums", "experts_cached": "in sums"}
# Model and weights -> numbers of layers to compile.
STEPS = {
    ("nano-8b", "bf16"): (2, 3),
    ("nano-8b", "int8"): (2, 3),
    ("super-49b", "int8"): (3, 4),
    ("r1", "fp8"): (2, 3, 4, 5),
}
# The last layer of so many -> launches that were reached.
LAUNCHES = {
    ("nano-8b", "bf16", 3): 15,
    ("nano-8b", "int8", 3): 15,
    ("super-49b", "int8", 4): 16,
    ("r1", "fp8", 3): 22,  # dense: latent attention has 15 of them
    ("r1", "fp8", 5): 35,  # experts: their routing has 9
}


@dataclass(frozen=True)
class Step:
    """A compiled decode step: what target_programs.py says of it, its facts, and the bytes that it has to read."""

    part: dict[str, Any]
    facts: Facts
    program: hlo.Program
    must_read: float


def fields(name: str, layers: int) -> dict[str, Any]:
    """The config.json of a preset's first layers."""
    found = next(info.config for info in rzoo.presets() if info.alias == name).to_hf() | {"num_hidden_layers": layers}
    if "block_configs" in found:
        found["block_configs"] = found["block_configs"][:layers]
    return found


def compiled(folder: Path, name: str, weights: str, layers: int, mistake: str | None = None, **changes: Any) -> Step:
    """A step in sums; mistake: one of planted_mistakes.py. changes: of the job."""
    request = {"model": fields(name, layers), "gpu": "h100", "weights": weights, "batch": 1, "context": 4096}
    request |= {"phase": "decode", "kv": "split", "mesh": None, "rules": None}
    job = request | {"mesh": {}, "rules": "single", "stacked": False, "forms": SUMS, "products": "sums"} | changes
    path = folder / f"{name}-{weights}-{layers}-{mistake}-{job['rules']}.hlo"
    child: Any = {"child": (str(MISTAKES), mistake)} if mistake else {}
    (part,) = deviceless.compile_for(job | {"hlo": str(path)}, **child)["parts"]
    made = modelled.setting(request | {"devices": None} | changes)
    (held,) = modelled.parts(made)
    text = path.read_text()
    return Step(part, facts(text, SMALL), hlo.parse(text), held.read + held.cache)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where scheduled programs lie; skips where nothing compiles."""
    if deviceless.aot_python() is None:
        pytest.skip(f"needs an environment that compiles for GPUs: {deviceless.INSTALL}")
    return tmp_path_factory.mktemp("hlo")


@pytest.fixture(scope="module")
def steps(folder):
    """(model, weights, layers) -> its Step."""
    cases = [(name, weights, layers) for (name, weights), numbers in STEPS.items() for layers in numbers]
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(cases, pool.map(lambda case: compiled(folder, *case), cases), strict=True))


@pytest.fixture(scope="module")
def mistaken(folder):
    """Mistake -> the step of nano-8b in 8 bits with it."""
    make = partial(compiled, folder, "nano-8b", "int8", 2)
    with ThreadPoolExecutor(2) as pool:
        names = ("upcast", "transpose", "undonated")
        return dict(zip(names, pool.map(make, names), strict=True))


deepest = pytest.mark.parametrize("case", [(*name, numbers[-1]) for name, numbers in STEPS.items()], ids=str)


@deepest
def test_no_cache_is_laid_out_anew_and_no_weight_is_widened_in_memory(steps, case):
    assert steps[case].facts.moved == ()
    assert steps[case].facts.widened == ()


@deepest
def test_the_cache_is_changed_in_place(steps, case):
    assert steps[case].facts.aliased == steps[case].part["cache"]


@deepest
def test_a_step_reads_its_weights_and_its_cache_once(steps, case):
    assert steps[case].must_read < steps[case].facts.read <= 1.05 * steps[case].must_read


@deepest
def test_memory_beside_weights_and_cache_is_less_than_eight_megabytes(steps, case):
    assert steps[case].part["temp"] < 8e6


@pytest.mark.parametrize("case", LAUNCHES, ids=str)
def test_a_layer_launches_no_more_than_was_reached(steps, case):
    name, weights, layers = case
    of_layer = steps[case].facts.launches - steps[name, weights, layers - 1].facts.launches
    assert of_layer <= LAUNCHES[case]


def test_a_step_of_r1_reads_the_experts_that_were_chosen_and_no_others(steps):
    before, after = (steps["r1", "fp8", layers] for layers in (4, 5))
    held = after.part["weights"] - before.part["weights"]
    assert held > 11e9  # 256 experts
    assert after.facts.read - before.facts.read < 1.05 * (after.must_read - before.must_read) < 0.06 * held


def test_a_planted_upcast_is_found(mistaken):
    found = mistaken["upcast"]
    assert found.facts.widened
    assert found.facts.read > 1.05 * found.must_read


def test_a_planted_transpose_is_found(mistaken):
    moved = mistaken["transpose"].facts.moved
    assert {one.bytes for one in moved} == {2 * 8 * 4096 * 128}  # keys, or values, of a layer
    assert len(moved) >= 2


def test_a_cache_that_is_not_donated_is_found(mistaken):
    assert mistaken["undonated"].facts.aliased == 0
    assert mistaken["undonated"].part["outputs"] > mistaken["undonated"].part["cache"]


@pytest.fixture(scope="module")
def spread(folder):
    """Rules -> the step of nano-8b on 8 GPUs: products in sums are for one."""
    meshes = {"tensor": 1, "fsdp": 8}  # rules -> rows
    make = lambda rules: compiled(  # noqa: E731
        folder, "nano-8b", "bf16", 2, mesh={rules: 8}, rules=rules, products="dots", batch=meshes[rules]
    )
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(meshes, pool.map(make, meshes), strict=True))


def test_attention_and_feed_forward_end_in_one_all_reduce_each(spread):
    found = {one["kind"]: one for one in spread["tensor"].part["collectives"]}
    assert set(found) <= {"all-reduce", "all-gather"}
    assert found["all-reduce"]["count"] == 2 * 2 + 1  # and the embedding, whose rows are split
    assert found["all-reduce"]["bytes"] == (2 * 2 + 1) * 4 * 4096  # in float32
    assert found["all-gather"]["bytes"] == 8 * 8  # the likeliest token of each part of the vocabulary


def test_collectives_are_asynchronous_and_gathers_run_beside_other_work(spread):
    for rules, kind in (("tensor", "all-reduce"), ("fsdp", "all-gather")):
        found = overlaps(spread[rules].program)
        counted = next(one["count"] for one in spread[rules].part["collectives"] if one["kind"] == kind)
        assert len([one for one in found if one.kind == kind]) >= counted
    beside = sum(one.bytes for one in found if one.launches)
    assert beside > 0.9 * sum(one.bytes for one in found)
