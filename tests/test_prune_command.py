"""`rzoo prune` as people run it: plans from shapes, a model written, healing resumed, refusals without a trace."""

import json
from contextlib import contextmanager

import numpy as np
import pytest
from typer.testing import CliRunner

import rzoo
from rzoo.cli import app
from rzoo.core import RzooError
from rzoo.models.registry import config_from_hf, count_parameters
from rzoo.train.prune_run import Budget, dry_run, kv_bytes, run
from tests.chat_folder import write_talker

TEXT = "".join(chr(33 + i) for i in np.random.default_rng(0).integers(0, 90, 16 * 16 + 5))


@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    """A model whose rows are 16 tokens long."""
    return write_talker(tmp_path_factory.mktemp("talker") / "model", context=16)


def test_a_dry_run_counts_a_plan_of_175_billion_parameters_and_its_config_loads():
    made = CliRunner().invoke(app, ["prune", "brief/v3-175b", "--params", "138e9", "--dry-run", "--json"])
    found = json.loads(made.stdout)
    smaller = config_from_hf(found["after"]["config"])
    assert found["before"]["parameters"] == 174_626_015_880
    assert count_parameters(smaller) == found["after"]["parameters"]
    assert 0.97 * 138e9 < found["after"]["parameters"] <= 138e9


def test_a_folder_needs_no_weights_for_a_dry_run(tmp_path, talker):
    (tmp_path / "config.json").write_bytes((talker / "config.json").read_bytes())
    found = dry_run(str(tmp_path), Budget(keep=0.9))
    assert found["after"]["parameters"] <= 0.9 * found["before"]["parameters"]


def test_healing_that_was_stopped_goes_on_and_the_result_is_compared_and_written(talker, tmp_path):
    @contextmanager
    def stopped():
        raise KeyboardInterrupt
        yield

    out, asked = tmp_path / "small", {"steps": 3, "dtype": "float32"}
    with pytest.raises(KeyboardInterrupt):
        run(str(talker), TEXT, out, Budget(keep=0.9), healing=stopped, **asked)
    unhealed = rzoo.load(out, dtype="float32", quiet=True)
    found = run(str(talker), TEXT, out, Budget(keep=0.9), **asked)
    healed = rzoo.load(out, dtype="float32", quiet=True)
    assert healed.config == unhealed.config == config_from_hf(found["after"]["config"])
    assert (healed.params["norm.scale"] != unhealed.params["norm.scale"]).any()
    assert not (tmp_path / "small.healing").exists()
    assert found["after"]["bytes"] == 4 * found["after"]["parameters"] <= 0.9 * found["before"]["bytes"]
    assert found["pruned"]["perplexity"] != found["after"]["perplexity"] > 1
    assert found["before"]["kv_bytes_per_token"] == kv_bytes(rzoo.load(talker, dtype="float32", quiet=True)) > 0
    with pytest.raises(RzooError, match="is there and not empty"):
        run(str(talker), TEXT, out, Budget(keep=0.9), **asked)


@pytest.mark.parametrize(
    ("text", "budget", "words"),
    [
        (TEXT[:40], {"keep": 0.9}, "32 tokens in whole rows of 16; at least 256 are needed"),
        (TEXT, {"keep": 0.001}, "can't be reached by pruning: the smallest model has"),
        (TEXT, {"most": 1e15}, "prunes nothing: the model has"),
    ],
    ids=("short", "tight", "wide"),
)
def test_what_can_not_be_done_is_refused_and_nothing_is_written(talker, tmp_path, text, budget, words):
    with pytest.raises(RzooError, match=words):
        run(str(talker), text, tmp_path / "small", Budget(**budget))
    assert not [*tmp_path.iterdir()]


def test_budgets_that_say_nothing_or_nonsense_are_refused():
    for asked, words in (({}, "either keep or params"), ({"keep": 1.5}, r"keep \(1.5\) must be above 0")):
        with pytest.raises(RzooError, match=words):
            Budget(**asked)
    with pytest.raises(RzooError, match=r"params \(nan\) must be at least 1"):
        Budget(most=float("nan"))
