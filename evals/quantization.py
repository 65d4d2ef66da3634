"""What quantized weights cost: bytes, and the next-token distributions on a held-out text against those before."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rzoo.compile.gates import divergence
from rzoo.compile.quantize import Rules, quantize
from rzoo.compile.shapes import device_bytes
from rzoo.core import RzooError, new_figure, save_figure
from rzoo.engine.prompts import needs_text
from rzoo.evals.prose import HELD_OUT
from rzoo.handle import LM, checked_ids
from rzoo.models.stacking import unstack
from rzoo.models.weights import Quantized, held_as

TOKENS = 1024  # of the text, for the whole model
LAYER_TOKENS = 256  # of its beginning, for each layer by itself


@dataclass(frozen=True)
class Loss:
    """Against the model as it was: KL divergence of next tokens in nats, its mean and 99th percentile over all
    positions, and the share of positions whose likeliest token is the same.
    """

    kl_mean: float
    kl_99th: float
    top1: float


@dataclass(frozen=True)
class LayerLoss:
    """A part of the model ("layers.7", "embed") quantized by itself: its loss, its bytes before and after."""

    name: str
    loss: Loss
    before: int
    after: int


@dataclass(frozen=True)
class QuantizationReport:
    """weights: what was asked for. before, after: bytes of all weights. coverage: share of the parameters that are in
    codes. skipped: matrices and vectors that are not. layers: worst first, none where they were not asked for.
    """

    model: str
    weights: str
    before: int
    after: int
    coverage: float
    skipped: tuple[str, ...]
    tokens: int
    loss: Loss
    layers: tuple[LayerLoss, ...]

    def to_json(self) -> dict[str, Any]:
        """The same in JSON's types."""
        return asdict(self)


def held_out_ids(lm: LM, text: str | None = None) -> np.ndarray:
    """The first tokens, [1, t], of a text, None for the one that comes with rzoo. Raises RzooError for one that is too
    short, and for a model without a tokenizer.
    """
    needs_text(lm)
    ids = lm.tokenizer.encode(HELD_OUT if text is None else text, add_bos=lm.tokenizer.add_bos_token)
    if len(ids) < 2:
        fix = "some hundred words tell more than one"
        raise RzooError(f"the text has {len(ids)} tokens, it takes 2", field="text", value=text, fix=fix)
    return np.asarray([ids[: min(TOKENS, lm.config.context)]], np.int32)


def report(
    lm: LM,
    weights: str | Rules,
    ids: Any,
    *,
    layers: bool = True,
    track: Callable[[Sequence[str]], Iterable[str]] = iter,
) -> tuple[LM, QuantizationReport]:
    """Quantizes a model as rzoo.quantize does, and tells what that cost on `ids` [b, t].

    layers: each layer by itself, too, with its weights rounded and held wide, so that one program serves all. track:
    is given their names and gives them back one by one, for a bar of progress. Raises RzooError as rzoo.quantize does.
    """
    ids = checked_ids(ids, lm.config)
    quantized = quantize(lm, weights)
    before, after = (unstack(lm.config, one.params) for one in (lm, quantized))
    whole = loss_between(lm(ids), quantized(ids))
    part = ids[:, :LAYER_TOKENS]
    found = _by_layer(lm, before, after, part, track) if layers else []
    coded = {path for path, value in after.items() if isinstance(value, Quantized)}
    sizes = {path: int(np.prod(value.shape)) for path, value in after.items()}
    return quantized, QuantizationReport(
        model=lm.about.source.split(" from ")[0],
        weights=weights if isinstance(weights, str) else ", ".join(f"{k}: {v}" for k, v in weights.items()),
        before=device_bytes(before),
        after=device_bytes(after),
        coverage=sum(sizes[path] for path in coded) / sum(sizes.values()),
        skipped=tuple(f"{path} ({held_as(after[path])})" for path in after if path not in coded),
        tokens=ids.size,
        loss=whole,
        layers=tuple(sorted(found, key=lambda layer: -layer.loss.kl_mean)),
    )


def _by_layer(lm: LM, before: Any, after: Any, ids: np.ndarray, track: Callable[..., Any]) -> list[LayerLoss]:
    groups: dict[str, list[str]] = {}
    for path, value in after.items():
        if isinstance(value, Quantized):
            name = ".".join(path.split(".")[:2]) if path.startswith("layers.") else path.split(".")[0]
            groups.setdefault(name, []).append(path)
    reference, found = lm.with_params(before)(ids), []
    for name in track(list(groups)):
        held = {path: after[path] for path in groups[name]}
        rounded = {path: value.dequantize(before[path].dtype) for path, value in held.items()}
        loss = loss_between(reference, lm.with_params({**before, **rounded})(ids))
        old = device_bytes({path: before[path] for path in held})
        found.append(LayerLoss(name, loss, old, device_bytes(held)))
    return found


def loss_between(reference: Float[Array, "b t v"], logits: Float[Array, "b t v"]) -> Loss:
    """The loss of logits against those of a reference."""
    return Loss(*(float(number) for number in _loss(reference, logits)))


@jax.jit
def _loss(reference: Float[Array, "b t v"], logits: Float[Array, "b t v"]) -> tuple[Array, Array, Array]:
    kl = jnp.maximum(divergence(reference, logits), 0)  # rounding may leave a little below 0
    same = reference.argmax(axis=-1) == logits.argmax(axis=-1)
    return kl.mean(), jnp.percentile(kl, 99), same.mean()


def table(found: QuantizationReport, most: int = 8) -> str:
    """The report in lines, the `most` layers that lose most."""
    loss = found.loss
    lines = [
        f"{found.model} as {found.weights}: {found.before:,} -> {found.after:,} bytes"
        f" ({found.after / found.before:.1%}), {found.coverage:.1%} of the parameters in codes",
        f"against the model before, {found.tokens} tokens: KL {loss.kl_mean:.2g} nats in the mean,"
        f" {loss.kl_99th:.2g} at the 99th percentile; the likeliest token is the same for {loss.top1:.1%}",
    ]
    if found.layers:
        lines += ["", "one part at a time   KL mean   KL 99th   same token        bytes"]
    for layer in found.layers[:most]:
        own = layer.loss
        lines.append(f"{layer.name:18} {own.kl_mean:9.2g} {own.kl_99th:9.2g} {own.top1:12.1%} {layer.after:12,}")
    if len(found.layers) > most:
        lines.append(f"{len(found.layers) - most} more lose less: --json shows all")
    return "\n".join(lines)


def draw(found: QuantizationReport, path: str) -> None:
    """Draws each part's mean KL divergence in the order of the model. Raises RzooError without matplotlib."""
    picture = new_figure(figsize=(8, 3.5), layout="constrained")
    axes = picture.subplots()
    in_order = sorted(found.layers, key=lambda layer: [int(n) if n.isdigit() else -1 for n in layer.name.split(".")])
    axes.bar([layer.name.removeprefix("layers.") for layer in in_order], [layer.loss.kl_mean for layer in in_order])
    axes.set(ylabel="KL divergence, nats", title=f"{found.weights}, one part at a time")
    axes.tick_params(axis="x", rotation=90)
    save_figure(picture, path)
