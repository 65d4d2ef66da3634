"""The handle of a loaded model: immutable, a pytree over its parameters, callable.

It is no nnx.Module: a tokenizer on a module would be hashed into its GraphDef and re-compile at every load.
`lm.module()` gives the module over the same arrays for research on it.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rzoo.compile.precision import BOUNDS, Bound
from rzoo.compile.programs import programs_of
from rzoo.compile.storage import plain
from rzoo.core import RzooError
from rzoo.models import registry, step
from rzoo.models.forms import CAPTURES, Forms
from rzoo.models.rope import depends_on_length
from rzoo.models.stacking import stacked_weights, unstack
from rzoo.models.weights import held_as

# Lengths to which ids are padded on the right, so that few programs serve all; longer ids run in chunks of the last.
BUCKETS = (16, 64, 256, 1024)


ONE_ROW = "one row of ids is [1, t]: ids[None]"


@dataclass(frozen=True, eq=False)
class About:
    """What belongs to a loaded model beside numbers. Compared by identity: it never enters a compiled program.

    source: what was asked for and where it was found. bits: how the file stores most weights, e.g. "Q4_1".
    tokenizer, template: None where the checkpoint has none. stops: ids that end an answer. thinking: an entry of
    rzoo.formats.THINKING, None for a model without. recommended: sampling settings.
    """

    source: str = "memory"
    bits: str = "float32"
    tokenizer: Any = None
    template: str | None = None
    stops: tuple[int, ...] = ()
    thinking: str | None = None
    recommended: dict[str, Any] = field(default_factory=dict)


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True, eq=False)
class LM:
    """A loaded model: `lm(ids)` gives logits, `lm.params` is a plain dict of arrays, `lm.module()` the nnx.Module.

    bound: what `policy` lets a tuned program differ by from float32. record: the tuning record that was applied.
    """

    config: Any
    params: registry.Params
    forms: Forms = Forms()
    policy: str = "exact"
    about: About = field(default_factory=About)
    mesh: Any = None
    record: Any = None
    bound: Bound = BOUNDS["exact"]

    @property
    def tokenizer(self) -> Any:
        """rzoo.tokenizer.Tokenizer, or None."""
        return self.about.tokenizer

    @property
    def source(self) -> str:
        """What was loaded, from where and in which bits, in one line."""
        sizes = Counter[str]()
        for value in self.params.values():
            if leaves := jax.tree.leaves(value):
                sizes[held_as(value)] += sum(leaf.size for leaf in leaves)
        held = max(sizes, key=lambda kind: sizes[kind], default="no numbers")
        return f"{self.about.source} ({self.about.bits} in the file, {held} in memory)"

    @property
    def blueprint(self) -> step.Blueprint:
        """What compiled programs depend on, weights apart."""
        return step.Blueprint(self.config, self.forms)

    def with_params(self, params: registry.Params) -> "LM":
        """The same model over other parameters: per layer, stacked, or of the names that this handle holds.

        Raises RzooError where their names or shapes are not those of the model.
        """
        shapes = {path: weight.shape for path, (_, weight) in registry.abstract_weights(self.config).items()}
        stacked = {path: weight.shape for path, (_, weight) in stacked_weights(self.config).items()}
        own, given = _shapes(self.params), _shapes(params)
        wanted = next((allowed for allowed in (shapes, stacked, own) if allowed.keys() == given.keys()), None)
        if wanted is None:
            odd = sorted(given.keys() ^ own.keys())
            raise RzooError(f"params: {len(odd)} names differ from the model's: {', '.join(odd[:4])}", field="params")
        wrong = [f"{path} is {given[path]}, not {shape}" for path, shape in wanted.items() if given[path] != shape]
        if wrong:
            raise RzooError(f"params: {len(wrong)} differ from the model's: {'; '.join(wrong[:8])}", field="params")
        return replace(self, params=params)

    def module(self) -> nnx.Module:
        """The nnx.Module over the same arrays; what is done to it does not reach this handle."""
        return registry.assemble(self.config, self.forms, plain(unstack(self.config, self.params)))

    def __call__(self, ids: Any, capture: str | Sequence[str] | None = None) -> Any:
        """float32 logits [b, t, v] of token ids [b, t]; with `capture`, (logits, {name: arrays by layer}).

        capture names "hidden" (embedding, then after each block, the last after the final norm), "attention"
        (probabilities [b, h, t, s]), "entropy" of these in nats [b, h, t], "router" (the weight that each token gives
        to each expert, [b, t, e]), "load" (tokens of each expert, [e]), "chosen" (positions that sparse attention
        keeps, [b, t, n], -1 for none; nothing where all are kept), "touched" (keys that covering attention reads for
        each query, [b, k, t]), "channels" (of a gated feed-forward, [b, t, f]), "heads" (what grouped attention gives,
        [b, t, h, c]), "gathered" (the channels of a feed-forward that reads few, [b, t, n]).
        Outside of a trace the program of the ids' bucket is compiled once and kept; inside
        jax.grad, vmap or jit this is a plain function. Give jit the handle as an argument,
        `jax.jit(lambda lm, ids: lm(ids))(lm, ids)`: one that it closes over is compiled in as constants.
        Raises RzooError for ids that are no [b, t] of vocabulary ids.
        """
        traced = any(isinstance(a, jax.core.Tracer) for a in jax.tree.leaves((ids, self.params)))
        if not traced:
            ids = checked_ids(ids, self.config)
        elif jnp.ndim(ids) != 2:
            raise RzooError(f"ids must have shape [b, t]; got {list(jnp.shape(ids))}", field="ids", fix=ONE_ROW)
        if capture is not None:
            return self._captured(ids, (capture,) if isinstance(capture, str) else tuple(capture))
        return step.forward(self.blueprint, self.params, jnp.asarray(ids)) if traced else self._bucketed(ids)

    def _captured(self, ids: Any, capture: tuple[str, ...]) -> Any:
        unknown = [name for name in capture if name not in CAPTURES]
        if unknown:
            raise RzooError(
                f"capture ({', '.join(unknown)}) is unknown; known: {', '.join(CAPTURES)}",
                field="capture",
                value=capture,
            )
        observing = step.Blueprint(self.config, replace(self.forms, capture=capture))
        return programs_of(observing).forward_captured(observing, self.params, ids)

    def _bucketed(self, ids: np.ndarray) -> jax.Array:
        t = ids.shape[1]
        length = next((n for n in BUCKETS if n >= t), None)
        if depends_on_length(self.config.rope):
            length = t
        if length is not None:
            padded = np.pad(ids, ((0, 0), (0, length - t)))
            return programs_of(self.blueprint).forward(self.blueprint, self.params, padded)[:, :t]
        return self._in_chunks(ids)

    def _in_chunks(self, ids: np.ndarray) -> jax.Array:
        """Long ids in chunks against a cache: memory beside the logits grows with t, not with its square."""
        (b, t), chunk = ids.shape, BUCKETS[-1]
        padded = np.pad(ids, ((0, 0), (0, -t % chunk)))
        cache = self.blueprint.empty_cache(b, padded.shape[1])
        pieces = []
        for start in range(0, t, chunk):
            run = programs_of(self.blueprint).prefill_chunk_scored
            piece, cache = run(self.blueprint, self.params, padded[:, start : start + chunk], cache)
            pieces.append(piece)
        return jnp.concatenate(pieces, axis=1)[:, :t]

    def tree_flatten(self) -> tuple[tuple[registry.Params], tuple[Any, ...]]:
        """Parameters are the leaves; the rest is static."""
        return (self.params,), (self.config, self.forms, self.policy, self.about, self.mesh, self.record, self.bound)

    @classmethod
    def tree_unflatten(cls, static: tuple[Any, ...], leaves: tuple[registry.Params]) -> "LM":
        """The inverse of tree_flatten."""
        config, *rest = static
        return cls(config, leaves[0], *rest)

    def __repr__(self) -> str:
        count = registry.count_parameters(self.config)
        return f"LM({self.source}, {count:,} parameters, policy {self.policy})"


def _shapes(params: registry.Params) -> dict[str, Any]:
    """The logical shape of each parameter; of one that has none, the name of its type."""
    return {path: getattr(value, "shape", type(value).__name__) for path, value in params.items()}


def checked_ids(ids: Any, config: Any) -> np.ndarray:
    """ids as int32 [b, t]; RzooError for another shape or type, for unknown ids, or more than the context."""
    try:
        array = np.asarray(ids)
    except ValueError as error:
        raise RzooError(
            "ids must be rows of one length, [b, t]", field="ids", fix="generate takes a list of them"
        ) from error
    if array.ndim != 2 or not array.size or array.dtype.kind not in "iu":
        raise RzooError(
            f"ids must be integers of shape [b, t], both at least 1; got {array.dtype} {list(array.shape)}",
            field="ids",
            fix=ONE_ROW if array.ndim == 1 else None,
        )
    wrong = array[(array < 0) | (array >= config.vocab_size)]
    if wrong.size:
        raise RzooError(
            f"ids contain {wrong[0]}, outside of the vocabulary 0..{config.vocab_size - 1}", field="ids", value=wrong[0]
        )
    if array.shape[1] > config.context:
        raise RzooError(
            f"ids have {array.shape[1]} tokens, more than the context of {config.context}",
            field="ids",
            fix="give fewer tokens",
        )
    return array.astype(np.int32)
