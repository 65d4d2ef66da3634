"""How families write a conversation, and how each is told to think: facts in tables.

TEMPLATES serve checkpoints that bring no chat template of their own, and tests; they are
written from the formats that the models' papers and cards describe. THINKING says by which words a model's thinking is
switched on and off.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rzoo.core import RzooError

# The parts that the DeepSeek templates share. A template writes BOS itself; there is no space or newline between parts.
_SYSTEM = (
    "{{ bos_token }}"
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

TEMPLATES: dict[str, str] = {
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
