"""The tuner: its rule on simulated times, both gates, records, and what becomes of candidates that fail."""

import json
import time
from dataclasses import replace

import jax
import numpy as np
import pytest
import tokenizers
from jax.experimental.compilation_cache import compilation_cache

from rzoo.compile import gates, kernels
from rzoo.compile.autotune import Candidate, Search, candidates, decided, tune
from rzoo.compile.measure import LOOKS, Comparison, judged, most_against
from rzoo.compile.precision import BOUNDS
from rzoo.compile.record import Choice, Record, apply, key_of, path_of, read, recorded, write
from rzoo.compile.storage import Laid, lay_out
from rzoo.compile.trial import failure
from rzoo.compile.workload import Case, Work
from rzoo.core import RzooError
from rzoo.models.attention import attend
from rzoo.models.registry import initialize
from rzoo.sharding.place import place
from rzoo.tokenizer import Tokenizer
from tests.test_every_model import IDS, tiny
from tests.tiny import DIVISIBLE

DECODE = Case("decode", 1, 2)


def simulated(rng, gain, noise):
    """The verdict on paired times whose noise is log-normal, a fifth of them disturbed by something else."""
    mine: list[float] = []
    theirs: list[float] = []
    for look in LOOKS:
        while len(mine) < look:
            slow = 1 + rng.exponential(1.0) * (rng.random(2) < 0.2)
            a, b = np.exp(rng.normal(0, noise, 2)) * slow
            mine.append(a / gain)
            theirs.append(b)
        found = judged(mine, theirs, last=look == LOOKS[-1])
        if found is not None:
            return found
    raise AssertionError("no verdict at the last look")


@pytest.mark.parametrize("noise", [0.005, 0.05, 0.15])
def test_equal_candidates_hardly_ever_win_and_are_not_called_slower(noise):
    rng = np.random.default_rng(0)
    words = [simulated(rng, 1.0, noise).word for _ in range(400)]
    assert words.count("win") <= 400 * 2 / 40
    assert words.count("loss") <= 400 * 2 / 40


@pytest.mark.parametrize(("gain", "noise"), [(1.3, 0.1), (3.0, 0.3), (1.05, 0.01)])
def test_a_gain_above_the_noise_is_found(gain, noise):
    rng = np.random.default_rng(1)
    assert sum(simulated(rng, gain, noise).word == "win" for _ in range(200)) >= 190


def test_a_gain_below_the_noise_is_no_win():
    rng = np.random.default_rng(2)
    assert sum(simulated(rng, 1.005, 0.2).word == "win" for _ in range(200)) <= 8


def test_the_sign_test_allows_as_many_rounds_against_as_the_level_does():
    assert [most_against(n) for n in LOOKS] == [0, 2, 8]


def comparison(word, ratio):
    """A comparison with this outcome."""
    return Comparison(word, ratio, ratio, ratio, 1.0, 8)


@pytest.mark.parametrize(
    ("outcomes", "result"),
    [
        ([("win", 1.3), ("even", 1.0)], "win"),
        ([("even", 1.2), ("even", 1.0)], "no win"),
        ([("win", 1.3), ("even", 0.9)], "loss"),
        ([("win", 1.3), ("loss", 0.8)], "loss"),
    ],
)
def test_a_candidate_wins_somewhere_and_loses_nowhere(outcomes, result):
    assert decided([comparison(*outcome) for outcome in outcomes]) == result


@pytest.fixture
def lm(tmp_path, monkeypatch):
    """A tiny model; records go to a folder of this test."""
    monkeypatch.setenv("RZOO_CACHE", str(tmp_path / "cache"))
    return tiny("llama")


def search(lm):
    """A search over one case, with time left."""
    return Search(lm, [DECODE], time.monotonic() + 600, lambda line: None)


def of_form(name):
    """A candidate that puts the form `name` into attend_decode."""
    return Candidate(name, lambda c: c.with_entry("forms", ("attend_decode", name)), ("decode",))


def no_number(q, keys, values, starts, scale, numerics):
    """Not a number."""
    return attend(q, keys, values, starts, scale, numerics) * np.nan


def no_memory(*arguments):
    """What XLA raises where memory is short."""
    raise MemoryError("out of memory while trying to allocate 99 GiB")


def one_percent_off(q, keys, values, starts, scale, numerics):
    """A hundredth too much."""
    return 1.01 * attend(q, keys, values, starts, scale, numerics)


def test_what_fails_is_recorded_and_the_search_goes_on(lm, monkeypatch):
    planted = {"no number": no_number, "no memory": no_memory, "one percent": one_percent_off}
    for name, form in planted.items():
        monkeypatch.setitem(kernels.FORMS["attend_decode"], name, form)
    running = search(lm)
    for name in (*planted, "not there", "reference"):
        running.consider(of_form(name))
    results = {entry["name"]: (entry["result"], entry.get("why", "")) for entry in running.record.candidates}
    assert list(results) == [*planted, "not there", "reference"]
    assert results["no number"][0] == results["one percent"][0] == "refused by gate (a)"
    assert "attend_decode differs by 0.01, more than 5e-06" in results["one percent"][1]
    assert results["no memory"] == ("failed", "MemoryError: out of memory while trying to allocate 99 GiB")
    assert "form attend_decode (not there) is unknown" in results["not there"][1]
    assert "times" in running.record.candidates[-1]
    kept = json.loads(path_of(running.record.key).read_text(), parse_constant=pytest.fail)
    assert [entry["name"] for entry in kept["candidates"]] == list(results)


@pytest.mark.parametrize("decode", [True, False])
def test_forms_of_latent_attention_and_experts_pass_gate_a_and_a_planted_error_does_not(decode):
    seen = gates.activations(tiny("deepseek-v3"), IDS[:1, :8])
    fields = ["latent_attend_decode" if decode else "latent_attend_prefill", "experts_cached"]
    for field in fields:
        for name, form in kernels.FORMS[field].items():
            assert gates.form_error(field, form, seen) <= gates.FLOAT32_ERROR, (field, name)
        wrong = lambda *given, right=kernels.FORMS[field]["reference"]: 1.01 * right(*given)  # noqa: E731
        assert gates.form_error(field, wrong, seen) == pytest.approx(0.01, rel=1e-3)
    assert gates.form_error("stacked", True, seen) == 0.0


def test_gate_b_reads_text_where_there_is_a_tokenizer(lm):
    known = {chr(i): i for i in range(lm.config.vocab_size)}
    tokenizer = Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE(known, [])))
    read, drawn = gates.sample_ids(replace(lm, about=replace(lm.about, tokenizer=tokenizer))), gates.sample_ids(lm)
    assert read.shape == drawn.shape == (2, 160)
    assert read.reshape(-1)[:100].tolist() == [known[c] for c in gates.TEXT if c in known][:100]
    assert drawn.min() >= 0 and drawn.max() < lm.config.vocab_size


def test_a_killed_search_goes_on_from_its_record(lm):
    first = search(lm)
    first.consider(of_form("blocks of 32"))
    second = search(lm)
    second.take_up()
    second.consider(of_form("blocks of 32"))
    assert len(second.record.candidates) == 1
    second.consider(of_form("blocks of 128"))
    assert len(read(path_of(key_of(lm))).candidates) == 2


def test_one_percent_in_one_layer_fails_gate_a(lm):
    seen = gates.activations(lm, IDS[:1])
    params = lay_out(lm.config, lm.params, (), {"layers.{}.mlp.up": "pieces"})
    assert gates.weights_error(lm, params, seen)[0] <= gates.FLOAT32_ERROR
    planted = params["layers.1.mlp.up"]
    assert isinstance(planted, Laid)
    wrong = {**params, "layers.1.mlp.up": jax.tree.map(lambda a: 1.01 * a, planted)}
    worst, path = gates.weights_error(lm, wrong, seen)
    assert (round(worst, 3), path) == (0.01, "layers.1.mlp.up")


def test_a_wrong_scale_fails_gate_b_and_the_true_one_passes(lm):
    expected = gates.float32_logits(lm, IDS)
    right = gates.distances(gates.logits_of(lm, IDS), expected)
    assert gates.beyond(BOUNDS["exact"], right) == ""
    scaled = lm.with_params({**lm.params, "norm.scale": 1.05 * lm.params["norm.scale"]})
    wrong = gates.distances(gates.logits_of(scaled, IDS), expected)
    assert "logit" in gates.beyond(BOUNDS["exact"], wrong)
    assert "kl_mean" in gates.beyond(BOUNDS["stored"], gates.distances(2 * expected, expected))
    large = 30 * expected / np.abs(expected).max()
    assert gates.distances(large + 2e-4, large)["logit"] == pytest.approx(2e-4 / 3, rel=1e-2)
    assert gates.beyond(BOUNDS["stored"], gates.distances(expected * np.nan, expected))


CHOICE = Choice(
    joined=("layers.{}.attention.q",),
    layouts=(("layers.{}.mlp.down", "transposed"),),
    forms=(("attend_decode", "blocks of 32"), ("stacked", "stacked")),
    options=(("decode 1", (("xla_cpu_prefer_vector_width", 256),)),),
)


def test_a_record_is_kept_and_applied_to_the_same_handle_alone(lm):
    write(Record(key_of(lm), CHOICE, summary={"words": "decode 1 1.30x"}))
    tuned, line = recorded(lm)
    assert tuned.record.choice == CHOICE
    assert "decode 1 1.30x" in line
    np.testing.assert_allclose(tuned(IDS), lm(IDS), atol=3e-5)
    other, line = recorded(replace(lm, policy="stored", bound=BOUNDS["stored"]))
    assert other.record is None
    assert line == "1 tuning record(s) of this model ignored: other bound, policy"
    assert recorded(tiny("qwen2"))[1] is None


def test_a_broken_record_is_ignored_with_a_line(lm):
    path = write(Record(key_of(lm), CHOICE))
    path.write_text(path.read_text()[:100])
    assert recorded(lm)[0] is lm
    assert "is no tuning record" in recorded(lm)[1]
    write(Record(key_of(lm), Choice(layouts=(("head", "spiral"),))))
    assert "layout (spiral) is unknown" in recorded(lm)[1]


@pytest.fixture
def no_compile_cache():
    """What is compiled is compiled anew."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


def test_the_same_record_gives_the_same_optimised_program(lm, no_compile_cache):
    texts = []
    for _ in range(2):
        tuned = apply(Record(key_of(lm), CHOICE), lm)
        jax.clear_caches()
        work = Work(tuned.blueprint, tuned.params, DECODE, tuned.record.options("decode", 1))
        texts.append(work.compiled().as_text())
    assert texts[0] == texts[1]


def test_the_empty_record_gives_the_program_of_no_record(lm):
    empty = apply(Record(key_of(lm)), lm)
    texts = [
        Work(m.blueprint, m.params, DECODE, Record({}).options("decode", 1)).compiled().as_text() for m in (lm, empty)
    ]
    assert texts[0] == texts[1]


def test_options_are_those_of_the_smallest_tuned_batch_that_holds_the_rows():
    options = tuple((f"decode {b}", (("xla_cpu_prefer_vector_width", b),)) for b in (1, 8))
    record = Record({}, Choice(options=options))
    assert [dict(record.options("decode", rows))["xla_cpu_prefer_vector_width"] for rows in (1, 2, 8, 9)] == [
        1,
        8,
        8,
        8,
    ]
    assert record.options("prefill", 1) == ()


def test_options_that_end_or_hold_up_a_process_end_no_search(lm):
    assert "No such compile option" in failure(lm, Choice(), DECODE, (("xla_no_such", 1),), 120)
    assert failure(lm, Choice(), DECODE, (), 0.01) == "no end within 0.01 s"


@pytest.mark.report("F20")
def test_the_search_tries_forms_and_layouts_then_stacking_then_options(lm):
    names = [candidate.name for candidate in candidates(lm, [DECODE])]
    order = [next(i for i, name in enumerate(names) if word in name) for word in ("attend", "joined", "stacked", "xla")]
    assert order == sorted(order)
    assert "two_rows: mlp" in names


@pytest.mark.parametrize(("budget", "batches", "words"), [(0, (1,), r"budget \(0\)"), (1, (), r"batches \(\[\]\)")])
def test_a_budget_or_batch_that_is_none_is_refused(lm, budget, batches, words):
    with pytest.raises(RzooError, match=words):
        tune(lm, budget, batches=batches)


def test_a_tuned_handle_generates_what_the_untuned_does(lm):
    import rzoo

    tuned = apply(Record(key_of(lm), CHOICE), lm)
    prompts = [[1, 2, 3], [4, 5]]
    expected = [c.tokens for c in rzoo.generate(lm, prompts, max_new_tokens=8)]
    assert [c.tokens for c in rzoo.generate(tuned, prompts, max_new_tokens=8)] == expected


@pytest.fixture
def even(lm):
    """A tiny model that divides over devices."""
    config = DIVISIBLE["llama"]
    return replace(lm, config=config, params=initialize(config))


def test_a_tuned_model_on_a_mesh_generates_what_one_device_does(even):
    import rzoo

    prompts = (IDS % 96).tolist()
    single = [c.tokens for c in rzoo.generate(even, prompts, max_new_tokens=8)]
    placed = place(even, {"data": 2, "tensor": 4}, "tensor×data")
    case = Case("decode", 2, 2)
    offered = list(candidates(placed, [case]))
    assert all("xla" in candidate.name for candidate in offered)
    running = Search(placed, [case], time.monotonic() + 600, lambda line: None)
    running.consider(next(c for c in offered if "emitters" in c.name))
    assert "times" in running.record.candidates[0], running.record.candidates
    choice = Choice(options=(("decode 2", (("xla_cpu_use_fusion_emitters", False),)),))
    tuned = apply(Record(key_of(placed), choice), placed)
    assert [c.tokens for c in rzoo.generate(tuned, prompts, max_new_tokens=8)] == single


def test_a_pipeline_is_not_tuned(even):
    with pytest.raises(RzooError, match="a pipeline of several programs is not tuned"):
        tune(place(even, {"pipe": 2}, "tensor×pipe"), 1)
