"""Vocabularies in the metadata of GGUF files (`tokenizer.ggml.*`), rebuilt as `tokenizers` objects.

A byte-level vocabulary ("gpt2") comes with its merges, and with the name (`pre`) of the way in which text is cut before
they apply. A SentencePiece vocabulary ("llama") comes with scores, from which the merges follow: of all neighbours
whose union is a token, those of the highest score are merged first. A vocabulary or `pre` of another name is refused:
cut otherwise, text would silently become other tokens than those that the model was trained on.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from rzoo.core import RzooError

LONGEST = 512  # characters of a SentencePiece token: the work on one grows with their square


class PreTokenizer(NamedTuple):
    """How a GGUF `pre` cuts text: by each regular expression in turn, or by GPT-2's own when there are none."""

    patterns: tuple[str, ...]
    digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


def _llama3_pattern(digits: str) -> str:
    contractions = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    rest = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    return rf"{contractions}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}|{rest}"


_DEEPSEEK_V3_PATTERNS = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_EAST_ASIAN = "[\u0800-\u9fa5\uac00-\ud7ff]+"
# Of the letters with case, DeepSeek's first tokenizer lists all but Georgian, mathematical and later ones.
_NO_CASE = (
    "\u0560\u0588\u10c7-\u10ff\u1c80-\u1c8f\u2d00-\u2d2f\ua790-\uab6f"
    "\U00010570-\U000105bf\U00016e40-\U00016e7f\U0001d400-\U0001df2f"
)
_DEEPSEEK_LLM_PATTERNS = (
    r"[\r\n]",
    rf"\s?(?:(?![{_NO_CASE}])[\p{{Lu}}\p{{Ll}}\p{{Lt}}])+",
    r"\s?[!-/:-~"
    + "\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",  # ":-~" takes letters, too: so it stands there
    r"\s+$",
    _EAST_ASIAN,
    r"\p{N}",
)
_DEEPSEEK_CODER_PATTERNS = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}")
_LLAMA3 = PreTokenizer((_llama3_pattern(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)

# tokenizer.ggml.pre -> how it cuts text. Source: llama.cpp's llama-vocab and the models' own tokenizer.json.
PRE_TOKENIZERS = {
    "smollm": PreTokenizer((), digits=True),
    "gpt-2": PreTokenizer(()),
    "default": PreTokenizer(()),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "smaug-bpe": PreTokenizer(_LLAMA3.patterns),
    "qwen2": PreTokenizer((_llama3_pattern(r"\p{N}"),), nfc=True),
    "deepseek-r1-qwen": PreTokenizer((_llama3_pattern(r"\p{N}"),)),
    "deepseek-llm": PreTokenizer(_DEEPSEEK_LLM_PATTERNS),
    "deepseek-coder": PreTokenizer(_DEEPSEEK_CODER_PATTERNS),
    "deepseek-v3": PreTokenizer(_DEEPSEEK_V3_PATTERNS, add_bos=True),
}
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # tokenizer.ggml.token_type


class Vocabulary(NamedTuple):
    """core: its tokenizer. add_bos: whether models with it begin a text with BOS, where the file does not say."""

    core: tokenizers.Tokenizer
    add_bos: bool


def vocabulary_of(metadata: dict[str, Any]) -> Vocabulary:
    """The vocabulary in the metadata of a GGUF file. Raises RzooError for a broken one, or of an unknown kind."""
    kind = _choice(metadata, "tokenizer.ggml.model", ("gpt2", "llama"), None)
    tokens = _list(metadata, "tokenizer.ggml.tokens", str)
    vocab = {token: number for number, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        repeated = next(token for number, token in enumerate(tokens) if vocab[token] != number)
        words = f"tokenizer.ggml.tokens holds {repeated!r} twice"
        raise RzooError(words, field="tokenizer.ggml.tokens", value=repeated)
    types = _beside(metadata, "tokenizer.ggml.token_type", int, tokens)
    if kind == "gpt2":
        pre = PRE_TOKENIZERS[_choice(metadata, "tokenizer.ggml.pre", tuple(PRE_TOKENIZERS), "default")]
        found = Vocabulary(_byte_level_bpe(pre, vocab, _merges(metadata)), pre.add_bos)
    else:
        found = Vocabulary(_sentencepiece_bpe(metadata, vocab, types), True)
    kinds = {token: kind for token, kind in zip(tokens, types, strict=False) if kind in (_CONTROL, _USER_DEFINED)}
    found.core.add_tokens([AddedToken(t, special=kind == _CONTROL, normalized=False) for t, kind in kinds.items()])
    return found


def _byte_level_bpe(pre: PreTokenizer, vocab: dict[str, int], merges: list[tuple[str, str]]) -> tokenizers.Tokenizer:
    core = _bpe(vocab, merges, "merges", fuse_unk=False, ignore_merges=pre.ignore_merges)
    splits: list[Any] = [
        pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated") for pattern in pre.patterns
    ]
    digits = [pre_tokenizers.Digits(individual_digits=True)] if pre.digits else []
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not pre.patterns)
    core.pre_tokenizer = pre_tokenizers.Sequence([*digits, *splits, bytes_])
    core.decoder = decoders.ByteLevel()
    if pre.nfc:
        core.normalizer = normalizers.NFC()
    return core


def _sentencepiece_bpe(metadata: dict[str, Any], vocab: dict[str, int], types: list[int]) -> tokenizers.Tokenizer:
    """Spaces are "▁", one of which begins every text unless the file says otherwise; unknown characters are bytes."""
    tokens = list(vocab)
    scores = _beside(metadata, "tokenizer.ggml.scores", float, tokens)
    if not scores:
        raise RzooError("tokenizer.ggml.scores must be a list of float, found nothing", field="tokenizer.ggml.scores")
    unknown = token_id(metadata, "unknown", len(tokens))
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True) is True
    core = _bpe(
        vocab,
        _merges_by_score(tokens, scores, types or [_NORMAL] * len(tokens)),
        "scores",
        unk_token=tokens[unknown or 0],
        fuse_unk=True,
        byte_fallback=True,
    )
    begin = [normalizers.Prepend("▁")] if prefix else []
    core.normalizer = normalizers.Sequence([*begin, normalizers.Replace(" ", "▁")])
    end = [decoders.Strip(" ", 1, 0)] if prefix else []
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *end]  # type: ignore[list-item]
    )
    return core


def _merges_by_score(tokens: list[str], scores: list[float], types: list[int]) -> list[tuple[str, str]]:
    """Every pair of tokens whose union is a token of text, in the order in which SentencePiece would merge them."""
    known, wanted = set(tokens), []
    for number, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind != _NORMAL:
            continue
        if len(token) > LONGEST or math.isnan(scores[number]):
            words = f"token {number} of {len(token)} characters with score {scores[number]} cannot be one of text"
            raise RzooError(words, field="tokenizer.ggml.scores", value=number)
        splits = [(token[:i], token[i:]) for i in range(len(token) - 1, 0, -1)]
        wanted += [(-scores[number], number, pair) for pair in splits if known.issuperset(pair)]
    wanted.sort(key=lambda entry: entry[:2])
    return [pair for _, _, pair in wanted]


def _bpe(vocab: dict[str, int], merges: list[tuple[str, str]], field: str, **options: Any) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer(models.BPE(vocab, merges, **options))
    except Exception as error:  # the library raises the bare class
        words = f"tokenizer.ggml.{field} do not fit the tokens: {error}"
        raise RzooError(words, field=f"tokenizer.ggml.{field}") from error


def token_id(metadata: dict[str, Any], name: str, size: int) -> int | None:
    """The id of a special token of a GGUF file, None where it names none. RzooError for one outside the vocabulary."""
    key = f"tokenizer.ggml.{name}_token_id"
    value = metadata.get(key)
    if value is not None and not (type(value) is int and 0 <= value < size):
        raise RzooError(f"{key} ({value!r:.40}) must be from 0 to {size - 1}", field=key, value=value)
    return value


def _choice(metadata: dict[str, Any], key: str, known: tuple[str, ...], default: str | None) -> str:
    value = metadata.get(key, default)
    if value not in known:
        fix = f"supported: {', '.join(known)}"
        raise RzooError(f"{key} ({value!r:.60}) is not one that rzoo can rebuild", field=key, value=value, fix=fix)
    return value


def _list(metadata: dict[str, Any], key: str, kind: type) -> list[Any]:
    value = metadata.get(key)
    if not isinstance(value, list) or not value or not all(type(item) is kind for item in value):
        found = "nothing" if value is None else f"{value!r:.40}"
        raise RzooError(f"{key} must be a list of {kind.__name__}, found {found}", field=key)
    return value


def _beside(metadata: dict[str, Any], key: str, kind: type, tokens: list[str]) -> list[Any]:
    """A list with one entry a token; an empty one where the file has none."""
    values = _list(metadata, key, kind) if key in metadata else []
    if values and len(values) != len(tokens):
        raise RzooError(f"{key} has {len(values)} entries for {len(tokens)} tokens", field=key, value=len(values))
    return values


def _merges(metadata: dict[str, Any]) -> list[tuple[str, str]]:
    key = "tokenizer.ggml.merges"
    merges = []
    for merge in _list(metadata, key, str):
        left, space, right = merge.partition(" ")
        if not space:
            raise RzooError(f"{key} holds {merge!r}, which is no pair of tokens", field=key, value=merge)
        merges.append((left, right))
    return merges
