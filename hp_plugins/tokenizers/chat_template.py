"""Chat templates as transformers renders them, with nothing in them that changes from day to day."""

from __future__ import annotations

import datetime
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import transformers
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils.chat_template_utils import render_jinja_template

from hp_core.data.chat.template import Rendering, TemplateError, Turn
from hp_core.data.fingerprint import fingerprint
from hp_core.errors import ArgumentError
from hp_core.spelling import did_you_mean

# Told apart by name, because what a template does with today's date can't be seen from a rendering of today.
_TODAY = "strftime_now"
_WRITTEN_FORMAT = re.compile(rf"""\b{_TODAY}\(\s*(?:"([^"\\]*)"|'([^'\\]*)')\s*\)""")


class _Marks(Extension):
    """Reads `{% generation %}` blocks, which are transformers' own."""

    tags = {"generation"}  # noqa: RUF012 (the base class says so)

    def parse(self, parser: jinja2.parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TransformersTemplate:
    """A chat template with arguments, rendered by transformers; `date` stands in for today."""

    def __init__(self, tokenizer: Any, texts: tuple[str, str], arguments: Mapping[str, Any], date: str | None) -> None:
        """`texts` are the templates for conversations without tools and with. Raises `ArgumentError`."""
        variables = set[str]().union(*(_variables(text) for text in texts))
        _check_arguments(arguments, variables)
        self._plain, self._with_tools = (_dated(text, date) for text in texts)
        self._has_marks = any(re.search(r"\{%[-+]?\s*generation\b", text) for text in texts)
        given: dict[str, Any] = {**tokenizer.special_tokens_map, **arguments}
        self._variables = {name: value for name, value in given.items() if name in variables}
        self.fingerprint = fingerprint(
            "chat template",
            self._plain,
            self._with_tools,
            json.dumps(self._variables, default=str, sort_keys=True),
            transformers.__version__,
            jinja2.__version__,
        )

    def render(
        self,
        messages: Sequence[Turn],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        add_generation_prompt: bool = False,
    ) -> Rendering:
        """The text of a conversation, with its generation marks if the template has any. Raises `TemplateError`."""
        try:
            # What `apply_chat_template` calls. That itself gives no places of marks, and copies every conversation.
            # Its annotation promises a text; it is the texts and the marks of all conversations.
            result: Any = render_jinja_template(
                conversations=[[dict(turn) for turn in messages]],
                tools=None if tools is None else [dict(tool) for tool in tools],
                chat_template=self._plain if tools is None else self._with_tools,
                return_assistant_tokens_mask=self._has_marks,
                add_generation_prompt=add_generation_prompt,
                **self._variables,
            )
        # A template is a program of its own and fails in any way; its reason is what the user needs.
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            is_own = isinstance(error, jinja2.exceptions.TemplateError)
            raise TemplateError(reason if is_own else f"{type(error).__name__}: {reason}") from error
        rendered, marks = result
        if not self._has_marks:
            return Rendering(rendered[0])
        return Rendering(rendered[0], tuple((begin, end) for begin, end in marks[0]))


def _environment() -> ImmutableSandboxedEnvironment:
    return ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Marks, loopcontrols])


def _variables(template: str) -> set[str]:
    """The names that a template reads and doesn't set. Raises `ArgumentError` for text that is no template."""
    try:
        return meta.find_undeclared_variables(_environment().parse(template))
    except jinja2.TemplateSyntaxError as error:
        raise ArgumentError("chat_template", f"line {error.lineno} of the chat template: {error.message}") from error


def _check_arguments(arguments: Mapping[str, Any], variables: set[str]) -> None:
    provided = set(inspect.signature(transformers.PreTrainedTokenizerBase.apply_chat_template).parameters)
    provided |= {"messages", _TODAY, "raise_exception", "bos_token", "eos_token", "unk_token", "pad_token"}
    readable = sorted(variables - provided)
    for name in arguments:
        path = f"chat_template_kwargs.{name}"
        if name in provided:
            raise ArgumentError(path, "is given to the chat template by the trainer, not by the recipe")
        if name not in variables:
            guess = did_you_mean(name, readable) or f"it reads: {', '.join(readable) or 'none'}"
            raise ArgumentError(path, "changes nothing: the chat template reads no such variable", guess)
    try:
        json.dumps(dict(arguments))
    except (TypeError, ValueError) as error:
        raise ArgumentError("chat_template_kwargs", f"must be plain values: {error}") from error


def _dated(template: str, date: str | None) -> str:
    """The template with `date` for today, so that a conversation has the same tokens on any day.

    Raises `ArgumentError` when it would print today's date, or has no use for the given one.
    """
    if _TODAY not in _variables(template):
        if date is not None:
            raise ArgumentError("date", "changes nothing: the chat template prints no date")
        return template
    if date is None:
        # It may not come to that: many templates take the date as an argument.
        reason = "it prints today's date, so a row would have other tokens tomorrow; give one: `date: '2026-01-31'`"
        return (
            f"{{% macro {_TODAY}(format) %}}{{{{ raise_exception({json.dumps(reason)}) }}}}{{% endmacro %}}\n{template}"
        )
    try:
        day = datetime.date.fromisoformat(date)
    except ValueError as error:
        raise ArgumentError("date", f"{date!r} is no date such as '2026-01-31'") from error
    formats = {one or other for one, other in _WRITTEN_FORMAT.findall(template)}
    texts = {written: day.strftime(written) for written in sorted(formats)}
    body = (
        f"{{{{ {json.dumps(texts)}[format] if format in {json.dumps(sorted(texts))} else raise_exception(format) }}}}"
    )
    # The line end behind the block belongs to it (trim_blocks), so the template's own text begins where it did.
    return f"{{% macro {_TODAY}(format) %}}{body}{{% endmacro %}}\n{template}"
