"""What attention to few blocks saves and costs: SmolLM2 after 8,000 tokens of text, on this machine.

python benchmarks/covering.py [--text FILE] [--tokens 8064] [--scored 128] [--out FILE.json]

The text is the project's own notes where no other is given. Perplexity and touched keys are of the last tokens of it,
bytes are counted from the touched keys, times are of decode after it, interleaved with dense decode.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import rzoo
from rzoo.compile.kernels import covering
from rzoo.engine.session import State, decode, prefill
from rzoo.models.step import Blueprint

SHARES = (0.9, 0.95, 0.99)
STEPS, ROUNDS = 16, 5
NOTES = ("BUILD_NOTES.md", "README.md", "docs/chat.md")


@partial(jax.jit, static_argnames="blueprint")
def scored(blueprint: Blueprint, params: Any, tokens: Any, cache: Any) -> tuple[Any, Any]:
    """Negative log-probability of each token but the first, and keys that each query touches, a layer and head."""
    counts = jnp.full(tokens.shape[0], tokens.shape[1], jnp.int32)
    run = lambda module: module.hidden_states(tokens, cache, counts)[0]  # noqa: E731
    module = blueprint.module(params)
    x, observed = nnx.capture(run, nnx.Intermediate)(module)
    logprobs = jax.nn.log_softmax(module.logits(x)[:, :-1].astype(jnp.float32))
    losses = -jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1)
    return losses, [leaf.get_value()[0] for _, leaf in nnx.to_flat_state(observed)]


def copied(state: State) -> State:
    """The same, for a call that uses it up."""
    return State(jnp.copy(state.logits), jax.tree.map(jnp.copy, state.cache), state.lengths)


def seconds(lm: Any, state: State) -> float:
    """Of one token of decode after `state`."""
    mine = copied(state)
    jax.block_until_ready(mine.cache)
    start = time.perf_counter()
    decode(lm, mine, STEPS)
    return (time.perf_counter() - start) / STEPS


def measured(lm: Any, forms: Sequence[Any], ids: np.ndarray, count: int) -> list[dict[str, Any]]:
    """Each form on the last `count` tokens of ids [1, t] after all before them, the first one dense."""
    state = prefill(lm, [ids[0, :-count].tolist()], room=count + STEPS * 2)
    found = []
    for one in forms:
        losses, touched = scored(
            replace(one.blueprint, forms=replace(one.forms, capture=("touched",))),
            lm.params,
            ids[:, -count:],
            state.cache,
        )
        found.append({"loss": float(losses.mean()), "touched": [np.asarray(layer) for layer in touched]})
        seconds(one, state)  # compiles
    times: list[list[float]] = [[] for _ in forms]
    for _ in range(ROUNDS):
        for own, one in zip(times, forms, strict=True):
            own.append(seconds(one, state))
    for entry, own in zip(found, times, strict=True):
        entry["seconds"] = statistics.median(own)
    return found


def row(name: str, entry: dict[str, Any], dense: dict[str, Any], config: Any, length: int) -> dict[str, Any]:
    """The figures of one form. Bytes of a token: keys and values that are read, and all keys for the summaries."""
    entry_bytes, layers = 4 * config.head_width, config.layers
    keys = entry["touched"] and float(np.mean([layer.mean() for layer in entry["touched"]]))
    read = 2 * (keys or length) * config.kv_heads * layers * entry_bytes
    summaries = length * config.kv_heads * layers * entry_bytes if keys else 0.0
    return {
        "form": name,
        "perplexity": float(np.exp(entry["loss"])),
        "nats more": entry["loss"] - dense["loss"],
        "touched share": (keys or length) / length,
        "MB read a token": read / 1e6,
        "MB for summaries": summaries / 1e6,
        "ms a token": 1e3 * entry["seconds"],
        "time / dense": entry["seconds"] / dense["seconds"],
    }


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--text", type=Path)
    parser.add_argument("--tokens", type=int, default=8064)
    parser.add_argument("--scored", type=int, default=128)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    files = [asked.text] if asked.text else [Path(name) for name in NOTES]
    lm = rzoo.load("smollm2", record=False, quiet=True)
    ids = np.asarray([lm.tokenizer.encode("\n".join(file.read_text() for file in files))[: asked.tokens]])
    print(f"{ids.shape[1]} tokens of {', '.join(map(str, files))}")
    forms = [lm, *(covering(lm, share) for share in SHARES)]
    found = measured(lm, forms, ids, asked.scored)
    names = ["dense", *(f"covering {share}" for share in SHARES)]
    rows = [row(name, entry, found[0], lm.config, ids.shape[1]) for name, entry in zip(names, found, strict=True)]
    print("| " + " | ".join(rows[0]) + " |\n|" + "---|" * len(rows[0]))
    for one in rows:
        print("| " + " | ".join(v if isinstance(v, str) else f"{v:.4g}" for v in one.values()) + " |")
    if asked.out:
        asked.out.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
