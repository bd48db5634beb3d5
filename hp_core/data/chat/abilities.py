"""What a chat template does with the parts of a conversation: what it would leave out is refused, not lost."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hp_core.data.chat.conversation import Conversation, RowError
from hp_core.data.chat.template import ChatTemplate, TemplateError, Turn

_WORD = "Zq0wordqZ"
_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": _WORD,
        "description": "finds a page",
        "parameters": {"type": "object", "properties": {"page": {"type": "string", "description": "a page"}}},
    },
}
_ASK: Turn = {"role": "user", "content": "a question"}
_ANSWER: Turn = {"role": "assistant", "content": "an answer"}


@dataclass(frozen=True)
class Abilities:
    """What a template renders beside users' and assistants' texts.

    `roles` are those of system, developer and tool turns that it renders. `arguments` says how it takes the arguments
    of a tool call: as an `object`, as its JSON `text`, or not at all (None).
    """

    roles: frozenset[str]
    tools: bool
    reasoning: bool
    arguments: str | None

    @classmethod
    def of(cls, template: ChatTemplate) -> Abilities:
        """Found by rendering conversations with a word whose place is known."""

        def renders(*turns: Turn, tools: Sequence[Mapping[str, Any]] | None = None) -> bool:
            try:
                return _WORD in template.render(turns, tools).text
            except TemplateError:
                return False

        roles = {role for role in ("system", "developer") if renders({"role": role, "content": _WORD}, _ASK, _ANSWER)}
        arguments = next(
            (kind for kind in ("object", "text") if renders(_ASK, _call(kind, _WORD), _RESULT, _ANSWER)), None
        )
        called = _ANSWER if arguments is None else _call(arguments, "find")
        if renders(_ASK, called, {**_RESULT, "content": _WORD}, _ANSWER):
            roles.add("tool")
        reasoning = renders(_ASK, {**_ANSWER, "reasoning_content": _WORD})
        return cls(frozenset(roles), renders(_ASK, _ANSWER, tools=[_TOOL]), reasoning, arguments)

    def turns(self, conversation: Conversation) -> list[dict[str, Any]]:
        """The messages as the template takes them. Raises `RowError` for what it would leave out."""
        if conversation.tools is not None and not self.tools:
            raise RowError("tools", "the chat template doesn't render tools")
        turns: list[dict[str, Any]] = []
        for message in conversation.messages:
            if message.role not in ("user", "assistant") and message.role not in self.roles:
                raise RowError(message.path, f"the chat template doesn't render turns of role {message.role!r}")
            turn = message.for_template()
            if "reasoning_content" in turn and not self.reasoning:
                raise RowError(message.path, "the chat template doesn't render an answer's reasoning")
            if "tool_calls" in turn:
                if self.arguments is None:
                    raise RowError(message.path, "the chat template doesn't render calls of tools")
                if self.arguments == "text":
                    turn["tool_calls"] = [_with_text(call) for call in turn["tool_calls"]]
            turns.append(turn)
        return turns


_RESULT: Turn = {"role": "tool", "content": "a page", "name": "find", "tool_call_id": "call00001"}


def _call(kind: str, name: str) -> Turn:
    call = {"type": "function", "id": "call00001", "function": {"name": name, "arguments": {"page": "one"}}}
    return {"role": "assistant", "tool_calls": [call if kind == "object" else _with_text(call)]}


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    text = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}
