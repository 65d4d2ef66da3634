"""Runs side by side, and results for people."""

import json
import math
import re
import xml.dom.minidom
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from rzoo.cli import app
from rzoo.core import RzooError
from rzoo.evals.compare import compare, depth_of, depth_ratio, solved_depth
from rzoo.evals.evaluate import evaluate
from rzoo.evals.report import markdown, page
from rzoo.evals.task import Source
from rzoo.evals.tasks import TASKS
from tests.chat_folder import write_talker
from tests.pretended import QUESTIONS, TASK, Pretended, Said, echo

CHAIN = TASKS["chain"]
CHAINS = {one.text: one for one in CHAIN.instances(Source())}


def right_up_to(number):
    """Answers the first so many questions rightly."""
    return lambda prompt, seed: echo(prompt) if int(echo(prompt).text.split()[-1]) < number else Said("no")


@pytest.fixture
def two(tmp_path):
    for name, number in (("a", 10), ("b", 15)):
        evaluate(Pretended(right_up_to(number), name=name), TASK, out=tmp_path / name)
    return tmp_path


def test_two_folders_are_compared_by_question(two):
    (one,) = compare(two / "a", two / "b")
    assert (one.first.mean, one.second.mean, one.better.mean) == (0.5, 0.75, 0.25)
    assert one.better.error == pytest.approx(math.sqrt(0.25 * 0.75 / 19))
    assert one.better.error < math.hypot(one.first.error, one.second.error)
    (same,) = compare(two / "a" / "echo:model=a", two / "b" / "echo:model=b")
    assert same == one


def test_helms_own_folder_is_compared_too(tmp_path, shared):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for file in ("run_spec", "per_instance_stats"):
            text = (shared / f"data/helm_output_fixtures/mmlu_gpt2__{file}.json").read_text()
            (tmp_path / name / f"{file}.json").write_text(text)
    (one,) = compare(tmp_path / "a", tmp_path / "b")
    assert (one.first.n, one.better.mean) == (10, 0)


def test_folders_that_can_not_be_compared_are_told_in_words(two, tmp_path):
    with pytest.raises(RzooError, match=r"holds no per_instance_stats.json"):
        compare(two / "a", tmp_path / "none")
    other = replace(TASK, name="other")
    evaluate(Pretended(echo), other, out=tmp_path / "c")
    with pytest.raises(RzooError, match="no task is in both"):
        compare(two / "a", tmp_path / "c")
    evaluate(Pretended(echo), replace(TASK, instances=lambda s: [replace(QUESTIONS[0], id="z")]), out=tmp_path / "d")
    with pytest.raises(RzooError, match="share no question"):
        compare(two / "a", tmp_path / "d")
    for text in ("{", "[1]", '[{"instance_id": "a", "stats": []}]', "[" * 100_000):
        (two / "b" / "echo:model=b" / "per_instance_stats.json").write_text(text)
        with pytest.raises(RzooError, match="can't be read as one of HELM's files"):
            compare(two / "a", two / "b")


def solving(depth):
    """A model that answers chains of up to so many operations."""

    def say(prompt, seed):
        one = CHAINS[prompt[-1]["content"]]
        return Said(one.answer if int(one.group) <= depth else "none")

    return Pretended(say, chat=True, thinking="detailed")


def test_the_depth_that_is_solved_has_a_ratio_with_an_interval():
    assert solved_depth([1.0, 0.95, 0.8, 1.0]) == 2
    off, on = (evaluate(solving(depth), CHAIN).run for depth in (4, 9))
    assert (depth_of(off).mean, depth_of(on).mean) == (4, 9)
    ratio = depth_ratio(off, on)
    assert (ratio.mean, ratio.low, ratio.high) == (9 / 4, 9 / 4, 9 / 4)
    shaky = evaluate(solving(9), replace(CHAIN, scorer=unsure)).run
    assert depth_ratio(off, shaky).low < depth_ratio(off, shaky).high


def unsure(instance, text):
    """Every eighth chain of depth 5 is wrong."""
    verdict = CHAIN.verdict(instance, text)
    odd = instance.group == "5" and int(instance.id.split("-")[1]) % 56 == 4
    return replace(verdict, score=0.0) if odd else verdict


@pytest.fixture(scope="module")
def results():
    return [
        evaluate(Pretended(right_up_to(10), name="<b>&", chat=True, thinking="no_think"), TASK, thinking=True),
        evaluate(Pretended(lambda p, s: Said(f"say {s % 2}"), name="<b>&"), TASK, samples=4),
    ]


def test_the_table_says_how_sure_a_score_is_and_how_it_was_asked(results):
    table = markdown(results)
    first, second = (line for line in table.splitlines() if line.startswith("| echo"))
    assert "| 0.500 ± 0.115 | 0.299 to 0.701 | 20 | 1 | 0.0% | 0.0% | 3.0 |" in first
    assert (
        "chat template; generation; 0 examples; temperature 0; at most 8232 tokens; stops '\\n'; thinking on" in first
    )
    assert "plain text; generation; 2 examples; temperature 0.6; at most 40 tokens" in second
    assert "echo pass@4: " in table
    assert "echo majority@4: " in table


def test_the_page_is_whole_and_shows_a_picture(results):
    text = page(results)
    assert "<b>&" not in text
    assert "http" not in text.replace('xmlns="http://www.w3.org/2000/svg"', "")
    pictures = re.findall(r"<svg.*?</svg>", text)
    assert [len(xml.dom.minidom.parseString(one).getElementsByTagName("rect")) for one in pictures] == [2, 4]


def test_a_run_leaves_a_report_beside_its_files(two):
    assert "| echo |" in (two / "a" / "report.md").read_text()
    assert "<svg" in (two / "a" / "report.html").read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_talker(tmp_path_factory.mktemp("model") / "talker")


def rzoo(*words):
    return CliRunner().invoke(app, ["eval", *map(str, words)])


def test_the_command_scores_resumes_and_compares(folder, tmp_path):
    words = (folder, "chain", "--limit", "3", "--max-tokens", "4", "--out", tmp_path / "a")
    first = rzoo(*words)
    assert first.exit_code == 0, first.output
    assert first.stdout.startswith("chain ")
    again = json.loads(rzoo(*words, "--json").stdout)
    assert (again[0]["model"], again[0]["scores"]["accuracy"]["n"]) == ("talker", 3)
    assert "better by" in rzoo("compare", tmp_path / "a", tmp_path / "a").output
    both = rzoo(folder, "chain", "--limit", "3", "--max-tokens", "4", "--compare", "thinking=on,off")
    assert "solved depth off 0" in both.output


def test_the_command_lists_its_tasks():
    assert "chained arithmetic" in rzoo("tasks").output
    assert {one["name"] for one in json.loads(rzoo("tasks", "--json").output)} == set(TASKS)


WRONG = [
    (("m", "gsm9k"), "task (gsm9k) is unknown"),
    (("m", "--thinking", "maybe"), "thinking (maybe) must be on or off"),
    (("m", "--compare", "seed=1,2"), "compare (seed=1,2) knows thinking alone"),
    (("m", "--samples", "2", "--temperature", "0"), "2 samples at temperature 0"),
    (("compare", "a"), "1 folders can't be compared"),
]


@pytest.mark.parametrize(("words", "told"), WRONG, ids=[" ".join(words) for words, _ in WRONG])
def test_a_wrong_command_is_told_before_a_model_is_loaded(words, told):
    with pytest.raises(RzooError) as error:
        raise rzoo(*words).exception
    assert told in str(error.value)
