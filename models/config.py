"""Reading a config.json field by field: every mistake names the field, its value and what is supported."""

from collections.abc import Mapping, Sequence
from typing import Any

from rzoo.core import RzooError

MISSING = object()
LARGEST = 2**40  # no size of a model comes near; keeps products of sizes from untrusted files bounded


class HFConfig:
    """A config in Hugging Face's field names, read with checks."""

    def __init__(self, fields: Mapping[str, Any], where: str = "config.json"):
        self.fields, self.where = fields, where

    def get(self, field: str, default: Any = MISSING) -> Any:
        """The raw value; null counts as absent. Raises RzooError where it is absent and there is no default."""
        value = self.fields.get(field)
        if value is not None:
            return value
        if default is MISSING:
            raise RzooError(f"{self.where}: {field} is missing", field=field, fix=f"add {field} to {self.where}")
        return default

    def count(self, field: str, *, default: Any = MISSING, least: int = 1) -> int:
        """An integer of at least `least`."""
        value = self.get(field, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= LARGEST:
            raise self.wrong(field, value, f"must be an integer of at least {least}")
        return value

    def number(self, field: str, *, default: Any = MISSING) -> float:
        """A finite number."""
        value = self.get(field, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < float("inf"):
            raise self.wrong(field, value, "must be a finite number")
        return float(value)

    def flag(self, field: str, *, default: Any = MISSING) -> bool:
        """True or false."""
        value = self.get(field, default)
        if not isinstance(value, bool):
            raise self.wrong(field, value, "must be true or false")
        return value

    def text(self, field: str, *, default: Any = MISSING) -> str:
        """A string."""
        value = self.get(field, default)
        if not isinstance(value, str):
            raise self.wrong(field, value, "must be a string")
        return value

    def refuse(self, field: str, *, allowed: Sequence[Any]) -> None:
        """Raises RzooError unless the field has one of the values that the model implements (None: absent)."""
        value = self.fields.get(field)
        if value not in allowed:
            spoken = " or ".join(repr(a) for a in allowed if a is not None)
            raise self.wrong(field, value, f"is not supported by this model; supported: {spoken}")

    def gguf_vocabulary(self, metadata: Mapping[str, Any]) -> int:
        """vocab_size of a GGUF file; where it has none, the length of its list of tokens."""
        tokens = metadata.get("tokenizer.ggml.tokens")
        return self.count("vocab_size", default=len(tokens) if isinstance(tokens, list) else MISSING)

    def wrong(self, field: str, value: Any, what: str) -> RzooError:
        """The error for a field with a wrong value."""
        shown = repr(value) if len(repr(value)) < 80 else repr(value)[:77] + "..."
        return RzooError(f"{self.where}: {field} ({shown}) {what}", field=field, value=value)


def positive(config: Any, *fields: str) -> None:
    """Raises RzooError for the first of `fields` of a config dataclass that is not a positive integer."""
    for field in fields:
        value = getattr(config, field)
        if not isinstance(value, int) or value < 1:
            raise RzooError(f"{field} ({value}) must be a positive integer", field=field, value=value)
