"""Runs that are killed and go on, and HELM's files that they leave."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import rzoo
from rzoo.core import RzooError
from rzoo.evals.engine import LoadedModel
from rzoo.evals.evaluate import evaluate
from rzoo.evals.samples import FILE
from rzoo.evals.task import Adapter, Source
from rzoo.evals.tasks import TASKS
from tests.chat_folder import load_talker
from tests.pretended import QUESTIONS, TASK, Pretended, Said, Weight, echo

HELM = ("run_spec", "scenario", "scenario_state", "per_instance_stats", "stats")
FOLDER = "echo:model=pretended"
TIMES = {"seconds", "request_time"}


OTHER = replace(QUESTIONS[0], answer="7")


def say_seed(prompt, seed):
    return Said(f"{echo(prompt).text} {seed}")


def without_times(value):
    """What two runs must agree in: all but how long they took."""
    if isinstance(value, list):
        return [without_times(item) for item in value if not (isinstance(item, dict) and timed(item))]
    if isinstance(value, dict):
        return {name: without_times(item) for name, item in value.items() if name not in TIMES}
    return value


def timed(stat):
    return isinstance(stat.get("name"), dict) and stat["name"]["name"] in TIMES


def files(folder):
    return {name: without_times(json.loads((folder / f"{name}.json").read_text())) for name in HELM}


KILLED = """
import os, sys
from rzoo.evals.evaluate import evaluate
from tests.pretended import TASK, Pretended
from tests.test_evals_resume import say_seed
count = 0
def say(prompt, seed):
    global count
    count += 1
    if count > 31:
        os.kill(os.getpid(), 9)
    return say_seed(prompt, seed)
evaluate(Pretended(say), TASK, samples=3, out=sys.argv[1], batch=8)
"""


@pytest.mark.report("I25")
def test_a_sampled_run_that_was_killed_goes_on_and_ends_as_if_it_had_not_been(tmp_path):
    root = Path(__file__).resolve().parent.parent
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "killed")], cwd=root, env=dict(os.environ))
    assert killed.returncode == -9
    folder = "echo:samples=3,model=pretended"
    kept = (tmp_path / "killed" / folder / FILE).read_text().splitlines()
    assert len(kept) == 1 + 31
    engine = Pretended(say_seed)
    evaluate(engine, TASK, samples=3, out=tmp_path / "killed")
    assert sum(len(prompts) for prompts, _ in engine.asked) == 60 - 31
    evaluate(Pretended(say_seed), TASK, samples=3, out=tmp_path / "whole")
    assert files(tmp_path / "killed" / folder) == files(tmp_path / "whole" / folder)


def test_a_line_that_was_cut_off_is_asked_again(tmp_path):
    evaluate(Pretended(echo), TASK, out=tmp_path)
    file = tmp_path / FOLDER / FILE
    file.write_bytes(file.read_bytes()[:-20])
    engine = Pretended(echo)
    assert evaluate(engine, TASK, out=tmp_path).scores["accuracy"].mean == 1
    assert [len(prompts) for prompts, _ in engine.asked] == [1]
    assert len(file.read_text().splitlines()) == 21


def test_a_larger_limit_goes_on_from_a_smaller_one(tmp_path):
    evaluate(Pretended(echo), TASK, out=tmp_path, limit=5)
    engine = Pretended(echo)
    evaluate(engine, TASK, out=tmp_path)
    assert [len(prompts) for prompts, _ in engine.asked] == [15]


@pytest.mark.report("I27", "I28")
def test_no_run_goes_on_with_the_answers_of_another(tmp_path):
    evaluate(Pretended(echo), TASK, out=tmp_path)
    others = [
        (Pretended(echo, key={"weights": "b"}), TASK, {}, "a run with another weights"),
        (Pretended(echo), TASK, {"temperature": 0.6}, "a run with another temperature"),
        (Pretended(echo), TASK, {"seed": 1}, "a run with another seed"),
        (Pretended(echo), replace(TASK, text=replace(TASK.text, instructions="Hi.")), {}, "another adapter"),
        (Pretended(echo), replace(TASK, instances=lambda s: [OTHER]), {}, "data has changed"),
    ]
    for engine, task, settings, words in others:
        with pytest.raises(RzooError) as error:
            evaluate(engine, task, out=tmp_path, **settings)
        assert words in str(error.value)
        assert engine.asked == []


@pytest.mark.parametrize("line", ["[1]", "{}", "nonsense", '{"id": "q0"}', "[" * 100_000], ids=lambda line: line[:8])
def test_a_broken_file_of_samples_is_told_in_words(tmp_path, line):
    evaluate(Pretended(echo), TASK, out=tmp_path)
    file = tmp_path / FOLDER / FILE
    file.write_text(f"{file.read_text()}{line}\n")
    with pytest.raises(RzooError, match="line 22 is no sample"):
        evaluate(Pretended(echo), TASK, out=tmp_path)


def shape(value):
    """The names and kinds of a JSON value, lists by their first entry."""
    if isinstance(value, dict):
        return {name: shape(item) for name, item in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__


def assert_within(ours, theirs, path=""):
    """Every field of ours that HELM's has is of HELM's kind."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for name in ours.keys() & theirs.keys():
            assert_within(ours[name], theirs[name], f"{path}.{name}")
    elif isinstance(ours, list) and isinstance(theirs, list):
        for item, other in zip(ours, theirs, strict=False):
            assert_within(item, other, f"{path}[]")
    else:
        assert ours == theirs or "NoneType" in (ours, theirs), path


# What HELM's own files have and ours may lack: fields with defaults, costs, and what belongs to its method "joint".
OPTIONAL = {"train_trial_index", "request_datetime", "num_conditioning_tokens", "output_mapping", "top_p"}


def test_the_files_are_shaped_as_helms_own(tmp_path, shared):
    evaluate(Pretended(echo), TASK, out=tmp_path)
    for name in HELM:
        ours = shape(json.loads((tmp_path / FOLDER / f"{name}.json").read_text()))
        theirs = shape(json.loads((shared / f"data/helm_output_fixtures/narrativeqa_gpt2__{name}.json").read_text()))
        assert_within(ours, theirs, name)
        assert isinstance(ours, list) or theirs.keys() - ours.keys() <= OPTIONAL
    (state, *_), (theirs, *_) = (
        json.loads(file.read_text())["request_states"]
        for file in (
            tmp_path / FOLDER / "scenario_state.json",
            shared / "data/helm_output_fixtures/narrativeqa_gpt2__scenario_state.json",
        )
    )
    for part in ("instance", "request", "result"):
        assert theirs[part].keys() - state[part].keys() <= OPTIONAL


def test_helms_statistics_are_those_of_the_questions(tmp_path):
    evaluate(Pretended(lambda p, s: Said("3")), TASK, out=tmp_path)
    stats = json.loads((tmp_path / FOLDER / "stats.json").read_text())
    accuracy = next(stat for stat in stats if stat["name"] == {"name": "accuracy", "split": "test"})
    assert (accuracy["count"], accuracy["sum"], accuracy["mean"], accuracy["max"]) == (20, 1, 0.05, 1)
    part = next(stat for stat in stats if stat["name"].get("sub_split") == "b")
    assert (part["count"], part["sum"]) == (10, 1)
    ones = json.loads((tmp_path / FOLDER / "per_instance_stats.json").read_text())
    assert [one["instance_id"] for one in ones] == [one.id for one in QUESTIONS]


def test_a_private_task_leaves_no_text_in_any_file(tmp_path):
    secret = replace(TASK, private=True, instances=lambda s: [replace(QUESTIONS[3], text="question 3 secret words")])
    evaluate(Pretended(lambda p, s: Said("secret words 3", reasoning="secret words")), secret, out=tmp_path)
    written = {file.name: file.read_text() for file in (tmp_path / FOLDER).iterdir()}
    assert len(written) == 6
    assert [name for name, text in written.items() if "secret" in text] == []


def test_options_of_a_choice_are_requests_of_their_own(tmp_path):
    engine = Pretended(weigh=lambda prompt, option: Weight(-float(len(option))))
    evaluate(engine, "compare", out=tmp_path, limit=3)
    state = json.loads((tmp_path / "compare:model=pretended" / "scenario_state.json").read_text())
    assert [one["reference_index"] for one in state["request_states"]] == [0, 1] * 3
    assert state["request_states"][0]["result"]["completions"][0]["logprob"] == -float(len(" larger"))


@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    return load_talker(tmp_path_factory.mktemp("talker") / "model")


SHORT = Adapter(max_tokens=6)
CHAIN = replace(TASKS["chain"], chat=SHORT, text=SHORT)


def test_a_loaded_model_gives_the_same_samples_in_any_batch(talker):
    def texts(batch):
        settings = {"samples": 2, "limit": 3, "batch": batch, "deterministic": True}
        return [[one.text for one in each] for each in evaluate(talker, CHAIN, **settings).run.samples]

    assert texts(1) == texts(8)
    assert len({text for pair in texts(8) for text in pair}) > 3


def test_likelihoods_of_a_loaded_model_are_those_of_score(talker):
    engine = LoadedModel(talker, "talker")
    task = TASKS["compare"]
    one = next(iter(task.instances(Source())))
    found = evaluate(engine, replace(task, instances=lambda source: [one])).run.samples[0][0]
    expected = rzoo.score(talker, one.text, [" larger", " smaller"], raw=True)
    assert found.logprobs == pytest.approx([score.total for score in expected], abs=1e-4)
    assert engine.room(one.text) == 2560 - len(talker.tokenizer.encode(one.text))
    other = talker.with_params({**talker.params, "embed": -talker.params["embed"]})
    assert engine.key["weights"] != LoadedModel(other).key["weights"]
