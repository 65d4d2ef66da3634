"""DeepSeek-V3 and R1, and their predecessor V2: latent attention and mixtures of experts.

Sources: DeepSeek-V2 (2024), DeepSeek-V3 (2024), DeepSeek-R1 (2025) and the configs published with them. A pre-norm
decoder as Llama's, but attention keeps one small latent a token (latent.py), and from layer `dense_layers` on the
feed-forward is a mixture of experts (moe.py). V2 differs in the routing alone; V2-Lite also has no query latent; V3.2
attends to chosen positions (dynamic.py). The module that predicts a second token (mtp.py), which files store as one
more layer, is part of the model only where its config says so.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from rzoo.core import RzooError
from rzoo.models import llama
from rzoo.models.cache import Cache, LatentSlot, empty_latent_slots
from rzoo.models.config import HFConfig, positive
from rzoo.models.dynamic import IndexerConfig
from rzoo.models.forms import Forms
from rzoo.models.latent import softmax_scale
from rzoo.models.layers import GatedMLP, LatentAttention, MixtureOfExperts, RMSNorm
from rzoo.models.moe import Routing, SigmoidRouting, SoftmaxRouting
from rzoo.models.mtp import MTPModule, with_mtp_names
from rzoo.models.names import WeightName
from rzoo.models.rope import DefaultRope, Rope, Rotation, YarnRope
from rzoo.models.rope_config import in_bounds, read_gguf_rope, read_rope, single, write_rope
from rzoo.models.weights import weight

KINDS = {
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
}


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """The mixtures of experts. width: of one expert. active: experts a token is sent to. shared: experts that see every
    token. every: layer i has a mixture when i >= dense_layers and i is a multiple of `every`.
    """

    count: int
    active: int
    width: int
    shared: int = 1
    dense_layers: int = 0
    every: int = 1
    routing: Routing

    def __post_init__(self) -> None:
        positive(self, "count", "active", "width", "every")
        groups, kept = self.routing.groups, self.routing.kept_groups
        n_group, topk_group = f"groups (n_group {groups})", f"kept_groups (topk_group {kept})"
        problem = None
        if groups < 1 or self.count % groups:
            problem = f"count (n_routed_experts {self.count}) must be a multiple of {n_group}"
        elif not 1 <= kept <= groups:
            problem = f"{topk_group} must be at least 1 and at most {n_group}"
        elif self.active > kept * (self.count // groups):
            open_ones = f"the {kept * (self.count // groups)} experts of {topk_group} of {n_group}"
            problem = f"active (num_experts_per_tok {self.active}) must be at most {open_ones}"
        elif groups > 1 and isinstance(self.routing, SigmoidRouting) and self.count // groups < 2:
            problem = f"{n_group} leaves groups of one expert, but a group is ranked by its best two"
        if problem:
            raise RzooError(problem, field="routing", value=self.routing)


@dataclass(frozen=True, kw_only=True)
class DeepSeekConfig:
    """Sizes of one model. ffn_width: of the dense layers. nope_width, rope_width: the parts of a query without and with
    position; value_width: of a head's value. q_rank, kv_rank: of the latents (q_rank None: no query latent).
    indexer: of V3.2's sparse attention. mtp_layers: layers past the last one that files hold for predicting further
    tokens. mtp: the first of them is part of this model; no config.json says so, it is asked for at loading.
    """

    kind: str = "deepseek_v3"
    vocab_size: int
    width: int
    ffn_width: int
    layers: int
    heads: int
    q_rank: int | None
    kv_rank: int
    nope_width: int
    rope_width: int
    value_width: int
    experts: ExpertsConfig | None
    indexer: IndexerConfig | None = None
    rope: Rope = DefaultRope()
    norm_eps: float = 1e-6
    context: int = 4096
    tied: bool = False
    mtp_layers: int = 0
    mtp: bool = False

    def __post_init__(self) -> None:
        positive(self, "vocab_size", "width", "ffn_width", "layers", "heads", "kv_rank", "context")
        positive(self, "nope_width", "rope_width", "value_width")
        if self.q_rank is not None:
            positive(self, "q_rank")
        if self.rope_width % 2:
            raise RzooError(f"rope_width ({self.rope_width}) must be even", field="rope_width", value=self.rope_width)
        if self.mtp and not self.mtp_layers:
            words = (
                "mtp: this model has no module for multi-token prediction (mtp_layers, num_nextn_predict_layers, is 0)"
            )
            raise RzooError(words, field="mtp", value=True, fix="leave mtp out")
        if self.indexer is not None:
            self._check_indexer(self.indexer)

    def _check_indexer(self, indexer: IndexerConfig) -> None:
        if self.q_rank is None:
            raise RzooError("indexer: a model with one must have a q_rank (q_lora_rank)", field="q_rank", value=None)
        if indexer.width < self.rope_width:
            problem = f"indexer width (index_head_dim {indexer.width}) must be at least rope_width ({self.rope_width})"
            raise RzooError(problem, field="indexer", value=indexer.width)

    def is_mixture(self, layer: int) -> bool:
        """Whether a layer has a mixture of experts."""
        return self.experts is not None and layer >= self.experts.dense_layers and layer % self.experts.every == 0

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "DeepSeekConfig":
        """Reads a config.json of one of KINDS, in the spelling of transformers 4 or 5.

        Raises RzooError naming the field that is absent, malformed, contradictory or not supported.
        """
        hf = HFConfig(config)
        for field, allowed in UNSUPPORTED.items():
            hf.refuse(field, allowed=allowed)
        context = hf.count("max_position_embeddings", default=4096)
        mtp = hf.count("num_nextn_predict_layers", default=hf.get("num_mtp_layers", 0), least=0)
        return cls(
            kind=hf.text("model_type"),
            vocab_size=hf.count("vocab_size"),
            width=hf.count("hidden_size"),
            ffn_width=hf.count("intermediate_size"),
            layers=hf.count("num_hidden_layers"),
            heads=hf.count("num_attention_heads"),
            q_rank=hf.count("q_lora_rank", default=0, least=0) or None,
            kv_rank=hf.count("kv_lora_rank"),
            nope_width=hf.count("qk_nope_head_dim"),
            rope_width=hf.count("qk_rope_head_dim"),
            value_width=hf.count("v_head_dim"),
            experts=_read_experts(hf),
            indexer=IndexerConfig.from_hf(hf) if hf.text("model_type") == "deepseek_v32" else None,
            rope=read_rope(config, context=context),
            norm_eps=hf.number("rms_norm_eps", default=1e-6),
            context=context,
            tied=hf.flag("tie_word_embeddings", default=False),
            mtp_layers=mtp,
        )

    @classmethod
    def from_gguf(
        cls, metadata: Mapping[str, Any], *, tensors: frozenset[str], rope_divisors: tuple[float, ...] | None = None
    ) -> "DeepSeekConfig":
        """Reads the metadata of a GGUF file of architecture deepseek2, which serves V2 and V3."""
        own = {key.removeprefix("deepseek2."): value for key, value in metadata.items()}
        meta = HFConfig(own, "GGUF metadata deepseek2")
        mtp = meta.count("nextn_predict_layers", default=0, least=0)
        rope_width = meta.count("rope.dimension_count")
        key_width = meta.count("attention.key_length_mla", default=meta.get("attention.key_length", None))
        if key_width <= rope_width:
            raise meta.wrong(
                "attention.key_length", key_width, f"must be more than rope.dimension_count ({rope_width})"
            )
        context = meta.count("context_length")
        experts = _read_gguf_experts(meta)
        sigmoid = experts is not None and isinstance(experts.routing, SigmoidRouting)
        return cls(
            kind="deepseek_v3" if sigmoid else "deepseek_v2",
            vocab_size=meta.gguf_vocabulary(metadata),
            width=meta.count("embedding_length"),
            ffn_width=meta.count("feed_forward_length"),
            layers=meta.count("block_count") - mtp,
            heads=meta.count("attention.head_count"),
            q_rank=meta.count("attention.q_lora_rank", default=0, least=0) or None,
            kv_rank=meta.count("attention.kv_lora_rank"),
            nope_width=key_width - rope_width,
            rope_width=rope_width,
            value_width=meta.count("attention.value_length_mla", default=meta.get("attention.value_length", None)),
            experts=experts,
            rope=_read_gguf_rope(meta, rope_width, context, rope_divisors),
            norm_eps=single(meta.number("attention.layer_norm_rms_epsilon")),
            context=context,
            tied="output.weight" not in tensors,
            mtp_layers=mtp,
        )

    def to_hf(self, *, spelling: int | None = None) -> dict[str, Any]:
        """The config.json of this model, as transformers 4 or 5 spells it or (None) readable by both; inverse of
        from_hf.
        """
        return {
            "architectures": [KINDS[self.kind]],
            "model_type": self.kind,
            "vocab_size": self.vocab_size,
            "hidden_size": self.width,
            "intermediate_size": self.ffn_width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "q_lora_rank": self.q_rank,
            "kv_lora_rank": self.kv_rank,
            "qk_nope_head_dim": self.nope_width,
            "qk_rope_head_dim": self.rope_width,
            "v_head_dim": self.value_width,
            "hidden_act": "silu",
            "rms_norm_eps": self.norm_eps,
            "max_position_embeddings": self.context,
            "tie_word_embeddings": self.tied,
            "attention_bias": False,
            "num_nextn_predict_layers": self.mtp_layers,
            **_write_experts(self.experts, self.layers),
            **(self.indexer.to_hf() if self.indexer else {}),
            **write_rope(self.rope, spelling=spelling),
        }


# Fields that change the computation -> the values that this file implements.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", None),
    "attention_bias": (False, None),
    "rope_interleave": (True, None),
    "pretraining_tp": (1, None),
    "ep_size": (1, None),
    "indexer_rope_interleave": (False, None),
}


def _read_experts(hf: HFConfig) -> ExpertsConfig | None:
    """The mixtures of a config.json, or None where it has no routed experts."""
    count = hf.count("n_routed_experts", default=hf.get("num_local_experts", 0), least=0)
    if not count:
        return None
    v3 = hf.text("model_type") != "deepseek_v2"
    hf.refuse("scoring_func", allowed=("sigmoid" if v3 else "softmax", None))
    hf.refuse("topk_method", allowed=("noaux_tc", None) if v3 else ("greedy", "group_limited_greedy", None))
    groups = hf.count("n_group", default=1)
    kept = hf.count("topk_group", default=groups)
    scale = hf.number("routed_scaling_factor", default=1.0)
    if v3:
        normalize = hf.flag("norm_topk_prob", default=True)
        routing: Routing = SigmoidRouting(groups=groups, kept_groups=kept, normalize=normalize, scale=scale)
    else:
        hf.refuse("norm_topk_prob", allowed=(False, None))
        if groups > 1 and hf.text("topk_method", default="greedy") == "greedy":
            raise hf.wrong("n_group", groups, "contradicts topk_method ('greedy'), which knows no groups")
        routing = SoftmaxRouting(groups=groups, kept_groups=kept, scale=scale)
    return ExpertsConfig(
        count=count,
        active=hf.count("num_experts_per_tok"),
        width=hf.count("moe_intermediate_size"),
        shared=hf.count("n_shared_experts", default=0, least=0),
        dense_layers=hf.count("first_k_dense_replace", default=0, least=0),
        every=hf.count("moe_layer_freq", default=1),
        routing=routing,
    )


def _write_experts(experts: ExpertsConfig | None, layers: int) -> dict[str, Any]:
    if experts is None:
        return {"n_routed_experts": None, "first_k_dense_replace": layers}
    routing = experts.routing
    fields = {
        "n_routed_experts": experts.count,
        "num_experts_per_tok": experts.active,
        "moe_intermediate_size": experts.width,
        "n_shared_experts": experts.shared,
        "first_k_dense_replace": experts.dense_layers,
        "moe_layer_freq": experts.every,
        "n_group": routing.groups,
        "topk_group": routing.kept_groups,
        "routed_scaling_factor": routing.scale,
    }
    if isinstance(routing, SigmoidRouting):
        method = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": routing.normalize}
    else:
        greedy = "greedy" if routing.groups == 1 else "group_limited_greedy"
        method = {"scoring_func": "softmax", "topk_method": greedy, "norm_topk_prob": False}
    return fields | method


def _read_gguf_experts(meta: HFConfig) -> ExpertsConfig | None:
    count = meta.count("expert_count", default=0, least=0)
    if not count:
        return None
    gating = meta.count("expert_gating_func", default=1)
    if gating not in (1, 2):
        raise meta.wrong("expert_gating_func", gating, "is not supported; supported: 1 (softmax), 2 (sigmoid)")
    # Files from before the group keys: 256 sigmoid experts are V3's, published with 8 groups of which 4 are kept.
    old = (8, 4) if count == 256 and gating == 2 else (1, 1)
    groups = meta.count("expert_group_count", default=old[0])
    kept = meta.count("expert_group_used_count", default=old[1] if groups == old[0] else groups)
    scale = single(meta.number("expert_weights_scale", default=1.0))
    normalize = meta.flag("expert_weights_norm", default=False)
    if gating == 2:
        routing: Routing = SigmoidRouting(groups=groups, kept_groups=kept, normalize=normalize, scale=scale)
    else:
        meta.refuse("expert_weights_norm", allowed=(False, None))
        routing = SoftmaxRouting(groups=groups, kept_groups=kept, scale=scale)
    return ExpertsConfig(
        count=count,
        active=meta.count("expert_used_count"),
        width=meta.count("expert_feed_forward_length"),
        shared=meta.count("expert_shared_count", default=0, least=0),
        dense_layers=meta.count("leading_dense_block_count", default=0, least=0),
        routing=routing,
    )


def _read_gguf_rope(meta: HFConfig, width: int, context: int, divisors: tuple[float, ...] | None) -> Rope:
    rope = read_gguf_rope(meta, width=width, context=context, divisors=divisors)
    if not isinstance(rope, YarnRope):
        return rope
    key = "rope.scaling.yarn_log_multiplier"
    mscale = single(meta.number(key) / 0.1)  # the key holds 0.1 * mscale_all_dim
    return in_bounds(replace(rope, mscale=mscale, mscale_all_dim=mscale), meta, {"mscale": key})


class Block(nnx.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x)), which is dense or a mixture of experts."""

    def __init__(self, config: DeepSeekConfig, layer: int, *, forms: Forms, rngs: nnx.Rngs | None):
        norm = lambda: RMSNorm(config.width, eps=config.norm_eps, forms=forms, rngs=rngs)  # noqa: E731
        self.attention_norm = norm()
        self.attention = LatentAttention(
            config.width,
            heads=config.heads,
            nope_width=config.nope_width,
            rope_width=config.rope_width,
            value_width=config.value_width,
            q_rank=config.q_rank,
            kv_rank=config.kv_rank,
            scale=softmax_scale(config.rope, config.nope_width + config.rope_width),
            eps=config.norm_eps,
            indexer=config.indexer,
            forms=forms,
            rngs=rngs,
        )
        self.mlp_norm = norm()
        if config.experts is not None and config.is_mixture(layer):
            self.mlp: Any = MixtureOfExperts(
                config.width,
                config.experts.width,
                experts=config.experts.count,
                active=config.experts.active,
                shared=config.experts.shared,
                routing=config.experts.routing,
                forms=forms,
                rngs=rngs,
            )
        else:
            self.mlp = GatedMLP(config.width, config.ffn_width, bias=False, forms=forms, rngs=rngs)
        self.forms = forms

    def __call__(
        self, x: Float[Array, "b t d"], at: Rotation, starts: Int[Array, " b"], slot: LatentSlot | None
    ) -> tuple[Float[Array, "b t d"], LatentSlot | None]:
        mixed, slot_out = self.attention(self.attention_norm(x), at, starts, slot)
        x = self.forms.place(x + mixed, "btd")
        normed = self.mlp_norm(x)
        if isinstance(self.mlp, MixtureOfExperts):
            x = x + self.mlp(normed, cached=slot is not None)
        else:
            x = x + self.mlp(normed)
        x = self.forms.place(x, "btd")
        self.forms.observe(self, "hidden", lambda: x)
        return x, slot_out


class DeepSeek(llama.Llama):
    """Llama's decoder over blocks of their own: token ids [b, t] to float32 logits [b, t, v]."""

    def __init__(self, config: DeepSeekConfig, *, forms: Forms = Forms(), rngs: nnx.Rngs | None):
        self.embed = weight("vd", (config.vocab_size, config.width), rngs, scale=1.0)
        self.layers = nnx.List([Block(config, i, forms=forms, rngs=rngs) for i in range(config.layers)])
        self.norm = RMSNorm(config.width, eps=config.norm_eps, forms=forms, rngs=rngs)
        self.head = None if config.tied else weight("vd", (config.vocab_size, config.width), rngs)
        own = lambda: Block(config, config.layers, forms=forms, rngs=rngs)  # noqa: E731
        more: dict[str, Any] = {"eps": config.norm_eps, "forms": forms, "rngs": rngs}
        self.mtp_module: Any = MTPModule(config.width, block=own(), **more) if config.mtp else None
        self.config, self.forms = config, forms

    @property
    def rotary_width(self) -> int:
        """The part of a query that has a position."""
        return self.config.rope_width

    def mtp(self, hidden: Float[Array, "b t d"], tokens: Int[Array, "b t"]) -> Float[Array, "b t v"]:
        """Logits of the token two after each position, from its hidden state (as of hidden_states) and the token that
        follows it: of ids, mtp(hidden[:, :-1], ids[:, 1:]) says what comes at 2, 3, …

        Raises RzooError where the model was loaded without the module.
        """
        return self.logits(self.mtp_states(hidden, tokens)[0])

    def mtp_states(
        self,
        hidden: Float[Array, "b t d"],
        tokens: Int[Array, "b t"],
        cache: Cache | None = None,
        counts: Int[Array, " b"] | None = None,
    ) -> tuple[Float[Array, "b t d"], Cache | None]:
        """The states that these logits are made from, which stand for the hidden ones of the next position when a
        further token is guessed; cache (one slot of the module's own) and counts as in hidden_states.
        """
        if self.mtp_module is None:
            words = "this model has no module for multi-token prediction"
            raise RzooError(words, field="mtp", fix="load one that has it with mtp=True")
        starts, at = self.places(hidden, cache, counts)
        embedded = self.embed.rows(tokens, self.forms.numerics)
        states, slot = self.mtp_module(hidden, embedded, at, starts, None if cache is None else cache.slots[0])
        return states, None if cache is None else Cache((slot,), cache.lengths)


def empty_cache(config: DeepSeekConfig, batch: int, capacity: int, dtype: Any) -> Cache:
    """A cache for `batch` rows of up to `capacity` tokens: kv_rank + rope_width values a token and layer, and a key of
    the indexer.
    """
    width, index_width = config.kv_rank + config.rope_width, config.indexer.width if config.indexer else None
    slots = empty_latent_slots(config.layers, batch, capacity, width, dtype, index_width)
    return Cache(slots, jnp.zeros(batch, jnp.int32))


def _attention(ours: str, hf: str, gguf: str, **more: Any) -> WeightName:
    names = (f"layers.{{}}.attention.{ours}", f"model.layers.{{}}.self_attn.{hf}.weight", f"blk.{{}}.{gguf}.weight")
    return WeightName(*names, **more)


def _indexer(ours: str, hf: str, *, blocks: bool = False) -> WeightName:
    prefix = "model.layers.{}.self_attn.indexer."
    return WeightName(f"layers.{{}}.attention.indexer.{ours}", prefix + hf, None, blocks=blocks)


def _mlp(ours: str, hf: str, gguf: str, **more: Any) -> WeightName:
    names = (f"layers.{{}}.mlp.{ours}", f"model.layers.{{}}.mlp.{hf}.weight", f"blk.{{}}.{gguf}.weight")
    return WeightName(*names, **more)


# Our path · name in Hugging Face files · name in GGUF files; what the further fields mean stands in names.py.
# kv_b_proj holds, head by head, key_up and then value_up; newer GGUF files have them apart, key_up transposed.
NAMES = with_mtp_names(
    WeightName("embed", "model.embed_tokens.weight", "token_embd.weight"),
    WeightName("norm.scale", "model.norm.weight", "output_norm.weight"),
    WeightName("head", "lm_head.weight", "output.weight"),
    WeightName("layers.{}.attention_norm.scale", "model.layers.{}.input_layernorm.weight", "blk.{}.attn_norm.weight"),
    WeightName("layers.{}.mlp_norm.scale", "model.layers.{}.post_attention_layernorm.weight", "blk.{}.ffn_norm.weight"),
    _attention("q_down", "q_a_proj", "attn_q_a", blocks=True),
    _attention("q_norm.scale", "q_a_layernorm", "attn_q_a_norm"),
    _attention("q_up", "q_b_proj", "attn_q_b", blocks=True),
    _attention("q", "q_proj", "attn_q", blocks=True),
    _attention("kv_down", "kv_a_proj_with_mqa", "attn_kv_a_mqa", blocks=True),
    _attention("kv_norm.scale", "kv_a_layernorm", "attn_kv_a_norm"),
    _attention("key_up", "kv_b_proj", "attn_kv_b", blocks=True, apart="blk.{}.attn_k_b.weight", transposed=True),
    _attention("value_up", "kv_b_proj", "attn_kv_b", blocks=True, apart="blk.{}.attn_v_b.weight"),
    _attention("output", "o_proj", "attn_output", blocks=True),
    _indexer("query_up", "wq_b.weight", blocks=True),
    _indexer("key", "wk.weight", blocks=True),
    _indexer("key_norm.scale", "k_norm.weight"),
    _indexer("key_norm.bias", "k_norm.bias"),
    _indexer("head_weight", "weights_proj.weight"),
    _mlp("gate", "gate_proj", "ffn_gate", blocks=True),
    _mlp("up", "up_proj", "ffn_up", blocks=True),
    _mlp("down", "down_proj", "ffn_down", blocks=True),
    _mlp("router.weight", "gate", "ffn_gate_inp"),
    WeightName(
        "layers.{}.mlp.router.bias", "model.layers.{}.mlp.gate.e_score_correction_bias", "blk.{}.exp_probs_b.bias"
    ),
    _mlp("expert_gate", "experts.{e}.gate_proj", "ffn_gate_exps", blocks=True),
    _mlp("expert_up", "experts.{e}.up_proj", "ffn_up_exps", blocks=True),
    _mlp("expert_down", "experts.{e}.down_proj", "ffn_down_exps", blocks=True),
    _mlp("shared.gate", "shared_experts.gate_proj", "ffn_gate_shexp", blocks=True),
    _mlp("shared.up", "shared_experts.up_proj", "ffn_up_shexp", blocks=True),
    _mlp("shared.down", "shared_experts.down_proj", "ffn_down_shexp", blocks=True),
)
