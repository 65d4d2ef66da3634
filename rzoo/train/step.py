"""The training step: gradients of the loss through optax, and what is learned without a gradient beside it.

Sources: DeepSeek-V3 (2024), sections 2.1.2 (the router's selection bias follows the load of the experts) and 4.2.
Nothing here depends on where arrays live: on a mesh, the step's arrays keep the shardings of the state it is given.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from rzoo.core import RzooError
from rzoo.handle import LM
from rzoo.models import step as programs
from rzoo.models.registry import Params, abstract_weights, always_float32


class Batch(NamedTuple):
    """Sequences to learn from. weights: how much it counts to predict each token from those before it, 0 for padding
    and for prompts; that of the first token of a row is never used.
    """

    tokens: Int[Array, "b t"]
    weights: Float[Array, "b t"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """What a step takes and gives. learned: parameters with gradients; biases: the routers' selection biases, by path;
    optimizer: optax's state; step: steps done.
    """

    learned: Params
    biases: Params
    optimizer: Any
    step: Int[Array, ""]

    @property
    def params(self) -> Params:
        """All parameters, as a handle holds them."""
        return {**self.learned, **self.biases}


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What is minimised and what follows without a gradient. bias_rate: by how much a selection bias moves a step
    towards an even load (gamma of DeepSeek-V3; 0: never).
    """

    bias_rate: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.bias_rate < 1:
            raise RzooError(
                f"bias_rate ({self.bias_rate}) must be at least 0 and below 1", field="bias_rate", value=self.bias_rate
            )


PLAIN = Objective()
Step = Callable[[State, Batch], tuple[State, dict[str, Array]]]


def initial(lm: LM, optimizer: optax.GradientTransformation) -> State:
    """The state before the first step. Raises RzooError for weights that are held in blocks and have no gradient."""
    fixed = [path for path, value in lm.params.items() if not isinstance(value, jax.Array)]
    if fixed:
        raise RzooError(
            f"{len(fixed)} weights are quantized or laid out anew and can't be trained: {fixed[0]}, …",
            field="lm",
            fix="load the model with dtype float32 or bfloat16, and record=False",
        )
    names = always_float32(lm.config)
    own = {path: jnp.copy(value) for path, value in lm.params.items()}  # steps use their state up, a handle stays
    learned = {path: value for path, value in own.items() if path not in names}
    biases = {path: value for path, value in own.items() if path in names}
    return State(learned, biases, optimizer.init(learned), jnp.zeros((), jnp.int32))


def step_of(lm: LM, optimizer: optax.GradientTransformation, objective: Objective = PLAIN) -> Step:
    """The compiled step of a model: (state, batch) -> (state after it, metrics). The state it is given is used up.

    metrics, scalars: loss (nats a counted token), gradient_norm, and load (of the busiest expert over the mean, the
    worst of all layers) for models with experts.
    """
    observed = ("load",) if always_float32(lm.config) else ()
    blueprint = programs.Blueprint(lm.config, replace(lm.forms, capture=observed, stacked=False))
    return jax.jit(partial(_step, blueprint, optimizer, objective), donate_argnums=0)


def _step(
    blueprint: programs.Blueprint,
    optimizer: optax.GradientTransformation,
    objective: Objective,
    state: State,
    batch: Batch,
) -> tuple[State, dict[str, Array]]:
    def objective_of(learned: Params) -> tuple[Array, tuple[Array, ...]]:
        logits, seen = programs.forward_captured(blueprint, {**learned, **state.biases}, batch.tokens)
        return cross_entropy(logits, batch), seen.get("load", ())

    (loss, loads), gradients = jax.value_and_grad(objective_of, has_aux=True)(state.learned)
    updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.learned)
    learned = optax.apply_updates(state.learned, updates)
    by_depth = [path for path in abstract_weights(blueprint.config) if path in state.biases]  # jit sorts names: 10 < 2
    biases = {
        path: balanced(state.biases[path], load, objective.bias_rate)
        for path, load in zip(by_depth, loads, strict=True)
    }
    metrics = {"loss": loss, "gradient_norm": optax.tree.norm(gradients)}
    if loads:
        metrics["load"] = jnp.stack([load.max() / load.mean() for load in loads]).max()
    return State(learned, biases, optimizer_state, state.step + 1), metrics


def cross_entropy(logits: Float[Array, "b t v"], batch: Batch) -> Float[Array, ""]:
    """Mean loss in nats over the counted tokens, each predicted from the logits at the place before it."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], batch.tokens[:, 1:])
    counted = batch.weights[:, 1:]
    return (losses * counted).sum() / jnp.maximum(counted.sum(), 1.0)


def balanced(bias: Float[Array, " e"], load: Int[Array, " e"], rate: float) -> Float[Array, " e"]:
    """A selection bias after a step in which the experts took `load` tokens: up for the idle, down for the busy."""
    return bias + rate * jnp.sign(load.mean() - load).astype(bias.dtype)
