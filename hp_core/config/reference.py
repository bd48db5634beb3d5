"""The recipe reference, docs/recipe.md, from the models and the components that ship with this package.

`python -m hp_core.config.reference` prints it.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Iterator, Mapping

from hp_core.components import Component, Components
from hp_core.config.base import Section, section_in
from hp_core.config.json_schema import Schema, SchemaGenerator, component_schema
from hp_core.config.models import TrainerConfig
from hp_core.config.section import SECTIONS, ComponentSection, section_at
from hp_core.config.shape import members
from hp_core.config.target import Target
from hp_core.entry_points import canonical, describe

DISTRIBUTION = "hyperparallel"
_INTRODUCTION = """\
# The recipe

This page is generated from the code by `python -m hp_core.config.reference`; a test compares the two.

A recipe is one YAML 1.2 file. Every key not listed here is an error, except root keys that begin with `x-`, which are
ignored and can hold anchors.

- Numbers: `1e-5` and `1_000` are numbers, `010` is ten. `yes`, `no`, `on`, `off`, dates and `12:30` are text.
- `base: other.yaml` starts from another recipe.
- `${env:NAME}` and `${env:NAME,default}` read the environment. An expression that is the whole value is typed as if its
  value were written there; `!!str ${env:NAME}` takes it as text. The values are never printed.
- `--training.seed=1` on the command line writes a value over the file's, typed as if it were written there, and
  `--plan_overrides[0].exact_type=false` reaches into a list. The order of overrides doesn't matter.
- A section that names a component takes `name: NAME` (an installed one; `package:NAME` where two packages offer it) or
  `_target_: package.module.attribute`, and its arguments beside it. `section: NAME` is short for
  `section: {name: NAME}`. A `_target_` names code: trust a recipe as you trust a program.
"""


def reference(components: Components) -> str:
    """Return the reference in Markdown; `components` are filtered to those of this distribution."""
    own = [one for one in components.all() if canonical(one.distribution) == DISTRIBUTION]
    lines = [_INTRODUCTION, "## Root keys", ""]
    schema = TrainerConfig.model_json_schema(schema_generator=SchemaGenerator)
    definitions = schema["$defs"]
    scalars = {key: value for key, value in schema["properties"].items() if _is_scalar(key)}
    lines += _table(scalars, [], definitions)
    if TrainerConfig.LATER:
        lines += ["", f"Reserved for later versions, and refused until then: {_listed(TrainerConfig.LATER)}."]
    for key, field in TrainerConfig.model_fields.items():
        section, is_list = section_in(field.annotation)
        if section is not None and section_at((key,)) is None:
            description = [f"{field.description or ''} A list.", ""] if is_list else []
            lines += ["", f"## `{key}`", "", *description, inspect.getdoc(section) or "", ""]
            lines += _section_tables(section, definitions, key)
        lines += _component_sections(key, field.description or "", own)
    return "\n".join(lines) + "\n"


def _is_scalar(key: str) -> bool:
    is_section = section_in(TrainerConfig.model_fields[key].annotation)[0] is not None
    return not is_section and all(section.root != key for section in SECTIONS)


def _listed(keys: Iterable[str]) -> str:
    return ", ".join(f"`{key}`" for key in keys)


def _section_tables(section: type[Section], definitions: Mapping[str, Schema], path: str) -> Iterator[str]:
    schema = definitions[section.__name__]
    inner = {
        key: field.annotation
        for key, field in section.recipe_keys().items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
    }
    plain = {key: value for key, value in schema["properties"].items() if key not in inner}
    for key in plain:
        if Target in members(section.recipe_keys()[key].annotation):
            plain[key] = {**plain[key], "anyOf": [{"type": "component"}, {"type": "null"}]}
    yield from _table(plain, schema.get("required", []), definitions)
    if section.LATER:
        yield from ("", f"Reserved for later versions, and refused until then: {_listed(section.LATER)}.")
    for key, below in inner.items():
        yield from ("", f"### `{path}.{key}`", "", inspect.getdoc(below) or "", "")
        yield from _section_tables(below, definitions, f"{path}.{key}")


def _component_sections(key: str, description: str, own: list[Component]) -> Iterator[str]:
    for section in SECTIONS:
        if section.root != key:
            continue
        yield from ("", f"## `{section.name}`", "")
        if section.name == key:
            yield from (description + (f" Default: `{section.default}`." if section.default else ""), "")
        yield f"Entry-point group `{section.group}`.{' A list.' if section.is_item else ''}"
        if section.runtime_arguments:
            yield f"The trainer provides {_listed(section.runtime_arguments)}."
        for component in own:
            if component.group == section.group:
                yield from _component(section, component)


def _component(section: ComponentSection, component: Component) -> Iterator[str]:
    yield from ("", f"### `{section.name}`: `{component.name}`", "")
    try:
        schema = component_schema(section, component)
        summary = inspect.getdoc(component.load()) or ""
    except Exception as error:
        yield f"Can't be imported: {describe(getattr(error, 'cause', error))}"
        return
    if summary:
        yield from (" ".join(summary.split("\n\n")[0].split()), "")
    if schema["properties"]:
        yield from _table(schema["properties"], schema["required"], schema.get("$defs", {}))
    else:
        yield "No arguments."


def _table(properties: Mapping[str, Schema], required: list[str], definitions: Mapping[str, Schema]) -> Iterator[str]:
    yield from ("| key | value | default | meaning |", "|---|---|---|---|")
    for key, schema in properties.items():
        default = "required" if key in required else _default(schema)
        cells = (f"`{key}`", kind(schema, definitions), default, _description(schema))
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _description(schema: Schema) -> str:
    alternatives = [one.get("description", "") for one in schema.get("anyOf", [])]
    return str(next((text for text in (schema.get("description", ""), *alternatives) if text), ""))


def _default(schema: Schema) -> str:
    return f"`{json.dumps(schema['default'], ensure_ascii=False)}`" if "default" in schema else ""


_KINDS = {
    "integer": "integer",
    "number": "number",
    "boolean": "true or false",
    "string": "text",
    "null": "null",
    "component": "component",
}
_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def kind(schema: Schema, definitions: Mapping[str, Schema]) -> str:
    """Return what a JSON Schema allows, in words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        # What has no definition of its own here is a section of the recipe, which names a component.
        return kind(definitions[name], definitions) if name in definitions else "component"
    if "enum" in schema or "const" in schema:
        return " or ".join(f"`{json.dumps(one).strip(chr(34))}`" for one in schema.get("enum", [schema.get("const")]))
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(kind(one, definitions) for one in schema["anyOf"]))
    if schema.get("type") == "array":
        if "prefixItems" in schema:
            return f"[{', '.join(kind(one, definitions) for one in schema['prefixItems'])}]"
        return f"list of {kind(schema.get('items', {}), definitions)}"
    if schema.get("type") == "object":
        keys = schema.get("properties")
        return f"mapping of {', '.join(f'`{key}`' for key in keys)}" if keys else "mapping"
    bounds = " and ".join(f"{sign} {schema[key]:g}" for key, sign in _BOUNDS.items() if key in schema)
    return f"{_KINDS.get(schema.get('type', ''), 'anything')}{f' {bounds}' if bounds else ''}"


if __name__ == "__main__":
    print(reference(Components.discover()), end="")
