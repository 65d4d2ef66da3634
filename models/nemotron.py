"""Llama-Nemotron Super and Ultra (nemotron-nas, GGUF arch deci): a Llama decoder with one block layout per layer.

Sources: Puzzle (Bercovich et al. 2024), FFN Fusion (2025), Llama-Nemotron (2025). A layer's attention is grouped, or
one linear map, or absent; its feed-forward part is gated, or one linear map, or absent. What is absent has no norm
either, and a layer without grouped attention keeps no keys and values. All else is Llama's.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from rzoo.core import RzooError
from rzoo.models import llama
from rzoo.models.cache import Cache, Slot, empty_slots
from rzoo.models.config import LARGEST, HFConfig, positive
from rzoo.models.forms import Forms
from rzoo.models.layers import GatedMLP, GroupedAttention, RMSNorm
from rzoo.models.names import WeightName
from rzoo.models.rope import DefaultRope, Rope, Rotation
from rzoo.models.rope_config import read_gguf_rope, read_rope, single, write_rope
from rzoo.models.weights import weight


@dataclass(frozen=True)
class GroupedAttentionSpec:
    """Causal attention with this number of key/value heads."""

    kv_heads: int


@dataclass(frozen=True)
class FeedForwardSpec:
    """A gated feed-forward part of this width. active: of how many channels, those with the strongest gate, a token
    reads up and down weights (None: all); files can't say it, it is a way to run a model (modes.py).
    """

    width: int
    active: int | None = None


@dataclass(frozen=True)
class Linear:
    """One d x d matrix without a bias in the place of attention or of the feed-forward part; the norm stays."""


@dataclass(frozen=True)
class BlockSpec:
    """What one layer is made of; None: nothing, not even a norm."""

    attention: GroupedAttentionSpec | Linear | None
    ffn: FeedForwardSpec | Linear | None


@dataclass(frozen=True, kw_only=True)
class NemotronConfig:
    """Sizes of one model, and a block for each layer. context: the most positions it was trained for."""

    vocab_size: int
    width: int
    heads: int
    head_width: int
    blocks: tuple[BlockSpec, ...]
    rope: Rope = DefaultRope()
    norm_eps: float = 1e-5
    context: int = 2048
    tied: bool = False

    def __post_init__(self) -> None:
        positive(self, "vocab_size", "width", "heads", "head_width", "context")
        if self.head_width % 2:
            raise RzooError(f"head_width ({self.head_width}) must be even", field="head_width", value=self.head_width)
        for i, block in enumerate(self.blocks):
            _check_block(block, f"blocks[{i}]", self.heads)
        if not any(isinstance(block.attention, GroupedAttentionSpec) for block in self.blocks):
            raise RzooError(
                "blocks must hold at least one with grouped attention: without it no token sees another",
                field="blocks",
            )

    @property
    def layers(self) -> int:
        """Number of layers, those that hold nothing included."""
        return len(self.blocks)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "NemotronConfig":
        """Reads a config.json with block_configs, in the spelling of Hugging Face, Megatron/NeMo or ModelOpt.

        Raises RzooError naming the field that is absent, malformed or not supported.
        """
        hf = HFConfig(config)
        hf.refuse("hidden_act", allowed=("silu", None))
        hf.refuse("pretraining_tp", allowed=(1, None))
        hf.refuse("attention_bias", allowed=(False, None))
        hf.refuse("mlp_bias", allowed=(False, None))
        heads, width = hf.count("num_attention_heads"), hf.count("hidden_size")
        context = hf.count("max_position_embeddings", default=2048)
        return cls(
            vocab_size=hf.count("vocab_size"),
            width=width,
            heads=heads,
            head_width=hf.count("head_dim", default=width // heads),
            blocks=_read_blocks(hf, heads, width),
            rope=read_rope(config, context=context),
            norm_eps=hf.number("rms_norm_eps", default=1e-6),
            context=context,
            tied=hf.flag("tie_word_embeddings", default=False),
        )

    @classmethod
    def from_gguf(
        cls, metadata: Mapping[str, Any], *, tensors: frozenset[str], rope_divisors: tuple[float, ...] | None = None
    ) -> "NemotronConfig":
        """Reads the metadata of a GGUF file of architecture deci; tying from its tensor names."""
        own = {key.removeprefix("deci."): value for key, value in metadata.items() if key.startswith("deci.")}
        meta = HFConfig(own, "GGUF metadata deci")
        heads, blocks = _read_gguf_blocks(meta)
        width = meta.count("embedding_length")
        head_width = meta.count("attention.key_length", default=width // heads)
        meta.refuse("rope.dimension_count", allowed=(head_width, None))
        meta.refuse("attention.value_length", allowed=(head_width, None))
        meta.refuse("expert_count", allowed=(0, None))
        context = meta.count("context_length")
        return cls(
            vocab_size=meta.gguf_vocabulary(metadata),
            width=width,
            heads=heads,
            head_width=head_width,
            blocks=blocks,
            rope=read_gguf_rope(meta, width=head_width, context=context, divisors=rope_divisors),
            norm_eps=single(meta.number("attention.layer_norm_rms_epsilon")),
            context=context,
            tied="output.weight" not in tensors,
        )

    def to_hf(self, *, spelling: int | None = None) -> dict[str, Any]:
        """The config.json of this model, rotary settings as transformers 4 or 5 spells them or (None) readable by both;
        inverse of from_hf.

        Blocks are in Hugging Face's spelling, but for feed-forward widths that are no multiple of 256: it can't say
        those, and ModelOpt's intermediate_size stands there.
        """
        return {
            "architectures": ["DeciLMForCausalLM"],
            "model_type": "nemotron-nas",
            "vocab_size": self.vocab_size,
            "hidden_size": self.width,
            "intermediate_size": None,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": None,
            "head_dim": self.head_width,
            "hidden_act": "silu",
            "rms_norm_eps": self.norm_eps,
            "max_position_embeddings": self.context,
            "tie_word_embeddings": self.tied,
            "attention_bias": False,
            "mlp_bias": False,
            "block_configs": [_write_block(block, self.heads, self.width) for block in self.blocks],
            **write_rope(self.rope, spelling=spelling),
        }


def _check_block(block: BlockSpec, where: str, heads: int) -> None:
    match block.attention:
        case GroupedAttentionSpec(kv_heads) if not isinstance(kv_heads, int) or kv_heads < 1 or heads % kv_heads:
            raise RzooError(
                f"{where}: heads ({heads}) must be a multiple of kv_heads ({kv_heads})", field=where, value=kv_heads
            )
        case GroupedAttentionSpec() | Linear() | None:
            pass
        case other:
            raise RzooError(f"{where}: attention ({other!r}) is no attention", field=where, value=other)
    match block.ffn:
        case FeedForwardSpec():
            positive(block.ffn, "width")
            if block.ffn.active is not None and not 1 <= block.ffn.active <= block.ffn.width:
                words = f"{where}: active ({block.ffn.active}) must be at least 1 and at most width ({block.ffn.width})"
                raise RzooError(words, field=where, value=block.ffn.active)
        case Linear() | None:
            pass
        case other:
            raise RzooError(f"{where}: ffn ({other!r}) is no feed-forward part", field=where, value=other)


def parse_layout(text: str) -> tuple[BlockSpec, ...]:
    """Blocks from a compact table such as "3*8/14336 2*-/7168 -/-": [count*]KV heads/feed-forward width, - for none."""
    blocks: list[BlockSpec] = []
    for entry in text.split():
        count, _, block = entry.rpartition("*")
        kv_heads, _, width = block.partition("/")
        attention = None if kv_heads == "-" else GroupedAttentionSpec(int(kv_heads))
        ffn = None if width == "-" else FeedForwardSpec(int(width))
        blocks += [BlockSpec(attention, ffn)] * int(count or 1)
    return tuple(blocks)


# What files may say of a part beside its size, without effect on what is computed.
HARMLESS = {"gated": True, "hidden_act": "silu", "weights_precision": "bf16"}


def _read_blocks(hf: HFConfig, heads: int, width: int) -> tuple[BlockSpec, ...]:
    entries = hf.get("block_configs")
    if not isinstance(entries, list):
        raise hf.wrong("block_configs", entries, "must be a list with one object for each layer")
    if len(entries) != hf.count("num_hidden_layers"):
        words = f"contradicts block_configs, which has {len(entries)} entries"
        raise hf.wrong("num_hidden_layers", hf.get("num_hidden_layers"), words)
    return tuple(_read_block(_Part(hf, f"block_configs[{i}]", entry), heads, width) for i, entry in enumerate(entries))


class _Part(HFConfig):
    """One object of block_configs, known by its place."""

    def __init__(self, parent: HFConfig, name: str, fields: Any):
        if not isinstance(fields, Mapping):
            raise parent.wrong(name, fields, "must be an object")
        super().__init__(fields, f"{parent.where}: {name}")

    def only(self, known: Sequence[str]) -> None:
        """Raises RzooError for the first other field that is set: it would change what is computed."""
        for field, value in self.fields.items():
            if field not in known and value not in (None, False, [], {}) and HARMLESS.get(field) != value:
                raise self.wrong(field, value, f"is not supported; supported: {', '.join(known)}")


_Sizes = Mapping[str, Callable[[_Part], int]]  # field -> the size that it says, in our terms


def _read_block(block: _Part, heads: int, width: int) -> BlockSpec:
    """One entry of block_configs: attention, and the feed-forward part as ffn or (Megatron) as mlp."""
    block.only(("attention", "ffn", "mlp"))
    ffn = "ffn" if block.fields.get("mlp") is None else "mlp"
    if ffn == "mlp" and block.fields.get("ffn") is not None:
        raise block.wrong("mlp", block.fields["mlp"], "contradicts ffn: give one of them")
    kv_heads: _Sizes = {
        "n_heads_in_group": lambda part: _divided(part, heads),
        "num_key_value_heads": lambda part: part.count("num_key_value_heads"),
        "num_query_groups": lambda part: part.count("num_query_groups"),
    }
    widths: _Sizes = {
        "ffn_mult": lambda part: _multiplied(part, width),
        "intermediate_size": lambda part: part.count("intermediate_size"),
        "ffn_hidden_size": lambda part: part.count("ffn_hidden_size"),
    }
    return BlockSpec(
        _read_part(_Part(block, "attention", block.get("attention")), kv_heads, GroupedAttentionSpec),
        _read_part(_Part(block, ffn, block.get(ffn)), widths, FeedForwardSpec),
    )


def _read_part(part: _Part, sizes: _Sizes, make: Callable[[int], Any]) -> Any:
    """None, Linear() or make(size). Several fields may give the size if they agree."""
    part.only(("no_op", "replace_with_linear", *sizes))
    nothing, linear = part.flag("no_op", default=False), part.flag("replace_with_linear", default=False)
    if nothing and linear:
        raise part.wrong("no_op", True, "contradicts replace_with_linear (True)")
    if nothing or linear:
        return None if nothing else Linear()
    found = {field: read(part) for field, read in sizes.items() if part.fields.get(field) is not None}
    if not found:
        raise part.wrong(next(iter(sizes)), None, f"is missing; one of {', '.join(sizes)} gives the size")
    if len(set(found.values())) > 1:
        raise part.wrong(next(iter(found)), part.get(next(iter(found))), f"contradicts the others: {found}")
    return make(next(iter(found.values())))


def _divided(part: _Part, heads: int) -> int:
    """KV heads from the number of query heads that share one."""
    group = part.count("n_heads_in_group")
    if heads % group:
        raise part.wrong("n_heads_in_group", group, f"must divide num_attention_heads ({heads})")
    return heads // group


def _multiplied(part: _Part, width: int) -> int:
    """The feed-forward width of ffn_mult, of which the reference keeps 6 decimals."""
    multiple = round(part.number("ffn_mult"), 6)
    if not 0 < multiple * width < LARGEST:
        raise part.wrong("ffn_mult", multiple, "must be positive, and no larger than a model can be")
    return up_to_256(int(2 * multiple * width / 3))


def up_to_256(width: int) -> int:
    """The next multiple of 256."""
    return -(-width // 256) * 256


def _write_block(block: BlockSpec, heads: int, width: int) -> dict[str, Any]:
    attention: dict[str, Any] = _flags(block.attention) | {"n_heads_in_group": None}
    ffn: dict[str, Any] = _flags(block.ffn) | {"ffn_mult": None}
    if isinstance(block.attention, GroupedAttentionSpec):
        attention["n_heads_in_group"] = heads // block.attention.kv_heads
    if isinstance(block.ffn, FeedForwardSpec) and block.ffn.active is not None:
        fix = "export the model that it is a mode of"
        raise RzooError("a mode of a model can't be written as a config.json", field="active", fix=fix)
    if isinstance(block.ffn, FeedForwardSpec) and block.ffn.width % 256:
        ffn["intermediate_size"] = block.ffn.width
    elif isinstance(block.ffn, FeedForwardSpec):
        ffn["ffn_mult"] = round(1.5 * block.ffn.width / width, 6)
    return {"attention": attention, "ffn": ffn}


def _flags(part: Any) -> dict[str, bool]:
    return {"no_op": part is None, "replace_with_linear": isinstance(part, Linear)}


def _read_gguf_blocks(meta: HFConfig) -> tuple[int, tuple[BlockSpec, ...]]:
    """Query heads, and blocks from the arrays of GGUF's arch deci: no heads is no attention, heads without KV heads are
    a linear map, no width is no feed-forward part.
    """
    names = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
    head_counts, kv_counts, widths = (_gguf_array(meta, name) for name in names)
    counts = sorted(set(head_counts) - {0})
    if len(counts) != 1:
        raise meta.wrong(names[0], head_counts, "must be one number in all blocks with attention, and 0 in the others")
    blocks = []
    for heads, kv_heads, width in zip(head_counts, kv_counts, widths, strict=True):
        attention = None if not heads else GroupedAttentionSpec(kv_heads) if kv_heads else Linear()
        blocks.append(BlockSpec(attention, FeedForwardSpec(width) if width else None))
    return counts[0], tuple(blocks)


def _gguf_array(meta: HFConfig, name: str) -> list[int]:
    values, count = meta.get(name), meta.count("block_count")
    if not isinstance(values, list) or len(values) != count:
        raise meta.wrong(name, values, f"must be an array with a number for each of the {count} blocks")
    if not all(isinstance(value, int) and 0 <= value <= LARGEST for value in values):
        raise meta.wrong(name, values, "must hold integers of at least 0")
    return values


class LinearMap(nnx.Module):
    """The matrix in the place of a part. Its rows are called f: no weight has an axis twice, and they split alike."""

    def __init__(self, width: int, *, forms: Forms, rngs: nnx.Rngs | None):
        self.linear = weight("fd", (width, width), rngs)
        self.forms = forms

    def __call__(self, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        return self.linear.contract("btd,fd->btf", x, self.forms.numerics)


class Block(nnx.Module):
    """x + attention(norm(x)), then x + ffn(norm(x)); what the spec leaves out adds nothing and has no weights."""

    def __init__(self, spec: BlockSpec, config: NemotronConfig, *, forms: Forms, rngs: nnx.Rngs | None):
        norm = lambda part: None if part is None else _norm(config, forms, rngs)  # noqa: E731
        self.attention_norm: Any = norm(spec.attention)
        self.attention = _attention(spec.attention, config, forms, rngs)
        self.mlp_norm: Any = norm(spec.ffn)
        self.mlp = _feed_forward(spec.ffn, config, forms, rngs)
        self.forms = forms

    def __call__(
        self, x: Float[Array, "b t d"], at: Rotation, starts: Int[Array, " b"], slot: Slot | None
    ) -> tuple[Float[Array, "b t d"], Slot | None]:
        if isinstance(self.attention, GroupedAttention):
            mixed, slot = self.attention(self.attention_norm(x), at, starts, slot)
            x = self.forms.place(x + mixed, "btd")
        elif self.attention is not None:
            x = self.forms.place(x + self.attention(self.attention_norm(x)), "btd")
        if self.mlp is not None:
            x = self.forms.place(x + self.mlp(self.mlp_norm(x)), "btd")
        self.forms.observe(self, "hidden", lambda: x)
        return x, slot


def _norm(config: NemotronConfig, forms: Forms, rngs: nnx.Rngs | None) -> RMSNorm:
    return RMSNorm(config.width, eps=config.norm_eps, forms=forms, rngs=rngs)


def _attention(
    spec: GroupedAttentionSpec | Linear | None, config: NemotronConfig, forms: Forms, rngs: nnx.Rngs | None
) -> nnx.Module | None:
    match spec:
        case GroupedAttentionSpec(kv_heads):
            return GroupedAttention(
                config.width,
                heads=config.heads,
                kv_heads=kv_heads,
                head_width=config.head_width,
                qkv_bias=False,
                output_bias=False,
                forms=forms,
                rngs=rngs,
            )
        case Linear():
            return LinearMap(config.width, forms=forms, rngs=rngs)
        case None:
            return None


def _feed_forward(
    spec: FeedForwardSpec | Linear | None, config: NemotronConfig, forms: Forms, rngs: nnx.Rngs | None
) -> nnx.Module | None:
    match spec:
        case FeedForwardSpec(width, active):
            return GatedMLP(config.width, width, bias=False, active=active, forms=forms, rngs=rngs)
        case Linear():
            return LinearMap(config.width, forms=forms, rngs=rngs)
        case None:
            return None


class Nemotron(llama.Llama):
    """Llama's decoder over blocks of their own: token ids [b, t] to float32 logits [b, t, v]."""

    def __init__(self, config: NemotronConfig, *, forms: Forms = Forms(), rngs: nnx.Rngs | None):
        self.embed = weight("vd", (config.vocab_size, config.width), rngs, scale=1.0)
        self.layers = nnx.List([Block(spec, config, forms=forms, rngs=rngs) for spec in config.blocks])
        self.norm = _norm(config, forms, rngs)
        self.head = None if config.tied else weight("vd", (config.vocab_size, config.width), rngs)
        self.config, self.forms = config, forms


def empty_cache(config: NemotronConfig, batch: int, capacity: int, dtype: Any) -> Cache:
    """A cache for `batch` rows of up to `capacity` tokens. A layer without grouped attention has None for a slot."""
    width = config.head_width
    slots: list[Slot | None] = []
    for block in config.blocks:
        if isinstance(block.attention, GroupedAttentionSpec):
            slots += empty_slots(1, batch, block.attention.kv_heads, capacity, width, width, dtype)
        else:
            slots.append(None)
    return Cache(tuple(slots), jnp.zeros(batch, jnp.int32))


# Llama's names, and the matrices in the place of parts. GGUF has none for a feed-forward part.
NAMES = (
    *(row for row in llama.NAMES if not row.path.endswith("_bias")),
    WeightName(
        "layers.{}.attention.linear", "model.layers.{}.self_attn.linear_attn.weight", "blk.{}.attn_output.weight"
    ),
    WeightName("layers.{}.mlp.linear", "model.layers.{}.mlp.linear_mlp.weight", None),
)
