"""Forms for a GPU that is not there: what is refused, what is kept, and the plan that runs on them."""

import json

import pytest

import rzoo
from rzoo.compile import deviceless
from rzoo.compile.targets import target
from rzoo.compile.tune_for_target import LAUNCH_SECONDS, MARGIN, TRIED, step_seconds, tune_for_target
from rzoo.core import RzooError
from tests.test_cli import rzoo as command

REFUSED = (
    ({"model": "super-49b"}, r"99.73 GB of weights and 822.08 MB of cache do not fit one h100.*\n  smaller weights"),
    ({"model": "nano-8b", "gpu": "rpi5"}, r"nothing is compiled for rpi5.*\n  programs are compiled for a100-80gb"),
    ({"model": "nano-8b", "gpu": "h10"}, r"gpu \(h10\) is unknown"),
    ({"model": "nano-8b", "weights": "int3"}, r"weights \(int3\) is unknown"),
    ({"model": "nano-8b", "batch": 0}, r"batch \(0\) must be an integer of at least 1"),
    ({"model": "nano-8b"}, r"the extra gpu-aot is missing\n  rzoo plan --install-aot"),
)


@pytest.fixture
def without_extra(monkeypatch):
    """No interpreter that compiles."""
    monkeypatch.setenv(deviceless.SETTING, "none")


@pytest.mark.parametrize(("asked", "words"), REFUSED)
def test_what_can_not_be_searched_for_is_told(without_extra, asked, words):
    with pytest.raises(RzooError, match=f"(?s){words}"):
        tune_for_target(**asked)


def test_a_plan_in_tuned_forms_wants_a_record(without_extra):
    with pytest.raises(RzooError, match="rzoo tune MODEL --gpu h100 --weights int8 --batch 3 --context 4096"):
        rzoo.plan("nano-8b", weights="int8", batch=3, tuned=True)


def test_a_step_costs_its_bytes_and_its_launches():
    found = step_seconds(target("h100"), {"read": 3352320000, "written": 3352320000, "launches": 100})
    assert found == pytest.approx(0.002 + 100 * LAUNCH_SECONDS)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--gpu", "h100", "--budget", "60"), "--budget is for a search that measures, on this machine"),
        (("--context", "512"), "--context goes with --gpu alone"),
    ],
)
def test_options_of_the_other_search_are_refused(options, words):
    done = command("tune", "nano-8b", *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """A folder with the config of SmolLM2's first two layers, the record of a search, and its lines."""
    if deviceless.aot_python() is None:
        pytest.skip(f"needs an environment that compiles for GPUs: {deviceless.INSTALL}")
    folder = tmp_path_factory.mktemp("tuned")
    fields = next(info.config for info in rzoo.presets() if info.alias == "smollm2").to_hf() | {"num_hidden_layers": 2}
    (folder / "config.json").write_text(json.dumps(fields))
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RZOO_CACHE", str(folder / "cache"))
        yield str(folder), tune_for_target(str(folder), context=1024, progress=lines.append), lines


@pytest.mark.extras
def test_a_change_is_kept_where_it_lowers_the_modelled_time(searched):
    _, record, lines = searched
    tried = [
        "as planned",
        "unrolled",
        *(f"attend_decode: {form}" for form in TRIED["attend_decode"]),
        "products in sums",
    ]
    assert [entry["name"] for entry in record["candidates"]] == tried
    seconds = record["summary"]["first_seconds"]
    for entry in record["candidates"][1:]:
        if "seconds" in entry:
            assert (entry["result"] == "kept") == (entry["seconds"] <= (1 - MARGIN) * seconds)
        seconds = entry["seconds"] if entry["result"] == "kept" else seconds
    assert record["summary"]["seconds"] == seconds < record["summary"]["first_seconds"]
    assert all("modelled" in line or "failed" in line for line in lines)
    assert lines[-1].partition("record: ")[2].endswith(".json")


@pytest.mark.extras
def test_a_plan_in_tuned_forms_is_of_the_program_that_was_chosen(searched):
    model, record, _ = searched
    asked = {"model": model, "context": 1024}
    tuned, planned = rzoo.plan(**asked, tuned=True), rzoo.plan(**asked)
    kept = [entry for entry in record["candidates"] if entry["result"] == "kept"][-1]
    for name in ("read", "written", "launches", "temp"):
        assert tuned.figures[name].value == kept[name]
    assert tuned.figures["read"].value < planned.figures["read"].value
    with pytest.raises(RzooError, match="found for one GPU"):
        rzoo.plan(**asked, devices=2, rules="fsdp", tuned=True)
