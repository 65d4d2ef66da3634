"""What many scores come to: errors by question, pass@k, votes, calibration, F1, paired comparisons."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from rzoo.core import RzooError
from rzoo.evals import estimates
from rzoo.evals.estimates import (
    brier,
    calibration_error,
    estimate,
    macro_f1,
    majority_at_k,
    paired_difference,
    paired_ratio,
    pass_at_k,
    repetition_rate,
    wilson,
)


def test_one_sample_a_question_has_the_error_of_a_mean():
    values = [0.0, 1.0, 1.0, 0.5, 0.25]
    found = estimate(values)
    assert (found.mean, found.n, found.samples) == (0.55, 5, 5)
    assert found.error == pytest.approx(np.std(values, ddof=1) / math.sqrt(5))


def test_samples_that_only_repeat_their_question_make_nothing_surer():
    once = estimate([0, 1, 1, 0, 1])
    many = estimate(np.repeat([0, 1, 1, 0, 1], 64).tolist(), np.repeat(range(5), 64).tolist())
    assert (many.mean, many.error, many.n, many.samples) == (once.mean, pytest.approx(once.error), 5, 320)


def test_the_clustered_error_is_that_of_statistics_on_unequal_clusters():
    values, questions = [1, 0, 1, 1, 0, 0, 1], ["a", "a", "b", "c", "c", "c", "c"]
    mean = 4 / 7
    by_hand = ((1 + 0 - 2 * mean) ** 2 + (1 - mean) ** 2 + (2 - 4 * mean) ** 2) * 3 / 2 / 7**2
    assert estimate(values, questions).error == pytest.approx(math.sqrt(by_hand))


@given(st.integers(0, 40), st.integers(1, 40))
def test_a_wilson_interval_holds_the_mean_and_solves_its_equation(right, more):
    n = right + more
    assert wilson(n, n)[1] == 1 - wilson(0, n)[0] == 1
    low, high = wilson(right, n)
    assert 0 <= low <= right / n <= high <= 1
    for bound in {low, high} - {0.0, 1.0}:
        assert abs(right / n - bound) == pytest.approx(1.959964 * math.sqrt(bound * (1 - bound) / n), abs=1e-9)


def test_all_right_of_few_is_not_certain():
    found = estimate([1] * 10)
    assert (found.mean, found.error) == (1.0, 0.0)
    assert found.low == pytest.approx(0.722, abs=1e-3) and found.high == 1.0


def test_the_interval_of_few_questions_with_many_samples_is_a_bootstrap_that_repeats():
    values, questions = [1, 1, 0, 1, 0, 0, 0.5, 1], [0, 0, 1, 1, 2, 2, 3, 3]
    found = estimate(values, questions)
    assert found == estimate(values, questions)
    assert found.low < found.mean < found.high and found.low >= 0 and found.high <= 1


def test_bootstrap_and_normal_intervals_agree_where_questions_are_many(monkeypatch):
    values = np.random.default_rng(0).random(400).tolist()
    normal = estimate(values)
    monkeypatch.setattr(estimates, "FEW", 1000)
    resampled = estimate(values)
    assert (resampled.low, resampled.high) == pytest.approx((normal.low, normal.high), abs=0.004)


def test_a_single_question_has_no_error():
    found = estimate([1, 0, 1], ["q"] * 3)
    assert (found.mean, found.error, found.n, found.samples) == (pytest.approx(2 / 3), None, 1, 3)


@pytest.mark.parametrize(
    ("values", "questions", "words"),
    [([], None, "nothing to take"), ([1, math.nan], None, "finite"), ([1, 0], ["a"], "2 values are of 1 questions")],
)
def test_a_missing_value_is_refused(values, questions, words):
    with pytest.raises(RzooError, match=words):
        estimate(values, questions)


@given(st.integers(1, 7).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(case):
    n, right, k = case
    subsets = list(itertools.combinations([1] * right + [0] * (n - right), k))
    assert pass_at_k(n, right, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@pytest.mark.parametrize("k", [0, -1, 4])
def test_pass_at_k_of_too_few_samples_is_refused(k):
    with pytest.raises(RzooError, match=f"pass@{k} can't be told from 3 samples"):
        pass_at_k(3, 1, k)


@pytest.mark.parametrize(
    ("answers", "scores", "k", "score"),
    [
        (["5", "6", "6"], [1, 0, 0], None, 0.0),
        (["5", "6", "6"], [1, 0, 0], 1, 1.0),
        (["5", None, None], [1, 0, 0], None, 1.0),
        (["5", "6"], [1, 0], None, 0.5),
        (["6", "5"], [0, 1], None, 0.5),
        ([None, None], [0, 0], None, 0.0),
        ([], [], None, 0.0),
    ],
)
def test_a_majority_counts_readable_answers_and_shares_ties(answers, scores, k, score):
    assert majority_at_k(answers, scores, k) == score


def test_calibration_error_is_zero_for_what_comes_true_and_one_for_sure_errors():
    assert calibration_error([0.25] * 4 + [0.75] * 4, [1, 0, 0, 0, 1, 1, 1, 0], bins=2) == 0
    assert calibration_error([1.0] * 20, [0] * 20) == 1
    assert calibration_error([0.2, 0.8], [1, 0], bins=1) == 0
    assert calibration_error([0.2, 0.8], [1, 0], bins=2) == pytest.approx(0.8)
    assert calibration_error([0.9, 0.6], [1, 1]) == pytest.approx(0.25)  # fewer answers than bins


def test_brier_is_the_mean_squared_distance():
    assert brier([1, 0, 0.5, 0.8], [1, 0, 1, 0]) == pytest.approx((0.25 + 0.64) / 4)


def test_macro_f1_by_hand():
    found = macro_f1(["a", "a", "b", "c"], ["a", "b", "b", "a"], ["a", "b", "c"])
    assert found.each == {"a": 0.5, "b": pytest.approx(2 / 3), "c": 0.0}
    assert (found.macro, found.used) == (pytest.approx((0.5 + 2 / 3) / 3), 3)


@pytest.mark.report("I36", "I39")
def test_a_class_never_predicted_counts_zero_and_one_absent_from_both_sides_is_left_out_and_told():
    found = macro_f1(["a", "b"], ["a", "a"], ["a", "b", "c", "d", "e"])
    assert (found.macro, found.used) == (pytest.approx((2 / 3 + 0) / 2), 2)
    assert found.each["c"] is None


@pytest.mark.report("I37")
def test_a_prediction_outside_of_the_list_is_a_miss_and_no_class():
    found = macro_f1(["a", "b", "b"], ["archive", None, "b"], ["a", "b"])
    assert found.each == {"a": 0.0, "b": pytest.approx(2 / 3)}
    assert found.macro == pytest.approx(1 / 3)


def test_gold_outside_of_the_list_is_refused():
    with pytest.raises(RzooError, match="archive"):
        macro_f1(["archive"], ["a"], ["a"])


def test_the_always_neutral_model_of_unequal_classes():
    gold = ["neutral"] * 656 + ["up"] * 200 + ["down"] * 144
    found = macro_f1(gold, ["neutral"] * 1000, ["neutral", "up", "down"])
    assert found.macro == pytest.approx(0.264, abs=1e-3)


def test_a_paired_difference_is_surer_than_two_means():
    hard = np.random.default_rng(1).random(200)
    a = {i: [p] for i, p in enumerate(hard)}
    b = {i: [min(1, p + 0.05)] for i, p in enumerate(hard)}
    found = paired_difference(a, b)
    assert found.mean == pytest.approx(0.05, abs=0.005)
    assert found.error < 0.1 * estimate(hard.tolist()).error
    assert found.low > 0


def test_only_shared_questions_are_compared_and_none_is_refused():
    assert paired_difference({"q": [1, 0], "r": [1], "s": [0]}, {"q": [1], "s": [0.5], "t": [1]}).n == 2
    with pytest.raises(RzooError, match="share no question"):
        paired_difference({"q": [1]}, {"r": [1]})


def test_a_paired_ratio_has_an_interval_and_none_to_zero():
    a = {i: [float(i % 4 < 1)] for i in range(40)}
    b = {i: [float(i % 4 < 2)] for i in range(40)}
    found = paired_ratio(a, b)
    assert found.mean == 2 and 1.3 < found.low < 2 < found.high < 4.5
    with pytest.raises(RzooError, match="ratio to a mean of 0"):
        paired_ratio({"q": [0]}, {"q": [1]})


def test_repetition_is_the_share_of_runs_that_stood_before():
    assert repetition_rate(["a", "b", "c", "d", "e", "f"]) == 0
    assert repetition_rate([1] * 103) == pytest.approx(0.99)
    assert repetition_rate([1, 2, 3, 4, 1, 2, 3, 4]) == pytest.approx(1 / 5)
    assert repetition_rate([]) == repetition_rate([1, 1, 1]) == 0
