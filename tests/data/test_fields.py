from __future__ import annotations

from typing import Any

import pytest

from hp_core.data.fields import RowText
from hp_core.data.records import Row
from hp_core.errors import ArgumentError, InputError


def text(fields: dict[str, Any], field: str | None = None, template: str | None = None) -> str:
    return RowText.of(field, template)(Row("a.jsonl:3", fields))


def test_field_and_template() -> None:
    assert text({"text": "a"}) == "a"
    assert text({"body": "b"}, field="body") == "b"
    assert text({"q": "why?", "n": 3}, template="{{Q}} {q}\n{n}!") == "{Q} why?\n3!"
    assert RowText.of(None, "{a}{b}{a}").fields == ("a", "b", "a")


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("no field", "names no field"),
        ("{", "Single '{'"),
        ("{}", "a place is written {name}"),
        ("{0}", "a place is written {name}"),
        ("{a.__class__}", "a place is written {name}"),
        ("{a[0]}", "a place is written {name}"),
        ("{a:>10}", "a place is written {name}"),
        ("{a!r}", "a place is written {name}"),
    ],
)
def test_templates_that_can_not_be_used(template: str, said: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        RowText.of(None, template)
    assert caught.value.path == "template"
    assert said in str(caught.value)


def test_field_and_template_together_are_refused() -> None:
    with pytest.raises(ArgumentError, match="both given"):
        RowText.of("text", "{text}")


@pytest.mark.parametrize(
    ("fields", "options", "said"),
    [
        (
            {"txet": "a", "id": 1},
            {},
            "a.jsonl:3: the row has no field 'text'; its fields are: txet, id; did you mean 'txet'?",
        ),
        ({}, {"template": "{q}"}, "a.jsonl:3: the row has no field 'q'; its fields are: none"),
        ({"text": None}, {}, "a.jsonl:3: field 'text' is null"),
        ({"q": None}, {"template": "{q}"}, "a.jsonl:3: field 'q' is null"),
        ({"text": 5}, {}, "a.jsonl:3: field 'text' is of type int, not text"),
        ({"q": ["a"]}, {"template": "{q}"}, "a.jsonl:3: field 'q' is of type list, not text"),
    ],
)
def test_rows_without_usable_text_are_placed(fields: dict[str, Any], options: dict[str, str], said: str) -> None:
    with pytest.raises(InputError) as caught:
        text(fields, **options)
    assert str(caught.value) == said


def test_identity_tells_rules_apart() -> None:
    identities = {
        RowText.of().identity,
        RowText.of("a").identity,
        RowText.of(None, "{a}").identity,
        RowText.of(None, "{a} ").identity,
        RowText.of(None, " {a}").identity,
    }
    assert len(identities) == 5
    assert RowText.of("text").identity in identities
