"""The Llama family: Llama 3.x, SmolLM2, Qwen2 and the R1 distills of both, Llama-Nemotron Nano.

Sources: Llama 3 (Grattafiori et al. 2024), Qwen2 (Yang et al. 2024), DeepSeek-R1 (2025). A plain pre-norm decoder:
RMSNorm, grouped-query attention with half-split rotary pairs, SwiGLU. Qwen2 differs by biases on q, k and v only.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from rzoo.core import RzooError
from rzoo.models.cache import Cache, Slot, empty_slots
from rzoo.models.config import HFConfig, positive
from rzoo.models.forms import Forms
from rzoo.models.layers import GatedMLP, GroupedAttention, RMSNorm
from rzoo.models.names import WeightName
from rzoo.models.rope import DefaultRope, Rope, Rotation, rotation
from rzoo.models.rope_config import read_gguf_rope, read_rope, single, write_rope
from rzoo.models.weights import weight


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Sizes of one model. context: the most positions it was trained for. kind: the model_type it is published as."""

    kind: str = "llama"
    vocab_size: int
    width: int
    ffn_width: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    rope: Rope = DefaultRope()
    norm_eps: float = 1e-5
    context: int = 2048
    tied: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self) -> None:
        positive(self, "vocab_size", "width", "ffn_width", "layers", "heads", "kv_heads", "head_width", "context")
        if self.heads % self.kv_heads:
            raise RzooError(
                f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})",
                field="kv_heads",
                value=self.kv_heads,
            )
        if self.head_width % 2:
            raise RzooError(f"head_width ({self.head_width}) must be even", field="head_width", value=self.head_width)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "LlamaConfig":
        """Reads a config.json of model_type llama or qwen2, in the spelling of transformers 4 or 5.

        Raises RzooError naming the field that is absent, malformed or not supported.
        """
        hf = HFConfig(config)
        qwen2 = hf.text("model_type") == "qwen2"
        hf.refuse("hidden_act", allowed=("silu", None))
        hf.refuse("use_sliding_window", allowed=(False, None))
        hf.refuse("pretraining_tp", allowed=(1, None))
        hf.refuse("block_configs", allowed=([], None))
        heads = hf.count("num_attention_heads")
        width = hf.count("hidden_size")
        biased = hf.flag("attention_bias", default=False)
        head_width = hf.count("head_dim", default=width // heads)
        context = hf.count("max_position_embeddings", default=2048)
        return cls(
            kind=hf.text("model_type"),
            vocab_size=hf.count("vocab_size"),
            width=width,
            ffn_width=hf.count("intermediate_size"),
            layers=hf.count("num_hidden_layers"),
            heads=heads,
            kv_heads=hf.count("num_key_value_heads", default=heads),
            head_width=head_width,
            rope=read_rope(config, context=context),
            norm_eps=hf.number("rms_norm_eps", default=1e-6),
            context=context,
            tied=hf.flag("tie_word_embeddings", default=False),
            qkv_bias=qwen2 or biased,
            output_bias=biased and not qwen2,
            mlp_bias=hf.flag("mlp_bias", default=False),
        )

    @classmethod
    def from_gguf(
        cls, metadata: Mapping[str, Any], *, tensors: frozenset[str], rope_divisors: tuple[float, ...] | None = None
    ) -> "LlamaConfig":
        """Reads the metadata of a GGUF file of architecture llama or qwen2; biases and tying from its tensor names."""
        kind = metadata["general.architecture"]
        own = {key.removeprefix(f"{kind}."): value for key, value in metadata.items() if key.startswith(f"{kind}.")}
        meta = HFConfig(own, f"GGUF metadata {kind}")
        heads = meta.count("attention.head_count")
        width = meta.count("embedding_length")
        head_width = meta.count("attention.key_length", default=width // heads)
        meta.refuse("rope.dimension_count", allowed=(head_width, None))
        meta.refuse("attention.value_length", allowed=(head_width, None))
        meta.refuse("expert_count", allowed=(0, None))
        context = meta.count("context_length")
        return cls(
            kind=kind,
            vocab_size=meta.gguf_vocabulary(metadata),
            width=width,
            ffn_width=meta.count("feed_forward_length"),
            layers=meta.count("block_count"),
            heads=heads,
            kv_heads=meta.count("attention.head_count_kv", default=heads),
            head_width=head_width,
            rope=read_gguf_rope(meta, width=head_width, context=context, divisors=rope_divisors),
            norm_eps=single(meta.number("attention.layer_norm_rms_epsilon")),
            context=context,
            tied="output.weight" not in tensors,
            qkv_bias="blk.0.attn_q.bias" in tensors,
            output_bias="blk.0.attn_output.bias" in tensors,
            mlp_bias="blk.0.ffn_gate.bias" in tensors,
        )

    def to_hf(self, *, spelling: int | None = None) -> dict[str, Any]:
        """The config.json of this model, as transformers 4 or 5 spells it or (None) readable by both; inverse of
        from_hf.
        """
        config = {
            "architectures": ["Qwen2ForCausalLM" if self.kind == "qwen2" else "LlamaForCausalLM"],
            "model_type": self.kind,
            "vocab_size": self.vocab_size,
            "hidden_size": self.width,
            "intermediate_size": self.ffn_width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_width,
            "hidden_act": "silu",
            "rms_norm_eps": self.norm_eps,
            "max_position_embeddings": self.context,
            "tie_word_embeddings": self.tied,
            **write_rope(self.rope, spelling=spelling),
        }
        if self.kind == "qwen2":
            return config | {"use_sliding_window": False}
        return config | {"attention_bias": self.output_bias, "mlp_bias": self.mlp_bias}


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: LlamaConfig, *, forms: Forms, rngs: nnx.Rngs | None):
        norm = lambda: RMSNorm(config.width, eps=config.norm_eps, forms=forms, rngs=rngs)  # noqa: E731
        self.attention_norm = norm()
        self.attention = GroupedAttention(
            config.width,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_width=config.head_width,
            qkv_bias=config.qkv_bias,
            output_bias=config.output_bias,
            forms=forms,
            rngs=rngs,
        )
        self.mlp_norm = norm()
        self.mlp = GatedMLP(config.width, config.ffn_width, bias=config.mlp_bias, forms=forms, rngs=rngs)
        self.forms = forms

    def __call__(
        self, x: Float[Array, "b t d"], at: Rotation, starts: Int[Array, " b"], slot: Slot | None
    ) -> tuple[Float[Array, "b t d"], Slot | None]:
        mixed, slot = self.attention(self.attention_norm(x), at, starts, slot)
        x = self.forms.place(x + mixed, "btd")
        x = self.forms.place(x + self.mlp(self.mlp_norm(x)), "btd")
        self.forms.observe(self, "hidden", lambda: x)
        return x, slot


class Llama(nnx.Module):
    """A decoder: token ids [b, t] to float32 logits [b, t, v]. rngs None: shapes alone, to be filled by `assemble`.

    The decoder of other families, too: config and layers may be theirs.
    """

    config: Any
    layers: Any

    def __init__(self, config: LlamaConfig, *, forms: Forms = Forms(), rngs: nnx.Rngs | None):
        self.embed = weight("vd", (config.vocab_size, config.width), rngs, scale=1.0)
        self.layers = nnx.List([Block(config, forms=forms, rngs=rngs) for _ in range(config.layers)])
        self.norm = RMSNorm(config.width, eps=config.norm_eps, forms=forms, rngs=rngs)
        self.head = None if config.tied else weight("vd", (config.vocab_size, config.width), rngs)
        self.config, self.forms = config, forms

    def __call__(self, tokens: Int[Array, "b t"]) -> Float[Array, "b t v"]:
        return self.logits(self.hidden_states(tokens)[0])

    @property
    def rotary_width(self) -> int:
        """How much of a head's width is turned by position."""
        return self.config.head_width

    def hidden_states(
        self, tokens: Int[Array, "b t"], cache: Cache | None = None, counts: Int[Array, " b"] | None = None
    ) -> tuple[Float[Array, "b t d"], Cache | None]:
        """Hidden states after the final norm; with a cache, of tokens that follow what it holds, and the cache with
        them.

        counts: how many of the t tokens of each row are real (None: all). The lengths of the returned cache are the old
        ones: the caller adds to them.
        """
        x, out = self.through_layers(self.embedded(tokens), cache, counts)
        return self.norm(x), out

    def embedded(self, tokens: Int[Array, "b t"]) -> Float[Array, "b t d"]:
        """What enters the first layer."""
        x = self.forms.place(self.embed.rows(tokens, self.forms.numerics), "btd")
        self.forms.observe(self, "hidden", lambda: x)
        return x

    def through_layers(
        self, x: Float[Array, "b t d"], cache: Cache | None = None, counts: Int[Array, " b"] | None = None
    ) -> tuple[Float[Array, "b t d"], Cache | None]:
        """What leaves the last of the layers that this module holds, before the final norm; cache as in hidden_states,
        a slot for each of them.
        """
        starts, at = self.places(x, cache, counts)
        slots = []
        for i, layer in enumerate(self.layers):
            x, slot = layer(x, at, starts, None if cache is None else cache.slots[i])
            slots.append(slot)
        out = None if cache is None else Cache(tuple(slots), cache.lengths)
        return x, out

    def places(
        self, x: Float[Array, "b t d"], cache: Cache | None, counts: Int[Array, " b"] | None
    ) -> tuple[Int[Array, " b"], Rotation]:
        """Where the first token of each row stands, and the rotations of all; arguments as in hidden_states."""
        starts = jnp.zeros(x.shape[0], jnp.int32) if cache is None else cache.lengths
        positions = starts[:, None] + jnp.arange(x.shape[1])
        length = starts + (x.shape[1] if counts is None else counts)
        return starts, rotation(self.config.rope, self.rotary_width, positions, length)

    def logits(self, x: Float[Array, "*batch d"]) -> Float[Array, "*batch v"]:
        """Scores of the vocabulary from final hidden states, in float32."""
        head = self.embed if self.head is None else self.head
        return head.scores(x, self.forms.types("head"))


def empty_cache(config: LlamaConfig, batch: int, capacity: int, dtype: Any) -> Cache:
    """A cache for `batch` rows of up to `capacity` tokens."""
    width = config.head_width
    slots = empty_slots(config.layers, batch, config.kv_heads, capacity, width, width, dtype)
    return Cache(slots, jnp.zeros(batch, jnp.int32))


# Our path · name in Hugging Face files · name in GGUF files · [rows, columns] of the file in our axes.
# turned: rows that GGUF stores with rotary pairs interleaved (arch llama), by the axis that counts heads.
NAMES = (
    WeightName("embed", "model.embed_tokens.weight", "token_embd.weight"),
    WeightName("norm.scale", "model.norm.weight", "output_norm.weight"),
    WeightName("head", "lm_head.weight", "output.weight"),
    WeightName("layers.{}.attention_norm.scale", "model.layers.{}.input_layernorm.weight", "blk.{}.attn_norm.weight"),
    WeightName("layers.{}.attention.q", "model.layers.{}.self_attn.q_proj.weight", "blk.{}.attn_q.weight", turned=True),
    WeightName("layers.{}.attention.k", "model.layers.{}.self_attn.k_proj.weight", "blk.{}.attn_k.weight", turned=True),
    WeightName("layers.{}.attention.v", "model.layers.{}.self_attn.v_proj.weight", "blk.{}.attn_v.weight"),
    WeightName("layers.{}.attention.output", "model.layers.{}.self_attn.o_proj.weight", "blk.{}.attn_output.weight"),
    WeightName(
        "layers.{}.attention.q_bias", "model.layers.{}.self_attn.q_proj.bias", "blk.{}.attn_q.bias", turned=True
    ),
    WeightName(
        "layers.{}.attention.k_bias", "model.layers.{}.self_attn.k_proj.bias", "blk.{}.attn_k.bias", turned=True
    ),
    WeightName("layers.{}.attention.v_bias", "model.layers.{}.self_attn.v_proj.bias", "blk.{}.attn_v.bias"),
    WeightName("layers.{}.attention.output_bias", "model.layers.{}.self_attn.o_proj.bias", "blk.{}.attn_output.bias"),
    WeightName("layers.{}.mlp_norm.scale", "model.layers.{}.post_attention_layernorm.weight", "blk.{}.ffn_norm.weight"),
    WeightName("layers.{}.mlp.gate", "model.layers.{}.mlp.gate_proj.weight", "blk.{}.ffn_gate.weight"),
    WeightName("layers.{}.mlp.up", "model.layers.{}.mlp.up_proj.weight", "blk.{}.ffn_up.weight"),
    WeightName("layers.{}.mlp.down", "model.layers.{}.mlp.down_proj.weight", "blk.{}.ffn_down.weight"),
    WeightName("layers.{}.mlp.gate_bias", "model.layers.{}.mlp.gate_proj.bias", "blk.{}.ffn_gate.bias"),
    WeightName("layers.{}.mlp.up_bias", "model.layers.{}.mlp.up_proj.bias", "blk.{}.ffn_up.bias"),
    WeightName("layers.{}.mlp.down_bias", "model.layers.{}.mlp.down_proj.bias", "blk.{}.ffn_down.bias"),
)
