"""How families write a conversation, and the words that switch thinking."""

import pytest

from rzoo.chat import encode_chat, render
from rzoo.core import RzooError
from rzoo.formats import TEMPLATES, THINKING, thinking_of, with_thinking
from rzoo.models.presets import PRESETS
from rzoo.tokenizer import Tokenizer

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "<think>\nA greeting.\n</think>\n\nHello."},
    {"role": "user", "content": "1+1?"},
]
START, ANSWER = (
    "<B>Be brief.<｜User｜>hi<｜Assistant｜>",
    "\n\nHello.<｜end▁of▁sentence｜><｜User｜>1+1?<｜Assistant｜>",
)
RENDERED = {
    "deepseek-v3": START + "<think>\nA greeting.\n</think>" + ANSWER,
    "deepseek-r1": START + ANSWER,
    "deepseek-r1-opened": START + ANSWER + "<think>\n",
    "deepseek-v3.1": START + "</think>" + ANSWER + "</think>",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_is_written_as_the_family_does(name):
    assert render(TEMPLATES[name], TURNS, bos_token="<B>") == RENDERED[name]


def test_v3_1_thinks_when_asked():
    prompt = render(TEMPLATES["deepseek-v3.1"], TURNS, bos_token="<B>", thinking=True)
    assert prompt == RENDERED["deepseek-v3.1"].removesuffix("</think>") + "<think>"


def test_several_system_turns_are_joined_by_an_empty_line():
    turns = [{"role": "system", "content": "a"}, {"role": "user", "content": "u"}, {"role": "system", "content": "b"}]
    assert render(TEMPLATES["deepseek-v3"], turns, bos_token="<B>") == "<B>a\n\nb<｜User｜>u<｜Assistant｜>"


CALL = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TOOLS = [
    {"role": "user", "content": "u"},
    {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "R1"},
    {"role": "tool", "content": "R2"},
    {"role": "assistant", "content": "done"},
    {"role": "user", "content": "v"},
]
RESULTS = (
    "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
    "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>R1<｜tool▁output▁end｜>"
    "<｜tool▁output▁begin｜>R2<｜tool▁output▁end｜><｜tool▁outputs▁end｜>done<｜end▁of▁sentence｜><｜User｜>v<｜Assistant｜>"
)


def test_tool_calls_are_written_with_a_fence_by_r1_and_plainly_by_v3_1():
    fenced = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>'
    start = "<B><｜User｜>u<｜Assistant｜>"
    expected = start + "<｜tool▁calls▁begin｜>" + 2 * fenced + RESULTS
    assert render(TEMPLATES["deepseek-r1"], TOOLS, bos_token="<B>") == expected
    plain = '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
    expected = start + "</think><｜tool▁calls▁begin｜>" + 2 * plain + RESULTS + "</think>"
    assert render(TEMPLATES["deepseek-v3.1"], TOOLS, bos_token="<B>") == expected


def test_r1s_prompt_has_the_published_ids(shared):
    tokenizer = Tokenizer.from_file(shared / "deepseek-r1")
    turns = [{"role": "user", "content": "What is 1+1?"}]
    expected = [0, 128803, 3085, 344, 223, 19, 13, 19, 33, 128804, 128798, 201]
    assert encode_chat(tokenizer, turns, template=TEMPLATES["deepseek-r1-opened"]) == expected
    first = encode_chat(tokenizer, turns, template=TEMPLATES["deepseek-r1"])
    assert first + tokenizer.encode("<think>\n") == expected


USER = [{"role": "user", "content": "hi"}]
SWITCHED = [
    ("detailed", True, USER, [{"role": "system", "content": "detailed thinking on"}, *USER]),
    ("detailed", False, USER, [{"role": "system", "content": "detailed thinking off"}, *USER]),
    (
        "detailed",
        True,
        [{"role": "system", "content": "Be brief."}, *USER],
        [{"role": "system", "content": "detailed thinking on"}, {"role": "user", "content": "Be brief.\n\nhi"}],
    ),
    ("no_think", True, USER, USER),
    ("no_think", False, USER, [{"role": "system", "content": "/no_think"}, *USER]),
    (
        "no_think",
        False,
        [{"role": "system", "content": "Be brief."}, *USER],
        [{"role": "system", "content": "/no_think\n\nBe brief."}, *USER],
    ),
]


@pytest.mark.parametrize(("kind", "thinking", "given", "expected"), SWITCHED)
def test_the_words_stand_in_the_right_place(kind, thinking, given, expected):
    before = [dict(m) for m in given]
    asked = with_thinking(kind, given, thinking)
    assert (asked.messages, asked.variables, asked.opening) == (expected, {}, "")
    assert given == before


def test_templates_with_a_variable_get_it_and_r1_gets_its_opening():
    assert with_thinking("template", USER, False).variables == {"thinking": False}
    assert with_thinking("always", USER, True).opening == "<think>\n"
    for kind in (*THINKING, None):
        untouched = with_thinking(kind, USER, None)
        assert (untouched.messages, untouched.variables, untouched.opening) == (USER, {}, "")


def test_what_a_model_cannot_do_is_refused():
    with pytest.raises(RzooError, match="this model has no thinking mode"):
        with_thinking(None, USER, True)
    with pytest.raises(RzooError, match="this model always thinks"):
        with_thinking("always", USER, False)


def test_every_preset_names_known_formats():
    for entry in PRESETS.values():
        assert entry.thinking is None or entry.thinking in THINKING
        assert entry.template is None or entry.template in TEMPLATES


KINDS = [
    ("{% if 'detailed thinking' in x %}", "detailed"),
    ("{% if '/no_think' in x %}", "no_think"),
    (TEMPLATES["deepseek-v3.1"], "template"),
    (TEMPLATES["deepseek-r1-opened"], "always"),
    (TEMPLATES["deepseek-v3"], None),
    (None, None),
]


@pytest.mark.parametrize(("template", "kind"), KINDS)
def test_a_template_tells_how_its_model_thinks(template, kind):
    assert thinking_of(template) == kind
