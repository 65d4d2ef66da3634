"""Drawing a token: settings of each row, filters against sorting, distributions, the rule of speculative decoding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rzoo.core import RzooError
from rzoo.engine.drafting import Drafter, looked_up
from rzoo.engine.sampling import Draws, Greedy, Sampler, Sampling, draws_of, in_vocabulary, log_weights, seed_of
from rzoo.engine.speculative import Guesses, Verify

DRAWN = 20_000
VOCAB = 8
CRITICAL = 24.32  # of chi-square with 7 degrees of freedom at p = 0.001
weigh, choose, verify = (jax.jit(f) for f in (log_weights, Sampler(VOCAB).__call__, Verify(VOCAB).__call__))


def weights_of(logits, *settings):
    """log_weights of rows with these settings over the same logits [v]."""
    rows = jnp.tile(jnp.asarray(logits, jnp.float32), (len(settings), 1))
    draws = draws_of(settings, [(i, 0) for i in range(len(settings))], rows.shape[1], [()] * len(settings), [()] * 99)
    return np.asarray(weigh(rows, draws))


def kept_by_sorting(logits, s):
    """Which tokens the settings keep, as one would write it down."""
    logits = logits.astype(np.float64)
    order = np.argsort(-logits, kind="stable")
    if s.temperature == 0:
        return {int(order[0])}
    kept = [int(i) for i in order[: s.top_k or len(logits)]]
    p = np.exp((logits[kept] - logits.max()) / s.temperature)
    before = np.concatenate([[0], np.cumsum(p / p.sum())[:-1]])
    return {i for i, b, q in zip(kept, before, p, strict=True) if b < s.top_p and q >= s.min_p * p[0]}


UNLIKE = [
    Sampling(),
    Sampling(temperature=1.5),
    Sampling(temperature=0.7, top_k=5),
    Sampling(temperature=1.0, top_k=1000),
    Sampling(temperature=1.0, top_p=0.8),
    Sampling(temperature=1.0, top_k=10, top_p=0.7, min_p=0.05),
    Sampling(temperature=2.0, min_p=0.2),
    Sampling(temperature=1.0, top_p=1e-9),
]


@pytest.mark.report("C17", "C20")
def test_one_program_keeps_in_each_row_what_its_own_settings_keep():
    for seed in range(5):
        logits = np.random.default_rng(seed).normal(size=50).astype(np.float32) * 3
        found = weights_of(logits, *UNLIKE)
        for row, settings in zip(found, UNLIKE, strict=True):
            assert set(np.flatnonzero(np.isfinite(row)).tolist()) == kept_by_sorting(logits, settings), settings
            assert row.max() == 0


@pytest.mark.report("C14", "C15")
def test_no_temperature_makes_a_weight_that_is_no_number():
    logits = np.asarray([3.0, 60000.0, 2.0, 60000.0, -1e6, -np.inf], np.float32)
    for temperature in (0, 1e-45, 1e-30, 3e-4, 1e6):
        (found,) = weights_of(logits, Sampling(temperature=temperature))
        assert not np.isnan(found).any()
        assert found[5] == -np.inf
        alive = 1 if temperature < 1e-38 else 2 if temperature < 1 else 5  # float32 has nothing lower but 0
        assert (np.exp(found) > 0).sum() == alive


def test_vocabulary_padding_is_never_chosen():
    logits = jnp.asarray([[1.0, 2.0, 3.0, 99.0]] * 2)
    draws = draws_of([Sampling(), Sampling(temperature=1e6)], [(0, 0), (1, 0)], 4)
    at, choose_of_three = jnp.zeros(2, jnp.int32), jax.jit(Sampler(3).__call__)
    for position in range(30):
        chosen, _, _ = choose_of_three(logits, draws, at + position, at == 0)
        assert chosen[0] == 2 and chosen[1] < 3
    assert Greedy(3)(logits, None).tolist() == [2, 2]


def drawn(draws: Draws, logits, count=DRAWN):
    """Tokens drawn at `count` positions from the same logits."""
    rows = jax.tree.map(lambda a: jnp.repeat(a, count, axis=0), draws)
    return np.asarray(choose(jnp.tile(logits, (count, 1)), rows, jnp.arange(count), jnp.ones(count, bool))[0])


def chi_square(tokens, p):
    """Of the counts of tokens against the distribution p."""
    expected = np.asarray(p, np.float64) * len(tokens)
    return float(((np.bincount(tokens, minlength=len(expected)) - expected) ** 2 / expected).sum())


LOGITS = jnp.asarray([1.0, 0.5, 0.0, -0.5, 2.0, -1.0, 0.3, 1.5])


@pytest.mark.report("C18")
def test_without_filters_draws_are_distributed_as_the_whole_softmax():
    tokens = drawn(draws_of([Sampling(temperature=1.5)], [(5, 0)], VOCAB), LOGITS)
    assert chi_square(tokens, jax.nn.softmax(LOGITS / 1.5)) < CRITICAL
    assert chi_square(tokens, jax.nn.softmax(LOGITS / 1.2)) > CRITICAL


def guesses_for(q_logits, count):
    """Guesses of one token drawn from q for `count` rows of their own seeds."""
    draws = draws_of([Sampling(temperature=1.0)] * count, [(i, 0) for i in range(count)], VOCAB)
    at, live = jnp.full(count, 3), jnp.ones(count, bool)
    ids, q, _ = jax.jit(Drafter(VOCAB).__call__)(jnp.tile(q_logits, (count, 1)), draws, at, live)
    keys = [draws_of([Sampling()] * count, [(i, n) for i in range(count)], VOCAB).keys for n in (1, 2)]
    return Guesses(ids[:, None], jnp.ones(count, jnp.int32), q[:, None], at, draws, *keys)


def test_the_rejection_rule_draws_from_the_model_and_accepting_always_does_not():
    given = guesses_for(LOGITS[::-1], DRAWN)
    logits = jnp.tile(LOGITS, (DRAWN, 2, 1))
    p = jax.nn.softmax(LOGITS)
    states = jnp.zeros((DRAWN, 2, 1))
    taken, after, _ = verify(logits, states, given)
    first = np.where(np.asarray(taken) > 0, given.ids[:, 0], after)
    assert chi_square(first, p) < CRITICAL
    assert chi_square(np.asarray(after)[np.asarray(taken) > 0], p) < CRITICAL  # the token that comes on top
    assert chi_square(np.asarray(given.ids[:, 0]), p) > CRITICAL
    certain = Guesses(given.ids * 0 + 4, given.counts, None, given.starts, given.draws, given.accept, given.replace)
    taken, after, _ = verify(logits, states, certain)
    assert chi_square(np.where(np.asarray(taken) > 0, 4, after), p) < CRITICAL


@pytest.mark.report("C24")
def test_penalties_count_the_tokens_of_their_own_row_alone():
    harsh = Sampling(temperature=1.0, repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25)
    prompts, answers = [[1, 1], [0] * 9], [[2, 2, 2], [0] * 50]
    plain = Sampling(temperature=1.0)
    draws = draws_of([harsh, plain], [(0, 0), (0, 0)], VOCAB, prompts, answers)
    logits = np.full(VOCAB, 4.0, np.float32)
    logits[3] = -1.0
    found = np.asarray(weigh(jnp.tile(logits, (2, 1)), draws))
    expected = logits - 4
    np.testing.assert_allclose(found[1], expected)
    expected[1], expected[2] = 4 / 2 - 4, 4 / 2 - 3 * 0.5 - 0.25 - 4
    np.testing.assert_allclose(found[0], expected)
    negative = weigh(jnp.tile(-logits, (2, 1)), draws)
    assert negative[0, 1] - negative[0, 0] == -4  # a negative logit is made lower, too


def test_a_token_that_is_chosen_is_counted_and_one_of_a_finished_row_is_not():
    draws = draws_of([Sampling(presence_penalty=5.0)] * 2, [(0, 0)] * 2, VOCAB, [()] * 2, [()] * 2)
    logits, at = jnp.tile(LOGITS, (2, 1)), jnp.zeros(2, jnp.int32)
    first, _, draws = choose(logits, draws, at, jnp.asarray([True, False]))
    second, _, draws = choose(logits, draws, at, jnp.asarray([True, True]))
    assert first.tolist() == [4, 4] and second.tolist() == [7, 4]


def test_draws_of_a_row_do_not_depend_on_its_place_or_its_peers():
    own = Sampling(temperature=1.0)
    alone = draws_of([own], [(7, 1)], VOCAB)
    among = draws_of([Sampling(temperature=2.0), own, own], [(1, 0), (7, 0), (7, 1)], VOCAB)
    at = jnp.asarray([4])
    (token,), _, _ = choose(LOGITS[None], alone, at, at > 0)
    tokens, _, _ = choose(jnp.tile(LOGITS, (3, 1)), among, jnp.asarray([9, 4, 4]), at > 0)
    assert tokens[2] == token
    many = [drawn(draws_of([own], [(7, sample)], VOCAB), LOGITS).tolist() for sample in (0, 1)]
    assert many[0] != many[1]


def test_seeds_are_fresh_unless_given_and_their_own_for_each_prompt():
    assert seed_of(None, 0) != seed_of(None, 0)
    assert seed_of(3, 0) == 3
    assert len({seed_of(3, i) for i in range(5)} | {seed_of(4, i) for i in range(5)}) == 10
    assert seed_of(seed_of(3, 2), 0) == seed_of(3, 2)


WRONG = [
    ({"temperature": -1}, "temperature (-1) must be from 0 to 1e6"),
    ({"temperature": float("nan")}, "temperature (nan) must be"),
    ({"temperature": "hot"}, "temperature ('hot') must be"),
    ({"top_k": 0}, "top_k (0) must be an integer of at least 1\n  None keeps the whole vocabulary"),
    ({"top_k": 2.5}, "top_k (2.5) must be an integer"),
    ({"top_p": 0}, "top_p (0) must be above 0 and at most 1"),
    ({"min_p": 1.5}, "min_p (1.5) must be from 0 to 1"),
    ({"repetition_penalty": 0}, "repetition_penalty (0) must be from 0.001 to 1000"),
    ({"frequency_penalty": True}, "frequency_penalty (True) must be"),
]


@pytest.mark.parametrize(("given", "words"), WRONG, ids=[words[:24] for _, words in WRONG])
def test_a_setting_out_of_range_is_named_with_the_way_out(given, words):
    with pytest.raises(RzooError) as error:
        Sampling(**given)
    assert words in str(error.value)


def test_a_seed_that_is_none_is_refused():
    for seed in (-1, 2**63, "a", 1.5, True):
        with pytest.raises(RzooError, match=r"must be an integer from 0 to 2\*\*63"):
            seed_of(seed, 0)


def test_lookup_finds_what_followed_the_longest_match():
    assert looked_up([1, 2, 3, 4, 5, 9, 2, 3], 2) == [4, 5]
    assert looked_up([7, 3, 8, 1, 2, 3, 4, 5, 1, 2, 3], 9) == [4, 5, 1, 2, 3]
    assert looked_up([94] * 10, 4) == [94] * 4
    assert looked_up([1, 2, 3], 4) == [] and looked_up([1], 4) == []


def test_logits_are_float32_whatever_they_were():
    assert in_vocabulary(jnp.ones((1, 4), jnp.bfloat16), 4).dtype == jnp.float32
