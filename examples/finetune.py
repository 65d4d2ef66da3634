"""Fine-tunes a model with optax on a text that repeats, until its loss has halved.

python examples/finetune.py [MODEL]
"""

import sys

import jax
import jax.numpy as jnp
import optax

import rzoo

lm = rzoo.load(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
ids = jnp.tile(jnp.arange(1, 9), (4, 4))
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def loss(lm):
    return optax.softmax_cross_entropy_with_integer_labels(lm(ids[:, :-1]), ids[:, 1:]).mean()


@jax.jit
def step(lm, state):
    value, gradients = jax.value_and_grad(loss)(lm)
    updates, state = optimizer.update(gradients, state, lm)
    return optax.apply_updates(lm, updates), state, value


state, first, value = optimizer.init(lm), loss(lm), jnp.inf
while value > first / 2:
    lm, state, value = step(lm, state)
    print(f"loss {value:.3f} of {first:.3f}")
