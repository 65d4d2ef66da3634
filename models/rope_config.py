"""Rotary settings in config.json, in both spellings.

transformers 4 writes `rope_theta` and `rope_scaling` (null where nothing is scaled; the kind under `type` or
`rope_type`), transformers 5 writes `rope_parameters` with all of it. A reader that knows only one of them falls back
to theta 10000 without a word, so both are read and, unless asked otherwise, both are written.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from rzoo.core import RzooError
from rzoo.models.config import HFConfig
from rzoo.models.rope import DefaultRope, DividedRope, DynamicRope, LinearRope, Llama3Rope, Rope, YarnRope, frequencies

KINDS = ("default", "linear", "dynamic", "llama3", "yarn")

# (our field, field of the files) beyond theta and factor, by kind.
FIELDS: dict[str, tuple[tuple[str, str], ...]] = {
    "default": (),
    "linear": (),
    "dynamic": (("original_context", "original_max_position_embeddings"),),
    "llama3": (
        ("low_frequency_factor", "low_freq_factor"),
        ("high_frequency_factor", "high_freq_factor"),
        ("original_context", "original_max_position_embeddings"),
    ),
    "yarn": (
        ("original_context", "original_max_position_embeddings"),
        ("beta_fast", "beta_fast"),
        ("beta_slow", "beta_slow"),
        ("mscale", "mscale"),
        ("mscale_all_dim", "mscale_all_dim"),
        ("attention_factor", "attention_factor"),
        ("truncate", "truncate"),
    ),
}
# Least and largest value by our field; beyond them rope.py would divide by zero or overflow. No model comes near.
BOUNDS: dict[str, tuple[float, float]] = {
    "theta": (1.001, 1e30),
    "factor": (1, 1e6),
    "original_context": (1, 1e9),
    "low_frequency_factor": (0, 1e6),
    "high_frequency_factor": (0, 1e6),
    "beta_fast": (1e-6, 1e6),
    "beta_slow": (1e-6, 1e6),
    "mscale": (0, 1e6),
    "mscale_all_dim": (0, 1e6),
    "attention_factor": (0, 1e6),
}
GGUF_NAMES = {
    "theta": "rope.freq_base",
    "factor": "rope.scaling.factor",
    "original_context": "rope.scaling.original_context_length",
}
TYPES = {"default": DefaultRope, "linear": LinearRope, "dynamic": DynamicRope, "llama3": Llama3Rope, "yarn": YarnRope}


def read_rope(config: Mapping[str, Any], *, context: int) -> Rope:
    """The rotary settings of a config.json in either spelling; `context` is its max_position_embeddings.

    Raises RzooError for an unknown kind, a malformed field, a value that could not be computed with, or two spellings
    that contradict each other.
    """
    settings = _settings(config)
    hf = HFConfig(settings, "config.json: rope settings")
    kind = hf.text("rope_type", default=settings.get("type") or "default")
    if kind not in KINDS:
        raise hf.wrong("rope_type", kind, f"is not supported; supported: {', '.join(KINDS)}")
    hf.refuse("partial_rotary_factor", allowed=(1, None))
    values: dict[str, Any] = {"theta": hf.number("rope_theta", default=10000.0)}
    if kind != "default":
        values["factor"] = hf.number("factor")
    for ours, theirs in FIELDS[kind]:
        if theirs == "original_max_position_embeddings":
            values[ours] = hf.count(theirs, default=context)
        elif theirs == "truncate":
            values[ours] = hf.flag(theirs, default=True)
        elif hf.fields.get(theirs) is not None:
            values[ours] = hf.number(theirs)
    return in_bounds(TYPES[kind](**values), hf, {"theta": "rope_theta", **dict(FIELDS[kind])})


def in_bounds(rope: Any, hf: HFConfig, names: Mapping[str, str]) -> Any:
    """The same; RzooError for a value that is out of BOUNDS. names: our field -> the file's, where they differ."""
    for ours, (least, largest) in BOUNDS.items():
        value = getattr(rope, ours, None)
        if value is not None and not least <= value <= largest:
            raise hf.wrong(names.get(ours, ours), value, f"must be at least {least:g} and at most {largest:g}")
    return rope


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Both spellings as one flat dict: rope_theta, rope_type, factor, …"""
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    for field, value in (("rope_parameters", new), ("rope_scaling", old)):
        if value is not None and not isinstance(value, Mapping):
            raise HFConfig(config).wrong(field, value, "must be an object or null")
    top = {f: config[f] for f in ("rope_theta", "partial_rotary_factor") if config.get(f) is not None}
    settings = top | dict(old or {}) | dict(new or {})
    theta = config.get("rope_theta")
    if theta is not None and new and "rope_theta" in new and new["rope_theta"] != theta:
        raise RzooError(
            f"config.json: rope_theta ({theta}) contradicts rope_parameters ({settings['rope_theta']})",
            field="rope_theta",
            value=theta,
            fix="keep the one that the model was trained with",
        )
    return settings


def write_rope(rope: Rope, *, spelling: int | None = None) -> dict[str, Any]:
    """The fields of config.json for `rope`: as transformers 4 or 5 spells them, or (None) both side by side."""
    if isinstance(rope, DividedRope):
        raise RzooError(
            "rotary frequencies given as a list of divisors have no field in config.json",
            field="rope",
            fix="set config.rope to the Llama3Rope that they were made from",
        )
    kind = next(name for name, kind in TYPES.items() if type(rope) is kind)
    scaling: dict[str, Any] = {"rope_type": kind}
    if not isinstance(rope, DefaultRope):
        scaling["factor"] = rope.factor
    for ours, theirs in FIELDS[kind]:
        if getattr(rope, ours) is not None:
            scaling[theirs] = getattr(rope, ours)
    old: dict[str, Any] = {"rope_theta": rope.theta, "rope_scaling": None if kind == "default" else scaling}
    new = {"rope_parameters": {"rope_theta": rope.theta, **scaling}}
    return old if spelling == 4 else new if spelling == 5 else old | new


def read_gguf_rope(meta: HFConfig, *, width: int, context: int, divisors: tuple[float, ...] | None) -> Rope:
    """The rotary settings of GGUF metadata (keys without the architecture's prefix) and of its rope_freqs tensor."""
    theta = single(meta.number("rope.freq_base", default=10000.0))
    if divisors is not None:
        return in_bounds(_llama3_like(theta, width, divisors), meta, GGUF_NAMES)
    return in_bounds(_gguf_scaling(meta, theta, context), meta, GGUF_NAMES)


def _gguf_scaling(meta: HFConfig, theta: float, context: int) -> Rope:
    """The scaling that GGUF metadata names."""
    kind = meta.text("rope.scaling.type", default="none")
    if kind == "none":
        return DefaultRope(theta=theta)
    factor = single(meta.number("rope.scaling.factor"))
    if kind == "linear":
        return LinearRope(theta=theta, factor=factor)
    if kind == "yarn":
        original = meta.count("rope.scaling.original_context_length", default=context)
        return YarnRope(theta=theta, factor=factor, original_context=original)
    raise meta.wrong("rope.scaling.type", kind, "is not supported; supported: none, linear, yarn")


def _llama3_like(theta: float, width: int, divisors: tuple[float, ...]) -> Rope:
    """The published Llama 3 scaling that these divisors were made from, or the divisors themselves."""
    if len(divisors) != width // 2:
        raise RzooError(
            f"rope_freqs.weight has {len(divisors)} entries, the head width {width} needs {width // 2}",
            field="rope_freqs.weight",
            value=len(divisors),
        )
    given = DividedRope(theta=theta, divisors=divisors)
    one = jnp.ones(1, jnp.int32)
    for factor in (8.0, 16.0, 32.0):
        published = Llama3Rope(theta=theta, factor=factor)
        if jnp.allclose(frequencies(published, width, one), frequencies(given, width, one), rtol=1e-5, atol=0):
            return published
    return given


def single(value: float) -> float:
    """A float32 of a file as the decimal that it was written from: 9.99999974e-06 -> 1e-05."""
    return float(f"{value:.6g}")
