"""The settings of a run."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rzoo.core import RzooError, closest

DRAWN = {"temperature": 0.6, "top_p": 0.95}  # for several samples where nothing else is asked: R1's own settings


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a run is made. data: folder of data files; limit: questions at most, a seeded sample; out: folder of results,
    in which a run that was killed goes on; seed: of the sample of questions and of every draw. samples: answers to
    each question. temperature, top_p: None for greedy, or DRAWN for several samples. thinking: None as the model comes.
    max_tokens: of an answer, None for the task's own. raw: no chat template. batch: answers at once; deterministic: the
    same bits in any batch.
    sandbox: a command that runs programs that a model wrote, in front of "python3 …"; () for a child with limits.
    """

    data: Path | None = None
    limit: int | None = None
    out: Path | None = None
    seed: int = 0
    samples: int = 1
    temperature: float | None = None
    top_p: float | None = None
    thinking: bool | None = None
    max_tokens: int | None = None
    raw: bool = False
    batch: int = 64
    deterministic: bool = False
    sandbox: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, least in (("limit", 1), ("samples", 1), ("max_tokens", 1), ("batch", 1), ("seed", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise RzooError(f"{name} ({value}) must be at least {least}", field=name, value=value)
        if self.samples > 1 and self.temperature == 0:
            fix = "give a temperature, such as --temperature 0.6"
            raise RzooError(f"{self.samples} samples at temperature 0 are all the same", field="samples", fix=fix)

    @property
    def drawing(self) -> dict[str, float]:
        """Temperature and top_p, as they are used."""
        usual = DRAWN if self.samples > 1 else {"temperature": 0.0, "top_p": 1.0}
        return {name: value if (value := getattr(self, name)) is not None else usual[name] for name in usual}


def settings_of(given: Mapping[str, Any]) -> Settings:
    """Settings by name. Raises RzooError for an unknown one, with close names, and for a value out of range."""
    known = [item.name for item in fields(Settings)]
    for name in given:
        if name not in known:
            raise RzooError(f"setting ({name}) is unknown", field=name, value=given[name], fix=closest(name, known))
    paths = {name: Path(given[name]) for name in ("data", "out") if given.get(name) is not None}
    return Settings(**{**given, **paths})
