"""A tiny config of each family: what the laws are tested on. A registered family without one fails a test."""

from dataclasses import replace
from typing import Any

from rzoo.models.deepseek import DeepSeekConfig, ExpertsConfig
from rzoo.models.dynamic import IndexerConfig
from rzoo.models.llama import LlamaConfig
from rzoo.models.moe import SigmoidRouting, SoftmaxRouting
from rzoo.models.nemotron import BlockSpec, FeedForwardSpec, GroupedAttentionSpec, Linear, NemotronConfig, parse_layout
from rzoo.models.rope import DefaultRope, DynamicRope, LinearRope, Llama3Rope, YarnRope

SIZES = {"vocab_size": 97, "width": 32, "ffn_width": 48, "layers": 2, "heads": 4, "kv_heads": 2, "head_width": 8}

V3_EXPERTS = ExpertsConfig(
    count=8, active=2, width=16, dense_layers=1, routing=SigmoidRouting(groups=4, kept_groups=2, scale=2.5)
)
V3 = DeepSeekConfig(
    vocab_size=97,
    width=32,
    ffn_width=48,
    layers=2,
    heads=4,
    q_rank=24,
    kv_rank=16,
    nope_width=8,
    rope_width=4,
    value_width=8,
    experts=V3_EXPERTS,
    rope=YarnRope(factor=40.0, original_context=64, mscale=1.0, mscale_all_dim=1.0),
    context=2048,
)

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
    "deepseek-v3": V3,
    "deepseek-v2": replace(
        V3,
        kind="deepseek_v2",
        q_rank=None,
        experts=ExpertsConfig(count=8, active=2, width=16, shared=2, routing=SoftmaxRouting(scale=1.5)),
    ),
    "deepseek-v32": replace(V3, kind="deepseek_v32", indexer=IndexerConfig(heads=32, width=8, keep=8)),
    "deepseek-dense": replace(V3, experts=None, rope=DefaultRope(), tied=True),
    "nemotron": NemotronConfig(
        vocab_size=97,
        width=32,
        heads=4,
        head_width=8,
        blocks=BLOCKS,
        rope=Llama3Rope(factor=8.0, original_context=64),
    ),
}

# Sizes that every rule table divides on 2, 4 and 8 devices.
EVEN = {"vocab_size": 96, "width": 32, "ffn_width": 64, "layers": 4, "heads": 8, "context": 2048}

DIVISIBLE: dict[str, Any] = {
    "llama": LlamaConfig(**EVEN, kv_heads=8, head_width=8),
    "nemotron": NemotronConfig(
        **{name: size for name, size in EVEN.items() if name not in ("ffn_width", "layers")},
        head_width=8,
        blocks=(*parse_layout("8/64 8/128 -/64"), BlockSpec(GroupedAttentionSpec(8), Linear())),
    ),
    "deepseek-v3": DeepSeekConfig(
        **EVEN,
        q_rank=16,
        kv_rank=16,
        nope_width=8,
        rope_width=4,
        value_width=8,
        experts=ExpertsConfig(
            count=16, active=2, width=16, dense_layers=1, routing=SigmoidRouting(groups=4, kept_groups=2, scale=2.5)
        ),
    ),
}
