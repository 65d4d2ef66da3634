"""Steps of training: `rzoo.save` and what `rzoo.load` does with a step.

A folder of steps holds one folder a step, named by its number: params/ (Orbax, our paths as keys, logical shapes) with
config.json, generation_config.json, tokenizer.json and chat_template.jinja beside it, perhaps extra/ (what belongs to
training alone, such as an optimizer's arrays), and files.json, the size and CRC-32 of every file under params/,
extra/. A step appears under its number when it is complete; until then it is a hidden folder that nothing reads and
the next save removes.
"""

import json
import math
import os
import re
import secrets
import shutil
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
from jax import ShapeDtypeStruct

from rzoo.checkpoint.huggingface import CONFIG, GENERATION_CONFIG
from rzoo.checkpoint.safetensors_file import few, read_json, writing
from rzoo.checkpoint.save import about_files
from rzoo.compile.blocks import KINDS, BlockQuantized
from rzoo.core import RzooError
from rzoo.handle import LM
from rzoo.models.registry import Params, abstract_weights, config_from_hf
from rzoo.models.stacking import unstack
from rzoo.models.weights import Quantized
from rzoo.sharding.pipeline import Pipeline
from rzoo.sharding.place import held
from rzoo.sharding.placement import Placement

STORAGES = (Quantized, BlockQuantized)
PARAMS, EXTRA, FILES, STORAGE = "params", "extra", "files.json", "storage.json"
PARTIAL = re.compile(r"\.(\d+)\.partial-[0-9a-f]{8}")
READ_AT_ONCE = 1  # GB of a step in memory beside what is placed
_running: dict[Path, "Saving"] = {}


@dataclass(frozen=True)
class Saving:
    """A save under way. path: the step's folder, there when `wait` has returned."""

    path: Path
    thread: threading.Thread
    errors: list[BaseException]

    def wait(self) -> Path:
        """Returns the step's folder when it is complete; raises RzooError where it could not be written."""
        self.thread.join()
        _running.pop(self.path, None)
        if self.errors:
            raise self.errors[0]
        return self.path


def save(
    lm: LM,
    folder: str | Path,
    step: int | None = None,
    *,
    keep: int | None = None,
    wait: bool = True,
    extra: Mapping[str, jax.Array] | None = None,
) -> Saving:
    """Saves a model as a step of `folder`, which may hold earlier ones; `step` None is the one after the latest.

    keep: how many of the latest steps to leave, None all. wait=False returns once the weights are copied and writes
    on; a later save to the folder, or the end of the program, waits. extra: further arrays that belong to the step,
    such as an optimizer's, for `read_extra`. Raises RzooError for a step that is not after
    the latest one, and for what cannot be written: then the folder is as it was.
    """
    root = Path(folder).absolute()
    for other in [one for path, one in _running.items() if path.parent == root]:
        other.wait()
    number = _next_step(root, step)
    if keep is not None and keep < 1:
        raise RzooError(f"keep ({keep}) must be at least 1", field="keep", value=keep)
    partial = root / f".{number}.partial-{_shared_token()}"
    with writing(partial):
        root.mkdir(parents=True, exist_ok=True)
        if jax.process_index() == 0:
            _remove_partial(root)
            partial.mkdir()
    arrays = flat_arrays(_own(lm))
    files = {**about_files(lm), STORAGE: json.dumps(_storage(lm.params)).encode()}
    saving = Saving(root / str(number), threading.Thread(target=lambda: None), [])
    checkpointer = _start(partial, {PARAMS: arrays} | ({EXTRA: dict(extra)} if extra else {}))
    work = lambda: _finish(checkpointer, partial, saving, files, keep)  # noqa: E731
    saving = replace(saving, thread=threading.Thread(target=work, name=f"rzoo save {number}"))
    saving.thread.start()
    _running[saving.path] = saving
    if wait or jax.process_count() > 1:
        saving.wait()
    return saving


@cache
def _wait_at_exit() -> None:
    """Has the interpreter wait for saves before it stops the thread pools that Orbax writes with.

    atexit and threads that are joined at the end come after that; the call that concurrent.futures uses for its own
    stop is the only one before, last registered first.
    """
    threading._register_atexit(_wait_for_all)  # type: ignore[attr-defined]


def _wait_for_all() -> None:
    for saving in list(_running.values()):
        saving.wait()


def _own(lm: LM) -> Params:
    """The weights that the config has, in its order: a pipeline holds a tied embedding twice."""
    params = unstack(lm.config, lm.params)
    return {path: params[path] for path in abstract_weights(lm.config)}


def _next_step(root: Path, step: int | None) -> int:
    done = steps(root)
    latest = done[-1] if done else -1
    if step is None:
        return latest + 1
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise RzooError(f"step ({step}) must be an integer of at least 0", field="step", value=step)
    if step <= latest:
        raise RzooError(
            f"step ({step}) is not after the latest of {root} ({latest})",
            field="step",
            value=step,
            fix=f"save to a new folder, or as step {latest + 1}",
        )
    return step


def _shared_token() -> str:
    """Eight hex digits, the same in all processes."""
    if jax.process_count() == 1:
        return secrets.token_hex(4)
    from jax.experimental import multihost_utils

    return f"{int(multihost_utils.broadcast_one_to_all(int.from_bytes(secrets.token_bytes(3)))):08x}"


def _remove_partial(root: Path) -> None:
    """Removes what interrupted saves left."""
    for path in root.iterdir():
        if PARTIAL.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def _start(partial: Path, groups: Mapping[str, dict[str, jax.Array]]) -> Any:
    """Copies the arrays of each folder and begins to write them."""
    import orbax.checkpoint as ocp

    _wait_at_exit()
    checkpointer = ocp.StandardCheckpointer()
    try:
        for name, arrays in groups.items():
            checkpointer.save(partial / name, arrays)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise _unwritten(partial, error) from error
    return checkpointer


def _finish(checkpointer: Any, partial: Path, saving: Saving, files: Mapping[str, bytes], keep: int | None) -> None:
    """Waits for the arrays, writes the small files and gives the step its name."""
    try:
        checkpointer.wait_until_finished()
        checkpointer.close()
        if jax.process_index() == 0:
            with writing(partial):
                for name, data in {**files, FILES: json.dumps(_checksums(partial)).encode()}.items():
                    _write(partial / name, data)
                _sync(partial)
                os.rename(partial, saving.path)
                _sync(saving.path.parent)
                _remove_old(saving.path.parent, keep)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        saving.errors.append(error if isinstance(error, RzooError) else _unwritten(partial, error))


def _unwritten(path: Path, error: BaseException) -> RzooError:
    return RzooError(
        f"{path.parent} could not be written: {error}",
        field="folder",
        value=str(path.parent),
        fix="free space or choose another folder; the steps that were there are intact",
    )


def _write(path: Path, data: bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checksums(folder: Path) -> dict[str, list[int]]:
    """Relative name -> [size, CRC-32] of every file; each is synced on the way."""
    return {str(path.relative_to(folder)): _checksum(path) for path in sorted(folder.rglob("*")) if path.is_file()}


def _checksum(path: Path, *, sync: bool = True) -> list[int]:
    size = crc = 0
    with open(path, "rb") as file:
        if sync:
            os.fsync(file.fileno())
        while piece := file.read(1 << 22):
            size, crc = size + len(piece), zlib.crc32(piece, crc)
    return [size, crc]


def _remove_old(root: Path, keep: int | None) -> None:
    for number in steps(root)[:-keep] if keep else ():
        gone = root / f".{number}.partial-{secrets.token_hex(4)}"
        os.rename(root / str(number), gone)
        shutil.rmtree(gone, ignore_errors=True)


def steps(root: Path) -> list[int]:
    """Numbers of the complete steps of a folder, ascending."""
    if not root.is_dir():
        return []
    return sorted(int(p.name) for p in root.iterdir() if p.name.isdigit() and (p / FILES).is_file())


def find_step(path: Path) -> tuple[Path | None, tuple[str, ...]]:
    """The step that `path` is, or the latest of those that it holds, and warnings; None where it is neither.

    Raises RzooError for a step that was not completed.
    """
    if (path / FILES).is_file():
        return path, ()
    unfinished = sorted(p.name for p in path.iterdir() if PARTIAL.fullmatch(p.name)) if path.is_dir() else []
    found = steps(path)
    if found:
        skipped = (f"skipped {len(unfinished)} unfinished saves in {path}: {few(unfinished)}",) if unfinished else ()
        return path / str(found[-1]), skipped
    if PARTIAL.fullmatch(path.name) or unfinished or (path / PARAMS).is_dir():
        raise RzooError(f"{path} holds no complete step", field="source", value=str(path), fix="save it again")
    return None, ()


def flat_arrays(params: Params) -> dict[str, Any]:
    """Weights by path; those in a storage as one entry for each array, "layers.0.mlp.gate/codes"."""
    out: dict[str, Any] = {}
    for path, value in params.items():
        if isinstance(value, STORAGES):
            out |= {f"{path}/{name}": array for name, array in _parts(value).items()}
        else:
            out[path] = value
    return out


def _parts(value: Any) -> dict[str, Any]:
    """The arrays of a storage by field."""
    return {f.name: getattr(value, f.name) for f in fields(value) if hasattr(getattr(value, f.name), "dtype")}


def _storage(params: Params) -> dict[str, Any]:
    """What rebuilds the weights that are no plain arrays."""
    static = lambda value: {f.name: getattr(value, f.name) for f in fields(value) if f.metadata.get("static")}  # noqa: E731
    return {path: static(value) for path, value in params.items() if isinstance(value, STORAGES)}


@dataclass(frozen=True)
class Step:
    """A complete step whose small files were read and checked, and none of its weights.

    stored: path -> shape and dtype, or a Quantized of those.
    """

    path: Path
    config: Any
    stored: dict[str, Any]
    generation: dict[str, Any]
    warnings: tuple[str, ...] = ()


def open_step(path: Path) -> Step:
    """Reads and checks all of a step but its weights. Raises RzooError for what is absent or does not fit."""
    config = config_from_hf(read_json(path / CONFIG))
    generation = read_json(path / GENERATION_CONFIG) if (path / GENERATION_CONFIG).is_file() else {}
    _check_files(path)
    stored = _rebuilt(_metadata(path), read_json(path / STORAGE), path)
    if any(name.startswith("mtp_module.") for name in stored) and hasattr(config, "mtp"):
        config = replace(config, mtp=True)
    _check_weights(config, stored, str(path))
    return Step(path, config, stored, generation)


def _check_files(path: Path) -> None:
    """Compares sizes and checksums; each of several processes takes its share of the files."""
    listed = read_json(path / FILES)
    share = sorted(listed)[jax.process_index() :: jax.process_count()]
    for name in share:
        file = path / name
        if not file.is_file() or ".." in Path(name).parts:
            raise _damaged(path, f"{name} is missing")
        size = file.stat().st_size
        if [size] != listed[name][:1]:
            raise _damaged(path, f"{name} has {size} bytes, {listed[name][0]} were written")
        if _checksum(file, sync=False) != listed[name]:
            raise _damaged(path, f"{name} is not what was written (CRC-32)")


def _damaged(path: Path, what: str) -> RzooError:
    return RzooError(f"{path} is damaged: {what}", field="source", value=str(path), fix="load another step")


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except RzooError:
        raise
    except Exception as error:  # Orbax and TensorStore raise many kinds
        raise _damaged(path, str(error)) from error


def _metadata(path: Path) -> dict[str, ShapeDtypeStruct]:
    """Key -> shape and dtype of every array, read without the devices that saved them."""
    import orbax.checkpoint as ocp

    with _reading(path):
        tree = ocp.StandardCheckpointer().metadata(path / PARAMS).item_metadata.tree
        return {key: ShapeDtypeStruct(array.shape, array.dtype) for key, array in tree.items()}


def _rebuilt(arrays: Mapping[str, Any], storage: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Weights by path from arrays by key; the inverse of flat_arrays."""
    out = {key: value for key, value in arrays.items() if "/" not in key}
    for name, static in storage.items():
        parts = {key.split("/")[1]: value for key, value in arrays.items() if key.startswith(f"{name}/")}
        shape = tuple(static["shape"])
        if "kind" in static:
            if "tiles" not in parts or static["kind"] not in KINDS:
                raise _damaged(path, f"{name} has no tiles of a known kind")
            out[name] = BlockQuantized(parts["tiles"], static["kind"], shape, bool(static["integer"]))
            continue
        if not {"codes", "scale"} <= set(parts):
            raise _damaged(path, f"{name} has no codes or no scale")
        block = tuple(static["block"])
        activations = static.get("activations")  # steps of before it was there have none
        out[name] = Quantized(parts["codes"], parts["scale"], parts.get("offset"), block, shape, activations)
    return out


def _check_weights(config: Any, stored: Mapping[str, Any], where: str) -> None:
    """Raises one RzooError with every weight that is missing, extra or of another shape than the config says."""
    expected = {path: tuple(weight.shape) for path, (_, weight) in abstract_weights(config).items()}
    missing = [path for path in expected if path not in stored]
    extra = [path for path in stored if path not in expected]
    wrong = [
        f"{path} is {list(stored[path].shape)}, the config says {list(shape)}"
        for path, shape in expected.items()
        if path in stored and tuple(stored[path].shape) != shape
    ]
    lists = (("missing", missing), ("not part of this model", extra), ("wrong shape", wrong))
    lines = [f"{title} ({len(names)}): {few(names)}" for title, names in lists if names]
    if lines:
        message = "\n  ".join([f"{where}: the weights do not fit the config", *lines])
        raise RzooError(message, field="source", value=where, fix="load it with the config that it was saved with")


def restore(lm: LM, folder: str | Path) -> LM:
    """`lm` with the weights of a step (a folder of steps means the latest), each where and in the type that lm has it.

    Raises RzooError that names every field of the config that differs.
    """
    path, _ = find_step(Path(folder).absolute())
    if path is None:
        raise RzooError(f"{folder} holds no step", field="folder", value=str(folder), fix="save one with rzoo.save")
    step = open_step(path)
    _check_same(step.config, lm.config, str(path))
    target = {name: jax.tree.map(_like, value) for name, value in _own(lm).items()}
    return lm.with_params(read_step(step, target))


def _like(array: Any) -> ShapeDtypeStruct:
    return ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def _check_same(saved: Any, wanted: Any, where: str) -> None:
    if saved == wanted:
        return
    if type(saved) is not type(wanted):
        lines = [f"it is a {type(saved).__name__}, the model a {type(wanted).__name__}"]
    else:
        pairs = [(f.name, getattr(saved, f.name), getattr(wanted, f.name)) for f in fields(saved)]
        lines = [f"{name}: {a} in the step, {b} in the model" for name, a, b in pairs if a != b]
    raise RzooError(
        "\n  ".join([f"{where} was saved from another model", *lines]),
        field="config",
        value=where,
        fix="restore it into a model of its own config: rzoo.load(step)",
    )


def target_for(step: Step, dtype: str | None, forms: Any, paths: Sequence[str]) -> dict[str, Any]:
    """What to restore, where and in which type (None: as stored): by path, shapes with shardings."""
    out = {}
    for path, weight, axes in held(step.config, forms):
        if weight not in paths:
            continue
        value = step.stored[weight]
        if not isinstance(value, STORAGES) and dtype is not None:
            value = ShapeDtypeStruct(value.shape, dtype)
        if isinstance(forms.place, Placement | Pipeline):
            on = forms.place.of(path).weight(value, axes)
        else:
            one = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
            on = jax.tree.map(lambda _, one=one: one, value)
        out[path] = jax.tree.map(lambda a, s: ShapeDtypeStruct(a.shape, a.dtype, sharding=s), value, on)
    return out


def read_step(step: Step, target: Mapping[str, Any]) -> Params:
    """The weights of `target` from a step: every device reads its own part, whatever mesh saved them."""
    import orbax.checkpoint as ocp

    first = {path: value for path, value in target.items() if path in step.stored}
    arrays = flat_arrays(dict(first))
    with _reading(step.path):
        reader = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(restore_concurrent_gb=READ_AT_ONCE))
        how = ocp.checkpoint_utils.construct_restore_args(arrays)
        args = ocp.args.PyTreeRestore(item=arrays, restore_args=how, partial_restore=True)
        read = reader.restore(step.path / PARAMS, args=args)
    storage = {path: vars(value) for path, value in first.items() if isinstance(value, STORAGES)}
    params = _rebuilt(read, storage, step.path)
    for path in target:  # the second end of a tied pipeline
        if path not in params:
            params[path] = jax.device_put(params["embed"], target[path].sharding)
    return {path: params[path] for path in target}  # Orbax sorts names: layers.10 before layers.2


def read_extra(path: Path, like: Mapping[str, Any]) -> dict[str, Any]:
    """The extra arrays of a step, in the types and places of `like`. Raises RzooError where it has other ones."""
    import orbax.checkpoint as ocp

    if not (path / EXTRA).is_dir():
        raise RzooError(
            f"{path} holds a model and no state of training",
            field="folder",
            value=str(path),
            fix="train into a new folder, starting from this model",
        )
    with _reading(path):
        found = ocp.StandardCheckpointer().metadata(path / EXTRA).item_metadata.tree
        shapes = {key: tuple(array.shape) for key, array in found.items()}
        if shapes != {key: tuple(array.shape) for key, array in like.items()}:
            raise RzooError(
                f"{path} was saved by another optimizer",
                field="optimizer",
                value=str(path),
                fix="resume with the optimizer that the run began with, or train into a new folder",
            )
        return ocp.StandardCheckpointer().restore(path / EXTRA, {key: _like(array) for key, array in like.items()})


def chosen_paths(config: Any, only: str | None) -> list[str]:
    """The weights that `only` names: all for None, else prefixes such as "layers.0-3,embed", a-b for a range of layers.

    Raises RzooError for a prefix that names none.
    """
    paths = list(abstract_weights(config))
    if only is None:
        return paths
    found: set[str] = set()
    for part in only.split(","):
        name = part.strip()
        ranged = re.fullmatch(r"layers\.(\d{1,9})-(\d{1,9})(.*)", name)
        layers = range(int(ranged[1]), min(int(ranged[2]) + 1, config.layers)) if ranged else ()
        prefixes = [f"layers.{i}{ranged[3]}" for i in layers] if ranged else [name]
        own = {path for path in paths for prefix in prefixes if path == prefix or path.startswith(f"{prefix}.")}
        if not own:
            raise RzooError(
                f"only ({name}) names no weight of this model",
                field="only",
                value=name,
                fix=f"it has {config.layers} layers: layers.0 .. layers.{config.layers - 1}, embed, norm, head",
            )
        found |= own
    return [path for path in paths if path in found]


def step_bytes(step: Step) -> int:
    """Bytes of all weights as they are stored."""
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(step.stored))
