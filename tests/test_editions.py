"""What fits into a memory, and a cost of editions that never improves when one of its numbers grows."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st
from typer.testing import CliRunner

from rzoo.cli import app
from rzoo.compile.editions import Edition, cost, fit, front, memory_size
from rzoo.core import RzooError
from rzoo.models.presets import PRESETS

NUMBER = st.floats(1e-3, 1e6)
REFERENCE = Edition("reference", 100.0, 0.1, 8e9)


def test_the_list_says_what_fits_and_why_the_others_do_not():
    found = {
        entry["name"]: entry
        for entry in json.loads(CliRunner().invoke(app, ["models", "--fit", "8GB", "--json"]).stdout)
    }
    assert found["smollm2-135m-instruct"]["weights"] == "bf16" and found["smollm2-135m-instruct"]["fits"]
    assert found["llama-3.1-nemotron-nano-8b-v1"]["weights"] == "int4"
    assert not found["deepseek-r1"]["fits"] and "times too much" in found["deepseek-r1"]["why"]
    words = CliRunner().invoke(app, ["models", "--fit", "8GB"]).stdout.splitlines()
    assert words[0].startswith("fits") and words[-1].startswith("no")


def test_eight_billion_parameters_need_8_bits_and_8_gigabytes():
    config = PRESETS["llama-3.1-nemotron-nano-8b-v1"].config
    assert [fit(config, size * 10**9).weights for size in (20, 10, 6)] == ["bf16", "int8", "int4"]
    assert not fit(config, 18 * 10**8).fits  # the brief's 1.8 GB
    assert fit(config, 20 * 10**9, context=10**9).needed > fit(config, 20 * 10**9).needed


def test_sizes_are_read_and_what_is_none_is_refused():
    assert [memory_size(text) for text in ("8GB", "8 GiB", "1.5gb", "100")] == [8 * 10**9, 2**33, 15 * 10**8, 100]
    for text in ("", "GB", "-1GB", "8XB", "nan", "1e999GB"):
        with pytest.raises(RzooError, match="is no size of a memory"):
            memory_size(text)


@given(NUMBER, NUMBER, NUMBER, st.sampled_from(("power", "latency", "memory")), st.floats(1.0, 10.0))
def test_a_cost_never_improves_when_power_latency_or_memory_grows(power, latency, memory, field, more):
    edition = Edition("one", power, latency, memory)
    worse = replace(edition, **{field: getattr(edition, field) * more})
    assert cost(worse, REFERENCE, alpha=0.5, beta=2.0) >= cost(edition, REFERENCE, alpha=0.5, beta=2.0)
    assert front([worse, edition])[-1] == edition


def test_the_front_holds_what_no_other_beats():
    light, fast, both = (
        Edition("light", 5.0, 1.0, 1e9),
        Edition("fast", 50.0, 0.1, 8e9),
        Edition("worse", 60.0, 1.0, 8e9),
    )
    assert front([light, both, fast]) == [light, fast]
    assert cost(REFERENCE, REFERENCE) == 1.0 and cost(light, REFERENCE, beta=0.0) < cost(fast, REFERENCE, beta=0.0)


def test_nonsense_is_refused():
    with pytest.raises(RzooError, match=r"power \(0.0\) of idle must be above 0"):
        Edition("idle", 0.0, 1.0, 1.0)
    with pytest.raises(RzooError, match="must be at least 0, and one above"):
        cost(REFERENCE, REFERENCE, alpha=0.0, beta=0.0, gamma=0.0)
