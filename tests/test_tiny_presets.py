"""The models that are trained here and come with the package: they think, answer and draft."""

import numpy as np
import pytest

import rzoo
from rzoo.checkpoint.sources import packaged_file
from rzoo.data.chains import chain
from rzoo.models.presets import PRESETS

RNG = np.random.default_rng(2_000_003)  # no seed of the training
CHAINS = [chain(RNG, depth) for depth in (1, 3, 6, 10)]
PROMPTS = [one.prompt for one in CHAINS]


@pytest.fixture(scope="module")
def r1():
    return rzoo.load("r1-tiny", mtp=True, quiet=True, record=False)


@pytest.fixture(scope="module")
def answers(r1):
    return rzoo.generate(r1, PROMPTS, max_new_tokens=80)


def test_r1_tiny_writes_its_steps_down_and_answers_rightly(answers):
    assert [(a.reasoning, a.text) for a in answers] == [(one.thought, one.answer) for one in CHAINS]
    assert {answer.finish_reason for answer in answers} == {"stop"}


def test_its_module_drafts_more_than_six_of_ten_tokens_rightly_and_changes_none(r1, answers):
    drafted = rzoo.generate(r1, PROMPTS, max_new_tokens=80, draft="mtp", draft_tokens=1)
    assert [a.tokens for a in drafted] == [a.tokens for a in answers]
    accepted = [answer.tokens_per_pass - 1 for answer in drafted]
    assert np.mean(accepted) >= 0.6


def test_v3_tiny_answers_without_a_thought():
    answer = rzoo.generate(rzoo.load("v3-tiny", quiet=True, record=False), PROMPTS[0], max_new_tokens=8)
    assert answer.reasoning is None
    assert answer.text in list("0123456789")


@pytest.mark.parametrize("name", ["r1-tiny", "v3-tiny"])
def test_their_weights_are_small(name):
    path = packaged_file(PRESETS[name])
    assert path is not None
    assert (path / "model.safetensors").stat().st_size <= 8_000_000
