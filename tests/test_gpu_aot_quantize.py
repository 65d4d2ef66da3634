"""Programs of quantized models compiled for an H100 that is not there: no weight is widened in its memory."""

import pytest

from rzoo.compile import deviceless
from rzoo.compile.hlo import parse
from rzoo.compile.hlo_facts import widened
from rzoo.compile.quantize import quantized_bytes, schemes_for
from rzoo.models.llama import LlamaConfig

pytestmark = pytest.mark.extras
CONFIG = LlamaConfig(
    vocab_size=32768, width=2048, ffn_width=8192, layers=2, heads=16, kv_heads=8, head_width=128, context=1024
)
LEAST = 2 * 2**20  # bytes: half of the smallest matrix of a layer in 8 bits (k, v), in 4 bits all of it


@pytest.mark.parametrize("weights", ["int8:channel", "int8:g32", "int4:g128", "w8a8"])
@pytest.mark.parametrize(("phase", "batch"), [("decode", 1), ("decode", 8), ("prefill", 1)])
def test_no_weight_is_written_wider_than_it_is_stored(tmp_path, weights, phase, batch):
    if deviceless.aot_python() is None:
        pytest.skip(f"needs an environment that compiles for GPUs: {deviceless.INSTALL}")
    job = {"model": CONFIG.to_hf(), "gpu": "h100", "mesh": {}, "rules": "single", "phase": phase, "batch": batch}
    job |= {"context": 1024, "weights": weights, "stacked": False, "hlo": str(tmp_path / "program")}
    (part,) = deviceless.compile_for(job)["parts"]
    program = parse((tmp_path / "program").read_text())
    assert [found.name for found in widened(program, LEAST)] == []
    assert part["weights"] == pytest.approx(quantized_bytes(CONFIG, schemes_for(CONFIG, weights), "bfloat16"), rel=1e-3)
