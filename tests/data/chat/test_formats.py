from __future__ import annotations

import json
from typing import Any

import pytest

from hp_core.data.chat.conversation import Conversation, RowError
from hp_core.data.chat.formats import ConversationFormat, FormatName, named_format
from hp_core.data.chat.mapping import mapped_format
from hp_core.errors import ArgumentError


def read(name: FormatName, **fields: Any) -> Conversation:
    return named_format(name)(fields)


def pairs(conversation: Conversation) -> list[tuple[str, str | None]]:
    return [(one.role, one.content) for one in conversation.messages]


ASK, ANSWER = {"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}
CALL = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"page": 1}'}}
TOOL = {"type": "function", "function": {"name": "find", "parameters": {}}}


def test_messages() -> None:
    turns = [
        {"role": "system", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "short"}]},
        {"role": "user", "content": "a?", "name": "Ann", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "weight": 0.5},
        {"role": "tool", "content": "1", "tool_call_id": "c1"},
        {"role": "assistant", "content": "b", "train": False, "reasoning": "hm"},
    ]
    conversation = read("messages", messages=turns, tools=[TOOL], more="not read")
    assert pairs(conversation) == [
        ("system", "be short"),
        ("user", "a?"),
        ("assistant", None),
        ("tool", "1"),
        ("assistant", "b"),
    ]
    called = conversation.messages[2]
    assert called.extras["tool_calls"][0]["function"] == {"name": "find", "arguments": {"page": 1}}
    assert (called.weight, called.train) == (0.5, None)
    assert conversation.messages[4].train is False
    assert conversation.messages[1].for_template() == {"role": "user", "content": "a?", "name": "Ann"}
    assert conversation.messages[4].for_template()["reasoning_content"] == "hm"
    assert conversation.tools == [TOOL]


def test_lists_may_be_written_as_json_text() -> None:
    plain = read("messages", messages=[ASK, ANSWER], tools=[TOOL])
    assert read("messages", messages=json.dumps([ASK, ANSWER]), tools=json.dumps([TOOL])) == plain
    assert read("messages", messages=[ASK, ANSWER], tools="").tools is None


def test_sharegpt() -> None:
    turns = [
        {"from": "human", "value": "a?"},
        {"from": "function_call", "value": '{"name": "find", "arguments": {"page": 1}}'},
        {"from": "observation", "value": "1"},
        {"from": "gpt", "value": "b", "weight": 1},
    ]
    conversation = read("sharegpt", conversations=turns, system="be short", tools=json.dumps([TOOL["function"]]))
    assert pairs(conversation) == [
        ("system", "be short"),
        ("user", "a?"),
        ("assistant", None),
        ("tool", "1"),
        ("assistant", "b"),
    ]
    assert conversation.messages[2].extras["tool_calls"][0]["function"]["name"] == "find"
    assert conversation.tools == [TOOL["function"]]
    assert conversation.messages[1].path == "conversations[0]"
    for system in (None, ""):
        assert read("sharegpt", conversations=turns, system=system).messages[0].role == "user"


def test_one_thought_may_stand_under_several_names() -> None:
    for thoughts in ({"reasoning": "hm", "thinking": "hm"}, {"reasoning_content": "", "thinking": "hm"}):
        answer = read("messages", messages=[ASK, {**ANSWER, **thoughts}]).messages[1]
        assert answer.extras == {"reasoning_content": "hm"}


def test_alpaca() -> None:
    full = read("alpaca", instruction="add", input="1 and 2", output="3", system="count", history=[["a?", "b"]])
    assert pairs(full) == [
        ("system", "count"),
        ("user", "a?"),
        ("assistant", "b"),
        ("user", "add\n1 and 2"),
        ("assistant", "3"),
    ]
    for more in ({}, {"input": ""}, {"input": None, "system": None, "history": None}):
        assert pairs(read("alpaca", instruction="add", output="", **more)) == [("user", "add"), ("assistant", "")]


def test_prompt_completion() -> None:
    assert pairs(read("prompt_completion", prompt="a?", completion="b")) == [("user", "a?"), ("assistant", "b")]
    conversation = read("prompt_completion", prompt=[ASK, ANSWER, ASK], completion=[ANSWER, ASK, ANSWER])
    assert [one.train for one in conversation.messages] == [None, False, None, None, None, None]
    assert [one.path for one in conversation.messages][2:4] == ["prompt[2]", "completion[0]"]


def test_a_mapping_of_turns() -> None:
    made = mapped_format(
        {
            "messages": "dialog",
            "role": "speaker",
            "content": "text",
            "roles": {"bot": "assistant"},
            "system": "ctx",
            "train": "learn",
        }
    )
    turns = [{"speaker": "user", "text": "a?", "mood": "good"}, {"speaker": "bot", "text": "b", "learn": False}]
    conversation = made({"dialog": turns, "ctx": "short"})
    assert pairs(conversation) == [("system", "short"), ("user", "a?"), ("assistant", "b")]
    assert conversation.messages[2].train is False
    assert set(made.fields) == {"dialog", "ctx"}
    with pytest.raises(RowError, match=r"^ctx: the row has no such column"):
        made({"dialog": turns})


def test_a_mapping_of_columns() -> None:
    made = mapped_format({"user": "question", "assistant": "answer", "system": "ctx", "weight": "w"})
    conversation = made({"question": "a?", "answer": "b", "ctx": "", "w": 2})
    assert pairs(conversation) == [("user", "a?"), ("assistant", "b")]
    assert conversation.messages[1].weight == 2
    with pytest.raises(
        RowError, match=r"^answer: the row has no such column; its columns are: question, answr.*'answr'"
    ):
        made({"question": "a?", "answr": "b", "ctx": None, "w": 1})


def test_formats_tell_which_columns_may_be_missing() -> None:
    def told(made: ConversationFormat) -> tuple[set[str], set[str]]:
        return set(made.fields.required), set(made.fields.optional)

    assert told(named_format("messages")) == ({"messages"}, {"tools"})
    assert told(named_format("sharegpt")) == ({"conversations"}, {"system", "tools"})
    assert told(named_format("alpaca")) == ({"instruction", "output"}, {"input", "system", "history"})
    assert told(named_format("prompt_completion")) == ({"prompt", "completion"}, {"tools"})
    assert told(mapped_format({"messages": "m", "tools": "t"})) == ({"m", "t"}, set())
    assert told(mapped_format({"user": "q", "assistant": "a", "weight": "w"})) == ({"q", "a", "w"}, set())


@pytest.mark.parametrize(
    ("mapping", "problem"),
    [
        ({}, "mapping: 'user' is missing; give `user` and `assistant` columns"),
        ({"user": "q"}, "mapping: 'assistant' is missing"),
        ({"user": "q", "assistent": "a"}, "mapping.assistent: unknown key; did you mean 'assistant'"),
        ({"user": "q", "assistant": "a", "role": "r"}, "mapping.role: unknown key"),
        ({"user": "q", "assistant": "q"}, "mapping: the column 'q' is named twice"),
        ({"user": "q", "assistant": 3}, "mapping.assistant: is 3, not the name"),
        ({"messages": "m", "user": "q"}, "mapping.user: unknown key"),
        ({"messages": "m", "role": "x", "content": "x"}, "mapping: the key 'x' of a turn is named twice"),
        ({"messages": "m", "system": "m"}, "mapping: the column 'm' is named twice"),
        ({"messages": "m", "roles": {"bot": "asistant"}}, "mapping.roles.bot: 'asistant' is no role.*'assistant'"),
        ({"messages": "m", "roles": ["bot"]}, "mapping.roles: is .* not a mapping"),
    ],
)
def test_mappings_that_do_not_work_are_refused(mapping: dict[str, Any], problem: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{problem}"):
        mapped_format(mapping)


@pytest.mark.parametrize(
    ("turns", "problem"),
    [
        (None, "messages: is null, not a list"),
        ("a?", "messages: is text that is not JSON"),
        ({"role": "user"}, "messages: is an object, not a list"),
        ([], "messages: the conversation is empty"),
        ([ASK], "messages: the conversation has no assistant turn"),
        ([ANSWER, ASK], r"messages\[0\].role: the conversation begins with an assistant turn"),
        ([{"role": "system", "content": "s"}, ANSWER], r"messages\[1\].role: the conversation begins with an assist"),
        ([{"role": "tool", "content": "s"}, ANSWER], r"messages\[0\].role: the conversation begins with a tool turn"),
        ([ASK, "b"], r"messages\[1\]: is text, not a turn with 'role' and 'content'"),
        ([ASK, {"role": "assistant", "content": None}], r"messages\[1\].content: is null, not text"),
        ([ASK, {"role": "assistant"}], r"messages\[1\].content: is missing; the turn has: role"),
        ([ASK, {"role": "assistant", "contents": "b"}], r"messages\[1\].contents: unknown key; did you mean 'content'"),
        ([ASK, {"content": "b"}], r"messages\[1\].role: is missing; the turn has: content"),
        ([ASK, {"role": "asistant", "content": "b"}], r"messages\[1\].role: is 'asistant'; .*did you mean 'assistant'"),
        ([ASK, {"role": None, "content": "b"}], r"messages\[1\].role: is null, not text"),
        ([ASK, {"role": "assistant", "content": 3}], r"messages\[1\].content: is a number, not text"),
        ([ASK, {"role": "assistant", "content": [{"type": "video"}]}], r"messages\[1\].content\[0\].type: is 'video'"),
        ([ASK, {"role": "assistant", "content": [{"type": "image"}]}], r"messages\[1\].content: an answer can't hold"),
        ([ASK, {"role": "assistant", "content": [{"type": "text"}]}], r"messages\[1\].content\[0\].text: is null"),
        ([{**ASK, "tool_calls": [CALL]}, ANSWER], r"messages\[0\].tool_calls: stands in a turn of role 'user'"),
        ([ASK, {**ANSWER, "tool_calls": [3]}], r"messages\[1\].tool_calls\[0\]: is a number, not a call"),
        (
            [ASK, {**ANSWER, "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            r"messages\[1\].tool_calls\[0\].function.arguments: is text that is not JSON",
        ),
        (
            [ASK, {**ANSWER, "tool_calls": [{"function": {"arguments": {}}}]}],
            r"messages\[1\].tool_calls\[0\].function.name: is null",
        ),
        (
            [ASK, {**ANSWER, "tool_calls": [{**CALL, "kind": 1}]}],
            r"messages\[1\].tool_calls\[0\].kind: is unknown",
        ),
        ([ASK, {**ANSWER, "thinking": 3}], r"messages\[1\].thinking: is a number, not text"),
        (
            [ASK, {**ANSWER, "reasoning": "hm", "thinking": "well"}],
            r"messages\[1\].thinking: is another thought than that under 'reasoning'; a turn has one",
        ),
        ([ASK, {**ANSWER, "weight": 1e300}], r"messages\[1\].weight: is beyond the range of float32"),
        ([ASK, {**ANSWER, "weight": 1e-50}], r"messages\[1\].weight: is 1e-50, which float32 would round to 0"),
        ("[" * 100_000, "messages: is JSON text that is nested too deep"),
        ([{**ASK, "name": 3}, ANSWER], r"messages\[0\].name: is a number, not text"),
        ([{**ASK, "mood": "good"}, ANSWER], r"messages\[0\].mood: unknown key; with a `mapping`"),
    ],
)
def test_faulty_messages_are_placed(turns: Any, problem: str) -> None:
    with pytest.raises(RowError, match=f"^{problem}"):
        read("messages", messages=turns)


@pytest.mark.parametrize(
    ("name", "fields", "problem"),
    [
        ("messages", {"mesages": []}, "messages: the row has no such column; its columns are: mesages; did you mean"),
        ("messages", {"messages": [ASK, ANSWER], "tools": [{}]}, r"tools\[0\]: is a tool without a name"),
        ("messages", {"messages": [ASK, ANSWER], "tools": 3}, "tools: is a number, not a list"),
        ("sharegpt", {"conversations": [{"from": "hunan", "value": ""}]}, r"conversations\[0\].from: is 'hunan'"),
        (
            "sharegpt",
            {"conversations": [{"from": "human", "value": "a"}, {"from": "function_call", "value": "find"}]},
            r"conversations\[1\].value: is text that is not JSON",
        ),
        ("alpaca", {"instruction": "a"}, "output: the row has no such column"),
        ("alpaca", {"instruction": None, "output": "b"}, "instruction: is null, not text"),
        ("alpaca", {"instruction": "a", "output": "b", "history": [["c"]]}, r"history\[0\]: is not a pair"),
        ("prompt_completion", {"prompt": "a"}, "completion: the row has no such column"),
        ("prompt_completion", {"prompt": "a", "completion": []}, "completion: is an empty list"),
        ("prompt_completion", {"prompt": 1, "completion": "b"}, "prompt: is a number, neither text nor a list"),
        ("prompt_completion", {"prompt": "a", "completion": [ASK, ANSWER]}, r"completion\[0\].role: is 'user'"),
    ],
)
def test_faulty_rows_are_placed(name: FormatName, fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(RowError, match=f"^{problem}"):
        named_format(name)(fields)
