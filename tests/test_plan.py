"""Plans by arithmetic: bytes as real arrays have them, words, JSON, the cache, the nearest plans that fit."""

import dataclasses
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rzoo
from rzoo.compile import deviceless, modelled, plan_words, shapes
from rzoo.compile.aot import prefill_program
from rzoo.compile.folders import private_folder
from rzoo.compile.kernels import policy_forms
from rzoo.compile.targets import TARGETS, target
from rzoo.core import RzooError
from rzoo.handle import LM
from rzoo.models.attention import partial_sums
from rzoo.models.registry import abstract_weights, count_parameters, initialize, preset
from rzoo.models.step import Blueprint
from rzoo.models.weights import Numerics, Quantized
from rzoo.sharding.place import place
from rzoo.sharding.placement import per_device
from tests.test_cli import rzoo as run
from tests.tiny import TINY


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Plans of a test are kept nowhere else, and nothing is compiled."""
    monkeypatch.setenv("RZOO_CACHE", str(tmp_path))
    monkeypatch.setenv(deviceless.SETTING, "none")


def test_targets_describe_themselves_to_xla():
    text = target("H100").description
    assert "device_memory_size: 84942979072" in text
    assert 'device_description_str: "NVIDIA H100 80GB HBM3"' in text
    assert "feature_extension: ACCELERATED_FEATURES" in text
    assert "feature_extension: NONE" in target("a100-80gb").description
    for gpu in TARGETS.values():
        assert gpu.memory > 0 and gpu.bandwidth > 0 and gpu.rate("bf16") > 0
        assert gpu.chip is None or gpu.description.count("{") == gpu.description.count("}")


def test_a_rate_that_a_device_lacks_is_that_of_bf16():
    assert target("a100-80gb").rate("fp8") == target("a100-80gb").rate("bf16") < target("h100").rate("fp8")


def test_nothing_is_compiled_for_a_device_of_arithmetic():
    with pytest.raises(RzooError, match=r"known for arithmetic alone\n.*compiled for a100-80gb, h100"):
        _ = target("rpi5").description


@pytest.mark.parametrize(
    ("name", "mesh", "rules"),
    [
        ("llama", {"tensor": 2}, "tensor"),
        ("llama", {"tensor": 4}, "tensor"),  # more devices than KV heads
        ("llama-tied", {"pipe": 2}, "tensor×pipe"),
        ("deepseek-v3", {"expert": 4}, "expert"),
        ("nemotron", {"fsdp": 2}, "fsdp"),
    ],
)
def test_bytes_by_arithmetic_are_those_of_real_arrays(name, mesh, rules):
    config = TINY[name]
    if "tensor" in mesh:
        config = dataclasses.replace(config, vocab_size=96)
    held = place(LM(config, initialize(config), policy_forms("exact", "float32")), mesh, rules).params
    per = np.zeros(jax.device_count())
    for value in held.values():
        for shard in [shard for leaf in jax.tree.leaves(value) for shard in leaf.addressable_shards]:
            per[shard.device.id] += shard.data.nbytes
    plan = rzoo.plan(config, mesh=mesh, rules=rules, context=64, batch=2)
    bias = 4 * sum(w.size for p, (_, w) in abstract_weights(config).items() if p.endswith("router.bias"))
    copies = bias if "expert" not in mesh else bias // mesh["expert"]  # kept in float32
    assert plan.figures["weights"].value == (per.max() - copies) / 2 + copies


def test_the_arithmetic_of_the_editions():
    nano = rzoo.plan("nano-8b", gpu="rpi5", weights="int8", context=256)
    count = count_parameters(preset("nano-8b")[1].config)
    assert count == pytest.approx(8.03e9, rel=1e-3)
    assert count < nano.figures["weights"].value < 1.001 * count  # a scale for each output
    assert not nano.fits
    super_bf16, super_int8 = (rzoo.plan("super-49b", gpu="a100-80gb", weights=kind) for kind in ("bf16", "int8"))
    assert super_bf16.figures["weights"].value == 2 * count_parameters(preset("super-49b")[1].config)
    assert (super_bf16.fits, super_int8.fits) == (False, True)
    assert super_bf16.over == super_bf16.figures["peak"].value - super_bf16.usable
    ultra = rzoo.plan("ultra-253b", devices=64, rules="tensor", batch=64, context=8192)
    assert 7_918_789_632 <= ultra.figures["weights"].value <= 1.1 * 7_918_789_632
    copied = rzoo.plan("ultra-253b", devices=64, rules="tensor", batch=64, context=8192, kv="copied")
    assert copied.figures["cache"].value == pytest.approx(8 * ultra.figures["cache"].value, rel=1e-6)
    r1 = {gpu: rzoo.plan("r1", gpu=gpu, mesh="tensor=8", weights="fp8", batch=8) for gpu in ("h200", "a100-80gb")}
    assert (r1["h200"].fits, r1["a100-80gb"].fits) == (True, False)


def test_the_nearest_plans_that_fit_are_named_and_do_fit():
    plan = rzoo.plan("super-49b", gpu="a100-80gb")
    changes = [near["change"] for near in plan.nearest]
    assert changes == [{"weights": "int8"}, {"rules": "tensor", "mesh": {"tensor": 2}, "devices": 2}, {"gpu": "h200"}]
    asked = {"gpu": "a100-80gb", "devices": None}
    assert all(rzoo.plan("super-49b", **asked | change).fits for change in changes)
    assert "fits with rules tensor, devices 2: 50.28 GB a GPU (modelled)" in plan_words.words(plan)


def test_as_many_sequences_fit_as_are_said():
    first = rzoo.plan("nano-8b", context=8192)
    asked = {"context": 8192}
    assert rzoo.plan("nano-8b", **asked, batch=first.sequences - 1).fits
    assert not rzoo.plan("nano-8b", **asked, batch=first.sequences + 2).fits


def test_a_plan_survives_json_and_every_figure_has_a_basis():
    plan = rzoo.plan(TINY["nemotron"], mesh={"pipe": 2}, rules="tensor×pipe", context=64)
    text = json.dumps(plan.to_json())
    assert json.loads(text)["fits"] is True
    assert rzoo.Plan.from_json(json.loads(text)).to_json() == json.loads(json.dumps(plan.to_json()))
    assert {figure.basis for figure in plan.figures.values()} == {"modelled"}


def test_what_runs_beside_collectives_is_a_table():
    plan = rzoo.plan("nano-8b", mesh={"tensor": 2})
    assert plan_words.overlap_table(plan) == "no collective runs beside other work: none was compiled"
    found = {"kind": "all-reduce", "name": "start.1", "bytes": 8192, "launches": 2, "read": 3 * 10**6}
    row = "| all-reduce | start.1 | 8.19 kB | 2 | 3.00 MB |"
    assert plan_words.overlap_table(dataclasses.replace(plan, overlaps=(found,))).splitlines()[-1] == row


def test_a_kept_plan_is_read_without_jax(tmp_path):
    code = "import sys, rzoo; p = rzoo.plan('super-49b', gpu='h200'); print('jax' in sys.modules, p.fits)"
    command = [sys.executable, "-c", code]
    said = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(2)]
    assert said == ["True True\n", "False True\n"]
    assert len(list((tmp_path / "plans").iterdir())) == 1


def test_a_broken_file_of_the_cache_is_made_again():
    made = rzoo.plan(TINY["llama"], context=64)
    (file,) = private_folder("plans").iterdir()
    file.write_text('{"figures": 3}')
    assert rzoo.plan(TINY["llama"], context=64).to_json() == made.to_json()
    assert json.loads(file.read_text())["gpu"] == "h100"


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"gpu": "h1000"}, r"gpu \(h1000\) is unknown; did you mean h100"),
        ({"weights": "int9"}, r"weights \(int9\) is unknown; did you mean int8"),
        ({"devices": 3, "rules": "tensor"}, r"feed-forward width .14336. over tensor .3."),
        ({"devices": 4, "mesh": "tensor=2"}, r"mesh \(tensor=2\) is not of 4 devices"),
        ({"devices": 2, "rules": "single"}, r"rules \(single\) leave 1 of 2 devices idle"),
        ({"rules": "tenser", "devices": 2}, r"rules \(tenser\) are unknown"),
        ({"phase": "train"}, r"phase \(train\) must be decode or prefill"),
        ({"batch": 0}, r"batch \(0\) must be an integer of at least 1"),
        ({"context": 10**6}, "is more than the 131072 tokens"),
        ({"kv": "halved", "devices": 2}, r"kv \(halved\) must be split or copied"),
    ],
)
def test_mistakes_are_told(asked, words):
    with pytest.raises(RzooError, match=words):
        rzoo.plan("nano-8b", **asked)


def test_a_model_that_is_none_is_told(tmp_path):
    with pytest.raises(RzooError, match=r"preset \(nano-9b\) is unknown; did you mean nano-8b"):
        rzoo.plan("nano-9b")
    with pytest.raises(RzooError, match="no name, folder, handle or config"):
        rzoo.plan(3)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(RzooError, match="is no JSON"):
        rzoo.plan(str(tmp_path))


def test_a_folder_with_a_config_is_planned(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY["llama"].to_hf()))
    assert rzoo.plan(str(tmp_path), context=64).figures == rzoo.plan(TINY["llama"], context=64).figures


def test_an_environment_with_wrong_versions_gets_the_line_that_mends_it(monkeypatch):
    with pytest.raises(
        RzooError, match=r"jax-cuda12-pjrt is 0.9.0, jaxlib is 0.10.2\n  .* -m pip install .*pjrt==0.10.2"
    ):
        deviceless.check(sys.executable, dict.fromkeys(deviceless.NEEDED, "0.10.2") | {deviceless.PLUGIN: "0.9.0"})
    with pytest.raises(RzooError, match=r"nvidia-cuda-nvcc-cu12 is missing\n"):
        deviceless.check(sys.executable, dict.fromkeys(deviceless.NEEDED, "0.10.2") | {deviceless.COMPILER: None})
    monkeypatch.setenv(deviceless.SETTING, "/no/such/python")
    with pytest.raises(RzooError, match=r"RZOO_AOT_PYTHON \(/no/such/python\) is no interpreter"):
        rzoo.plan("nano-8b")


def test_an_environment_is_looked_for_without_importing_one(monkeypatch, tmp_path):
    monkeypatch.delenv(deviceless.SETTING)
    usual = deviceless.aot_python()  # that of the checkout where there is one
    assert usual is None or usual.is_file()
    python = tmp_path / ".venv-aot" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    assert deviceless.aot_python() in (usual, python)
    assert deviceless.aot_python() is not None


def test_rules_that_gather_weights_pay_for_it():
    plan = rzoo.plan("nano-8b", devices=8, rules="fsdp")
    (gathered,) = plan.collectives
    assert (gathered["kind"], gathered["bytes"]) == ("all-gather", 8 * plan.figures["weights"].value)
    assert plan.figures["exchange_seconds"].value > plan.figures["memory_seconds"].value


def test_compiling_without_an_environment_names_the_command():
    with pytest.raises(RzooError, match="the extra gpu-aot is missing\n  rzoo plan --install-aot"):
        deviceless.compile_for({"gpu": "h100"})


def test_a_day_of_requests_asks_for_replicas():
    plan = rzoo.plan("nano-8b", batch=8)
    rate = plan.figures["tokens_per_second"].value
    found = plan_words.demand(plan, requests=86400, tokens_in=1, tokens_out=int(3 * rate))
    assert (found.prompt, found.answer, found.replicas) == (1, int(3 * rate), 3)
    with pytest.raises(RzooError, match=r"tokens_out \(0\) must be at least 1"):
        plan_words.demand(plan, 1, 1, 0)
    with pytest.raises(RzooError, match="from a plan of decode"):
        plan_words.demand(rzoo.plan("nano-8b", phase="prefill"), 1, 1, 1)


def test_the_command_answers_without_the_extra():
    done = run("plan", "super-49b", "--gpu", "a100-80gb", "--json", "--requests-per-day", "1000")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["fits"], found["figures"]["weights"]["basis"]) == (False, "modelled")
    assert found["demand"]["replicas"] == 1
    text = run("plan", "nano-8b", "--devices", "8", "--rules", "tensor", "--compare").stdout
    assert "nano-8b in bf16 on 8 × h100, tensor 8: decode, batch 1, context 4096\nfits: " in text
    assert "as compiled: rzoo plan --install-aot" in text
    assert "| nano-8b in bf16 on 8 × h100, fsdp 8: decode" in text


def test_the_command_wants_a_model():
    done = run("plan", "--gpu", "h100")
    assert (done.returncode, done.stderr) == (
        2, "rzoo: model is missing\n  name one, such as: rzoo plan nano-8b --gpu h100\n"
    )  # fmt: skip


def test_a_plan_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    plan_words.plot([rzoo.plan("nano-8b"), rzoo.plan("super-49b")], tmp_path / "plans.png")
    assert (tmp_path / "plans.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(RzooError, match=r"plans.odd can't be written"):
        plan_words.plot([rzoo.plan("nano-8b")], tmp_path / "plans.odd")


@pytest.mark.parametrize("starts", [[3, 7], [-5, 2]])
def test_attention_in_one_step_is_that_in_a_loop(starts):
    q, keys, values = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(SHAPES))
    given = (keys.shape[1], keys.shape[2], values.shape[3], jnp.asarray(starts), 0.3, Numerics())
    block = lambda at, size: tuple(jax.lax.dynamic_slice_in_dim(a, at, size, axis=2) for a in (keys, values))  # noqa: E731
    for once, looped in zip(partial_sums(q, block, *given, 128), partial_sums(q, block, *given, 4), strict=True):
        assert jnp.allclose(once, looped, atol=1e-5)


SHAPES = ((2, 1, 4, 8), (2, 2, 16, 8), (2, 2, 16, 8))  # of queries, keys and values


def row_scaled(shape: tuple[int, ...], inputs: int) -> Quantized:
    """int8 codes with one scale for each output, the last `inputs` axes summed over."""
    rng = np.random.default_rng(0)
    m = int(np.prod(shape[:-inputs]))
    codes = rng.integers(-127, 128, (m, int(np.prod(shape[-inputs:])))).astype(np.int8)
    scale = jnp.asarray(rng.uniform(1e-3, 1e-2, (m, 1)), jnp.float32)
    return Quantized(jnp.asarray(codes), scale, None, (1, codes.shape[1]), shape)


@pytest.mark.parametrize("mesh", [{"tensor": 2}, {"tensor": 4}])
def test_weights_with_a_scale_for_each_output_split_over_their_inputs(mesh):
    config = dataclasses.replace(TINY["llama"], vocab_size=96)
    params = initialize(config)
    for path, (axes, weight) in abstract_weights(config).items():
        if path.startswith("layers.") and len(axes) > 1:
            params[path] = row_scaled(weight.shape, len(axes) - 1 if axes[0] == "d" else 1)
    alone = LM(config, params, policy_forms("exact", "float32"))
    ids = np.arange(12).reshape(2, 6)
    assert np.allclose(place(alone, mesh, "tensor")(ids), alone(ids), atol=1e-4)


def test_shapes_of_weights_split_as_arrays_do():
    config = dataclasses.replace(TINY["llama"], vocab_size=96)
    lm = place(LM(config, initialize(config), policy_forms("exact", "float32")), {"tensor": 4}, "tensor")
    asked = {"model": config.to_hf(), "gpu": "h100", "devices": None, "rules": None, "mesh": {"tensor": 4}}
    made = modelled.setting(asked | {"kv": "split", "weights": "bf16", "batch": 1, "context": 8, "phase": "decode"})
    found = shapes.placed(shapes.weight_shapes(config, "bf16"), config, modelled.place_of(made))
    for path, value in lm.params.items():
        assert 2 * shapes.device_bytes(found[path]) == max(per_device(value)), path


@pytest.mark.parametrize("rows", [1, 2])
def test_stacked_layers_write_into_a_split_cache_what_a_device_holds(rows):
    config = dataclasses.replace(TINY["llama"], vocab_size=96)
    alone = LM(config, initialize(config), policy_forms("exact", "float32"))
    grouped = place(alone, {"tensor": 4}, "tensor")  # 2 KV heads: positions are split in two
    ids, counts = np.arange(rows * 12).reshape(rows, 12).astype(np.int32), np.full(rows, 12, np.int32)
    found = []
    for lm, stacked in ((alone, False), (grouped, True)):
        blueprint = Blueprint(config, dataclasses.replace(lm.forms, stacked=stacked))
        logits, cache = prefill_program()(blueprint, lm.params, ids, counts, blueprint.empty_cache(rows, 32))
        again, _ = prefill_program()(blueprint, lm.params, ids, counts, cache)
        found.append((logits, again))
    assert all(np.allclose(one, other, atol=1e-4) for one, other in zip(*found, strict=True))
