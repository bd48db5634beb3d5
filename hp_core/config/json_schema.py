"""A JSON Schema (draft 2020-12) of recipes, with the arguments of the installed components."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import CoreSchema

from hp_core.components import Component, Components
from hp_core.config.base import section_in
from hp_core.config.models import TrainerConfig
from hp_core.config.nested import nested_group
from hp_core.config.path import ITEM
from hp_core.config.plan_override import PlanOverride
from hp_core.config.section import IMPORT_PATH, NAME, SECTIONS, WORDS, ComponentSection
from hp_core.config.shape import members
from hp_core.config.signature import EMPTY, Parameter, Signature, argument_adapter
from hp_core.entry_points import describe

Schema: TypeAlias = "dict[str, Any]"

_DRAFT = "https://json-schema.org/draft/2020-12/schema"
_ENVIRONMENT = "environment"
_OVER_BASE = " over a base"
# What YAML gives no text for; an expression, which is text to an editor, may stand there.
_NO_TEXT = {"integer", "number", "boolean", "array"}


class SchemaGenerator(GenerateJsonSchema):
    """pydantic's generator, for signatures that may hold any Python type."""

    def handle_invalid_for_json_schema(self, schema: CoreSchema, error_info: str) -> Schema:
        """A type that JSON Schema can't describe may be anything."""
        return {}


def recipe_schema(components: Components) -> Schema:
    """Return the schema. The components are imported, each on its own: one that can't be is known by its name."""
    schema: Schema = {"$schema": _DRAFT, "title": "HyperParallel recipe", **core_schema()}
    definitions = schema["$defs"]
    definitions[_ENVIRONMENT] = {
        "type": "string",
        "pattern": r"^\$\{env:",
        "description": "A value from the environment.",
    }
    strict: Schema = {}
    for section in SECTIONS:
        _add_components(definitions, section, components)
        definitions[section.name] = _section(section, components, definitions, with_base=False)
        if not _is_listed(section):  # a base's lists are replaced, so nothing in them is left to it
            definitions[f"{section.name}{_OVER_BASE}"] = _section(section, components, definitions, with_base=True)
    for section in SECTIONS:
        if section.is_root:
            key = section.root
            schema["properties"][key] = {**_description(schema["properties"][key]), **_reference(section, _OVER_BASE)}
            strict[key] = _reference(section)
        elif _is_listed(section):
            _put_reference(schema, section)
    definitions[PlanOverride.__name__]["anyOf"] = [{"required": [action]} for action in PlanOverride.ACTIONS]
    for key, field in TrainerConfig.model_fields.items():
        if section_in(field.annotation)[1]:
            schema["properties"][key]["anyOf"].append({"type": "null"})
    for key, words in WORDS.items():
        keys = {"$ref": schema["properties"][key].pop("$ref")}
        schema["properties"][key]["anyOf"] = [{"enum": list(words)}, keys, {"$ref": f"#/$defs/{_ENVIRONMENT}"}]
    schema["patternProperties"] = {"^x-": True}
    schema["if"] = {"not": {"required": ["base"], "properties": {"base": {"type": "string"}}}}
    required = [key for key in schema.pop("required") if strict.get(key) is None or not _has_default(key)]
    schema["then"] = {"required": required, "properties": strict}
    return schema


def core_schema() -> Schema:
    """Return the schema of everything but the component sections, which it leaves open."""
    schema = TrainerConfig.model_json_schema(schema_generator=SchemaGenerator)
    for definition in ("DatasetConfig", "DataLoaderConfig"):
        schema["$defs"].pop(definition)
    schema["description"] = "A training recipe."
    result: Schema = _with_environment(_without_titles(schema))
    return result


def component_schema(section: ComponentSection, component: Component) -> Schema:
    """Return the schema of a component's arguments. Raises what its import raises."""
    signature = Signature.of(component.load())
    parameters = signature.recipe_parameters(section.runtime_arguments)
    parameters = {name: one for name, one in parameters.items() if name not in (NAME, IMPORT_PATH, *section.settings)}
    template = f"#/$defs/{_definition(section, component)}/$defs/{{model}}"
    generated = argument_adapter(parameters).json_schema(ref_template=template, schema_generator=SchemaGenerator)
    schema: Schema = _without_titles(generated)
    properties = schema.setdefault("properties", {})
    for name, parameter in parameters.items():
        nested = nested_group(parameter.annotation)
        if nested is not None:
            properties[name] = {**_description(properties[name]), "$ref": f"#/$defs/{nested.section}"}
            if type(None) not in members(parameter.annotation):
                properties[name]["not"] = {"type": "null"}
        _add_default(properties[name], parameter)
    schema["additionalProperties"] = signature.is_open
    schema["required"] = [name for name, parameter in parameters.items() if parameter.is_required]
    return schema


def _add_default(schema: Schema, parameter: Parameter) -> None:
    if parameter.default is not EMPTY and _is_json(parameter.default):
        schema["default"] = list(parameter.default) if isinstance(parameter.default, tuple) else parameter.default


def _is_json(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_json(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))


def _add_components(definitions: Schema, section: ComponentSection, components: Components) -> None:
    for component in _components(section, components):
        try:
            schema = _with_environment(component_schema(section, component))
        except (Exception, SystemExit) as error:
            cause = describe(getattr(error, "cause", error))
            schema = {"type": "object", "description": f"Can't be imported here: {cause}", "required": []}
        name = {"enum": [component.name, component.qualified_name]}
        settings = {one: {"$ref": f"#/$defs/{section.root}.{one}"} for one in section.settings}
        schema["properties"] = {NAME: name, **settings, **schema.get("properties", {})}
        definitions[_definition(section, component)] = schema


def _section(section: ComponentSection, components: Components, definitions: Schema, *, with_base: bool) -> Schema:
    """Return the schema of a component section: a name, a component with its arguments, or an import path.

    Over a base, the component and its required arguments may be left to it.
    """
    offered = _components(section, components)
    names = [name for one in offered for name in (one.name, one.qualified_name)]
    choices: list[Schema] = [{"enum": names}]
    for one in offered:
        reference = f"#/$defs/{_definition(section, one)}"
        required = definitions[_definition(section, one)].get("required", [])
        named = [] if one.name == section.default else [NAME]
        choices.append({"$ref": reference, "required": [NAME] if with_base else [*named, *required]})
    choices.append(
        {"type": "object", "required": [IMPORT_PATH], "properties": {IMPORT_PATH: {"type": "string"}, NAME: False}}
    )
    if with_base:
        choices.append({"type": "object", "properties": {NAME: False, IMPORT_PATH: False}})
    choices.append({"$ref": f"#/$defs/{_ENVIRONMENT}"})
    if _may_be_null(section):
        choices.append({"type": "null"})
    return {"anyOf": choices}


def _reference(section: ComponentSection, suffix: str = "") -> Schema:
    return {"$ref": f"#/$defs/{section.name}{suffix}"}


def _description(schema: Schema) -> Schema:
    return {"description": schema["description"]} if "description" in schema else {}


def _put_reference(schema: Schema, section: ComponentSection) -> None:
    """Refer to a section that is inside a list from the schema of what holds it."""
    holder, key = schema["properties"], section.root
    for step in section.pattern[1:]:
        below = holder[key]
        below = schema["$defs"][below["$ref"].rpartition("/")[2]] if "$ref" in below else below
        if step == ITEM:
            holder, key = next(one for one in below["anyOf"] if "items" in one), "items"
        else:
            holder, key = below["properties"], str(step)
    holder[key] = {**_description(holder[key]), **_reference(section)}


def _is_listed(section: ComponentSection) -> bool:
    return ITEM in section.pattern


def _components(section: ComponentSection, components: Components) -> list[Component]:
    return [one for one in components.all() if one.group == section.group]


def _definition(section: ComponentSection, component: Component) -> str:
    return f"{section.name}={component.qualified_name}"


def _may_be_null(section: ComponentSection) -> bool:
    if _is_listed(section):
        return False
    is_optional = not TrainerConfig.model_fields[section.root].is_required()
    return section.default is not None or not section.is_root or is_optional


def _has_default(key: str) -> bool:
    return any(section.pattern == (key,) and section.default is not None for section in SECTIONS)


def _without_titles(schema: Any) -> Any:
    if isinstance(schema, Mapping):
        return {
            key: _without_titles(value)
            for key, value in schema.items()
            if not (key == "title" and isinstance(value, str))
        }
    return [_without_titles(item) for item in schema] if isinstance(schema, list) else schema


def _with_environment(schema: Any) -> Any:
    """Return a schema that also takes an expression wherever it takes no text."""
    if isinstance(schema, list):
        return [_with_environment(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    changed = {
        key: _with_environment(value) if key not in ("default", "enum") else value for key, value in schema.items()
    }
    reference = {"$ref": f"#/$defs/{_ENVIRONMENT}"}
    if isinstance(changed.get("anyOf"), list):
        return {**changed, "anyOf": [*(one for one in changed["anyOf"] if one != reference), reference]}
    if isinstance(schema.get("type"), str) and (schema["type"] in _NO_TEXT or "enum" in schema):
        kept = {key: changed.pop(key) for key in ("description", "default") if key in changed}
        return {**kept, "anyOf": [changed, reference]}
    return changed
