"""Programs made ahead of time: what they give, that they are kept, and that nothing is traced again."""

import stat
from dataclasses import replace
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

import rzoo
from rzoo.compile import programs
from rzoo.compile.executables import ahead
from rzoo.compile.record import Choice, Record, apply, key_of
from rzoo.compile.workload import Case
from rzoo.engine import session
from rzoo.models import step
from rzoo.models.registry import initialize
from rzoo.sharding.place import place
from rzoo.tokenizer import Tokenizer
from tests.test_every_model import IDS, tiny
from tests.tiny import DIVISIBLE

CASES = (Case("prefill", 2, 24), Case("decode", 2, 4))


@pytest.fixture
def lm(tmp_path, monkeypatch):
    """A tiny model; artifacts go to a folder of this test."""
    monkeypatch.setenv("RZOO_CACHE", str(tmp_path))
    return tiny("llama")


def generated(lm, made):
    """Tokens of both rows, four each, by the programs made."""
    cache, counts = lm.blueprint.empty_cache(2, 256), np.full(2, 24, np.int32)
    logits, cache = made["prefill 2"](lm.params, IDS.astype(np.int32), counts, cache)
    key, wanted = jnp.zeros(2, jnp.uint32), np.full(2, 4, np.int32)
    tokens, _, _ = made["decode 2"](lm.params, logits, cache, key, wanted, np.full(1, -1, np.int32))
    return np.asarray(tokens)[:, :4].tolist()


@pytest.mark.parametrize("choice", [Choice(), Choice(joined=("layers.{}.attention.q",))])
def test_kept_programs_generate_what_the_engine_does_and_are_not_traced_again(lm, tmp_path, monkeypatch, choice):
    pytest.importorskip("flatbuffers", reason="artifacts need flatbuffers")
    expected = [list(c.tokens) for c in rzoo.generate(lm, IDS.tolist(), max_new_tokens=4)]
    tuned = apply(Record(key_of(lm), choice), lm)
    assert generated(tuned, ahead(tuned, CASES)) == expected
    folder = tmp_path / "executables"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert len(list(folder.glob("*.jax"))) == len(CASES) == len(list(folder.iterdir()))

    def traced(*arguments, **settings):
        raise AssertionError("traced again")

    monkeypatch.setattr(step, "prefill_chunk", traced)
    monkeypatch.setattr(step, "decode", traced)
    assert generated(tuned, ahead(tuned, CASES)) == expected


def test_in_steady_state_nothing_is_traced(lm, monkeypatch):
    """Prompts of other lengths, in the same buckets, run on the programs that are there."""
    chex.clear_trace_counter()
    once = lambda function: chex.assert_max_traces(n=1)(function)  # noqa: E731
    prefill = partial(jax.jit, static_argnames="blueprint", donate_argnames="cache")(once(step.prefill_chunk))
    static = ("blueprint", "steps", "select")
    decode = partial(jax.jit, static_argnames=static, donate_argnames="cache")(once(step.decode))
    counted = replace(programs.WHOLE, prefill_chunk=prefill, decode=decode)
    monkeypatch.setattr(programs, "WHOLE", counted)
    for length in (3, 17, 30):
        state = session.prefill(lm, [list(range(1, length))], room=40)
        for wanted in (16, 5, 16):
            _, state = session.decode(lm, state, wanted)


@pytest.fixture
def compiled():
    """How often XLA is asked for a program, in the cache or not, from here on: a list that grows."""
    seen: list[str] = []

    def listen(event, seconds, **about):
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(about.get("fun_name", event))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.report("F03")
@pytest.mark.parametrize("mesh", [None, {"data": 2, "tensor": 4}])
def test_generate_and_stream_compile_nothing_in_steady_state(lm, compiled, mesh):
    config = DIVISIBLE["llama"]
    letters = tokenizers.Tokenizer(tokenizers.models.BPE({chr(33 + i): i for i in range(90)}, []))
    letters.decoder = tokenizers.decoders.ByteLevel()
    about = replace(lm.about, tokenizer=Tokenizer(letters))
    even = replace(lm, config=config, params=initialize(config), about=about)
    placed = even if mesh is None else place(even, mesh, "tensor×data")

    def rounds(length):
        prompts = [list(range(1, length)), list(range(2, 4))]
        list(rzoo.generate(placed, prompts, max_new_tokens=20))
        list(rzoo.stream(placed, prompts[0], max_new_tokens=20))

    rounds(9)
    assert compiled
    compiled.clear()
    rounds(12)
    rounds(30)
    assert compiled == []
