"""Text to token ids and back: one `Tokenizer` over tokenizer.json files and GGUF vocabularies.

Encoding is done by the `tokenizers` library. Decoding is ours: every token stands for some bytes, a text is those bytes
put together and read as UTF-8, with U+FFFD for what is none. So a stream (`IncrementalDecoder`) and a whole (`decode`)
agree by construction. (For byte-level vocabularies this equals the library's decoding. Where byte-fallback tokens
form invalid UTF-8 the library replaces a whole run of bytes, and here only the invalid ones are.)

What the files say about classes is ignored: tokenizer.json alone decides how text is cut.
"""

from __future__ import annotations

import codecs
import json
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, SupportsIndex

import tokenizers

from rzoo.core import RzooError
from rzoo.vocabulary import token_id, vocabulary_of


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """A vocabulary with what its files say about it.

    `eos_ids` begins with the tokenizer's own end token; others that end a turn follow. `add_bos_token` tells whether
    the model expects plain text to begin with `bos_id`. `rows` is the number of rows of the model's embedding where it
    is known: ids between `vocab_size` and it are padding and decode to nothing.
    """

    core: tokenizers.Tokenizer
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None
    add_bos_token: bool = False
    chat_template: str | None = None
    rows: int = 0
    _bytes: dict[int, bytes] = field(default_factory=dict, init=False, repr=False)

    @staticmethod
    def from_file(path: str | os.PathLike[str]) -> Tokenizer:
        """The tokenizer of a folder that holds tokenizer.json, or of that file itself.

        tokenizer_config.json, special_tokens_map.json, generation_config.json, config.json (vocab_size) and
        chat_template.jinja are read where they lie beside it. Raises RzooError for files that are missing or broken.
        """
        return _from_file(Path(path))

    @staticmethod
    def from_gguf(metadata: dict[str, Any]) -> Tokenizer:
        """The tokenizer in the metadata of a GGUF file (`tokenizer.ggml.*`).

        Raises RzooError for a vocabulary that is broken or of a kind that rzoo does not rebuild.
        """
        return _from_gguf(metadata)

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest id that has a token."""
        return max(self.core.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def added(self) -> dict[int, str]:
        """The tokens that are matched in text before anything else is, special or not: id to text."""
        return {number: token.content for number, token in self.core.get_added_tokens_decoder().items()}

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The ids that `decode` leaves out unless told otherwise."""
        return frozenset(number for number, token in self.core.get_added_tokens_decoder().items() if token.special)

    def encode(self, text: str, *, add_bos: bool = False, parse_special: bool = True) -> list[int]:
        """The ids of `text`, with `bos_id` in front when `add_bos` is set and the text does not begin with it already.

        With parse_special=False, text that spells an added token such as <think> becomes ordinary tokens.
        Raises RzooError for text that is no valid Unicode.
        """
        ids = [number for number, _, _ in self.spans(text)] if parse_special else self._encode_plain(text)
        return [self.bos_id, *ids] if add_bos and self.bos_id is not None and ids[:1] != [self.bos_id] else ids

    def spans(self, text: str) -> list[tuple[int, int, int]]:
        """(id, start, end) of every token of `text`; start and end count characters."""
        encoding = _encoding(self.core, text)
        return [(number, start, end) for number, (start, end) in zip(encoding.ids, encoding.offsets, strict=True)]

    def _encode_plain(self, text: str) -> list[int]:
        ids = _encoding(self._without_added, text).ids
        forged = self.special_ids.intersection(ids)
        if forged:
            token = self.added[min(forged)]
            raise RzooError(f"text holds {token!r}, which this vocabulary cannot write as ordinary text", field="text")
        return ids

    @cached_property
    def _without_added(self) -> tokenizers.Tokenizer:
        """The same model and splitting, which it shares with `core`, but no added tokens."""
        plain = tokenizers.Tokenizer(self.core.model)
        for part in ("normalizer", "pre_tokenizer"):
            if getattr(self.core, part) is not None:
                setattr(plain, part, getattr(self.core, part))
        return plain

    def decode(self, ids: Iterable[SupportsIndex], *, skip_special: bool = True) -> str:
        """The text of `ids`. Raises RzooError for an id that the model has no row for."""
        decoder = IncrementalDecoder(self, skip_special=skip_special)
        return decoder.push(ids) + decoder.finish()

    def token_bytes(self, number: SupportsIndex) -> bytes:
        """The bytes that the token `number` stands for; none for the padding of the vocabulary.

        Raises RzooError for an id that the model has no row for.
        """
        number = int(number)
        if number not in self._bytes:
            self._bytes[number] = self._find_bytes(number)
        return self._bytes[number]

    def _find_bytes(self, number: int) -> bytes:
        rows = max(self.rows, self.vocab_size)
        if not 0 <= number < rows:
            raise RzooError(f"token id {number} must be from 0 to {rows - 1}", field="ids", value=number)
        if number in self.added:
            return self.added[number].encode()
        token = self.core.id_to_token(number)
        return b"" if token is None else self.text_form.token_bytes(token)

    @cached_property
    def text_form(self) -> TextForm:
        """How the tokens of this vocabulary spell bytes."""
        return _text_form(self.core.decoder)

    def token_id(self, text: str) -> int | None:
        """The id of the token that is spelled `text` in the vocabulary; None when there is none."""
        return self.core.token_to_id(text)

    def to_json(self) -> str:
        """The contents of a tokenizer.json that, with `settings` beside it, gives this tokenizer back."""
        return self.core.to_str()

    def settings(self) -> dict[str, Any]:
        """The contents of a tokenizer_config.json: what tokenizer.json has no place for, the chat template apart."""
        ids = {"bos_token": self.bos_id, "eos_token": next(iter(self.eos_ids), None), "pad_token": self.pad_id}
        named = {name: self.core.id_to_token(number) for name, number in ids.items() if number is not None}
        return {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": self.add_bos_token, **named}


class IncrementalDecoder:
    """Decodes ids as they come; the pieces put together equal `tokenizer.decode` of all ids.

    Holds back the bytes of one unfinished character, three at most.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True):
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._leading = tokenizer.text_form.leading

    def push(self, ids: Iterable[SupportsIndex]) -> str:
        """The text that `ids` complete. Raises RzooError for an id that the model has no row for."""
        token_bytes, skipped = self._tokenizer.token_bytes, self._skipped
        data = b"".join([token_bytes(number) for number in ids if number not in skipped])
        return self._trimmed(self._utf8.decode(data))

    def finish(self) -> str:
        """What is still held back: U+FFFD for a character that never ended. The decoder is then as new."""
        rest = self._trimmed(self._utf8.decode(b"", True))
        self._utf8.reset()
        self._leading = self._tokenizer.text_form.leading
        return rest

    def _trimmed(self, text: str) -> str:
        """`text` less the spaces that the vocabulary puts at the beginning of every text."""
        while self._leading and text:
            self._leading = self._leading - 1 if text[0] == " " else 0
            text = text.removeprefix(" ")
        return text


class TextForm(NamedTuple):
    """How tokens spell bytes, and how many spaces of its own the vocabulary puts before a text."""

    token_bytes: Callable[[str], bytes]
    leading: int


def _printable_bytes() -> dict[str, int]:
    """GPT-2's printable character for each byte: itself where it prints, else the next one from U+0100 on."""
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _printable_bytes()
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()


def _sentencepiece(token: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token.replace("▁", " ").encode()


def _text_form(decoder: Any) -> TextForm:
    """The spelling that a decoder of `tokenizers` undoes: GPT-2's bytes, or SentencePiece's ▁ and <0xNN>."""
    state: dict[str, Any] = json.loads(decoder.__getstate__()) if decoder is not None else {"type": "none"}
    steps: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return TextForm(_byte_level, 0)
    replaced = [(step["pattern"], step["content"]) for step in steps if step["type"] == "Replace"]
    if replaced == [({"String": "▁"}, " ")] and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        return TextForm(_sentencepiece, sum(step["start"] for step in steps if step["type"] == "Strip"))
    raise RzooError(
        f"decoder ({', '.join(kinds)}) of tokenizer.json is of a kind that rzoo does not read",
        field="decoder",
        value=kinds,
        fix="supported: ByteLevel; Replace (▁ by a space) with ByteFallback, Fuse and Strip",
    )


def _encoding(core: tokenizers.Tokenizer, text: str) -> Any:
    try:
        return core.encode(text, add_special_tokens=False)
    except (UnicodeError, TypeError) as error:
        fix = "give it as UTF-8: its bytes were read in another encoding"
        raise RzooError("text is not valid Unicode", field="text", fix=fix) from error


# tokenizer.json and the files beside it


def _from_file(path: Path) -> Tokenizer:
    folder, file = (path, path / "tokenizer.json") if path.is_dir() else (path.parent, path)
    core = _core(_read(file, "give a folder that holds tokenizer.json"), str(file))
    settings = {**_json(folder / "special_tokens_map.json"), **_json(folder / "tokenizer_config.json")}
    generation = _json(folder / "generation_config.json")
    ids = {name: _named_id(core, settings.get(f"{name}_token")) for name in ("bos", "eos", "pad")}
    bos_id = ids["bos"] if ids["bos"] is not None else next(iter(_listed_ids(generation, "bos_token_id")), None)
    pad_id = ids["pad"] if ids["pad"] is not None else next(iter(_listed_ids(generation, "pad_token_id")), None)
    own = [] if ids["eos"] is None else [ids["eos"]]
    return Tokenizer(
        core,
        bos_id=bos_id,
        eos_ids=tuple(dict.fromkeys([*own, *_listed_ids(generation, "eos_token_id")])),
        pad_id=pad_id,
        add_bos_token=_adds_bos(core, settings, bos_id),
        chat_template=_chat_template(folder, settings),
        rows=next(iter(_listed_ids(_json(folder / "config.json"), "vocab_size")), 0),
    )


def _read(path: Path, fix: str) -> str:
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise RzooError(f"{path}: cannot be read: {error.strerror}", field="path", value=str(path), fix=fix) from error
    except UnicodeDecodeError as error:
        raise RzooError(f"{path}: is not UTF-8", field="path", value=str(path)) from error


def _json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; an empty one when there is no such file."""
    if not path.exists():
        return {}
    try:
        value = json.loads(_read(path, "check its permissions"))
    except (ValueError, RecursionError) as error:
        raise RzooError(f"{path}: is not valid JSON: {error}", field="path", value=str(path)) from error
    if not isinstance(value, dict):
        raise RzooError(f"{path}: must hold a JSON object, found {type(value).__name__}", field="path", value=str(path))
    return value


def _core(text: str, source: str) -> tokenizers.Tokenizer:
    try:
        core = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises the bare class
        raise RzooError(f"{source}: is no tokenizer.json: {error}", field="path", value=source) from error
    core.no_truncation()
    core.no_padding()
    return core


def _named_id(core: tokenizers.Tokenizer, token: Any) -> int | None:
    """The id of a token given as its text or as an object with `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return core.token_to_id(text) if isinstance(text, str) else None


def _listed_ids(config: dict[str, Any], key: str) -> list[int]:
    """The ids under `key`, which may be one, a list or absent."""
    value = config.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(number) is int and number >= 0 for number in ids):
        raise RzooError(f"{key} ({value!r:.60}) must be a token id or a list of them", field=key, value=value)
    return ids


def _adds_bos(core: tokenizers.Tokenizer, settings: dict[str, Any], bos_id: int | None) -> bool:
    """What tokenizer_config.json says, else whether tokenizer.json itself puts the BOS first."""
    said = settings.get("add_bos_token")
    return said if isinstance(said, bool) else bos_id is not None and core.encode("").ids[:1] == [bos_id]


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    """chat_template.jinja, else the entry in tokenizer_config.json."""
    file = folder / "chat_template.jinja"
    return _read(file, "check its permissions") if file.exists() else _template_text(settings.get("chat_template"))


def _template_text(value: Any) -> str | None:
    """A template as configs hold it: a string, or a list of named ones, of which "default" counts."""
    if isinstance(value, list):
        named = [entry for entry in value if isinstance(entry, dict) and entry.get("name") == "default"]
        value = named[0].get("template") if named else None
    if value is not None and not isinstance(value, str):
        words = f"chat_template must be text or a list of named texts, found {type(value).__name__}"
        raise RzooError(words, field="chat_template")
    return value


# GGUF vocabularies


_ENDS = ("eos", "eot", "eom")  # of sentence, turn, message


def _from_gguf(metadata: dict[str, Any]) -> Tokenizer:
    core, add_bos = vocabulary_of(metadata)
    size = len(metadata["tokenizer.ggml.tokens"])
    ids = {name: token_id(metadata, name, size) for name in ("bos", *_ENDS, "padding")}
    return Tokenizer(
        core,
        bos_id=ids["bos"],
        eos_ids=tuple(number for name, number in ids.items() if name in _ENDS and number is not None),
        pad_id=ids["padding"],
        add_bos_token=bool(metadata.get("tokenizer.ggml.add_bos_token", add_bos)) and ids["bos"] is not None,
        chat_template=_template_text(metadata.get("tokenizer.chat_template")),
    )
