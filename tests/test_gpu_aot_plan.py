"""Plans compiled for GPUs that are not there: Ultra on 64 H100, Super on one A100, the same program twice."""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor

import pytest

import rzoo
from rzoo.compile import deviceless
from rzoo.compile.targets import TARGETS

pytestmark = pytest.mark.extras
GIB = 2**30
ULTRA = {"model": "ultra-253b", "gpu": "h100", "mesh": {"tensor": 64}, "rules": "tensor", "batch": 64, "context": 8192}


@pytest.fixture(scope="module", autouse=True)
def environment(tmp_path_factory):
    """The interpreter that compiles, and a cache of plans of this module's own."""
    if deviceless.aot_python() is None:
        pytest.skip(f"needs an environment that compiles for GPUs: {deviceless.INSTALL}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RZOO_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def ultra(tmp_path_factory):
    """Ultra's decode step compiled in two processes: both answers and the digests of both programs."""
    paths = [tmp_path_factory.mktemp("hlo") / "program" for _ in range(2)]
    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(lambda path: deviceless.compile_for(ULTRA | {"hlo": str(path)}), paths))
    return answers, [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]


def test_two_processes_make_the_same_program(ultra):
    answers, digests = ultra
    assert digests[0] == digests[1]
    assert answers[0]["parts"] == answers[1]["parts"]


def test_ultra_on_64_gpus_with_the_cache_split(ultra):
    (part,) = ultra[0][0]["parts"]
    assert 7_918_789_632 <= part["weights"] <= 1.1 * 7_918_789_632
    assert part["arguments"] <= 10.5 * GIB
    assert part["temp"] <= 0.3 * GIB
    assert part["arguments"] == pytest.approx(part["weights"] + part["cache"], rel=1e-3)
    assert part["aliased"] == pytest.approx(part["cache"], rel=1e-3)  # the cache is changed in place
    assert ultra[0][0]["rss"] <= 1.5e9


def test_each_part_of_a_layer_ends_in_one_all_reduce_over_all_gpus(ultra):
    (part,) = ultra[0][0]["parts"]
    whole = [one for one in part["collectives"] if len(one["devices"]) == 64 and one["kind"] == "all-reduce"]
    config = next(info.config for info in rzoo.presets() if info.alias == "ultra-253b")
    halves = sum((block.attention is not None) + (block.ffn is not None) for block in config.blocks)
    assert sum(one["count"] for one in whole) == halves + 1  # and the embedding, whose rows are split


def test_copied_kv_heads_cost_eight_times_the_cache():
    plan = rzoo.plan(**ULTRA | {"kv": "copied"})
    assert plan.fits
    assert plan.figures["cache"].basis == "compiled"
    assert plan.figures["cache"].value == pytest.approx(8 * 2**31, rel=1e-3)


def test_one_row_gathers_no_weight():
    plan = rzoo.plan(**ULTRA | {"batch": 1})
    assert plan.figures["exchanged"].value < 2e7
    assert plan.figures["temp"].value < 1e8


def test_super_fits_one_a100_in_int8_alone():
    refused, fits = (rzoo.plan("super-49b", gpu="a100-80gb", weights=kind) for kind in ("bf16", "int8"))
    assert (refused.fits, fits.fits) == (False, True)
    assert refused.figures["weights"].value == 99_734_290_432
    assert {name: fits.figures[name].basis for name in ("weights", "temp", "peak", "launches")} == dict.fromkeys(
        ("weights", "temp", "peak", "launches"), "compiled"
    )
    largest = 2 * 8192 * 28672  # of a feed-forward weight in bfloat16
    assert fits.figures["temp"].value < 2 * largest  # no more than one layer is ever widened or copied


def test_a_pipeline_of_unlike_stages_is_compiled_stage_by_stage(tmp_path):
    config = next(info.config for info in rzoo.presets() if info.alias == "super-49b")
    fields = config.to_hf()
    fields |= {"num_hidden_layers": 6, "block_configs": fields["block_configs"][:6]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    plan = rzoo.plan(str(tmp_path), mesh="tensor=4,pipe=2", batch=4)
    assert [stage["name"] for stage in plan.stages] == ["stage 0: layers 0-2", "stage 1: layers 3-5"]
    of_stages = [{part: stage[part] for part in ("weights", "cache", "temp")} for stage in plan.stages]
    assert {part: plan.figures[part].value for part in of_stages[0]} in of_stages  # those of the fullest
    assert plan.figures["peak"].value >= max(one["weights"] + one["cache"] for one in of_stages)


@pytest.mark.parametrize("gpu", [name for name, device in TARGETS.items() if device.chip])
def test_every_target_compiles(gpu):
    fields = next(info.config for info in rzoo.presets() if info.alias == "smollm2").to_hf()
    job = {"model": fields | {"num_hidden_layers": 2}, "gpu": gpu, "mesh": {}, "rules": "single", "batch": 2}
    answer = deviceless.compile_for(job | {"context": 256, "phase": "prefill"})
    assert answer["parts"][0]["launches"] > 0


def test_a_mistake_in_a_job_comes_back_in_words():
    with pytest.raises(rzoo.RzooError, match=r"over tensor .5."):
        deviceless.compile_for(ULTRA | {"mesh": {"tensor": 5}})
