"""Generation on tiny models: prompts of every kind, limits, interruption, bounded programs."""

import _thread
import os
import subprocess
import sys
import threading
from dataclasses import replace

import jax
import numpy as np
import pytest

import rzoo
from rzoo.compile.programs import WHOLE
from rzoo.core import RzooError
from rzoo.engine.prompts import is_single
from rzoo.engine.session import CHUNKS, capacity_for, chunks_of, prefill
from tests.chat_folder import load_talker
from tests.goldens import GOLDEN


@pytest.fixture(scope="module")
def lm():
    """A tiny model without a tokenizer."""
    return rzoo.load(str(GOLDEN / "llama_tied"), quiet=True)


@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    """The same with a tokenizer of single letters and a template."""
    return load_talker(tmp_path_factory.mktemp("talker") / "model")


def test_greedy_tokens_are_the_argmax_of_the_logits(lm):
    answer = rzoo.generate(lm, [5, 6, 7], max_new_tokens=20)
    ids = np.asarray([[*answer.prompt_tokens, *answer.tokens]])
    chosen = np.argmax(lm(ids)[0], axis=-1)[2:-1]
    assert chosen.tolist() == list(answer.tokens)
    assert answer.finish_reason in ("length", "stop")


def test_a_stop_ends_the_answer_and_is_not_part_of_the_text(talker):
    free = rzoo.generate(talker, "hi", max_new_tokens=12)
    stop = free.tokens[4]
    about = type(talker.about)(**{**vars(talker.about), "stops": (stop,)})
    stopped = rzoo.generate(type(talker)(**{**vars(talker), "about": about}), "hi", max_new_tokens=12)
    first = free.tokens.index(stop)
    assert stopped.tokens == free.tokens[: first + 1]
    assert stopped.finish_reason == "stop"
    assert stopped.text == talker.tokenizer.decode(free.tokens[:first])


def test_text_messages_and_ids_lead_to_the_same_prompt(talker):
    by_text = rzoo.generate(talker, "hi", max_new_tokens=3)
    assert talker.tokenizer.decode(by_text.prompt_tokens, skip_special=False) == "<s>user:hi;A:"
    assert rzoo.generate(talker, [{"role": "user", "content": "hi"}], max_new_tokens=3) == by_text
    assert rzoo.generate(talker, list(by_text.prompt_tokens), max_new_tokens=3) == by_text
    assert rzoo.generate(talker, np.asarray(by_text.prompt_tokens), max_new_tokens=3) == by_text
    raw = rzoo.generate(talker, "hi", max_new_tokens=3, raw=True)
    assert talker.tokenizer.decode(raw.prompt_tokens, skip_special=False).removeprefix("<s>") == "hi"


def test_a_list_gives_a_list_in_its_order(talker):
    prompts = ["hi", "how are you", [3, 4]]
    together = rzoo.generate(talker, prompts, max_new_tokens=6)
    assert together == [rzoo.generate(talker, p, max_new_tokens=6) for p in prompts]
    assert rzoo.generate(talker, []) == []


def test_streamed_pieces_join_to_the_text(talker):
    stream = rzoo.stream(talker, "hello", max_new_tokens=30)
    assert "".join(stream) == rzoo.generate(talker, "hello", max_new_tokens=30).text
    assert stream.completion.finish_reason in ("length", "stop")
    assert "tokens, first after" in stream.report()


def test_an_interrupt_returns_what_there_is(lm):
    timer = threading.Timer(1.0, _thread.interrupt_main)
    timer.start()
    answer = rzoo.generate(lm, [1], max_new_tokens=2500)
    timer.cancel()
    assert answer.finish_reason in ("interrupted", "stop", "length")
    assert rzoo.generate(lm, [1], max_new_tokens=3).tokens == answer.tokens[:3] or not answer.tokens


@pytest.mark.report("C06")
def test_the_answer_ends_where_the_context_ends(lm):
    prompt = [3] * (lm.config.context - 4)
    answer = rzoo.generate(lm, prompt, max_new_tokens=100, ignore_eos=True)
    assert (len(answer.tokens), answer.finish_reason) == (4, "length")


REFUSED = [
    ([[]], "the prompt is empty"),
    ([97], "prompt contains id 97, outside of the vocabulary 0..96"),
    ([-1], "prompt contains id -1"),
    ([1] * 2560, "the prompt has 2560 tokens, the context of the model is 2560"),
    ("text", "has no tokenizer"),
    ([{"role": "user", "content": "hi"}], "has no tokenizer"),
    (3.5, "prompt must be text, a list of ids, a list of messages, or a list of those; got float"),
]


@pytest.mark.parametrize(("prompt", "words"), REFUSED)
def test_a_prompt_that_cannot_be_answered_is_refused_before_any_work(lm, prompt, words):
    with pytest.raises(RzooError) as error:
        rzoo.generate(lm, prompt)
    assert words in str(error.value)


def test_limits_are_checked(lm):
    with pytest.raises(RzooError, match=r"max_new_tokens \(0\) must be an integer of at least 1"):
        rzoo.generate(lm, [1], max_new_tokens=0)
    with pytest.raises(RzooError, match="stream takes one prompt"):
        rzoo.stream(lm, [[1], [2]])


def test_one_prompt_is_told_from_many():
    assert all(is_single(p) for p in ("a", [1, 2], [np.int32(1)], [{"role": "user"}], np.asarray([1])))
    assert not any(is_single(p) for p in (["a"], [[1], [2]], [[{"role": "user"}]], []))


def test_chunks_cover_every_length_with_little_padding():
    for length in range(1, 2000, 7):
        pieces = chunks_of(length)
        assert set(pieces) <= set(CHUNKS)
        assert length <= sum(pieces) < length + CHUNKS[-1]


def test_capacities_are_few():
    assert {capacity_for(n) for n in range(1, 9000)} == {256, 512, 1024, 2048, 4096, 8192, 16384}


def test_programs_stay_few_however_lengths_vary(lm):
    rzoo.generate(lm, [1] * 700, max_new_tokens=2)
    rzoo.generate(lm, [1] * 30, max_new_tokens=2)
    before = WHOLE.prefill_chunk._cache_size(), WHOLE.decode._cache_size()
    for length in (1, 31, 33, 100, 150, 222):
        rzoo.generate(lm, [1] * length, max_new_tokens=2)
    after = WHOLE.prefill_chunk._cache_size(), WHOLE.decode._cache_size()
    assert after[0] - before[0] <= len(CHUNKS) and after[1] == before[1]


def test_prefill_memory_does_not_grow_with_the_square_of_the_length():
    """Temporaries of a prefill chunk at 8192 tokens, beside the cache, are at most twice those at 2048."""
    from rzoo.compile.kernels import default_forms
    from rzoo.models.llama import LlamaConfig
    from rzoo.models.registry import initialize
    from rzoo.models.step import Blueprint
    from rzoo.models.weights import Numerics

    config = LlamaConfig(
        vocab_size=64, width=32, ffn_width=32, layers=1, heads=4, kv_heads=2, head_width=8, context=16384
    )
    blueprint, params = Blueprint(config, default_forms(Numerics())), initialize(config)
    temporaries = {}
    for length in (2048, 8192):
        cache = blueprint.empty_cache(1, length)
        ids, counts = np.zeros((1, CHUNKS[0]), np.int32), np.full(1, CHUNKS[0], np.int32)
        compiled = WHOLE.prefill_chunk.lower(blueprint, params, ids, counts, cache).compile()
        temporaries[length] = compiled.memory_analysis().temp_size_in_bytes
    assert temporaries[8192] <= 2 * temporaries[2048]


def test_a_long_prompt_gives_the_logits_of_the_whole(lm):
    ids = np.random.default_rng(0).integers(0, 97, (1, 1500))
    np.testing.assert_allclose(prefill(lm, ids.tolist(), room=1).logits, lm(ids)[:, -1], atol=1e-4)


def test_rotation_that_depends_on_length_is_not_changed_by_padding():
    """Past its original context a dynamic rotation follows the row's length: buckets and chunks must not count in."""
    from rzoo.compile.kernels import default_forms
    from rzoo.handle import LM
    from rzoo.models.registry import initialize
    from rzoo.models.rope import DynamicRope
    from rzoo.models.weights import Numerics
    from tests.tiny import TINY

    config = replace(TINY["llama-dynamic"], rope=DynamicRope(factor=4.0, original_context=40))
    lm = LM(config, initialize(config), default_forms(Numerics()))
    ids = np.random.default_rng(0).integers(0, 97, (2, 70))
    whole = jax.jit(lambda model, i: model(i))(lm, ids)
    np.testing.assert_allclose(lm(ids), whole, atol=2e-5)
    state = prefill(lm, [ids[0].tolist(), ids[1, :50].tolist()], room=1)
    np.testing.assert_allclose(state.logits[0], whole[0, -1], atol=2e-5)
    np.testing.assert_allclose(state.logits[1], lm(ids[1:, :50])[0, -1], atol=2e-5)


MISTAKES = [
    (lambda lm: rzoo.generate(lm, [1.5, 2.0]), "a prompt is text, ids or messages; got float"),
    (lambda lm: rzoo.generate(lm, b"hi"), "prompt is bytes"),
    (lambda lm: rzoo.stream(lm, [1, 2]), "stream gives text, and this model has no tokenizer"),
    (lambda lm: lm([[1, 2], [3]]), "ids must be rows of one length, [b, t]"),
    (lambda lm: jax.vmap(lm)(np.ones((2, 3), int)), "ids must have shape [b, t]; got [3]"),
    (lambda lm: lm.with_params({}), "names differ from the model's"),
]


@pytest.mark.parametrize(("call", "words"), MISTAKES, ids=[words for _, words in MISTAKES])
def test_a_slip_in_python_is_told_in_words(lm, call, words):
    with pytest.raises(RzooError) as error:
        call(lm)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("rzoo.generate('smollm2', 'hi')", "lm must be a handle from rzoo.load; got str"),
        ("rzoo.generate(lm, [1], max_new_tokens='5')", "max_new_tokens ('5') must be an integer of at least 1"),
    ],
)
def test_a_wrong_type_is_told_in_words_where_no_checker_runs(call, words):
    program = f"import rzoo; lm = rzoo.load({str(GOLDEN / 'llama_tied')!r}, quiet=True); {call}"
    env = {**os.environ, "PYTHONPATH": str(GOLDEN.parent.parent)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, check=False)
    assert f"rzoo.core.RzooError: {words}" in done.stderr


def test_answers_and_handles_print_as_what_they_are(talker):
    answer = rzoo.generate(talker, "hi", max_new_tokens=3)
    assert str(answer) == answer.text
    assert "prompt_tokens" not in repr(answer)
    assert "no numbers" in repr(jax.tree.map(lambda x: None, talker))
