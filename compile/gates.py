"""Two gates that a candidate passes before it may win.

(a) each form against its reference on the same bits, on random inputs and on activations of the model itself;
(b) the assembled program against float32, within the bound of the policy.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rzoo.compile.aot import Options
from rzoo.compile.kernels import default_forms
from rzoo.compile.precision import Bound
from rzoo.compile.storage import Joined, Laid, can_be_laid, plain
from rzoo.models import step
from rzoo.models.attention import attend
from rzoo.models.latent import attend_naive
from rzoo.models.moe import experts_reference
from rzoo.models.registry import Params
from rzoo.models.stacking import unstack
from rzoo.models.weights import FrozenWeight, Numerics, Storage, contract_together, dense_product

FLOAT32_ERROR, OTHER_ERROR = 5e-6, 1e-3  # largest difference over the largest value of the reference
PADDED = 512  # keys that gate (a) pads to, so that forms in blocks meet several
ROUNDED = 10.0  # logits up to here may differ by the bound itself, larger ones by as much more: SmolLM2's reach 30
STEPS = 4  # of the tokens of gate (b), those that run one by one


# Field of Forms -> its reference; the fields that begin with its name are forms of the same function.
REFERENCES: Mapping[str, Callable[..., Array]] = {
    "attend": attend,
    "latent_attend": attend_naive,
    "experts": experts_reference,
}

# What gate (b) reads where the model has a tokenizer: prose, figures, code and other scripts.
TEXT = """The baker opens at six, sells 48 loaves before noon and closes when the shelves are empty. On Tuesday it
rained, so only 31 were sold; she gave 9 to the school and kept the rest for soup. How many loaves went into
the soup? First count what was baked: 48. Subtract those sold and those given away: 48 - 31 - 9 = 8. The
answer is 8.

def mean(values):
    total = 0.0
    for value in values:
        total += value
    return total / max(len(values), 1)

A matrix with m rows and n columns times a vector takes m * n products and reads every entry once, so a small machine
waits for its memory and not for its arithmetic. Die Katze schläft auf dem warmen Dach. Le train part à sept heures.
猫は屋根の上で眠っている。 The river is wide, slow and brown in spring; in August one can walk across without wet knees.
"""


@dataclass(frozen=True, eq=False)
class Probe:
    """In the place of a dense weight during an eager run: keeps what it is multiplied with."""

    value: Array
    path: str
    seen: dict[str, tuple[str, Array]]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    def product(self, spec: str, x: Array, numerics: Numerics) -> Array:
        """The reference product."""
        self.seen[self.path] = (spec, x)
        return dense_product(spec, x, self.value, numerics)

    def dense(self) -> Array:
        """The weight."""
        return self.value

    def rows(self, ids: Array, numerics: Numerics) -> Array:
        """Entries of the first axis."""
        return self.value[ids].astype(numerics.compute)

    def entry(self, i: Array | int) -> Any:
        """A stack is never probed."""
        raise NotImplementedError("a stack of matrices is never probed")


@dataclass(frozen=True)
class Seen:
    """Activations of a model: by weight (einsum, input), and by field of Forms the arguments of each call."""

    inputs: dict[str, tuple[str, Array]]
    calls: dict[str, list[tuple[Any, ...]]]


def activations(lm: Any, ids: Any) -> Seen:
    """What meets each matrix and each attention of an unstacked run over ids [b, t]."""
    seen: dict[str, tuple[str, Array]] = {}
    calls: dict[str, list[tuple[Any, ...]]] = {name: [] for name in REFERENCES}

    def keeping(name: str) -> Any:
        def keep(*arguments: Any) -> Array:
            calls[name].append(arguments)
            return REFERENCES[name](*arguments)

        return keep

    params = {
        path: Probe(value, path, seen)
        if not isinstance(value, Storage) and can_be_laid(lm.config, path, "rows")
        else value
        for path, value in plain(unstack(lm.config, lm.params)).items()
    }
    kept: dict[str, Any] = {name: keeping(name) for name in REFERENCES}
    forms = replace(lm.forms, stacked=False, **kept)
    step.forward(step.Blueprint(lm.config, forms), params, jnp.asarray(ids))
    return Seen(seen, calls)


def sample_ids(lm: Any) -> np.ndarray:
    """Ids [2, 160] that gate (b) compares on: TEXT, or random ones for a model without a tokenizer."""
    shape, vocabulary = (2, 160), lm.config.vocab_size
    if lm.tokenizer is None:
        return np.random.default_rng(0).integers(0, vocabulary, shape).astype(np.int32)
    ids = [i for i in lm.tokenizer.encode(TEXT) if i < vocabulary]
    return np.resize(np.asarray(ids or [0], np.int32), shape)


def allowed_error(numerics: Numerics) -> float:
    """Gate (a)'s bound for forms in these types."""
    return FLOAT32_ERROR if numerics.compute == "float32" else OTHER_ERROR


def weights_error(lm: Any, params: Params, seen: Seen) -> tuple[float, str]:
    """The largest error of the products of `params`, against those of the weights of `lm`, and whose it is."""
    dense = plain(unstack(lm.config, lm.params))
    laid, numerics, worst = unstack(lm.config, params), lm.forms.numerics, (0.0, "")
    for path, value in laid.items():
        if path not in seen.inputs or not isinstance(value, Joined | Laid):
            continue
        names = value.names if isinstance(value, Joined) else (path.rpartition(".")[2],)
        group = [f"{path.rpartition('.')[0]}.{name}".removeprefix(".") for name in names]
        spec, x = seen.inputs[path]
        noise = jax.random.normal(jax.random.key(len(path)), x.shape, x.dtype)
        for given in (x, noise, x[:1, :1]):
            found = _products(spec, given, tuple(laid[p] for p in group), numerics)
            expected = [_reference(spec, given, dense[p], numerics) for p in group]
            worst = max(worst, *((error(a, b), p) for a, b, p in zip(found, expected, group, strict=True)))
    return worst


@partial(jax.jit, static_argnums=(0, 3))
def _products(spec: str, x: Array, values: Sequence[Any], numerics: Numerics) -> tuple[Array, ...]:
    return contract_together(spec, x, [FrozenWeight(v, eager_sharding=False) for v in values], numerics)


@partial(jax.jit, static_argnums=(0, 3))
def _reference(spec: str, x: Array, weight: Array, numerics: Numerics) -> Array:
    return dense_product(spec, x, weight, numerics).astype(numerics.compute)


def form_error(field: str, form: Any, seen: Seen) -> float:
    """The largest error of the form in a field of Forms, on what the model gave its reference and on random numbers."""
    name = next((name for name in REFERENCES if field.startswith(name)), None)
    if name is None:  # no function of arrays: stacking
        return 0.0
    make = _expert_arguments if name == "experts" else partial(_attention_arguments, decode=field.endswith("decode"))
    worst, calls = 0.0, seen.calls[name]
    for arguments in (calls[0], calls[-1]):
        for given in make(arguments):
            worst = max(worst, error(form(*given), REFERENCES[name](*given)))
    return worst


def _attention_arguments(arguments: tuple[Any, ...], *, decode: bool) -> Iterator[tuple[Any, ...]]:
    """The queries of a call, or of decode the last one, on keys (and values, or latents) padded to several blocks."""
    q, *cached = (a for a in arguments if isinstance(a, jax.Array) and a.ndim == 4)
    room = ((0, 0), (0, 0), (0, -cached[0].shape[2] % PADDED), (0, 0))
    t = 1 if decode else q.shape[1]
    own = (q[:, -t:], *(jnp.pad(a, room) for a in cached))
    noise = tuple(jax.random.normal(jax.random.key(i), a.shape, a.dtype) for i, a in enumerate(own))
    *stored, _, scale, numerics = arguments[len(own) :]
    for given, end in ((own, q.shape[1]), (noise, own[1].shape[2])):
        yield *given, *stored, jnp.full(q.shape[0], end - t, jnp.int32), scale, numerics


def _expert_arguments(arguments: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """All tokens of a call, its first alone, and random ones."""
    x, indices, weights, *rest = arguments
    yield arguments
    yield x[:1], indices[:1], weights[:1], *rest
    yield jax.random.normal(jax.random.key(0), x.shape, x.dtype), indices, weights, *rest


def error(found: Array, expected: Array) -> float:
    """Largest difference over the largest value of `expected`; infinite where `found` is not finite."""
    a, b = np.asarray(found, np.float32), np.asarray(expected, np.float32)
    return float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30)) if np.isfinite(a).all() else float("inf")


def logits_of(lm: Any, ids: Any, options: Options = ()) -> np.ndarray:
    """float32 logits [b, t, v] of ids as generation computes them: a chunk, then STEPS tokens one by one."""
    score = partial(jax.jit, static_argnums=0, compiler_options=dict(options))(step.prefill_chunk_scored)
    t = ids.shape[1] - STEPS
    logits, cache = score(lm.blueprint, lm.params, ids[:, :t], lm.blueprint.empty_cache(ids.shape[0], 256))
    pieces = [logits]
    for i in range(t, ids.shape[1]):
        logits, cache = score(lm.blueprint, lm.params, ids[:, i : i + 1], cache)
        pieces.append(logits)
    return np.concatenate([np.asarray(piece) for piece in pieces], axis=1)


def float32_logits(lm: Any, ids: Any) -> np.ndarray:
    """What gate (b) compares with: the same bits in float32, on the default forms."""
    exact = replace(lm, params=plain(unstack(lm.config, lm.params)), forms=default_forms(Numerics()), record=None)
    return logits_of(exact, ids)


def divergence(of: Float[Array, "*batch v"], to: Float[Array, "*batch v"]) -> Float[Array, "*batch"]:
    """KL(of ‖ to) between the distributions of two logits, in nats."""
    wanted, found = jax.nn.log_softmax(of), jax.nn.log_softmax(to)
    return (jnp.exp(wanted) * (wanted - found)).sum(axis=-1)


def distances(found: np.ndarray, expected: np.ndarray) -> dict[str, float]:
    """How far logits [b, t, v] are from those expected, by the names of Bound. The distance of logits is the largest
    difference; beyond logits of ROUNDED it is that over their size in ROUNDED, since float32 rounds them by as much.
    """
    if not np.isfinite(found).all():
        return dict.fromkeys(("logit", "kl_mean", "kl_99th"), float("inf"))
    kl = np.asarray(divergence(jnp.asarray(expected), jnp.asarray(found)))
    return {
        "logit": float(np.abs(found - expected).max() / max(1.0, np.abs(expected).max() / ROUNDED)),
        "kl_mean": float(kl.mean()),
        "kl_99th": float(np.percentile(kl, 99)),
    }


def beyond(bound: Bound, found: Mapping[str, float]) -> str:
    """In words, what of `found` is beyond the bound; empty where nothing is."""
    limits = {name: limit for name, limit in vars(bound).items() if limit is not None}
    over = [f"{name} {found[name]:.2g} > {limit:g}" for name, limit in limits.items() if not found[name] <= limit]
    return ", ".join(over)
