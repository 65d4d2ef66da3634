"""Finished samples: what one is, and the file that keeps them, so that a run that was killed goes on where it was."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rzoo.core import RzooError
from rzoo.evals.task import Instance, Verdict

FILE = "samples.jsonl"
MOST_LINE = 64 << 20  # bytes of one sample; a longer line is no sample of ours


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One answer to one question. number: which of its samples; asked: a digest of the prompt.

    reason: why it counts as wrong, None for a right one and where that is not known. finish_reason: stop, length, or
    no_room for a prompt that leaves no room in the context. seconds: since the sample before it. logprobs: of each
    option of a choice.
    """

    id: str
    number: int
    asked: str
    score: float
    answer: str | None = None
    reason: str | None = None
    also: Mapping[str, float] = field(default_factory=dict)
    text: str = ""
    reasoning: str | None = None
    finish_reason: str = "stop"
    prompt_tokens: int = 0
    output_tokens: int = 0
    seconds: float = 0.0
    logprobs: tuple[float, ...] = ()

    @property
    def key(self) -> tuple[str, int]:
        """Which sample of which question."""
        return self.id, self.number


def seed_for(run_seed: int, instance: Instance, number: int) -> int:
    """The seed of a sample, of the run's seed and the sample's own name alone: the same in any batch."""
    digest = hashlib.sha256(f"{run_seed}\0{instance.id}\0{number}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def digest(text: str) -> str:
    """A short digest of what was asked."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def sample_of(verdict: Verdict, **about: Any) -> Sample:
    """A sample with this verdict."""
    return Sample(**asdict(verdict), **about)


class SampleFile:
    """samples.jsonl: a line on the run, then one for each finished sample, written as soon as it is.

    Used as a context: `with SampleFile(path, run) as kept`. kept.found: samples of an earlier call, by key. A last line
    that was cut off is dropped. Raises RzooError where the file is of another run.
    """

    def __init__(self, path: Path, run: Mapping[str, Any]):
        self.path, self._run = path, json.loads(json.dumps(run))
        self.found: dict[tuple[str, int], Sample] = {}

    def __enter__(self) -> "SampleFile":
        self.path.parent.mkdir(parents=True, exist_ok=True)
        whole = self._read() if self.path.exists() else 0
        self._file = self.path.open("ab")
        self._file.truncate(whole)
        if not whole:
            self._write(self._run)
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.close()

    def add(self, sample: Sample) -> None:
        """Keeps a sample: it is in the file when this returns."""
        self.found[sample.key] = sample
        self._write(asdict(sample))

    def _write(self, value: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")
        self._file.flush()

    def _read(self) -> int:
        """Reads what is there; how many bytes of it are whole lines."""
        whole = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MOST_LINE), b"")):
                if not line.endswith(b"\n"):
                    break
                value = self._parsed(line, number)
                if number == 0:
                    self._check(value)
                else:
                    sample = self._sample(value, number)
                    self.found[sample.key] = sample
                whole += len(line)
        return whole

    def _parsed(self, line: bytes, number: int) -> Any:
        try:
            return json.loads(line.decode("utf-8", "surrogatepass"))
        except (ValueError, RecursionError) as error:
            raise self._broken(number) from error

    def _sample(self, value: Any, number: int) -> Sample:
        try:
            return Sample(**{**value, "logprobs": tuple(value["logprobs"])})
        except (TypeError, KeyError) as error:
            raise self._broken(number) from error

    def _broken(self, number: int) -> RzooError:
        words = f"{self.path}: line {number + 1} is no sample"
        return RzooError(words, field="out", value=str(self.path), fix="delete the file, or give another folder")

    def _check(self, theirs: Any) -> None:
        if theirs == self._run:
            return
        theirs = theirs if isinstance(theirs, dict) else {}
        differ = [name for name in sorted({*theirs, *self._run}) if theirs.get(name) != self._run.get(name)]
        raise RzooError(
            f"{self.path.parent} holds a run with another {', '.join(differ)}",
            field="out",
            value=str(self.path.parent),
            fix="give another folder as --out, or delete that one",
        )
