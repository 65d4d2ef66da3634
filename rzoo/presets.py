"""`rzoo.presets`: what can be loaded by name."""

from dataclasses import dataclass
from typing import Any

from rzoo.checkpoint.sources import whereabouts
from rzoo.models.presets import PRESETS
from rzoo.models.registry import count_parameters


@dataclass(frozen=True)
class PresetInfo:
    """One published model. parameters: exact count. bytes: of its weights as published, in `bits`. found: where they
    are.
    """

    name: str
    alias: str | None
    parameters: int
    bytes: int
    bits: str
    found: str
    config: Any


# bytes a weight; Q4_1 as in the one file that has it, its embedding in Q8_0
BYTES = {"bfloat16": 2.0, "float32": 4.0}


def presets() -> list[PresetInfo]:
    """Every preset, with its exact number of parameters counted from shapes alone."""
    return [_info(name) for name in PRESETS]


def _info(name: str) -> PresetInfo:
    entry = PRESETS[name]
    count = count_parameters(entry.config)
    size = entry.file_bytes or int(count * BYTES[entry.dtype])
    return PresetInfo(name, entry.alias, count, size, entry.dtype, whereabouts(name), entry.config)
