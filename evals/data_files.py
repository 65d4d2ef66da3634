"""Rows of the user's data files: JSON lines, JSON, CSV, each also in gzip."""

import csv
import gzip
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rzoo.core import RzooError
from rzoo.evals.task import Instance, Source

MOST_BYTES = 1 << 30  # of a file, unpacked
Convert = Callable[[int, Any], Instance]


def instances_of(files: tuple[str, ...], get: str, convert: Convert) -> Callable[[Source], Iterator[Instance]]:
    """The instances function of a task that reads the first of `files` that is there below the user's folder.

    convert: of the place of a row and the row. What it raises over a row that is not as expected is told in words.
    """

    def read(source: Source) -> Iterator[Instance]:
        path = found(source.data, files, get)
        for place, row in enumerate(rows(path)):
            yield _converted(convert, place, row, path)

    return read


def _converted(convert: Convert, place: int, row: Any, path: Path) -> Instance:
    try:
        return convert(place, row)
    except KeyError as error:
        raise _strange(path, place, f"has no {error}") from error
    except (TypeError, ValueError, IndexError, AttributeError) as error:
        raise _strange(path, place, f"is not as expected ({error})") from error


def _strange(path: Path, place: int, words: str) -> RzooError:
    fix = "give the file as its authors publish it"
    return RzooError(f"{path}: row {place + 1} {words}", field="data", value=str(path), fix=fix)


def found(folder: Path | None, files: tuple[str, ...], get: str) -> Path:
    """The first of `files` below a folder. Raises RzooError where there is none, saying where they come from."""
    fix = f"put {' or '.join(files)} there; {get}"
    if folder is None:
        raise RzooError("this task reads a data file", field="data", fix=f"--data DIR; {fix}")
    path = next((folder / name for name in files if (folder / name).is_file()), None)
    if path is None:
        raise RzooError(f"data ({folder}) has no file for this task", field="data", value=str(folder), fix=fix)
    return path


def rows(path: Path) -> list[Any]:
    """What a file holds: objects of its lines, of a list, of its table. Raises RzooError where it can't be read."""
    kind = path.name.removesuffix(".gz").rpartition(".")[2]
    try:
        text = _text(path)
        if kind == "csv":
            return list(csv.DictReader(io.StringIO(text, newline=""), strict=True))
        return (
            _list_of(json.loads(text))
            if kind == "json"
            else [json.loads(line) for line in text.split("\n") if line.strip()]
        )
    except (OSError, EOFError, ValueError, csv.Error, RecursionError) as error:
        raise RzooError(f"{path} can't be read: {error}", field="data", value=str(path)) from error


def _text(path: Path) -> str:
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"it is larger than {MOST_BYTES >> 20} MiB")
    return data.decode("utf-8-sig")


def _list_of(value: Any) -> list[Any]:
    """The list that a JSON file is, or the one of BIG-Bench's "examples"."""
    value = value.get("examples") if isinstance(value, dict) else value
    if not isinstance(value, list):
        raise ValueError("it is no list of rows")
    return value
