"""Generation as a whole on tiny models: batches, seeds, stops, thoughts, sessions, drafts, and few programs."""

import json
import math
from dataclasses import replace

import jax
import numpy as np
import pytest

import rzoo
from rzoo.compile.kernels import default_forms
from rzoo.compile.programs import WHOLE
from rzoo.core import RzooError
from rzoo.engine.session import decode, prefill
from rzoo.handle import LM
from rzoo.models.registry import initialize
from rzoo.models.weights import Numerics
from rzoo.sharding.place import place
from tests.chat_folder import load_talker
from tests.goldens import GOLDEN
from tests.tiny import DIVISIBLE

PROMPTS = [[5, 6, 7], [9] * 50, [1, 2], list(range(90))]


@pytest.fixture(scope="module")
def lm():
    return rzoo.load(str(GOLDEN / "llama_tied"), quiet=True)


@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    return load_talker(tmp_path_factory.mktemp("talker") / "model")


def tokens_of(answers):
    return [answer.tokens for answer in answers]


# Batches


@pytest.mark.report("C02", "C03", "C05", "C23")
def test_the_logits_of_a_row_are_those_of_the_row_alone_in_any_batch_at_any_place(lm):
    def after_steps(prompts):
        tokens, state = decode(lm, prefill(lm, prompts, room=8), 5)
        return tokens[:, :5].tolist(), np.asarray(state.logits)

    alone = {tuple(p): after_steps([p]) for p in PROMPTS}
    for order in ([0, 1, 2, 3], [3, 2, 1, 0]):
        tokens, logits = after_steps([PROMPTS[i] for i in order])
        for row, at in enumerate(order):
            own_tokens, own_logits = alone[tuple(PROMPTS[at])]
            assert tokens[row] == own_tokens[0]
            np.testing.assert_allclose(logits[row], own_logits[0], atol=1e-4)


@pytest.mark.report("C23")
def test_deterministic_answers_have_the_same_bits_alone_and_in_batches(lm):
    options = {"max_new_tokens": 20, "deterministic": True, "logprobs": 0, "ignore_eos": True}
    long = list(np.random.default_rng(0).integers(0, 94, 600))  # grows the cache that the others share
    together = rzoo.generate(lm, [*PROMPTS, long, *[[3, 4]] * 4, [8]], **options)
    for at in (0, 3, 9):
        assert rzoo.generate(lm, [*PROMPTS, long, *[[3, 4]] * 4, [8]][at], **options) == together[at]
    assert rzoo.generate(lm, long, **options) == together[4]


@pytest.mark.report("C17", "C20", "C21")
def test_each_row_of_a_mixed_batch_answers_as_alone_with_its_own_settings_and_seed(lm):
    settings: dict[str, list] = {
        "temperature": [0, 1.5, 1.0, 1.0],
        "top_k": [None, None, 5, 1000],
        "top_p": [1, 1, 1, 0.9],
    }
    together = rzoo.generate(lm, PROMPTS, max_new_tokens=12, seed=3, **settings)
    assert together[0].seed is None and together[1].seed != together[2].seed
    for at, prompt in enumerate(PROMPTS[:3]):
        own = {name: values[at] for name, values in settings.items()}
        alone = rzoo.generate(lm, prompt, max_new_tokens=12, seed=together[at].seed, **own)
        assert alone.tokens == together[at].tokens
    assert rzoo.generate(lm, PROMPTS[0], max_new_tokens=12).tokens == together[0].tokens


@pytest.mark.report("C21")
def test_without_a_seed_every_answer_is_another_and_names_the_seed_that_repeats_it(lm):
    same = rzoo.generate(lm, [[1, 2]] * 3, max_new_tokens=8, temperature=1.0)
    again = rzoo.generate(lm, [1, 2], max_new_tokens=8, temperature=1.0)
    assert len({*tokens_of(same), again.tokens}) == 4
    assert rzoo.generate(lm, [1, 2], max_new_tokens=8, temperature=1.0, seed=again.seed).tokens == again.tokens


def test_n_answers_share_the_prompt_and_their_first_is_the_single_one(lm):
    several = rzoo.generate(lm, [1, 2], max_new_tokens=8, temperature=1.0, seed=5, n=4)
    assert len(set(tokens_of(several))) == 4
    assert [answer.computed for answer in several] == [2, 0, 0, 0]
    assert rzoo.generate(lm, [1, 2], max_new_tokens=8, temperature=1.0, seed=5).tokens == several[0].tokens
    lists = rzoo.generate(lm, [[1, 2], [4]], max_new_tokens=2, temperature=1.0, n=2)
    assert [len(answers) for answers in lists] == [2, 2]


@pytest.mark.report("C24")
def test_penalties_of_a_row_do_not_depend_on_longer_peers(lm):
    options = {"max_new_tokens": 12, "repetition_penalty": 3.0, "frequency_penalty": 1.0}
    together = rzoo.generate(lm, PROMPTS, **options)
    assert rzoo.generate(lm, PROMPTS[0], **options).tokens == together[0].tokens
    assert rzoo.generate(lm, PROMPTS[0], max_new_tokens=12).tokens != together[0].tokens


def test_vocabulary_padding_is_never_generated(talker):
    core = type(talker.tokenizer.core).from_str(talker.tokenizer.to_json())
    state = json.loads(core.to_str())
    state["model"]["vocab"] = {text: i for text, i in state["model"]["vocab"].items() if i < 60}
    state["added_tokens"] = []
    small = replace(talker.tokenizer, core=type(core).from_str(json.dumps(state)), bos_id=None, eos_ids=())
    padded = replace(talker, about=replace(talker.about, tokenizer=small, stops=()))
    assert max(rzoo.generate(talker, [5, 6], max_new_tokens=9).tokens) >= 60
    for temperature in (0, 100.0):
        assert max(rzoo.generate(padded, [5, 6], max_new_tokens=9, temperature=temperature).tokens) < 60


@pytest.mark.report("C08")
def test_log_probabilities_are_the_models_own_and_as_many_as_asked_for(lm):
    answer = rzoo.generate(lm, [5, 6], max_new_tokens=6, temperature=1.0, top_k=3, logprobs=4, seed=1)
    ids = np.asarray([[5, 6, *answer.tokens]])
    logprobs = jax.nn.log_softmax(lm(ids))[0, 1:-1]
    np.testing.assert_allclose(
        answer.logprobs, [row[t] for row, t in zip(logprobs, answer.tokens, strict=True)], atol=1e-4
    )
    for row, best in zip(logprobs, answer.top_logprobs, strict=True):
        assert [i for i, _ in best] == np.argsort(-row)[:4].tolist()
    assert rzoo.generate(lm, [5, 6], max_new_tokens=2, logprobs=0).top_logprobs is None


# Where answers end


def free_answer(talker, **options):
    return rzoo.generate(talker, "hi", max_new_tokens=24, ignore_eos=True, temperature=1.0, seed=2, **options)


@pytest.mark.report("B19", "B23")
def test_a_stop_string_over_token_borders_ends_text_and_stream_before_it(talker):
    free = free_answer(talker)
    stop = free.text[9:12]
    at = free.text.index(stop)
    cut = free_answer(talker, stop=[stop, "never this"])
    assert (cut.text, cut.finish_reason) == (free.text[:at], "stop")
    assert free.tokens[: len(cut.tokens)] == cut.tokens and len(cut.tokens) < 24
    pieces = rzoo.stream(talker, "hi", max_new_tokens=24, ignore_eos=True, temperature=1.0, seed=2, stop=stop)
    assert "".join(pieces) == cut.text and pieces.completion == cut


@pytest.mark.report("C09", "C11", "C12")
def test_ends_of_the_model_are_joined_ignored_when_asked_and_the_users_ids_stay(talker, tmp_path):
    load_talker(tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": [66]}))
    lm = rzoo.load(str(tmp_path / "model"), quiet=True)
    assert {66, 95} <= set(lm.about.stops)
    ended = rzoo.generate(lm, [5, 6, 7], max_new_tokens=8)
    assert (ended.tokens, ended.finish_reason, ended.text) == ((66,), "stop", "")
    on = rzoo.generate(lm, [5, 6, 7], max_new_tokens=8, ignore_eos=True)
    assert (on.tokens[0], len(on.tokens), on.finish_reason) == (66, 8, "length")
    mine = rzoo.generate(lm, [5, 6, 7], max_new_tokens=8, ignore_eos=True, stop=on.tokens[1])
    assert (mine.tokens, mine.finish_reason) == (on.tokens[:2], "stop")
    named = rzoo.generate(lm, [5, 6, 7], max_new_tokens=8, ignore_eos=True, stop=["</s>"])
    assert named.tokens == on.tokens[: on.tokens.index(95) + 1 if 95 in on.tokens else None]


def test_a_thought_is_closed_after_its_budget_and_the_model_answers(talker):
    options = {"raw": True, "max_new_tokens": 40, "ignore_eos": True, "temperature": 1.0, "seed": 4}
    (answer, free) = rzoo.generate(talker, ["a<think>", "a<thin"], max_think_tokens=[5, 0], **options)
    assert len(answer.reasoning) <= 5 and answer.text
    assert "".join(talker.tokenizer.decode(answer.tokens))[5:13] == "</think>"
    assert free.reasoning is None and len(free.tokens) == 40
    stream = rzoo.stream(talker, "a<think>", max_think_tokens=5, logprobs=0, **options)
    assert "".join(stream) == talker.tokenizer.decode(answer.tokens)
    assert stream.completion.tokens == answer.tokens
    assert [p is None for p in stream.completion.logprobs] == [5 <= i < 13 for i in range(40)]
    short = rzoo.generate(talker, "a<think>", max_think_tokens=5, **{**options, "max_new_tokens": 9})
    assert (len(short.tokens), short.finish_reason) == (9, "length")


# What is kept


def test_a_session_computes_only_what_is_new(lm):
    session = rzoo.Session()
    first = rzoo.generate(lm, PROMPTS[3], max_new_tokens=5, session=session)
    assert first.computed == 90
    longer = [*PROMPTS[3], *first.tokens, 3, 4]
    second = rzoo.generate(lm, longer, max_new_tokens=5, session=session)
    assert second.computed == 2
    assert second == rzoo.generate(lm, longer, max_new_tokens=5)
    back = [*PROMPTS[3][:40], 80, 81, 82]
    third = rzoo.generate(lm, back, max_new_tokens=5, session=session)
    assert (third.computed, third.tokens) == (3, rzoo.generate(lm, back, max_new_tokens=5).tokens)
    again = rzoo.generate(lm, back, max_new_tokens=5, session=session)
    assert (again.computed, again.tokens) == (1, third.tokens)
    assert rzoo.generate(replace(lm), back, max_new_tokens=5, session=session).computed == 43


def test_a_session_survives_a_stream_that_is_closed_early_and_a_stop_string(talker):
    session = rzoo.Session()
    stream = rzoo.stream(talker, "hi", max_new_tokens=60, ignore_eos=True, session=session)
    assert next(stream)
    stream.close()
    assert session.tokens == (*stream.completion.prompt_tokens, *stream.completion.tokens)
    stop = free_answer(talker).text[3:5]
    stopped = free_answer(talker, stop=stop, session=session)
    ids = [*stopped.prompt_tokens, *stopped.tokens, 7]
    again = rzoo.generate(talker, ids, max_new_tokens=4, session=session)
    assert again.computed == 1
    assert again.tokens == rzoo.generate(talker, ids, max_new_tokens=4).tokens


# Drafts


def test_drafts_change_no_greedy_answer(lm):
    other = lm.with_params({name: weight * 1.1 for name, weight in lm.params.items()})
    free = rzoo.generate(lm, PROMPTS, max_new_tokens=17)
    for draft in (lm, other, "lookup"):
        found = rzoo.generate(lm, PROMPTS, max_new_tokens=17, draft=draft, draft_tokens=3)
        assert tokens_of(found) == tokens_of(free)
        assert [a.finish_reason for a in found] == [a.finish_reason for a in free]


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_model_accepts_all_of_its_own_guesses(lm, temperature):
    options = {"max_new_tokens": 18, "temperature": temperature, "seed": 1, "ignore_eos": True}
    answer = rzoo.generate(lm, PROMPTS[0], draft=lm, draft_tokens=3, **options)
    assert len(answer.tokens) == 18
    assert answer.passes == math.ceil(17 / 4) <= math.ceil(18 / 4)
    assert answer.tokens_per_pass == 17 / 5


def test_lookup_takes_text_that_repeats_in_few_passes(lm):
    answer = rzoo.generate(lm, PROMPTS[0], max_new_tokens=30, draft="lookup", draft_tokens=4, ignore_eos=True)
    assert len(set(answer.tokens[2:])) == 1, "the golden model repeats itself"
    assert answer.passes <= 12


# Programs


def test_programs_stay_few_however_batches_lengths_and_settings_vary(lm):
    names = ("prefill_chunk", "decode", "decode_chosen", "take_rows")
    sizes = lambda: [getattr(WHOLE, name)._cache_size() for name in names]  # noqa: E731
    rng = np.random.default_rng(0)

    def ask(rows, **options):
        prompts = [rng.integers(0, 94, rng.integers(1, 60)).tolist() for _ in range(rows)]
        rzoo.generate(lm, prompts, max_new_tokens=int(rng.integers(1, 40)), **options)

    for rows in (4, 8):
        ask(rows)
        ask(rows, temperature=1.0)
    before = sizes()
    for rows in (3, 4, 5, 6, 7, 8):
        ask(rows)
        ask(rows, temperature=rng.random(rows).tolist(), top_k=int(rng.integers(1, 200)), min_p=0.1)
    assert sizes() == before


# Words


WRONG = [
    ({"temprature": 1}, "option (temprature) is unknown\n  did you mean temperature"),
    ({"temperature": [1.0]}, "temperature has 1 values for 2 prompts\n  give one for all, or one for each"),
    ({"top_p": [0.5, 2]}, "top_p (2) must be above 0 and at most 1"),
    ({"n": 3}, "n (3) answers at temperature 0 would all be the same\n  give a temperature"),
    ({"n": 0}, "n (0) must be an integer from 1 to 4096"),
    ({"stop": ["x"]}, "stop: this model has no tokenizer\n  give token ids"),
    ({"stop": 97}, "stop (97) must be text that is not empty, a token id, or a list of these"),
    ({"stop": 5.5}, "stop (5.5) must be text"),
    ({"logprobs": 101}, "logprobs (101) must be an integer from 0 to 100"),
    ({"max_think_tokens": -1}, "max_think_tokens (-1) must be an integer of at least 0"),
    ({"seed": "x"}, "seed ('x') must be an integer"),
    ({"draft": "tiny"}, 'draft (\'tiny\') must be a handle from rzoo.load, "lookup" or "mtp"'),
    ({"draft": "lookup", "logprobs": 1}, "logprobs can't be had with a draft"),
    ({"draft": "lookup", "presence_penalty": 1.0}, "penalties can't be had with a draft"),
    ({"draft_tokens": 0}, "draft_tokens (0) must be an integer from 1 to 32"),
    ({"session": 1}, "session must be a rzoo.Session"),
    ({"session": rzoo.Session()}, "a session keeps one prompt and its answer"),
]


@pytest.mark.parametrize(("options", "words"), WRONG, ids=[words[:30] for _, words in WRONG])
def test_a_wrong_option_is_told_before_any_work(lm, options, words):
    with pytest.raises(RzooError) as error:
        rzoo.generate(lm, [[1], [2]], **options)
    assert words in str(error.value)


def test_a_draft_of_another_vocabulary_is_refused(lm, talker):
    small = replace(lm, config=replace(lm.config, vocab_size=96))
    with pytest.raises(RzooError, match="draft has 96 tokens and the model 97"):
        rzoo.generate(lm, [1], draft=small)
    with pytest.raises(RzooError, match="stream gives one answer; n goes to generate"):
        rzoo.stream(talker, "hi", n=2, temperature=1.0)


# Meshes


@pytest.mark.extras
@pytest.mark.parametrize("mesh", [{"pipe": 2}, {"data": 2, "tensor": 2}])
def test_what_rows_do_is_the_same_on_a_mesh(mesh):
    config = replace(DIVISIBLE["llama"], layers=2)
    alone = LM(config, initialize(config), default_forms(Numerics()))
    placed = place(alone, mesh, "tensorxpipe" if "pipe" in mesh else "tensorxdata")

    def everything(lm):
        session = rzoo.Session()
        first = rzoo.generate(lm, [1, 2, 3], max_new_tokens=3, session=session)
        return (
            rzoo.generate(lm, [7, 8], max_new_tokens=5, temperature=1.0, seed=1, n=2),
            rzoo.generate(lm, [[5, 6], [7, 8, 9]], max_new_tokens=3, deterministic=True),
            rzoo.generate(lm, [1, 2, 3, *first.tokens, 4], max_new_tokens=3, session=session),
            rzoo.generate(lm, [[1, 2, 1, 2, 1], [3]], max_new_tokens=5, draft="lookup", draft_tokens=2),
        )

    assert everything(placed) == everything(alone)
    ours, theirs = (rzoo.score(lm, [1, 2], [[3, 4], [5]]) for lm in (alone, placed))
    assert [s.total for s in theirs] == pytest.approx([s.total for s in ours], abs=1e-4)
