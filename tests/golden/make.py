"""Makes tiny checkpoints like those in this folder, with reference outputs: random weights, float32, by transformers.

    pip install torch==2.13.0 "transformers>=5" && python tests/golden/make.py OUT

Another version of torch draws other weights, so the files differ from the committed ones; the tests hold for any.
"""

import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

COMMON = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2560,
    "initializer_range": 0.15,
    "dtype": "float32",
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "original_max_position_embeddings": 64,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
}
MODELS = {
    "llama_llama3rope": (
        transformers.LlamaConfig,
        {"rms_norm_eps": 1e-5, "rope_parameters": LLAMA3 | {"original_max_position_embeddings": 64}},
    ),
    "llama_tied": (
        transformers.LlamaConfig,
        {"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "rope_parameters": {"rope_theta": 100000.0}},
    ),
    "deepseek_v3": (transformers.DeepseekV3Config, DEEPSEEK),
    "deepseek_v32": (
        transformers.DeepseekV32Config,
        DEEPSEEK | {"index_n_heads": 32, "index_head_dim": 16, "index_topk": 8},
    ),
    "qwen2": (transformers.Qwen2Config, {"rms_norm_eps": 1e-6, "rope_parameters": {"rope_theta": 10000.0}}),
}


def make(name: str, out: Path) -> None:
    """One checkpoint folder: config.json, model.safetensors, reference.safetensors."""
    kind, fields = MODELS[name]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(kind(**COMMON | fields)).float().eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if key.endswith("bias"):  # zero when new: a lost bias must show
                weight.normal_(0.0, 0.5)
            elif "norm" in key:
                weight.normal_(1.0, 0.2)
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):  # so low that a masked score of 0 would win
                buffer.normal_(-0.7, 0.3)
        ids = torch.randint(0, COMMON["vocab_size"], (2, 48))
        found = model(ids, output_hidden_states=True)
    model.save_pretrained(out / name)
    outputs = {"input_ids": ids, "logits": found.logits}
    outputs |= {f"hidden.{i}": hidden for i, hidden in enumerate(found.hidden_states)}
    save_file({key: value.contiguous() for key, value in outputs.items()}, out / name / "reference.safetensors")


if __name__ == "__main__":
    for golden in MODELS:
        make(golden, Path(sys.argv[1]))
