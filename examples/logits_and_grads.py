"""Logits, hidden states and gradients of a loaded model.

python examples/logits_and_grads.py [MODEL]
"""

import sys

import jax
import jax.numpy as jnp

import rzoo

lm = rzoo.load(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
ids = jnp.asarray([rzoo.prompt_ids(lm, "The capital of France is Paris.", raw=True) if lm.tokenizer else [1, 2, 3, 4]])

logits, captured = lm(ids, capture=("hidden", "attention"))
print("logits", logits.shape, logits.dtype)
print("hidden states", len(captured["hidden"]), captured["hidden"][-1].shape)
print("attention probabilities", captured["attention"][0].shape)


def loss(lm):
    """Mean negative log-likelihood of each token given those before it."""
    scores = jax.nn.log_softmax(lm(ids)[:, :-1])
    return -jnp.take_along_axis(scores, ids[:, 1:, None], axis=-1).mean()


value, gradients = jax.jit(jax.value_and_grad(loss))(lm)
largest = max(gradients.params, key=lambda path: float(jnp.linalg.norm(gradients.params[path])))
print(f"loss {value:.4f}, largest gradient {largest}")
