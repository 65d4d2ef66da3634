"""How families write a conversation and tool calls, and how each is told to think: facts in tables.

TEMPLATES serve checkpoints that bring no chat template of their own (`family_of` says which), and tests; they are
written from the formats that the models' papers and cards describe. THINKING says by which words a model's thinking is
switched on and off. `split_tool_calls` reads the calls in an answer.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rzoo.core import RzooError

# A list of tools that vanished without a word would be worse than none.
_NO_TOOLS = (
    "{% if tools %}{{ raise_exception('this format has no place for a list of tools: describe them in a message') }}"
    "{% endif %}"
)
# The parts that the DeepSeek templates share. A template writes BOS itself; there is no space or newline between parts.
_SYSTEM = (
    _NO_TOOLS + "{{ bos_token }}"
    "{% set ns = namespace(system=[], after_tool=false) %}"
    "{% for m in messages %}{% if m.role == 'system' %}"
    "{% set ns.system = ns.system + [m.content] %}{% endif %}{% endfor %}"
    "{{ ns.system | join('\n\n') }}"
)
_TOOL_RESULT = (
    "{% if not ns.after_tool %}<｜tool▁outputs▁begin｜>{% endif %}{% set ns.after_tool = true %}"
    "<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>"
    "{% if loop.last or loop.nextitem.role != 'tool' %}<｜tool▁outputs▁end｜>{% endif %}"
)
_ARGUMENTS = "{{ call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}"
_CALL_FENCED = (
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ call.function.name }}\n"
    "```json\n" + _ARGUMENTS + "\n```<｜tool▁call▁end｜>"
)
_CALL_PLAIN = "<｜tool▁call▁begin｜>{{ call.function.name }}<｜tool▁sep｜>" + _ARGUMENTS + "<｜tool▁call▁end｜>"


def _deepseek(*, past: str, opening: str, call: str, content: str = "m.content") -> str:
    """past: between <｜Assistant｜> and a past answer; opening: before the answer to come; content: a past one."""
    return (
        _SYSTEM + "{% for m in messages %}"
        "{% if m.role == 'user' %}{% set ns.after_tool = false %}<｜User｜>{{ m.content }}"
        "{% elif m.role == 'assistant' %}"
        "{% if not ns.after_tool %}<｜Assistant｜>" + past + "{% endif %}{% set ns.after_tool = false %}"
        "{{ " + content + " if m.content else '' }}"
        "{% if m.tool_calls %}<｜tool▁calls▁begin｜>"
        "{% for call in m.tool_calls %}" + call + "{% endfor %}<｜tool▁calls▁end｜>{% endif %}"
        "<｜end▁of▁sentence｜>"
        "{% elif m.role == 'tool' %}" + _TOOL_RESULT + "{% endif %}{% endfor %}"
        "{% if add_generation_prompt and not ns.after_tool %}<｜Assistant｜>" + opening + "{% endif %}"
    )


# R1 and V3.1 drop what an earlier turn thought: all up to its last </think>.
_ANSWER = "m.content.split('</think>')[-1]"


def _llama3(content: str, note: str = "") -> str:
    """content: an expression for the text of the message m."""
    header = "<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n"
    return (
        note + _NO_TOOLS + "{{ bos_token }}{% for m in messages %}" + header + "{{ (" + content + ") | trim }}"
        "{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}"
        "{{ raise_exception('Llama 3 writes one tool call in a turn') }}{% endif %}"
        "{% set call = m.tool_calls[0].function %}"
        '{"name": {{ call.name | tojson }}, "parameters": '
        "{{ call.arguments if call.arguments is string else call.arguments | tojson }}}{% endif %}"
        "<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    )


_CHATML = (
    _NO_TOOLS + "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.first or loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n' }}<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}{% if m.content or not loop.first %}{{ '\n' }}{% endif %}"
    '<tool_call>\n{"name": {{ call.function.name | tojson }}, "arguments": ' + _ARGUMENTS + "}\n</tool_call>"
    "{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

TEMPLATES: dict[str, str] = {
    "llama3": _llama3("m.content or ''"),
    # The comment is for `thinking_of`: the words that switch thinking are a system message.
    "nemotron": _llama3(
        "(m.content or '').split('</think>')[-1] if m.role == 'assistant' else m.content",
        "{# detailed thinking on, detailed thinking off #}",
    ),
    "chatml": _CHATML,
    "deepseek-v3": _deepseek(past="", opening="", call=_CALL_FENCED),
    # R1 as first published, and R1-0528: the model opens <think> itself.
    "deepseek-r1": _deepseek(past="", opening="", call=_CALL_FENCED, content=_ANSWER),
    # R1's later revision: the prompt opens <think>, so that the output has only the closing tag.
    "deepseek-r1-opened": _deepseek(past="", opening="<think>\n", call=_CALL_FENCED, content=_ANSWER),
    "deepseek-v3.1": _deepseek(
        past="</think>",
        opening="{% if thinking is defined and thinking %}<think>{% else %}</think>{% endif %}",
        call=_CALL_PLAIN,
        content=_ANSWER,
    ),
}

# What ends a turn → the format of which it is the end. A base model often has the token, but does not stop at it.
_TURN_ENDS = {"<|eot_id|>": "llama3", "<|im_end|>": "chatml", "<｜end▁of▁sentence｜>": "deepseek-r1"}


def family_of(stops: Collection[str], added: Collection[str], *, nemotron: bool = False) -> str | None:
    """The entry of TEMPLATES for a checkpoint without a template; None for one that was not tuned to converse.

    stops: texts of the tokens that end an answer; added: of all that the tokenizer treats as units; nemotron: whether
    the architecture is Nemotron's, which writes as Llama 3 does.
    """
    family = next((family for end, family in _TURN_ENDS.items() if end in stops), None)
    if family == "deepseek-r1":  # DeepSeek's base models stop at the same token, but do not think
        return family if {"<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"} <= set(added) else None
    return "nemotron" if family == "llama3" and nemotron else family


@dataclass(frozen=True)
class Switch:
    """How thinking is switched. on, off: the system turn that says so (None: nothing to say).

    variable: the template reads `thinking` itself. opened: the words in which the prompt ends when it is to think;
    such a model always thinks.
    """

    description: str
    on: str | None = None
    off: str | None = None
    variable: bool = False
    opened: str | None = None


THINKING: dict[str, Switch] = {
    "detailed": Switch(
        'system turn "detailed thinking on" or "detailed thinking off"; other instructions go into the user turn',
        on="detailed thinking on",
        off="detailed thinking off",
    ),
    "no_think": Switch('thinks unless the system turn holds "/no_think"', off="/no_think"),
    "template": Switch("the template's variable `thinking`: the answer begins with <think> or </think>", variable=True),
    "always": Switch("always thinks; the answer is made to begin with <think>", opened="<think>\n"),
}


def thinking_of(template: str | None) -> str | None:
    """The entry of THINKING that a chat template belongs to, or None for a model without thinking."""
    if template is None:
        return None
    if "detailed thinking" in template:
        return "detailed"
    if "/no_think" in template:
        return "no_think"
    if re.search(r"(?<![-<\w/])thinking(?![-\w])", template) and "</think>" in template:
        return "template"
    return "always" if "<think>" in template or "</think>" in template else None


@dataclass(frozen=True)
class Asked:
    """A conversation with the wish to think or not in it. suffix: text after the template's generation prompt."""

    messages: list[Any]
    variables: dict[str, Any]
    opening: str = ""


def with_thinking(kind: str | None, messages: Sequence[Any], thinking: bool | None) -> Asked:
    """`messages` with the words that switch thinking on or off in a model of this kind (None: as the model comes).

    Raises RzooError where the model has no such switch.
    """
    asked = Asked(list(messages), {})
    if thinking is None:
        return asked
    if kind is None:
        raise RzooError(
            "thinking: this model has no thinking mode", field="thinking", value=thinking, fix="leave it out"
        )
    switch = THINKING[kind]
    if switch.variable:
        return Asked(asked.messages, {"thinking": thinking})
    if switch.opened is not None:
        if not thinking:
            raise RzooError("thinking: this model always thinks", field="thinking", value=False, fix="leave it out")
        return Asked(asked.messages, {}, switch.opened)
    words = switch.on if thinking else switch.off
    return asked if words is None else Asked(_with_system(asked.messages, words, alone=switch.on is not None), {})


def _with_system(messages: list[Any], words: str, *, alone: bool) -> list[Any]:
    """`words` as the system turn. alone: it holds nothing else, and its old text goes before the first user's."""
    given = [m for m in messages if isinstance(m, Mapping) and m.get("role") == "system"]
    rest = [m for m in messages if not (isinstance(m, Mapping) and m.get("role") == "system")]
    said = "\n\n".join(str(m.get("content", "")) for m in given)
    if not alone:
        return [{"role": "system", "content": f"{words}\n\n{said}" if said else words}, *rest]
    if said and rest and isinstance(rest[0], Mapping):
        rest[0] = {**rest[0], "content": f"{said}\n\n{rest[0].get('content', '')}"}
    return [{"role": "system", "content": words}, *rest]


# How a block of calls begins → how it ends: DeepSeek, then Hermes (ChatML models), then Nemotron.
_BLOCKS = {
    "<｜tool▁calls▁begin｜>": "<｜tool▁calls▁end｜>",
    "<tool_call>": "</tool_call>",
    "<TOOLCALL>": "</TOOLCALL>",
}
_OPENING = re.compile("|".join(map(re.escape, _BLOCKS)))
_DEEPSEEK_CALLS = re.compile(
    r"<｜tool▁call▁begin｜>([^<]*)<｜tool▁sep｜>((?:(?!<｜tool▁call▁).)*)<｜tool▁call▁end｜>", re.DOTALL
)
_FENCED = re.compile(r"([^\n`]+)\n```json\n(.*)\n```", re.DOTALL)


def split_tool_calls(answer: str) -> tuple[str, list[dict[str, Any]]]:
    """(text, calls): the calls in an answer as a message's `tool_calls` holds them, and the text around them.

    Nothing is lost: a block that is cut short or that is not understood stays in the text as it was. DeepSeek's
    arguments are the text that the model wrote, which its template writes again, the others' are JSON objects. Llama 3
    marks no call, so an answer that is nothing but {"name": …, "parameters": {…}} is one.
    """
    if (whole := _json_calls(answer, "parameters")) is not None:
        return "", whole
    kept: list[str] = []
    calls: list[dict[str, Any]] = []
    position = 0
    while opening := _OPENING.search(answer, position):
        closing = _BLOCKS[opening[0]]
        end = answer.find(closing, opening.end())
        if end < 0:
            break
        block = answer[opening.end() : end]
        found = _deepseek_calls(block) if "｜" in closing else _json_calls(block, "arguments")
        kept.append(answer[position : opening.start()] + ("" if found else opening[0] + block + closing))
        calls += found or []
        position = end + len(closing)
    return "".join([*kept, answer[position:]]), calls


def _deepseek_calls(block: str) -> list[dict[str, Any]] | None:
    """The calls of a block of DeepSeek's, R1's with a fence or V3.1's without; None where it holds anything else."""
    calls = []
    for name, arguments in _DEEPSEEK_CALLS.findall(block):
        fenced = _FENCED.fullmatch(arguments) if name == "function" else None
        calls.append(_call(*fenced.groups()) if fenced else _call(name, arguments))
    return calls if calls and not _DEEPSEEK_CALLS.sub("", block).strip() else None


def _json_calls(block: str, arguments: str) -> list[dict[str, Any]] | None:
    """The calls of a JSON object, or of a list of them, whose arguments stand under that key; None for other text."""
    if block.lstrip()[:1] not in ("{", "["):
        return None
    try:
        value = json.loads(block)
    except (ValueError, RecursionError):
        return None
    items = value if isinstance(value, list) else [value]
    if not items or not all(_is_call(item, arguments) for item in items):
        return None
    return [_call(item["name"], item[arguments]) for item in items]


def _is_call(item: Any, arguments: str) -> bool:
    return (
        isinstance(item, dict)
        and item.keys() - {"type"} == {"name", arguments}
        and isinstance(item["name"], str)
        and isinstance(item[arguments], dict)
    )


def _call(name: str, arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}
