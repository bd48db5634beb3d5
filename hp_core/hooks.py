"""The hooks as data: their names, arguments and kinds, and the manual made from their docstrings."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cache

import pluggy

from hp_core import hookspecs


@dataclass(frozen=True)
class Hook:
    """One hook: the arguments that it is called with, and whether the first result that isn't None ends the call."""

    name: str
    arguments: tuple[str, ...]
    firstresult: bool
    doc: str

    @property
    def signature(self) -> str:
        """The call as it is written, `build_loss(config)`."""
        return f"{self.name}({', '.join(self.arguments)})"


@cache
def hooks() -> dict[str, Hook]:
    """Return every hook by name, in call order."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    found = {}
    for name, function in vars(hookspecs).items():
        options = manager.parse_hookspec_opts(hookspecs, name)
        if options is not None:
            arguments = tuple(inspect.signature(function).parameters)
            found[name] = Hook(name, arguments, options["firstresult"], inspect.getdoc(function) or "")
    return found


def hook_manual() -> str:
    """Return the reference of all hooks as Markdown."""
    return "\n\n".join(_entry(hook) for hook in hooks().values()) + "\n"


def _entry(hook: Hook) -> str:
    text, example = hook.doc.split("\nExample:\n")
    kind = "first result that isn't None" if hook.firstresult else "every implementation is called"
    lines = [f"### `{hook.signature}`", "", f"*Kind: {kind}.*", ""]
    section = ""
    for line in text.rstrip().splitlines():
        if line in ("Args:", "Returns:"):
            section = line
            lines += [f"{line[:-1]}:", ""]
        elif section == "Args:" and line.startswith("    ") and not line.startswith("     "):
            name, _, meaning = line.strip().partition(": ")
            lines.append(f"- `{name}`: {meaning}")
        elif section == "Args:" and line.strip():
            lines.append("  " + line.strip())
        elif line.startswith(("When: ", "Ranks: ")):
            label, _, meaning = line.partition(": ")
            lines.append(f"- {label}: {meaning}")
        else:
            lines.append(line.strip())
    return "\n".join([*lines, "", "```python", inspect.cleandoc(example), "```"])
