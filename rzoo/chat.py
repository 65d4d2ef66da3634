"""Messages to a prompt by the model's own template, and a model's reasoning apart from its answer.

A chat template is a program out of a downloaded file: it is run by `rzoo.template` within bounds. `encode_chat` is the
one way from messages to ids. What a user writes cannot become a control token there: text in the messages that spells
an added token (a turn marker, <think>) is sealed before rendering, and becomes ordinary tokens. Every other id equals
what tokenizing the rendered prompt in one piece gives.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rzoo.core import RzooError
from rzoo.template import render_template
from rzoo.tokenizer import Tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool", "ipython", "function")
MAX_DEPTH = 32  # of lists and objects inside a message
THINK, END_THINK = "<think>", "</think>"


def render(
    template: str,
    messages: Sequence[Any],
    *,
    add_generation_prompt: bool = True,
    bos_token: str = "",
    eos_token: str = "",
    tools: Sequence[Any] | None = None,
    **variables: Any,
) -> str:
    """The prompt that the Jinja `template` makes of `messages`; `variables` are handed to it (enable_thinking=False).

    Raises RzooError for a message that is malformed, and for a template that refuses, is broken or wants too much.
    """
    context = {"messages": _checked(messages), "tools": tools, **variables}
    context = {name: _mapped(value, name, lambda text: text) for name, value in context.items()}
    own = {"add_generation_prompt": add_generation_prompt, "bos_token": bos_token, "eos_token": eos_token}
    return render_template(template, {**context, **own})


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Any],
    *,
    template: str | None = None,
    add_generation_prompt: bool = True,
    tools: Sequence[Any] | None = None,
    **variables: Any,
) -> list[int]:
    """The ids of the prompt that `template` (the tokenizer's own by default) makes of `messages`.

    Begins with exactly one BOS where the template writes one or the model expects one. Control tokens come from the
    template alone; the exception is <think> and </think> in assistant messages, which are the model's own words and
    which templates look for. Raises RzooError as `render` does, and when there is no template.
    """
    template = tokenizer.chat_template if template is None else template
    if template is None:
        fix = "give one as template=, or encode plain text"
        raise RzooError("the tokenizer has no chat template", field="template", fix=fix)
    seals = _Seals(tokenizer)
    context = {"messages": _checked(messages), "tools": tools, **variables}
    sealed = {name: _mapped(value, name, seals.seal) for name, value in context.items() if name != "messages"}
    sealed["messages"] = [
        _mapped(message, f"messages[{index}]", seals.seal_reply if message["role"] == "assistant" else seals.seal)
        for index, message in enumerate(context["messages"])
    ]
    prompt = render(
        template,
        **sealed,
        add_generation_prompt=add_generation_prompt,
        bos_token=_token_text(tokenizer, tokenizer.bos_id),
        eos_token=_token_text(tokenizer, next(iter(tokenizer.eos_ids), None)),
    )
    return _one_bos(tokenizer, seals.encode(prompt))


def split_reasoning(text: str, *, opened: bool) -> tuple[str | None, str]:
    """(reasoning, answer) of what a model wrote; `opened` says that its prompt ended in an open <think>.

    Four cases: <think>…</think>answer; …</think>answer after an opened prompt; no closing tag (cut short: all is
    reasoning); no tags and not opened (all is the answer, and the reasoning is None). Newlines next to a tag are
    dropped.
    """
    splitter = ReasoningSplitter(opened=opened)
    (reasoning, answer), (last_reasoning, last_answer) = splitter.push(text), splitter.finish()
    return reasoning + last_reasoning if splitter.thought else None, answer + last_answer


class ReasoningSplitter:
    """`split_reasoning` of text that comes in pieces, wherever these cut a tag: all that it gives, joined, is the same.

    Holds back what may yet be a tag, and the newlines before it. `thought`: whether any reasoning was begun.
    """

    def __init__(self, *, opened: bool):
        self.thought = opened
        self._held = ""
        self._read = self._undecided

    def push(self, text: str) -> tuple[str, str]:
        """The (reasoning, answer) that became certain with `text`."""
        text, self._held = self._held + text, ""
        return self._read(text)

    def finish(self) -> tuple[str, str]:
        """The (reasoning, answer) that was still held back at the end."""
        text, self._held = self._held, ""
        return (text.lstrip("\n") if self._read == self._undecided else text, "") if self.thought else ("", text)

    def _undecided(self, text: str) -> tuple[str, str]:
        body = text.lstrip()
        if len(body) < len(THINK) and THINK.startswith(body):
            self._held = text
            return "", ""
        tagged = body.startswith(THINK)
        self.thought = self.thought or tagged
        self._read = self._before_reasoning if self.thought else self._plain
        return self._read(body.removeprefix(THINK) if tagged else text)

    def _before_reasoning(self, text: str) -> tuple[str, str]:
        if text := text.lstrip("\n"):
            self._read = self._reasoning
            return self._reasoning(text)
        return "", ""

    def _reasoning(self, text: str) -> tuple[str, str]:
        reasoning, closed, answer = text.partition(END_THINK)
        if closed:
            self._read = self._before_answer
            return reasoning.rstrip("\n"), self._before_answer(answer)[1]
        tag = next((size for size in range(len(END_THINK) - 1, 0, -1) if text.endswith(END_THINK[:size])), 0)
        certain = text[: len(text) - tag].rstrip("\n")
        self._held = text[len(certain) :]
        return certain, ""

    def _before_answer(self, text: str) -> tuple[str, str]:
        if text := text.lstrip("\n"):
            self._read = self._plain
        return "", text

    def _plain(self, text: str) -> tuple[str, str]:
        return "", text


def reply(text: str, *, opened: bool) -> dict[str, Any]:
    """The message that holds what a model wrote, for the next turn: reasoning between both of its tags.

    With the tag that the prompt had opened put in front, a template that keeps reasoning renders the very prompt and
    answer again, and one that drops it finds all of it.
    """
    written = text.lstrip().startswith(THINK) or not opened
    return {"role": "assistant", "content": text if written else f"{THINK}\n{text}"}


def opens_reasoning(prompt: str) -> bool:
    """Whether `prompt` ends in a <think> that the model has yet to close."""
    return prompt.rstrip().endswith(THINK)


def _checked(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Copies of `messages` with their content as one text; refuses what is no message, by index and field."""
    if not messages:
        raise RzooError("messages is empty", field="messages", fix="give at least one {'role': …, 'content': …}")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RzooError(f"{where} must be an object, found {type(message).__name__}", field=where, value=message)
    role = message.get("role")
    if role not in ROLES:
        fix = f"known: {', '.join(ROLES)}"
        raise RzooError(f"{where}.role ({role!r:.40}) is unknown", field=f"{where}.role", value=role, fix=fix)
    content = _content(message.get("content"), f"{where}.content")
    if content is None and role != "assistant":
        raise RzooError(f"{where}.content is missing", field=f"{where}.content")
    return {**message, "content": content}


def _content(content: Any, where: str) -> str | None:
    """The text of a message. Parts are put together here, so that two of them cannot spell a control token."""
    if content is None or isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        if not (isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            words = f"{where} must be text or a list of {{'type': 'text', 'text': …}}, found {part!r:.60}"
            raise RzooError(words, field=where, value=part)
    return "".join(part["text"] for part in parts)


def _mapped(value: Any, where: str, change: Callable[[str], str], depth: int = 0) -> Any:
    """A copy of the JSON data `value` with `change` applied to every text in it, keys too."""
    if isinstance(value, str):
        return change(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping) and depth < MAX_DEPTH and all(isinstance(key, str) for key in value):
        return {change(key): _mapped(item, f"{where}.{key}", change, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple) and depth < MAX_DEPTH:
        return [_mapped(item, f"{where}[{index}]", change, depth + 1) for index, item in enumerate(value)]
    words = f"{where:.200} must be JSON data no deeper than {MAX_DEPTH} levels, found {type(value).__name__}"
    raise RzooError(words, field=where, value=value)


class _Seals:
    """Replaces what spells an added token by a mark that nobody can guess, and puts it back as ordinary tokens.

    A mark goes through a template as the text did (trimmed, split, quoted, dropped), and only the marked text is kept
    from the template's eyes, so that it treats the rest of a message as it would.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._nonce = secrets.randbits(64)
        self._texts: list[str] = []
        self._mark = re.compile(rf"\ue000{self._nonce}\.(\d+)\ue001")

    def seal(self, text: str, kept: tuple[str, ...] = ()) -> str:
        """`text` with marks for all added tokens but those `kept` and runs of spaces, which control nothing."""
        pieces, position = [], 0
        for _, start, end in self._added_tokens(text):
            if text[start:end].strip() not in ("", *kept):
                pieces += [text[position:start], f"\ue000{self._nonce}.{len(self._texts)}\ue001"]
                self._texts.append(text[start:end])
                position = end
        return "".join([*pieces, text[position:]])

    def seal_reply(self, text: str) -> str:
        """As `seal`, but for a message of the model."""
        return self.seal(text, (THINK, END_THINK))

    def encode(self, prompt: str) -> list[int]:
        """The ids of `prompt`, which is cut at the control tokens that the template wrote and nowhere else."""
        if not self._texts:
            return self._tokenizer.encode(prompt)
        ids, position = [], 0
        for number, start, end in self._added_tokens(prompt):
            ids += [*self._plain(prompt[position:start]), number]
            position = end
        return ids + self._plain(prompt[position:])

    def _plain(self, text: str) -> list[int]:
        unsealed = self._mark.sub(lambda match: self._texts[int(match[1])], text)
        return self._tokenizer.encode(unsealed, parse_special=False)

    def _added_tokens(self, text: str) -> list[tuple[int, int, int]]:
        added = self._tokenizer.added
        return [span for span in self._tokenizer.spans(text) if span[0] in added]


def _token_text(tokenizer: Tokenizer, number: int | None) -> str:
    return "" if number is None else tokenizer.token_bytes(number).decode("utf-8", "replace")


def _one_bos(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """`ids` with one BOS in front if they begin with any, or if the model expects one."""
    bos = tokenizer.bos_id
    if bos is None or (ids[:1] != [bos] and not tokenizer.add_bos_token):
        return ids
    first = next((index for index, number in enumerate(ids) if number != bos), len(ids))
    return [bos, *ids[first:]]
