"""What may be given as a prompt, and its token ids."""

from collections.abc import Mapping, Sequence
from typing import Any

from rzoo.chat import encode_chat, opens_reasoning
from rzoo.core import RzooError
from rzoo.formats import with_thinking
from rzoo.handle import LM


def is_single(prompts: Any) -> bool:
    """Whether this is one prompt (text, ids, messages) and not a list of prompts."""
    if isinstance(prompts, bytes):
        raise RzooError("prompt is bytes: decode them to text first", field="prompt")
    if isinstance(prompts, str):
        return True
    if hasattr(prompts, "ndim"):
        return prompts.ndim == 1
    if not isinstance(prompts, Sequence):
        kind = type(prompts).__name__
        raise RzooError(
            f"prompt must be text, a list of ids, a list of messages, or a list of those; got {kind}", field="prompt"
        )
    return bool(prompts) and all(
        isinstance(p, int) or hasattr(p, "__index__") or isinstance(p, Mapping) for p in prompts
    )


def prompt_ids(lm: LM, prompt: Any, *, raw: bool = False, thinking: bool | None = None) -> list[int]:
    """The token ids of one prompt, as `generate` reads it: exactly one BOS where the model uses one.

    thinking: True or False puts the words that switch it into the conversation (rzoo.formats.THINKING).
    """
    if isinstance(prompt, str):
        needs_text(lm)
        if not prompt.strip():
            raise RzooError("the prompt is empty", field="prompt", fix="give some text")
        if raw or lm.about.template is None:
            ids = lm.tokenizer.encode(prompt, add_bos=lm.tokenizer.add_bos_token)
        else:
            ids = _chat_ids(lm, [{"role": "user", "content": prompt}], thinking)
    elif not isinstance(prompt, Sequence) and not hasattr(prompt, "__array__"):
        raise RzooError(f"a prompt is text, ids or messages; got {type(prompt).__name__}", field="prompt", value=prompt)
    elif len(prompt) and all(isinstance(m, Mapping) for m in prompt):
        needs_text(lm)
        if lm.about.template is None:
            raise RzooError(
                "messages need a chat template and this model has none", field="prompt", fix="give plain text"
            )
        ids = _chat_ids(lm, prompt, thinking)
    else:
        wrong = next((i for i in prompt if not hasattr(i, "__index__")), None)
        if wrong is not None:
            raise RzooError(f"prompt contains {wrong!r}, which is no token id", field="prompt", value=wrong)
        ids = [int(i) for i in prompt]
    check_ids(ids, lm.config.vocab_size)
    return ids


def _chat_ids(lm: LM, messages: Any, thinking: bool | None) -> list[int]:
    asked = with_thinking(lm.about.thinking, messages, thinking)
    ids = encode_chat(lm.tokenizer, asked.messages, template=lm.about.template, **asked.variables)
    if asked.opening and not opens_reasoning(lm.tokenizer.decode(ids[-8:], skip_special=False)):
        ids += lm.tokenizer.encode(asked.opening)
    return ids


def check_ids(ids: Sequence[int], vocab_size: int) -> None:
    """Raises RzooError where there are none, or one that is not in the vocabulary."""
    if not ids:
        raise RzooError("the prompt is empty", field="prompt", fix="give at least one token")
    for i in ids:
        if not 0 <= i < vocab_size:
            raise RzooError(
                f"prompt contains id {i}, outside of the vocabulary 0..{vocab_size - 1}", field="prompt", value=i
            )


def needs_text(lm: LM) -> None:
    """Raises RzooError where the model has no tokenizer."""
    if lm.tokenizer is None:
        raise RzooError(
            f"{lm.about.source} has no tokenizer",
            field="prompt",
            fix="add tokenizer.json to its folder, or give token ids",
        )


def vocabulary(lm: LM) -> int:
    """How many ids stand for tokens: rows past the tokenizer's are padding."""
    return min(lm.config.vocab_size, lm.tokenizer.vocab_size) if lm.tokenizer else lm.config.vocab_size
