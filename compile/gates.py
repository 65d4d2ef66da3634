"""Two gates that a candidate passes before it may win.

(a) each form against its reference on the same bits, on random inputs and on activations of the model itself;
(b) the assembled program against float32, within the bound of the policy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from rzoo.compile.aot import Options
from rzoo.compile.kernels import default_forms
from rzoo.compile.precision import Bound
from rzoo.compile.storage import Joined, Laid, can_be_laid, plain
from rzoo.models import step
from rzoo.models.attention import attend
from rzoo.models.registry import Params
from rzoo.models.stacking import unstack
from rzoo.models.weights import FrozenWeight, Numerics, Storage, contract_together, dense_product

FLOAT32_ERROR, OTHER_ERROR = 5e-6, 1e-3  # largest difference over the largest value of the reference
PADDED = 512  # keys that gate (a) pads to, so that forms in blocks meet several
ROUNDED = 10.0  # logits up to here may differ by the bound itself, larger ones by as much more: SmolLM2's reach 30
STEPS = 4  # of the tokens of gate (b), those that run one by one


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
    """Activations of a model: by weight (einsum, input), and queries, keys and values of each attention."""

    inputs: dict[str, tuple[str, Array]]
    attention: list[tuple[Array, Array, Array]]


def activations(lm: Any, ids: Any) -> Seen:
    """What meets each matrix and each attention of an unstacked run over ids [b, t]."""
    seen, heads = {}, []  # type: ignore[var-annotated]

    def keep(q, keys, values, *rest):
        heads.append((q, keys, values))
        return attend(q, keys, values, *rest)

    params = {
        path: Probe(value, path, seen)
        if not isinstance(value, Storage) and can_be_laid(lm.config, path, "rows")
        else value
        for path, value in plain(unstack(lm.config, lm.params)).items()
    }
    forms = replace(lm.forms, attend=keep, stacked=False)
    step.forward(step.Blueprint(lm.config, forms), params, jnp.asarray(ids))
    return Seen(seen, heads)


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


def attention_error(form: Any, seen: Seen, numerics: Numerics, *, decode: bool) -> float:
    """The largest error of a form of attention on the model's own and on random queries, keys and values."""
    worst = 0.0
    for q, keys, values in (seen.attention[0], seen.attention[-1]):
        room = -keys.shape[2] % PADDED
        keys, values = (jnp.pad(a, ((0, 0), (0, 0), (0, room), (0, 0))) for a in (keys, values))
        t = 1 if decode else q.shape[1]
        own = (q[:, -t:], keys, values)
        noise = tuple(jax.random.normal(jax.random.key(i), a.shape, a.dtype) for i, a in enumerate(own))
        for given, end in ((own, q.shape[1]), (noise, keys.shape[2])):
            starts = jnp.full(q.shape[0], end - t, jnp.int32)
            run = lambda f, g=given, s=starts: f(*g, s, q.shape[-1] ** -0.5, numerics)  # noqa: B023, E731
            worst = max(worst, error(jax.jit(run, static_argnums=0)(form), run(attend)))
    return worst


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


def distances(found: np.ndarray, expected: np.ndarray) -> dict[str, float]:
    """How far logits [b, t, v] are from those expected, by the names of Bound. The distance of logits is the largest
    difference; beyond logits of ROUNDED it is that over their size in ROUNDED, since float32 rounds them by as much.
    """
    if not np.isfinite(found).all():
        return dict.fromkeys(("logit", "kl_mean", "kl_99th"), float("inf"))
    p, q = (jax.nn.log_softmax(a, axis=-1) for a in (expected, found))
    kl = np.asarray((jnp.exp(p) * (p - q)).sum(axis=-1))
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
