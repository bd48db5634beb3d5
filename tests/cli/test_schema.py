"""`hp-train schema`."""

from __future__ import annotations

import json

import pytest

from hp_core.cli import schema
from tests.cli.recipes import invoke, use_components


def test_schema_is_json_with_the_installed_components(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_components(monkeypatch)
    assert invoke(schema) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert {"optimizer=parts:adam", "optimizer=parts:sgd"} < set(data["$defs"])
    assert data["properties"]["training"]["$ref"] == "#/$defs/TrainingConfig"
