"""Decode and prefill on one GPU, planned beside measured: `python benchmarks/gpu.py [--out gpu.json] [--budget 480]`.

Needs jax with a GPU, flax, numpy and this tree alone. Weights are random, at the sizes of the published models. The
file is written anew after every section; a section for which no time is left is named in it. --small runs tiny models,
on any device.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESERVE = 60  # seconds that a section may take
REPEATS = 7
STEPS = 16  # of one call of the decode program (target_programs.py)
SUMS = {
    "stacked": False,
    "forms": {"attend_decode": "in sums", "experts_cached": "in sums"},
    "products": "sums",
}
STACKED: dict[str, Any] = {"forms": {"experts_cached": "in tiles"}}
# Name -> (preset, its first layers or None for all, what else the job of target_programs.py asks for).
SECTIONS: dict[str, tuple[str, int | None, dict[str, Any]]] = {
    **{
        f"nano-8b {kind} decode in sums": ("nano-8b", None, SUMS | {"weights": kind})
        for kind in ("bf16", "int8", "fp8")
    },
    "r1 fp8 decode in sums": ("r1", 5, SUMS | {"weights": "fp8"}),
    "ultra-253b bf16 decode in sums": ("ultra-253b", 6, SUMS),
    **{
        f"nano-8b {kind} prefill": ("nano-8b", None, STACKED | {"weights": kind, "phase": "prefill"})
        for kind in ("bf16", "int8", "fp8")
    },
    "r1 fp8 prefill": ("r1", 5, STACKED | {"weights": "fp8", "phase": "prefill"}),
    "ultra-253b bf16 prefill": ("ultra-253b", 6, STACKED | {"phase": "prefill"}),
    "nano-8b bf16 decode": ("nano-8b", None, STACKED),
    "nano-8b int8 decode of 8": ("nano-8b", None, STACKED | {"weights": "int8", "batch": 8}),
}
# What --small changes in a config.json, where the field is there.
SMALL = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 16,
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 16,
    "moe_intermediate_size": 128,
    "first_k_dense_replace": 1,
}


def stand_in_for_jaxtyping() -> None:
    """Where jaxtyping is not installed: annotations mean nothing here."""

    class Anything(type):
        def __getitem__(cls, _: object) -> object:
            return cls

    found: Any = ModuleType("jaxtyping")
    found.__getattr__ = lambda name: Anything(name, (), {})
    sys.modules["jaxtyping"] = found


def fields_of(preset: str, layers: int | None, small: bool) -> dict[str, Any]:
    """The config.json of a preset's first layers."""
    from rzoo.models.registry import preset as named

    fields = named(preset)[1].config.to_hf()
    layers = 2 if small else layers or fields["num_hidden_layers"]
    fields["num_hidden_layers"] = layers
    if small:
        fields |= {name: value for name, value in SMALL.items() if fields.get(name) is not None}
    if "block_configs" in fields:
        fields["block_configs"] = fields["block_configs"][:layers]
    return fields


def filled(shape: Any) -> Any:
    """A random array: small numbers, so that nothing overflows in a stack of layers."""
    import jax
    import jax.numpy as jnp

    if jax.dtypes.issubdtype(shape.dtype, jax.dtypes.prng_key):
        return jax.random.key(0)
    if shape.dtype in (jnp.int8, jnp.int4):
        limit = 127 if shape.dtype == jnp.int8 else 7
        return jax.random.randint(jax.random.key(0), shape.shape, -limit, limit, shape.dtype)
    wide = jnp.bfloat16 if shape.dtype.itemsize == 1 else shape.dtype
    return (0.02 * jax.random.normal(jax.random.key(0), shape.shape, wide)).astype(shape.dtype)


def arguments(job: Any, lowered: Any) -> tuple[Any, ...]:
    """What the program of a job takes, on the device: an empty cache, rows that take all steps, one id no token has."""
    import jax
    import jax.numpy as jnp

    given = lowered.program.args_info[0]
    params = jax.tree.map(filled, given[0])
    zeros = lambda tree: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), tree)  # noqa: E731
    if job.phase == "prefill":
        tokens = jnp.broadcast_to(jnp.arange(given[1].shape[1], dtype=jnp.int32) % 512, given[1].shape)
        return params, tokens, jnp.full(given[2].shape, tokens.shape[1], jnp.int32), zeros(given[3])
    logits, cache, key = filled(given[1]), zeros(given[2]), jax.random.key(0)
    return params, logits, cache, key, jnp.full(job.batch, STEPS, jnp.int32), jnp.full(1, -1, jnp.int32)


def calls(job: Any, compiled: Any, given: tuple[Any, ...]) -> Callable[[], Any]:
    """A function that runs the program once more: decode goes on where it was, prefill reads the same prompt anew."""
    held = list(given)

    def once() -> Any:
        if job.phase == "prefill":
            logits, cache = compiled(*held)
            held[3] = cache.with_lengths(cache.lengths * 0)
        else:
            _, logits, cache = compiled(*held)
            held[1:3] = logits, cache
        return logits.block_until_ready()

    return once


def section(name: str, small: bool, gpu: Any) -> dict[str, Any]:
    """One program, planned and measured."""
    import jax
    import numpy as np

    from rzoo.compile.target_programs import Job, config_of, programs, read
    from rzoo.compile.tune_for_target import step_seconds

    preset, layers, changes = SECTIONS[name]
    asked = {"gpu": gpu.name, "mesh": {}, "rules": "single", "batch": 1, "context": 256 if small else 4096}
    job = Job(model=fields_of(preset, layers, small), **asked | changes)
    start = time.perf_counter()
    ((_, lowered),) = programs(job, config_of(job.model), jax.devices()[:1])
    compiled = lowered.program.compile()
    part, compiling = read(compiled, lowered, name), time.perf_counter() - start
    once = calls(job, compiled, arguments(job, lowered))
    finite, times = bool(np.isfinite(once()).all()), [timed(once) for _ in range(REPEATS)]
    steps, tokens = (1, min(512, job.context)) if job.phase == "prefill" else (STEPS, 1)
    seconds = median(times) / steps
    kept = ("weights", "cache", "temp", "peak", "launches", "read", "written", "unknown_loops")
    return {
        "planned": {n: part[n] for n in kept} | {"seconds": step_seconds(gpu, part)},
        "measured": {
            "seconds": seconds,
            "spread": (max(times) - min(times)) / median(times),
            "tokens_per_second": job.batch * tokens / seconds,
            "read_bytes_per_second": part["read"] / seconds,
            "compile_seconds": compiling,
            "bytes_in_use": (jax.devices()[0].memory_stats() or {}).get("bytes_in_use"),
            "finite": finite,
        },
    }


def timed(work: Callable[[], Any]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def machine(small: bool) -> tuple[dict[str, Any], Any]:
    """What the device reaches, and the target that it is planned as: the one of its name, else an H200."""
    import jax

    from rzoo.compile.report import matrix_rate, read_rate
    from rzoo.compile.targets import TARGETS
    from rzoo.models.weights import Numerics

    kind = jax.devices()[0].device_kind
    named = [name for name in TARGETS if name.partition("-")[0] in kind.lower()]
    gpu = TARGETS[named[0] if named else "h200"]
    half = Numerics(compute="bfloat16", precision=jax.lax.Precision.DEFAULT)
    found = {
        "device": kind,
        "jax": jax.__version__,
        "planned as": gpu.name,
        "read_bytes_per_second": read_rate(2**24 if small else 2**33),
        "matrix_flops_per_second": matrix_rate(half, 256 if small else 8192),
        "sheet": {"read_bytes_per_second": gpu.bandwidth, "matrix_flops_per_second": gpu.rate("bf16")},
    }
    return found, gpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    parser.add_argument("--budget", type=float, default=480, help="seconds in all")
    parser.add_argument("--small", action="store_true", help="tiny models, on any device")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="some sections")
    args = parser.parse_args()
    start, found = time.monotonic(), {}
    found["machine"], gpu = machine(args.small)
    print("machine", json.dumps(found["machine"]), flush=True)
    for name in args.only:
        if time.monotonic() - start > args.budget - RESERVE:
            found[name] = {"not run": "no time is left"}
        else:
            try:
                found[name] = section(name, args.small, gpu)
            except Exception as error:  # such as no memory: the others still run
                found[name] = {"failed": f"{type(error).__name__}: {error}"[:500]}
        gc.collect()
        args.out.write_text(json.dumps(found, indent=1))
        print(name, json.dumps(found[name]), flush=True)
    if any("failed" in answer for answer in found.values()):
        sys.exit("some sections failed")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    try:
        import jaxtyping  # noqa: F401
    except ImportError:
        stand_in_for_jaxtyping()
    main()
