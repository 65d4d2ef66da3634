"""A tiny config of each family: what the laws are tested on. A registered family without one fails a test."""

from typing import Any

from rzoo.models.llama import LlamaConfig
from rzoo.models.nemotron import BlockSpec, FeedForwardSpec, GroupedAttentionSpec, Linear, NemotronConfig, parse_layout
from rzoo.models.rope import DefaultRope, DynamicRope, LinearRope, Llama3Rope, YarnRope

SIZES = {"vocab_size": 97, "width": 32, "ffn_width": 48, "layers": 2, "heads": 4, "kv_heads": 2, "head_width": 8}

# Every kind of part; runs of equal blocks, one of them with nothing in its midst; widths that ffn_mult can't say.
BLOCKS = (
    *parse_layout("2*2/48 -/48 -/- -/48 4/-"),
    BlockSpec(Linear(), FeedForwardSpec(256)),
    BlockSpec(GroupedAttentionSpec(1), Linear()),
)

TINY: dict[str, Any] = {
    "llama": LlamaConfig(**SIZES, rope=Llama3Rope(factor=8.0, original_context=64), context=2048),
    "llama-tied": LlamaConfig(**SIZES, tied=True, context=2048),
    "llama-biased": LlamaConfig(**SIZES, qkv_bias=True, output_bias=True, mlp_bias=True, context=2048),
    "llama-linear": LlamaConfig(**SIZES, rope=LinearRope(factor=4.0), context=2048),
    "llama-dynamic": LlamaConfig(**SIZES, rope=DynamicRope(factor=2.0, original_context=2048), context=2048),
    "llama-yarn": LlamaConfig(**SIZES, rope=YarnRope(factor=4.0, original_context=64), context=2048),
    "qwen2": LlamaConfig(
        **SIZES, kind="qwen2", qkv_bias=True, rope=DefaultRope(theta=1e6), norm_eps=1e-6, context=2048
    ),
    "nemotron": NemotronConfig(
        vocab_size=97,
        width=32,
        heads=4,
        head_width=8,
        blocks=BLOCKS,
        rope=Llama3Rope(factor=8.0, original_context=64),
    ),
}
