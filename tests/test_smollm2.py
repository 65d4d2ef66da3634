"""The packaged SmolLM2-135M-Instruct against recorded tokens and logits (transformers, float32)."""

import numpy as np
import pytest

import rzoo
from rzoo.checkpoint.opened import unturned

pytestmark = pytest.mark.extras

QUESTION = "What is the capital of France?"
PROMPT = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2]
PROMPT += [198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
ANSWER = [504, 3575, 282, 4649, 314, 7042, 30, 2]
TOP = {504: 25.3254, 60: 25.2433, 15319: 24.9424, 2219: 24.4017, 7026: 24.3146}
FIRST = [10.166, 6.2121, 6.8371, 6.2551, 5.3848, 4.9104, 2.3865, 4.9225]


@pytest.fixture(scope="module")
def lm(model_file):
    """The model, loaded from the file of its package."""
    return rzoo.load(str(model_file), quiet=True)


def test_logits_are_the_recorded_ones(lm):
    logits = np.asarray(lm(np.asarray([PROMPT])))[0]
    assert np.argsort(-logits[-1])[:5].tolist() == list(TOP)
    np.testing.assert_allclose(logits[-1][list(TOP)], list(TOP.values()), atol=1e-3)
    np.testing.assert_allclose(logits[-1][:8], FIRST, atol=1e-3)
    shifted = logits[:-1] - logits[:-1].max(axis=-1, keepdims=True)
    chosen = np.take_along_axis(shifted, np.asarray(PROMPT[1:])[:, None], axis=-1)[:, 0]
    nll = np.log(np.exp(shifted).sum(axis=-1)) - chosen
    assert nll.mean() == pytest.approx(4.3224, abs=1e-3)


def test_the_answer_is_paris(lm):
    answer = rzoo.generate(lm, QUESTION)
    assert list(answer.prompt_tokens) == PROMPT
    assert list(answer.tokens) == ANSWER
    assert answer.text == "The capital of France is Paris."
    assert (answer.finish_reason, answer.reasoning) == ("stop", None)


def test_streamed_pieces_join_to_the_answer(lm):
    question = "Write three words in Korean and one emoji."
    stream = rzoo.stream(lm, question, max_new_tokens=40)
    pieces = list(stream)
    assert len(pieces) > 2
    assert "".join(pieces) == rzoo.generate(lm, question, max_new_tokens=40).text == stream.completion.text


def test_forgetting_to_reorder_q_and_k_is_noticed(lm):
    """The loss hardly moves (4.3434 was measured for 4.3224) but the likeliest token becomes the end of text."""
    turned = {p: (_turned(v) if p.endswith((".attention.q", ".attention.k")) else v) for p, v in lm.params.items()}
    wrong = lm.with_params(turned)
    assert int(np.argmax(wrong(np.asarray([PROMPT]))[0, -1])) == 2


def _turned(heads):
    """The order of rows in the file: the inverse of `unturned`."""
    order = unturned(np.arange(heads.shape[0] * heads.shape[1]).reshape(heads.shape[:2]))
    flat = np.empty(np.asarray(heads).reshape(-1, heads.shape[2]).shape, np.float32)
    flat[order.ravel()] = np.asarray(heads).reshape(-1, heads.shape[2])
    return flat.reshape(heads.shape)


def test_export_and_load_keep_every_bit(lm, tmp_path):
    rzoo.export(lm, tmp_path / "out")
    back = rzoo.load(str(tmp_path / "out"), quiet=True)
    assert back.config == lm.config
    for path, value in lm.params.items():
        np.testing.assert_array_equal(back.params[path], value)
    assert rzoo.generate(back, QUESTION).tokens == tuple(ANSWER)
