"""How families write a conversation, and the words that switch thinking."""

import pytest
from hypothesis import given, strategies as st

from rzoo.chat import encode_chat, render
from rzoo.core import RzooError
from rzoo.formats import TEMPLATES, THINKING, family_of, split_tool_calls, thinking_of, with_thinking
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
LLAMA3 = "<|start_header_id|>{}<|end_header_id|>\n\n{}<|eot_id|>"
ASSISTANT = "<|start_header_id|>assistant<|end_header_id|>\n\n"


def llama3(answer):
    turns = (("system", "Be brief."), ("user", "hi"), ("assistant", answer), ("user", "1+1?"))
    return "<B>" + "".join(LLAMA3.format(*turn) for turn in turns) + ASSISTANT


RENDERED = {
    "llama3": llama3("<think>\nA greeting.\n</think>\n\nHello."),
    "nemotron": llama3("Hello."),
    "chatml": (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nA greeting.\n</think>\n\nHello.<|im_end|>\n"
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    ),
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


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_list_of_tools_is_refused_and_not_left_out(name):
    with pytest.raises(RzooError, match="no place for a list of tools"):
        render(TEMPLATES[name], TURNS, tools=[{"name": "f"}])


def test_chatml_and_llama_3_write_calls_as_json():
    named = {"type": "function", "function": {"name": "f", "arguments": {"a": "é"}}}
    turns = [{"role": "assistant", "content": "", "tool_calls": [named]}, *TOOLS[2:4]]
    json_call = '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>'
    results = "".join(f"\n<tool_response>\n{result}\n</tool_response>" for result in ("R1", "R2"))
    assert render(TEMPLATES["chatml"], turns, add_generation_prompt=False) == (
        f"<|im_start|>assistant\n{json_call}<|im_end|>\n<|im_start|>user{results}<|im_end|>\n"
    )
    assert render(TEMPLATES["llama3"], turns, add_generation_prompt=False) == "".join(
        LLAMA3.format(*turn)
        for turn in (
            ("assistant", '{"name": "f", "parameters": {"a": "é"}}'),
            ("ipython", "R1"),
            ("ipython", "R2"),
        )
    )
    two = [{"role": "assistant", "content": "", "tool_calls": [named, named]}]
    with pytest.raises(RzooError, match="one tool call in a turn"):
        render(TEMPLATES["llama3"], two)


FAMILIES = [
    ({"<|eot_id|>", "<|end_of_text|>"}, set(), False, "llama3"),
    ({"<|eot_id|>"}, set(), True, "nemotron"),
    ({"<|im_end|>"}, {"<|im_start|>"}, False, "chatml"),
    ({"<｜end▁of▁sentence｜>"}, {"<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"}, False, "deepseek-r1"),
    ({"<｜end▁of▁sentence｜>"}, {"<｜User｜>", "<｜Assistant｜>"}, False, None),
    ({"<|end_of_text|>"}, {"<|eot_id|>", "<|start_header_id|>"}, False, None),  # a base model
    (set(), set(), True, None),
]


@pytest.mark.parametrize(("stops", "added", "nemotron", "family"), FAMILIES)
def test_a_family_is_known_by_what_ends_its_turns(stops, added, nemotron, family):
    assert family_of(stops, added, nemotron=nemotron) == family


ENDS = {  # of the header of an answer, and of its turn
    "deepseek-r1": ("<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
    "deepseek-v3.1": ("<｜Assistant｜></think>", "<｜end▁of▁sentence｜>"),
    "chatml": ("<|im_start|>assistant\n", "<|im_end|>\n"),
    "llama3": (ASSISTANT, "<|eot_id|>"),
}


@pytest.mark.parametrize("name", ENDS)
def test_calls_read_from_an_answer_are_written_by_the_template_as_they_were(name):
    arguments = '{"a": "x < 1"}' if name.startswith("deepseek") else {"a": [1, "}</b>"]}
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    calls = [call] if name == "llama3" else [call, call]
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    written = render(TEMPLATES[name], [message], add_generation_prompt=False)
    header, end = ENDS[name]
    text, found = split_tool_calls(written.removeprefix(header).removesuffix(end))
    assert found == calls
    assert not text.strip()


LEFT_AS_TEXT = [
    "",
    "a <tool_call> b",
    "<tool_call>{broken}</tool_call> after",
    '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
    '{"name": "x", "parameters": {}, "more": 1}',
    '{"name": "x"}',
    "[]",
    "<TOOLCALL>[]</TOOLCALL>",
    "<｜tool▁calls▁begin｜>words<｜tool▁calls▁end｜>",
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
    "<tool_call>" + "[" * 100_000 + "</tool_call>",
]


@pytest.mark.parametrize("answer", LEFT_AS_TEXT, ids=range(len(LEFT_AS_TEXT)))
def test_what_is_no_call_stays_in_the_text(answer):
    assert split_tool_calls(answer) == (answer, [])


@given(pieces=st.lists(st.sampled_from(["a", "<tool_call>", "</tool_call>", '{"name": "f", "arguments": {}}', "\n"])))
def test_no_text_around_calls_is_lost(pieces):
    answer = "".join(pieces)
    text, calls = split_tool_calls(answer)
    assert text.count("a") + sum(str(call).count("'arguments'") for call in calls) * 2 == answer.count("a")


def test_nemotron_writes_a_list_of_calls():
    text, calls = split_tool_calls('Now: <TOOLCALL>[{"name": "f", "arguments": {"a": 1}}]</TOOLCALL>!')
    assert text == "Now: !"
    assert calls == [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]


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
    (TEMPLATES["nemotron"], "detailed"),
    (TEMPLATES["llama3"], None),
    (None, None),
]


@pytest.mark.parametrize(("template", "kind"), KINDS)
def test_a_template_tells_how_its_model_thinks(template, kind):
    assert thinking_of(template) == kind
