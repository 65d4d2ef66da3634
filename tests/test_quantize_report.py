"""`rzoo quantize`: what the report counts, the command as a person runs it, and the bounds on a real model."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

import rzoo
from rzoo.core import RzooError
from rzoo.evals.quantization import draw, held_out_ids, loss_between, report, table
from rzoo.handle import LM
from tests.chat_folder import load_talker, write_talker
from tests.goldens import GOLDEN
from tests.test_cli import rzoo as command

TEXT = "the quick brown fox jumps over the lazy dog; " * 3


@pytest.fixture(scope="module")
def lm(tmp_path_factory) -> LM:
    """A model with a tokenizer."""
    return load_talker(tmp_path_factory.mktemp("talker") / "model")


@pytest.mark.report("G12")
def test_the_report_counts_bytes_and_names_what_was_left(lm, tmp_path):
    rules = {"*": "int4:g16", "layers.1.*": None, "layers.2.*": None, "embed": "int8"}
    quantized, found = report(lm, rules, held_out_ids(lm, TEXT))
    assert found.before == sum(value.nbytes for value in lm.params.values())
    assert 0 < found.after < found.before
    assert "layers.1.mlp.up (float32)" in found.skipped
    assert "norm.scale (float32)" in found.skipped
    assert not any(name.startswith("layers.0.mlp.") for name in found.skipped)
    assert {layer.name for layer in found.layers} == {"layers.0", "embed"}
    assert found.layers[0].loss.kl_mean >= found.layers[1].loss.kl_mean
    assert 0 < found.loss.kl_mean <= found.loss.kl_99th
    assert quantized.params["layers.0.mlp.up"].block == (1, 16)
    assert json.loads(json.dumps(found.to_json()))["loss"]["top1"] == found.loss.top1
    assert f"{found.before:,} -> {found.after:,} bytes" in table(found)
    assert "1 more lose less" in table(found, most=1)
    draw(found, str(tmp_path / "picture.png"))
    assert (tmp_path / "picture.png").stat().st_size > 1000


def test_the_divergence_is_that_of_the_definition():
    p = jnp.log(jnp.asarray([[[0.5, 0.25, 0.25], [0.2, 0.3, 0.5]]]))
    q = jnp.log(jnp.asarray([[[0.25, 0.5, 0.25], [0.2, 0.3, 0.5]]]))
    loss = loss_between(p + 3.0, q)
    assert loss.kl_mean == pytest.approx(0.25 * np.log(2) / 2, rel=1e-5)
    assert loss.top1 == 0.5


def test_a_text_without_words_and_a_model_without_a_tokenizer_are_told(lm):
    with pytest.raises(RzooError, match="the text has 0 tokens, it takes 2"):
        held_out_ids(lm, "")
    with pytest.raises(RzooError, match="tokenizer"):
        held_out_ids(rzoo.load(GOLDEN / "qwen2", quiet=True), TEXT)


def test_the_command_reports_and_saves_what_load_takes(tmp_path):
    write_talker(tmp_path / "model")
    (tmp_path / "text").write_text(TEXT)
    options = ("--weights", "int4:g16", "--text", str(tmp_path / "text"), "--no-layers", "--json")
    done = command("quantize", str(tmp_path / "model"), *options, "--out", str(tmp_path / "small"))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["weights"], found["layers"]) == ("int4:g16", [])
    small = rzoo.load(tmp_path / "small", quiet=True)
    assert small.params["layers.0.mlp.up"].codes.dtype == "int4"
    assert "saved" in done.stderr
    wrong = command("quantize", str(tmp_path / "model"), "--weights", "int5")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "weights (int5) is no scheme; known: int8, int8:channel" in wrong.stderr


@pytest.mark.extras
@pytest.mark.report("G01", "G03")
@pytest.mark.parametrize(("weights", "bound"), [("int8", 0.002), ("int4:g32", 0.03)])
def test_smollm2_stays_within_its_bounds(model_file, weights, bound):
    """The file's own blocks are 32 wide with a scale and an offset: int4:g32 finds them again, and its loss is none."""
    lm = rzoo.load(str(model_file), quiet=True, record=False)
    _, found = report(lm, weights, held_out_ids(lm), layers=False)
    assert found.loss.kl_mean <= bound
    assert found.loss.top1 >= 0.97
    assert found.coverage > 0.999
