"""Multi-token prediction: the formula by hand, drafts against a cache, and its layer in files."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import rzoo
from rzoo.checkpoint.huggingface import open_folder
from rzoo.compile.kernels import default_forms
from rzoo.core import RzooError
from rzoo.engine.drafting import own_module, states_alone
from rzoo.engine.session import read_chunk
from rzoo.handle import LM
from rzoo.models import step
from rzoo.models.presets import DEEPSEEK_V3
from rzoo.models.registry import count_parameters, initialize
from rzoo.models.weights import Numerics
from tests.goldens import GOLDEN
from tests.tiny import TINY, V3

IDS = np.random.default_rng(0).integers(0, 97, (2, 12))


def with_module(config) -> LM:
    """A model with the module, all norms of which are random, so that a lost one shows."""
    config, rng = replace(config, mtp_layers=1, mtp=True), np.random.default_rng(1)
    params = {
        path: value * rng.uniform(0.5, 1.5, value.shape) if path.endswith("norm.scale") else value
        for path, value in initialize(config).items()
    }
    return LM(config, params, default_forms(Numerics()))


@pytest.fixture(scope="module")
def lm():
    return with_module(TINY["deepseek-v32"])


def hidden_of(lm: LM, ids) -> np.ndarray:
    """Final hidden states of whole sequences."""
    return np.asarray(lm(ids, capture="hidden")[1]["hidden"][-1])


def drafted(lm: LM, hidden, tokens, counts, cache, *, count: int):
    """step.draft on lists of rows."""
    hidden, tokens, counts = (jnp.asarray(a) for a in (np.stack(hidden), np.stack(tokens), counts))
    return DRAFT(lm.blueprint, lm.params, hidden, tokens, counts, cache, count=count)


def states_and_logits(module, hidden, tokens):
    """Of whole rows, without a cache."""
    states = module.mtp_states(hidden, tokens)[0]
    return states, module.logits(states)


STATES = nnx.jit(states_and_logits)
DRAFT = jax.jit(step.draft, static_argnames=("blueprint", "count"))


def rms(x, scale):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale


def turned(x, positions, width):
    """Rotary positions in interleaved pairs."""
    angle = positions[:, None] * 10000.0 ** (-np.arange(0, width, 2) / width)
    angle = angle.reshape(len(positions), *(1,) * (x.ndim - 2), width // 2)
    even, odd = x[..., ::2], x[..., 1::2]
    parts = [even * np.cos(angle) - odd * np.sin(angle), odd * np.cos(angle) + even * np.sin(angle)]
    return np.stack(parts, axis=-1).reshape(x.shape)


def by_hand(p, config, hidden, tokens):
    """Logits of one row, from the paper's formulas: no line of ours."""
    block = {path.removeprefix("mtp_module.block."): v for path, v in p.items()}
    both = [rms(p["embed"][tokens], p["mtp_module.embed_norm.scale"]), rms(hidden, p["mtp_module.hidden_norm.scale"])]
    x = np.concatenate(both, axis=-1) @ p["mtp_module.join"].T
    y, at, nope, rope = rms(x, block["attention_norm.scale"]), np.arange(len(x)), config.nope_width, config.rope_width
    latent = rms(y @ block["attention.q_down"].T, block["attention.q_norm.scale"])
    q = np.einsum("tr,hcr->thc", latent, block["attention.q_up"])
    both = y @ block["attention.kv_down"].T
    c = rms(both[:, : config.kv_rank], block["attention.kv_norm.scale"])
    shared = turned(both[:, config.kv_rank :], at, rope)
    keys, values = (np.einsum("sr,hcr->shc", c, block[f"attention.{name}"]) for name in ("key_up", "value_up"))
    scores = np.einsum("thc,shc->hts", q[..., :nope], keys)
    scores = (scores + np.einsum("thp,sp->hts", turned(q[..., nope:], at, rope), shared)) * (nope + rope) ** -0.5
    scores = np.exp(np.where(at[:, None] >= at, scores, -np.inf))
    mixed = np.einsum("hts,shz->thz", scores / scores.sum(-1, keepdims=True), values)
    x = x + np.einsum("thz,dhz->td", mixed, block["attention.output"])
    y = rms(x, block["mlp_norm.scale"])
    gate, up = y @ block["mlp.gate"].T, y @ block["mlp.up"].T
    x = x + (gate / (1 + np.exp(-gate)) * up) @ block["mlp.down"].T
    return rms(x, p["mtp_module.norm.scale"]) @ p["embed"].T


def test_logits_are_those_of_the_formula():
    lm = with_module(TINY["deepseek-dense"])
    hidden = hidden_of(lm, IDS[:1])[:, :-1]
    found = lm.module().mtp(jnp.asarray(hidden), jnp.asarray(IDS[:1, 1:]))
    params = {path: np.asarray(value, np.float64) for path, value in lm.params.items()}
    np.testing.assert_allclose(found[0], by_hand(params, lm.config, hidden[0], IDS[0, 1:]), atol=2e-5)


def test_the_module_does_not_change_what_the_model_says(lm):
    without = replace(lm.config, mtp=False)
    own = {path: value for path, value in lm.params.items() if not path.startswith("mtp_module.")}
    np.testing.assert_array_equal(lm(IDS), LM(without, own, lm.forms)(IDS))


def test_drafts_in_pieces_are_those_of_the_whole(lm):
    hidden, module = hidden_of(lm, IDS), lm.module()
    cache = lm.blueprint.empty_draft_cache(2, 16)
    none, cache = drafted(lm, hidden[:, :6], IDS[:, 1:7], [5, 3], cache, count=0)
    assert none.shape == (2, 0)
    assert cache.lengths.tolist() == [5, 3]
    rows = [hidden[0, 5:8], hidden[1, 3:6]], [IDS[0, 6:9], IDS[1, 4:7]]
    guesses, cache = drafted(lm, *rows, [3, 2], cache, count=2)
    assert cache.lengths.tolist() == [8, 5]
    states, tokens = np.zeros((2, 12, 32), np.float32), np.zeros((2, 12), np.int32)
    ends = np.asarray([8, 5])
    for row, end in enumerate(ends):
        states[row, :end], tokens[row, :end] = hidden[row, :end], IDS[row, 1 : end + 1]
    for i in range(2):  # what follows an end does not reach it
        found, logits = STATES(module, jnp.asarray(states), jnp.asarray(tokens))
        for row, end in enumerate(ends + i):
            guess = np.argmax(logits[row, end - 1])
            assert guesses[row, i] == guess
            states[row, end], tokens[row, end] = found[row, end - 1], guess


def test_a_model_without_the_module_says_how_to_get_it():
    lm = LM(V3, initialize(V3), default_forms(Numerics()))
    with pytest.raises(RzooError, match=r"no module for multi-token prediction\n  load one that has it with mtp=True"):
        lm.module().mtp(jnp.zeros((1, 2, 32)), jnp.zeros((1, 2), jnp.int32))


@pytest.mark.report("A30", "A31")
@pytest.mark.parametrize("fp8", [False, True])
def test_the_module_is_read_when_asked_for_and_skipped_with_one_line_else(lm, tmp_path, fp8, capsys):
    folder = rzoo.export(lm, tmp_path / "mtp", fp8=fp8)
    names = [name for name in open_folder(folder).tensors if name.startswith("model.layers.2.")]
    assert {"model.layers.2.embed_tokens.weight", "model.layers.2.shared_head.head.weight"} <= set(names)
    back = rzoo.load(str(folder), mtp=True, quiet=True)
    assert back.config == lm.config
    assert back.params.keys() == lm.params.keys()
    for path, value in lm.params.items():
        if not fp8:
            np.testing.assert_array_equal(back.params[path], value)
    plain = rzoo.load(str(folder))
    assert plain.config == replace(lm.config, mtp=False)
    assert capsys.readouterr().err.count(f"skipped {len(names)} tensors of layer 2 (multi-token prediction") == 1


def test_a_copy_that_differs_is_refused(lm, tmp_path):
    folder = rzoo.export(lm, tmp_path / "mtp")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.2.shared_head.head.weight"] = tensors["model.layers.2.shared_head.head.weight"] + 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RzooError, match=r"differs from lm_head\.weight, but multi-token prediction shares it"):
        rzoo.load(str(folder), mtp=True, quiet=True)


def test_a_saved_step_keeps_the_module(lm, tmp_path):
    rzoo.save(lm, tmp_path / "steps", step=1)
    back = rzoo.load(str(tmp_path / "steps"), quiet=True)
    assert back.config == lm.config
    np.testing.assert_array_equal(back.params["mtp_module.join"], lm.params["mtp_module.join"])


@pytest.mark.report("A33")
@pytest.mark.parametrize("golden", ["deepseek_v3", "llama_tied"])
def test_a_checkpoint_without_the_module_is_refused_in_words(golden):
    with pytest.raises(RzooError, match="has no module for multi-token prediction"):
        rzoo.load(str(GOLDEN / golden), mtp=True, quiet=True)


def test_the_count_with_the_module_is_the_published_one():
    with_mtp = count_parameters(replace(DEEPSEEK_V3, mtp=True))
    copies = 2 * DEEPSEEK_V3.vocab_size * DEEPSEEK_V3.width
    assert with_mtp + copies == 684_489_845_504


# Drafts in generation


PROMPTS = [[5, 6, 7], [9] * 40, [1]]


@pytest.mark.parametrize("deterministic", [False, True])
def test_drafts_of_the_module_change_no_greedy_answer(lm, deterministic):
    options = {"max_new_tokens": 14, "deterministic": deterministic}
    free = rzoo.generate(lm, PROMPTS, **options)
    found = rzoo.generate(lm, PROMPTS, draft="mtp", draft_tokens=2, **options)
    assert [a.tokens for a in found] == [a.tokens for a in free]
    assert all(answer.passes <= 13 for answer in found)


def test_guesses_in_generation_are_those_of_the_whole_sequence(lm):
    """After a prompt and after a pass, of which the states of the accepted tokens alone count."""
    prompts = [[5, 6, 7, 8, 9], [3, 1]]
    state, module = own_module(lm, prompts, 2)
    logits = lm([prompts[0]])[0, -1]
    np.testing.assert_allclose(state.logits[0], logits, atol=1e-4)
    newest = np.asarray([11, 12], np.int32)
    guesses, counts, q = module.guess(newest, np.ones(2, np.int32))
    assert (counts.tolist(), q) == ([2, 2], None)
    assert guesses[:, 0].tolist() == [_guessed(lm, [*p, int(n)]) for p, n in zip(prompts, newest, strict=True)]
    # a pass over the newest token and two guesses, of which the first row takes one and the second none
    passed = np.concatenate([newest[:, None], guesses], axis=1)
    states, after = read_chunk(lm, state, passed, np.asarray([3, 3]), None, states_alone)
    tokens = np.asarray([[guesses[0, 0], 20, 0], [21, 0, 0]], np.int32)
    after = after.cut([len(prompts[0]) + 2, len(prompts[1]) + 1])
    module.learn(after.lengths, tokens, np.asarray([2, 1], np.int32), states)
    guesses = module.guess(np.asarray([20, 21], np.int32), np.ones(2, np.int32))[0]
    rows = [[*prompts[0], 11, int(tokens[0, 0]), 20], [*prompts[1], 12, 21]]
    assert guesses[:, 0].tolist() == [_guessed(lm, row) for row in rows]


def _guessed(lm: LM, ids: list[int]) -> int:
    """The token after `ids` that the module thinks likeliest, from the whole row."""
    states = hidden_of(lm, [ids])[:, :-1]
    return int(np.argmax(lm.module().mtp(jnp.asarray(states), jnp.asarray([ids[1:]]))[0, -1]))


def test_a_draft_by_a_module_that_is_not_there_is_refused():
    lm = LM(V3, initialize(V3), default_forms(Numerics()))
    with pytest.raises(RzooError, match=r"draft \(mtp\): this model has no module(.|\n)*with mtp=True"):
        rzoo.generate(lm, [1], draft="mtp")
