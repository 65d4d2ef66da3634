"""The training step: gradients of the loss through optax, and what is learned without a gradient beside it.

Sources: DeepSeek-V3 (2024), sections 2.1.2 (the router's selection bias follows the load of the experts) and 2.2
(multi-token prediction); DeepSeek-V3.2-Exp (2025), section 2.1.1 (the indexer).
Nothing here depends on where arrays live: on a mesh, the step's arrays keep the shardings of the state it is given.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

from rzoo.compile.gates import divergence
from rzoo.core import RzooError
from rzoo.handle import LM
from rzoo.models import step as programs
from rzoo.models.registry import Params, always_float32, path_name


class Batch(NamedTuple):
    """Sequences to learn from. weights: how much it counts to predict each token from those before it, 0 for padding
    and for prompts; that of the first token of a row is never used. logits, hidden: what another model makes of the
    tokens (hidden: after its final norm); where they are given, they are learned from in the place of the tokens.
    """

    tokens: Int[Array, "b t"]
    weights: Float[Array, "b t"]
    logits: Float[Array, "b t v"] | None = None
    hidden: Float[Array, "b t d"] | None = None


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
    """What is minimised, and what follows without a gradient.

    bias_rate: by how much a selection bias moves a step towards an even load (gamma of DeepSeek-V3; 0: never). mtp:
    weight of the loss of the module for multi-token prediction. indexer: weight of the loss of the indexers, whose
    input is detached. hidden: weight of the distance to the other model's hidden states, where a batch has them.
    dense_steps: so many steps attend to all positions while the indexers learn from them; later
    ones to those that they choose.
    """

    bias_rate: float = 0.0
    mtp: float = 0.3
    indexer: float = 1.0
    hidden: float = 1.0
    dense_steps: int = 0

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

    metrics, scalars: loss (nats a counted token; of a batch with logits, KL from them), gradient_norm, and where the
    model has such parts load (of the busiest expert over the mean, the worst of all layers), mtp_loss and indexer_loss
    (nats); of a batch with hidden states hidden_loss (1 - cosine).
    """
    blueprint = programs.Blueprint(lm.config, replace(lm.forms, capture=("load", "indexer_loss"), stacked=False))
    sparse = jax.jit(partial(_step, blueprint, optimizer, objective), donate_argnums=0)
    indexer = getattr(lm.config, "indexer", None)
    if indexer is None or not objective.dense_steps:
        return sparse
    everything = replace(lm.config, indexer=replace(indexer, keep=lm.config.context))
    dense = jax.jit(partial(_step, replace(blueprint, config=everything), optimizer, objective), donate_argnums=0)
    return lambda state, batch: (dense if int(state.step) < objective.dense_steps else sparse)(state, batch)


def _step(
    blueprint: programs.Blueprint,
    optimizer: optax.GradientTransformation,
    objective: Objective,
    state: State,
    batch: Batch,
) -> tuple[State, dict[str, Array]]:
    def objective_of(learned: Params) -> tuple[Array, tuple[dict[str, Array], dict[str, Array]]]:
        losses, loads = losses_of(blueprint, {**learned, **state.biases}, batch)
        weights = {
            "loss": 1.0,
            "mtp_loss": objective.mtp,
            "indexer_loss": objective.indexer,
            "hidden_loss": objective.hidden,
        }
        return sum((weights[name] * value for name, value in losses.items()), jnp.zeros(())), (losses, loads)

    (_, (metrics, loads)), gradients = jax.value_and_grad(objective_of, has_aux=True)(state.learned)
    updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.learned)
    learned = optax.apply_updates(state.learned, updates)
    biases = {path: balanced(bias, loads[path], objective.bias_rate) for path, bias in state.biases.items()}
    metrics = {**metrics, "gradient_norm": optax.tree.norm(gradients)}
    if loads:
        metrics["load"] = jnp.stack([load.max() / load.mean() for load in loads.values()]).max()
    return State(learned, biases, optimizer_state, state.step + 1), metrics


def losses_of(
    blueprint: programs.Blueprint, params: Params, batch: Batch
) -> tuple[dict[str, Array], dict[str, Int[Array, " e"]]]:
    """The losses of a batch by name, and by path of each selection bias the tokens of its experts."""
    config, (tokens, weights, *_) = blueprint.config, batch

    def run(module: Any) -> dict[str, Array]:
        hidden, _ = module.hidden_states(tokens)
        found = {"loss": _token_loss(module.logits(hidden)[:, :-1], batch)}
        if batch.hidden is not None:
            found["hidden_loss"] = _mean(optax.cosine_distance(hidden, batch.hidden)[:, :-1], weights[:, 1:])
        if getattr(config, "mtp", False):
            further = module.mtp(hidden[:, :-1], tokens[:, 1:])[:, :-1]
            found["mtp_loss"] = cross_entropy(further, tokens[:, 2:], weights[:, 2:])
        return found

    losses, observed = nnx.capture(run, nnx.Intermediate)(blueprint.module(params))
    seen = {path_name(path): leaf.get_value()[0] for path, leaf in nnx.to_flat_state(observed)}
    of_indexers = [value.mean() for path, value in seen.items() if path.endswith(".indexer_loss")]
    if of_indexers:
        losses["indexer_loss"] = jnp.stack(of_indexers).mean()
    owners = {path: path.removesuffix(".load") + "." for path in seen if path.endswith(".load")}
    names = always_float32(config)
    return losses, {name: seen[path] for path, owner in owners.items() for name in names if name.startswith(owner)}


def _token_loss(logits: Float[Array, "b u v"], batch: Batch) -> Float[Array, ""]:
    """How far predictions of all tokens but the first are from the tokens, or from what the other model predicts."""
    weights = batch.weights[:, 1:]
    if batch.logits is None:
        return cross_entropy(logits, batch.tokens[:, 1:], weights)
    return _mean(divergence(batch.logits[:, :-1], logits), weights)


def cross_entropy(
    logits: Float[Array, "b t v"], targets: Int[Array, "b t"], weights: Float[Array, "b t"]
) -> Float[Array, ""]:
    """Mean loss in nats over the targets, each counted by its weight."""
    return _mean(optax.softmax_cross_entropy_with_integer_labels(logits, targets), weights)


def _mean(values: Float[Array, "b t"], weights: Float[Array, "b t"]) -> Float[Array, ""]:
    return (values * weights).sum() / jnp.maximum(weights.sum(), 1.0)


def balanced(bias: Float[Array, " e"], load: Int[Array, " e"], rate: float) -> Float[Array, " e"]:
    """A selection bias after a step in which the experts took `load` tokens: up for the idle, down for the busy."""
    return bias + rate * jnp.sign(load.mean() - load).astype(bias.dtype)
