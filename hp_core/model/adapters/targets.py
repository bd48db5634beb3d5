"""Which modules of a model get adapters, and which are trained whole: the patterns of a recipe, on names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hp_core.config.peft import ALL_LINEAR, PeftConfig
from hp_core.errors import InputError, Problem
from hp_core.model.replacement.claim import nearest_pattern


@dataclass(frozen=True)
class Chosen:
    """The FQNs of the modules to adapt, and of those to train whole, in the order of the model."""

    targets: tuple[str, ...]
    saved: tuple[str, ...]


def choose(model: PreTrainedModel, config: PeftConfig) -> Chosen:
    """Match the patterns of `config` against the names of the model's modules.

    Raises:
        InputError: with every problem: a pattern that matches nothing, or what can't be adapted or trained whole;
            modules inside each other; a module whose weight is another's, too.
    """
    return _Choice(model, config).made()


def matches(pattern: str, fqn: str) -> bool:
    """Whether a pattern is the whole name, an end of it from a dot on, or a glob of the whole."""
    return fqn == pattern or fqn.endswith(f".{pattern}") or fnmatchcase(fqn, pattern)


class _Choice:
    def __init__(self, model: PreTrainedModel, config: PeftConfig) -> None:
        self._config = config
        self._model = model
        self._modules = {fqn: module for fqn, module in model.named_modules() if fqn}
        self._problems: list[Problem] = []

    def made(self) -> Chosen:
        saved = self._saved(self._config.modules_to_save or ())
        named, general = self._targets(self._config.target_modules or (ALL_LINEAR,))
        # Every linear layer is every one that isn't trained already.
        general = {fqn for fqn in general if not _around(fqn, saved)}
        targets = self._without(named | general, self._config.exclude_modules or ())
        self._problems += self._inside(targets, saved)
        self._problems += self._shared([*targets, *saved])
        if not targets and not self._problems:
            self._problems.append(Problem("chooses no module", "peft.target_modules", hint="exclude fewer"))
        if self._problems:
            raise InputError(self._problems)
        return Chosen(self._in_order(targets), self._in_order(saved))

    def _in_order(self, names: Iterable[str]) -> tuple[str, ...]:
        chosen = set(names)
        return tuple(fqn for fqn in self._modules if fqn in chosen)

    def _targets(self, patterns: Sequence[str]) -> tuple[set[str], set[str]]:
        named: set[str] = set()
        general: set[str] = set()
        for path, pattern in _numbered("peft.target_modules", patterns):
            if pattern == ALL_LINEAR:
                head = self._model.get_output_embeddings()
                general |= {fqn for fqn, one in self._modules.items() if _is_linear(one) and one is not head}
                continue
            hits = self._hits(path, pattern)
            wrong = [fqn for fqn in hits if not _is_linear(hits[fqn]) and not isinstance(hits[fqn], nn.Embedding)]
            if wrong:
                kind = type(hits[wrong[0]]).__name__
                message = f"{pattern!r} matches {wrong[0]!r}, a {kind}, and LoRA is for linear layers and embeddings"
                self._problems.append(Problem(message, path, hint="narrow the pattern"))
            named |= set(hits)
        return named, general

    def _without(self, targets: set[str], patterns: Sequence[str]) -> set[str]:
        excluded: set[str] = set()
        for path, pattern in _numbered("peft.exclude_modules", patterns):
            hits = {fqn for fqn in targets if matches(pattern, fqn)}
            if not hits:
                hint = nearest_pattern(pattern, targets or self._modules)
                self._problems.append(Problem(f"{pattern!r} matches none of target_modules", path, hint=hint))
            excluded |= hits
        return targets - excluded

    def _saved(self, patterns: Sequence[str]) -> set[str]:
        found: set[str] = set()
        for path, pattern in _numbered("peft.modules_to_save", patterns):
            hits = self._hits(path, pattern)
            for fqn, module in hits.items():
                if isinstance(module, (nn.ModuleList, nn.ModuleDict)) or not any(True for _ in module.parameters()):
                    what = "a list, which has no forward pass" if _is_list(module) else "which has no weights"
                    message = f"{pattern!r} matches {fqn!r}, {what}"
                    self._problems.append(Problem(message, path, hint="narrow the pattern"))
                    break
            found |= set(hits)
        return found

    def _hits(self, path: str, pattern: str) -> Mapping[str, nn.Module]:
        hits = {fqn: module for fqn, module in self._modules.items() if matches(pattern, fqn)}
        if not hits:
            hint = nearest_pattern(pattern, self._modules)
            self._problems.append(Problem(f"{pattern!r} matches no module of the model", path, hint=hint))
        return hits

    def _inside(self, targets: set[str], saved: set[str]) -> Iterator[Problem]:
        for fqn in self._in_order(targets | saved):
            outer = _around(fqn, saved - ({fqn} - targets))
            if outer:
                where = "is trained whole itself" if outer == fqn else f"is inside {outer!r}, which is trained whole"
                hint = "take it out of one of the two, with exclude_modules or narrower patterns"
                yield Problem(f"{fqn!r} {where}", "peft.modules_to_save", hint=hint)
                return

    def _shared(self, names: Sequence[str]) -> Iterator[Problem]:
        owners: dict[nn.Parameter, list[str]] = {}
        for fqn, module in self._model.named_modules():
            for parameter in module.parameters(recurse=False):
                owners.setdefault(parameter, []).append(fqn)
        for fqn in names:
            for parameter in self._modules[fqn].parameters():
                others = [one for one in owners[parameter] if not f"{one}.".startswith(f"{fqn}.")]
                if others:
                    message = f"the weight of {fqn!r} is that of {others[0]!r}, too, which would stay as it is"
                    hint = "leave it out, or set model.config.tie_word_embeddings: false"
                    yield Problem(message, "peft", hint=hint)
                    return


def _numbered(path: str, patterns: Sequence[str]) -> Iterator[tuple[str, str]]:
    for index, pattern in enumerate(patterns):
        yield (f"{path}[{index}]" if len(patterns) > 1 else path), pattern


def _around(fqn: str, names: set[str]) -> str:
    """The outermost of `names` that a module is or is inside of; empty if there is none."""
    parts = fqn.split(".")
    return next((one for end in range(1, len(parts) + 1) if (one := ".".join(parts[:end])) in names), "")


def _is_linear(module: nn.Module) -> bool:
    # Attention of torch itself takes the weight of its projection, never its forward.
    return isinstance(module, (nn.Linear, Conv1D)) and not isinstance(module, NonDynamicallyQuantizableLinear)


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, (nn.ModuleList, nn.ModuleDict))
