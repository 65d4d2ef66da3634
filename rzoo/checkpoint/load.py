"""`rzoo.load`: a name or a path becomes a handle, tensor by tensor; what cannot fit is refused before it is read."""

import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from rzoo.checkpoint.names import mtp_copies
from rzoo.checkpoint.opened import Opened, open_checkpoint, quantizing
from rzoo.checkpoint.sources import Located, locate
from rzoo.checkpoint.training import chosen_paths
from rzoo.compile import native
from rzoo.compile.aot import use_compile_cache
from rzoo.compile.blocks import BlockQuantized, with_integers
from rzoo.compile.kernels import attend_native, default_forms, policy_forms
from rzoo.compile.precision import bound_of
from rzoo.compile.quantize import Rules, quantize, quantized_bytes, with_cache
from rzoo.compile.record import recorded
from rzoo.core import RzooError, dtype_named
from rzoo.formats import TEMPLATES, family_of, thinking_of
from rzoo.handle import LM, About
from rzoo.models.forms import Forms
from rzoo.models.nemotron import NemotronConfig
from rzoo.models.presets import Preset
from rzoo.models.registry import Params, abstract_weights, always_float32, count_parameters
from rzoo.models.weights import Numerics
from rzoo.sharding.choose import choose, implied_rules
from rzoo.sharding.distributed import join_processes
from rzoo.sharding.fit import copies, device_bytes, free_memory, in_gib, largest_weight_bytes, weight_bytes
from rzoo.sharding.mesh import Sizes, checked_sizes, parse_mesh
from rzoo.sharding.pipeline import Pipeline
from rzoo.sharding.place import forms_for, held as held_weights, spread
from rzoo.sharding.placement import Placement

ALIGNMENT = 64  # bytes; JAX reads an array in place only where it begins at a multiple of this
ROOM = 2**20  # bytes that aligning all weights of a model may take
KEPT = {"fp8": "FP8 blocks", "file": "blocks of a GGUF file"}  # what `dtype` names beside types of arrays


def load(
    source: str | os.PathLike[str],
    dtype: Any = None,
    policy: str = "exact",
    *,
    mesh: Sizes | str | None = None,
    rules: str | None = None,
    kv: str = "split",
    only: str | None = None,
    mtp: bool = False,
    weights: str | Rules | None = None,
    cache: str | None = None,
    kl: float | None = None,
    record: bool = True,
    quiet: bool = False,
) -> LM:
    """Loads a model: a preset's name, a folder in Hugging Face form, a .gguf file, a hub id, or a step of `rzoo.save`
    (of a folder of steps the latest).

    dtype: in which type weights are held; None is float32 where that fits into memory on a CPU, else the stored type.
    "fp8" keeps the FP8 blocks of a DeepSeek checkpoint as they are, and all other weights in the stored type; "file"
    keeps the blocks of a GGUF file, which products read as they are; policy "fast" then rounds what they are multiplied
    with to 8 bits.
    policy: "exact" computes in float32, "stored" in the held type with float32 sums, "fast" in whatever a tuner shows
    to stay within `kl` nats of exact in the mean (0.01 where none is given). mesh: sizes such as {"data": 2,
    "tensor": 4}, or "auto" for what `choose` takes of all devices; None is one device. Each device's part is read from
    the file by itself. rules: such as "tensor×data" (x will do); None are those with the mesh's axes. kv: as in
    sharding.place. only: a part of the weights, such as "layers.0-3,embed"; the handle can't compute with less than
    all. mtp: with the module of multi-token prediction, which drafts tokens; else its tensors are skipped.
    weights, cache: as rzoo.quantize takes them, such as "int4:g32"; each weight is quantized when it has been read, so
    that one at a time is held wide. A step is held as it was saved where dtype is None. record: apply the tuning record
    that rzoo.tune kept for exactly this model, policy and machine, and say so. One line on what will be loaded goes to
    stderr before weights are read, unless quiet. Raises RzooError for whatever is absent, malformed or too large.
    """
    join_processes()
    located = locate(source)
    opened = quantizing(open_checkpoint(located.path, mtp=mtp), weights, dtype)
    _check_preset(located, opened.config)
    wanted, chosen = _mesh_for(opened, mesh, rules)
    on_mesh = lambda forms: forms_for(opened.config, *wanted, forms, kv=kv) if wanted else forms  # noqa: E731
    held = choose_dtype(opened, dtype, located.name, on_mesh(default_forms(Numerics())).place)
    bound = bound_of(policy, kl)
    forms = policy_forms(policy, _dense_type(opened, held))
    forms = on_mesh(forms if cache is None else with_cache(opened.config, forms, cache))
    policy = policy if cache is None else "fast"
    use_compile_cache()
    if not quiet and jax.process_index() == 0:
        for line in (
            *opened.warnings,
            *chosen,
            _announcement(located, opened, held, forms.place),
            *_copies(opened, held, forms),
            *filter(None, [native.unavailable() if held == "file" else None]),
        ):
            print(f"rzoo: {line}", file=sys.stderr)
    as_saved = opened.read_all is not None and dtype is None
    params = read_weights(opened, None if as_saved else held, located.name, forms, chosen_paths(opened.config, only))
    if cache is None and any(isinstance(value, BlockQuantized) for value in params.values()):
        forms = replace(forms, attend_decode=attend_native)
        params = with_integers(params, policy == "fast")
    whole = getattr(forms.place, "mesh", None)
    lm = LM(opened.config, params, forms, policy, _about(located, opened), whole, bound=bound)
    if weights is not None and opened.read_all is not None:
        lm = quantize(lm, weights)
    return _tuned(lm, quiet) if record and only is None else lm


def _tuned(lm: LM, quiet: bool) -> LM:
    """With the tuning record that was made for it, where there is one."""
    tuned, line = recorded(lm)
    if line and not quiet and jax.process_index() == 0:
        print(f"rzoo: {line}", file=sys.stderr)
    return tuned


def _about(located: Located, opened: Opened) -> About:
    preset = located.preset or Preset(config=opened.config)
    template = opened.tokenizer.chat_template if opened.tokenizer else None
    template = template or TEMPLATES.get(preset.template or _family(opened) or "")
    return About(
        source=f"{located.name} from {located.path}",
        bits=opened.bits,
        tokenizer=opened.tokenizer,
        template=template,
        stops=opened.stops,
        thinking=preset.thinking or thinking_of(template),
        recommended={**preset.recommended, **opened.recommended},
    )


def _family(opened: Opened) -> str | None:
    """The format of a checkpoint that brings no template."""
    if opened.tokenizer is None:
        return None
    added = opened.tokenizer.added
    stops = {added[number] for number in opened.stops if number in added}
    return family_of(stops, added.values(), nemotron=isinstance(opened.config, NemotronConfig))


def _mesh_for(
    opened: Opened, mesh: Sizes | str | None, rules: str | None
) -> tuple[tuple[Sizes, str] | None, tuple[str, ...]]:
    """The mesh and rules to load on, None for one device, and a line on them where they were chosen."""
    if mesh is None and rules is None:
        return None, ()
    if mesh in (None, "auto"):
        count, free = jax.device_count(), free_memory()
        if free is not None and jax.default_backend() == "cpu":
            free //= jax.local_device_count()  # they share it
        choice = choose(opened.config, count, rules=rules, dtype=opened.dtype, free=free)
        return (choice.mesh, choice.rules), (f"chosen for {count} devices: {choice}",)
    sizes = parse_mesh(mesh) if isinstance(mesh, str) else checked_sizes(mesh or {})
    return (sizes, rules or implied_rules(sizes)), ()


def _check_preset(located: Located, config: Any) -> None:
    """A preset's name always means the same model: a file with other sizes is no such preset."""
    published = replace(config, mtp=False) if getattr(config, "mtp", False) else config
    if located.preset is not None and published != located.preset.config:
        raise RzooError(
            f"{located.name}: {located.path} holds another model than the preset means: {config}",
            field="source",
            fix="load it by its path",
        )


def choose_dtype(opened: Opened, asked: Any, name: str, place: Any = None) -> str:
    """The type to hold weights in; RzooError with the sizes that would fit where the wanted one does not.

    place: the form by that name, which says where they will lie.
    """
    if asked in KEPT and asked not in opened.kept:
        raise RzooError(
            f"dtype ({asked}): {name} has no weights in {KEPT[asked]}, most of it is {opened.bits}",
            field="dtype",
            value=asked,
            fix=f'load it with dtype="{opened.dtype}"',
        )
    if asked == "file" and isinstance(place, Placement | Pipeline):
        fix = f'load it on one device, or with dtype="{opened.dtype}"'
        raise RzooError("dtype (file): blocks of a GGUF file lie on one device", field="dtype", value=asked, fix=fix)
    on_cpu = jax.default_backend() == "cpu"
    named = [asked if asked in KEPT else dtype_named(asked).name] if asked is not None else []
    wanted = named or (["float32", opened.dtype] if on_cpu and opened.read_all is None else [opened.dtype])
    free = free_memory()
    sizes = {}
    for candidate in dict.fromkeys(wanted):
        sizes[candidate] = peak_bytes(opened, candidate, place)
        if free is None or sizes[candidate] <= free:
            return candidate
    needs = ", ".join(f"{in_gib(size)} in {candidate}" for candidate, size in sizes.items())
    half = weight_bytes(opened.config, "bfloat16")
    assert free is not None
    fix = f'load it with dtype="bfloat16" ({in_gib(half)})' if half < free else "use a machine with more memory"
    raise RzooError(
        f"{name} needs {needs}; {in_gib(free)} of memory are free",
        field="dtype",
        value=asked,
        fix=f"{fix}, or take a model of at most {int(free * 0.45 / 2e9)} billion parameters",
    )


def held_bytes(opened: Opened, held: str) -> int:
    """Bytes of all weights held in the type that choose_dtype gave, those of opened.schemes as these say."""
    if opened.schemes:
        return quantized_bytes(opened.config, opened.schemes, held)
    return opened.kept[held] if held in KEPT else weight_bytes(opened.config, held)


def _dense_type(opened: Opened, held: str) -> str:
    """The type of dense weights beside those that the file has in blocks; products of GGUF's are float32."""
    return {"fp8": opened.dtype, "file": "float32"}.get(held, held)


def needed_bytes(opened: Opened, held: str, place: Any) -> int:
    """What weights take of the memory that free_memory counts: of a device, or of the host whose devices share it."""
    if not isinstance(place, Placement | Pipeline):
        return held_bytes(opened, held)
    on_one = device_bytes(opened.config, _dense_type(opened, held), place)
    if opened.schemes:  # in about the proportion of the whole
        on_one = on_one * held_bytes(opened, held) // weight_bytes(opened.config, held)
    local = [d for d in place.mesh.devices.flat if d.process_index == jax.process_index()]
    return on_one * len(local) if jax.default_backend() == "cpu" else on_one


def peak_bytes(opened: Opened, held: str, place: Any) -> int:
    """The most that loading takes of that memory: all weights, and one more on its way."""
    one = largest_weight_bytes(opened.config, _dense_type(opened, held))
    return needed_bytes(opened, held, place) + one


def _announcement(located: Located, opened: Opened, held: str, place: Any) -> str:
    count = count_parameters(opened.config)
    size, peak = in_gib(held_bytes(opened, held)), in_gib(peak_bytes(opened, held, place))
    kinds = Counter(map(str, opened.schemes.values())).most_common()
    held = ", ".join([*(name for name, _ in kinds), f"the rest {held}"]) if kinds else held
    stored = f"{opened.bits} in the file, {held} in memory ({size}, at most {peak} while loading)"
    return f"loading {located.name}: {count:,} parameters, {stored}"


def _copies(opened: Opened, held: str, forms: Forms) -> Iterator[str]:
    """A line on weights that more than one device holds."""
    if not isinstance(forms.place, Placement | Pipeline):
        return
    found = copies(opened.config, _dense_type(opened, held), forms.place)
    if found:
        largest = ", ".join(f"{name} {in_gib(size)}" for name, size in list(found.items())[:3])
        yield f"copies of the same weights on several devices: {in_gib(sum(found.values()))} (most: {largest})"


def read_weights(opened: Opened, dtype: str | None, name: str, forms: Forms, paths: list[str]) -> Params:
    """The weights `paths`, one tensor at a time: beside those placed, memory holds at most one more."""
    if opened.read_all is not None:
        return opened.read_all(paths, dtype, forms)
    assert dtype is not None
    _check_copies(opened)
    params: Params = {}
    home = _Home(0 if isinstance(forms.place, Placement | Pipeline) else held_bytes(opened, dtype) + ROOM)
    wanted = [entry for entry in held_weights(opened.config, forms) if entry[1] in paths]
    for path, weight, axes in _with_progress(wanted, name, held_bytes(opened, dtype)):
        own = "float32" if weight in always_float32(opened.config) else dtype
        if isinstance(forms.place, Placement | Pipeline):
            params[path] = _read_onto(forms.place.of(path), opened, weight, axes, own)
        else:
            params[path] = home.take(opened.read(weight, own))
    return params


class _Home:
    """Where weights of a single device live. On a CPU that is one block of memory, in which JAX reads them in place.

    numpy asks the system for pages of 2 MiB in allocations of many MiB, not in those of a layer's matrices: SmolLM2 at
    batch 1 takes 11.7 ms a token at best and 13.5 in the median so, 13.0 and 14.5 with a block for each weight.
    """

    def __init__(self, nbytes: int):
        on_cpu = jax.default_backend() == "cpu"
        self.block, self.used = np.empty(nbytes if on_cpu else 0, np.uint8), 0

    def take(self, weight: Any) -> Any:
        """`weight` (an array, or a storage object) on the device."""
        return jax.tree.map(self._placed, weight)

    def _placed(self, array: Any) -> Any:
        start = self.used + -(self.block.ctypes.data + self.used) % ALIGNMENT
        if not isinstance(array, np.ndarray) or start + array.nbytes > self.block.size:
            return jax.device_put(array)
        place = self.block[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        place[...] = array
        self.used = start + array.nbytes
        return jax.device_put(place, may_alias=True)


def _read_onto(placement: Placement, opened: Opened, path: str, axes: tuple[str, ...], dtype: Any) -> Any:
    """One weight on a mesh: each part read for itself where the file allows it, once for all devices that hold it."""
    shape = abstract_weights(opened.config)[path][1].shape
    if opened.read_part is None:
        return spread(placement, path, axes, opened.read(path, dtype))
    read_part, parts = opened.read_part, {}

    def part(index: Any) -> np.ndarray:
        key = str(index)
        if key not in parts:
            parts[key] = read_part(path, index, dtype)
        return parts[key]

    abstract = jax.ShapeDtypeStruct(shape, dtype)
    return jax.make_array_from_callback(shape, placement.weight(abstract, axes), part)


def _check_copies(opened: Opened) -> None:
    """A file may repeat a weight under a second name: equal is dropped, different contradicts the config."""
    for name, path in opened.matched.copies.items():
        (own,) = opened.matched.tensors[path].names
        if np.array_equal(opened.read_raw(name), opened.read_raw(own)):
            continue
        if name in mtp_copies(opened.config):
            words = f"{name} differs from {own}, but multi-token prediction shares it with the model"
            raise RzooError(words, field=name, fix="load it without mtp")
        raise RzooError(
            f"{name} differs from {own}, but the config says tie_word_embeddings true",
            field="tie_word_embeddings",
            value=True,
            fix="set tie_word_embeddings to false to use both, or remove the tensor from the file",
        )


def _with_progress(paths: list[Any], name: str, size: int):
    """A bar on stderr where a person is watching and the load takes long enough to see."""
    if size < 2**30 or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        return paths
    from rich.console import Console
    from rich.progress import track

    return track(paths, f"loading {name}", console=Console(stderr=True), transient=True)
