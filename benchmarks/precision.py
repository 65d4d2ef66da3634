"""What 16-bit policies cost and save: ResNet-152 in plain Flax, and SmolLM2 (python benchmarks/precision.py [gpu]).

Random weights and generated images for ResNet-152 (there is no trained one here), the held-out text for SmolLM2. Of
each policy: bytes of parameters and of temporary memory of the compiled program, largest difference and top-1
agreement with float32. With an H100 as target ("gpu", in an environment with the extra gpu-aot) bytes are those of the
program compiled for one; XLA's CPU backend widens 16-bit numbers, and its temporary memory tells nothing of a GPU's.
"""

import sys
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

import rzoo
from rzoo.compile.adaptive import AdaptiveModel, MixedPrecisionScheduler, as_function, held_in, in_policy
from rzoo.compile.targets import target
from rzoo.core import RzooError
from rzoo.evals.quantization import held_out_ids

STAGES = ((64, 3), (128, 8), (256, 36), (512, 3))  # width and blocks of ResNet-152 (He et al. 2015, table 1)


class ConvNorm(nnx.Module):
    """A convolution and its batch norm, which uses running averages."""

    def __init__(self, inputs: int, outputs: int, size: int, stride: int, rngs: nnx.Rngs):
        self.conv = nnx.Conv(inputs, outputs, (size, size), (stride, stride), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(outputs, use_running_average=True, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(self.conv(x))


class Bottleneck(nnx.Module):
    """1x1, 3x3, 1x1 with a shortcut; four times as wide at its end."""

    def __init__(self, inputs: int, width: int, stride: int, rngs: nnx.Rngs):
        self.reduce = ConvNorm(inputs, width, 1, 1, rngs)
        self.middle = ConvNorm(width, width, 3, stride, rngs)
        self.expand = ConvNorm(width, 4 * width, 1, 1, rngs)
        changed = stride > 1 or inputs != 4 * width
        self.shortcut = ConvNorm(inputs, 4 * width, 1, stride, rngs) if changed else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.expand(jax.nn.relu(self.middle(jax.nn.relu(self.reduce(x)))))
        return jax.nn.relu(
            y / 4 + (x if self.shortcut is None else self.shortcut(x))
        )  # untrained norms would let it grow


class ResNet152(nnx.Module):
    """Images [b, height, width, 3] -> logits [b, 1000]."""

    def __init__(self, rngs: nnx.Rngs, stages: Sequence[tuple[int, int]] = STAGES):
        self.stem = ConvNorm(3, 64, 7, 2, rngs)
        blocks, inputs = [], 64
        for stage, (width, count) in enumerate(stages):
            for i in range(count):
                blocks.append(Bottleneck(inputs, width, 2 if i == 0 and stage else 1, rngs))
                inputs = 4 * width
        self.blocks = nnx.List(blocks)
        self.head = nnx.Linear(inputs, 1000, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = nnx.max_pool(jax.nn.relu(self.stem(images)), (3, 3), (2, 2), "SAME")
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(axis=(1, 2)))


def images(count: int, size: int) -> jax.Array:
    """Generated ones: waves of random direction, length and colour, and some noise."""
    keys = jax.random.split(jax.random.key(0), 3)
    at = jnp.linspace(-1, 1, size)
    direction = jax.random.normal(keys[0], (count, 2, 3)) * 8
    waves = jnp.sin(at[:, None, None] * direction[:, None, None, 0] + at[None, :, None] * direction[:, None, None, 1])
    return waves + 0.1 * jax.random.normal(keys[1], (count, size, size, 3))


def rows(name: str, model: object, x: jax.Array, on: object) -> None:
    """Prints a line for each policy: float32, one 16-bit type for all, and the calibrated map."""
    scheduler = MixedPrecisionScheduler()
    ranges = scheduler.calibrate(model, x)
    mixed = dict(scheduler.precision_map)
    kinds = [kind for kind in mixed.values()]
    policies = {kind: dict.fromkeys(mixed, kind) for kind in ("fp32", "bf16", "fp16")} | {"calibrated": mixed}
    largest = max(ranges, key=lambda part: ranges[part].largest)
    print(f"{name}: largest magnitude {ranges[largest].largest:.4g} in {largest};", end=" ")
    print(f"calibrated: {kinds.count('fp16')} modules in fp16, {kinds.count('bf16')} in bf16")
    print(f"{'policy':12} {'parameters':>14} {'temporary':>14} {'difference':>11} {'top-1':>7} {'moved':>6}")
    function, params = as_function(model)
    exact = None
    for label, policy in policies.items():
        scheduler.precision_map = dict(policy)
        scheduler.overflows.clear()
        out = AdaptiveModel(model, scheduler)(x)
        exact = out if exact is None else exact
        held, temp = compiled_bytes(function, held_in(params, policy), policy, x, on)
        same = float((out.argmax(-1) == exact.argmax(-1)).mean())
        away = float(jnp.abs(out - exact).max() / jnp.abs(exact).max())
        moved = sum(scheduler.overflows.values())
        print(f"{label:12} {held:14,} {temp:14,} {away:11.2g} {same:7.1%} {moved:6}", flush=True)


def compiled_bytes(function: object, params: object, policy: dict, x: jax.Array, on: object) -> tuple[int, int]:
    """Bytes of the parameters, and of what the program of a policy needs beside its arguments, on a device."""
    shaped = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=on), (params, x))
    run = lambda params, x: in_policy(function, policy, params, x)[0]  # noqa: E731
    program = jax.jit(run).lower(*shaped).compile()
    return sum(a.nbytes for a in jax.tree.leaves(params)), program.memory_analysis().temp_size_in_bytes


def device(gpu: bool) -> object:
    """Where programs are compiled for: an H100 that need not be there, or this machine."""
    if not gpu:
        return None
    from jax.experimental import topologies

    found = topologies.get_topology_desc(platform="cuda", target_config=target("h100").description, topology="1x1x1")
    return jax.sharding.SingleDeviceSharding(found.devices[0])


def main() -> None:
    """Both models."""
    on = device("gpu" in sys.argv[1:])
    rows("ResNet-152, 8 images of 64x64", ResNet152(nnx.Rngs(0)), images(8, 64), on)
    try:
        lm = rzoo.load("smollm2", quiet=True, record=False)
    except RzooError as error:
        print(f"SmolLM2 is not here: {error.message}")
        return
    rows("SmolLM2, 256 tokens", lm, jnp.asarray(held_out_ids(lm)[:, :256]), on)


if __name__ == "__main__":
    main()
