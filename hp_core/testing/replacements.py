"""What a replacement promises: the same numbers, weights and files as the module whose place it takes."""

from __future__ import annotations

import dataclasses
import fnmatch
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import pytest
import torch
from torch import nn

from hp_core.errors import ArgumentError
from hp_core.model.export import export_model, original_tensors
from hp_core.parallel.setup import DistributedSetup
from hp_core.testing.checks import (
    Check,
    RankResults,
    Section,
    described,
    largest,
    name_of,
    on_ranks,
    parametrize,
    require,
    require_close,
    require_equal,
)
from hp_core.testing.loss_steps import Step
from hp_core.testing.models import take_rows, tiny_batch, tiny_config, tiny_skeleton
from hp_core.testing.replacement_plain import Plain, halved
from hp_core.testing.replacement_steps import (
    ReplacementCase,
    checkpoint_of,
    definitions_of,
    dotted,
    flags_of,
    junk_in_memory,
    logits_of,
    note_dtypes,
    reloaded,
    state_of,
    step_of,
)
from hp_core.testing.setups import tiny_setup

# What one and several processes may differ by: sums over ranks run in another order.
_ORDER = 1e-5
# A few times the rounding of bf16: sums and roundings may come in another order, formulas may not differ.
_HALF = 8 * 2**-7


def replacement_checks(
    factory: Callable[..., nn.Module],
    /,
    *,
    match: str | Sequence[str],
    family: str = "llama",
    module_type: type[nn.Module] | str | None = None,
    exact_type: bool = False,
    tolerance: float = 1e-6,
    arguments: Mapping[str, Any] | None = None,
    refuses: Sequence[nn.Module] = (),
    skip: Mapping[str, str] | None = None,
) -> pytest.MarkDecorator:
    """Run a test function, `def test_replacement(check): check()`, once for each promise of a replacement.

    Args:
        factory: what a recipe names, decorated with `module_replacement`; importable by name.
        match: the glob, or globs, over the names of the tiny model's modules.
        family: the tiny model, one of `hp_core.testing.models.FAMILIES`.
        module_type: the class that every match must be an instance of.
        exact_type: every match must be of that class itself.
        tolerance: how far logits, loss and gradients may be from the original's; relative where those are above one.
        arguments: the factory's recipe arguments.
        refuses: modules that it must refuse with an `ArgumentError`.
        skip: why a promise doesn't apply, by its name.
    """
    tiny_config(family)  # refuses a family that there isn't
    patterns = (match,) if isinstance(match, str) else tuple(match)
    case = ReplacementCase(
        factory, family, patterns, dotted(module_type), exact_type, arguments or {}, tuple(refuses), tolerance
    )
    reasons = dict(skip or {})
    if not refuses:
        reasons.setdefault("refusals", "no modules are given as refuses")
    return parametrize(ReplacementChecks(case).checks(), reasons)


class ReplacementChecks:
    """The checks of one replacement; what they find out on two ranks is found out once."""

    def __init__(self, case: ReplacementCase) -> None:
        self.case = case

    def checks(self) -> list[Check]:
        """Every check, in the order in which a fault is best looked for."""
        promises: dict[str, tuple[str, Callable[[], None]]] = {
            "replaces": ("every module that matches is replaced, and called", partial(check_replaces, self.case)),
            "same_numbers": (
                "logits, loss and all gradients are the original's, in training, packed and padded too",
                lambda: check_same_numbers(self.case, self._plain),
            ),
            "same_state": (
                "names, shapes, dtypes, requires_grad, ties and values of weights and buffers are the original's",
                partial(check_same_state, self.case),
            ),
            "meta_build": (
                "a model that is built without memory and then filled is the one built directly",
                partial(check_meta_build, self.case),
            ),
            "half_precision": (
                "in bf16 it gives what the original gives: the same dtypes, and the same numbers up to rounding",
                lambda: check_half_precision(self.case, self._plain),
            ),
            "export": (
                "plain transformers loads an exported model, with the original's logits",
                partial(check_export, self.case),
            ),
            "second_model_untouched": (
                "classes, modules and other models are as before",
                lambda: check_second_model_untouched(self.case, self._plain),
            ),
            "refusals": ("it refuses what it can't replace", partial(check_refusals, self.case)),
            "two_ranks": ("loss and gradients under FSDP2 on two ranks are the original's", self.check_two_ranks),
            "sharded_export": ("a model sharded over two ranks is exported whole", self.check_sharded_export),
        }
        subject = name_of(self.case.factory)
        return [
            Check(name, subject, promise, partial(self._run, function))
            for name, (promise, function) in promises.items()
        ]

    def _run(self, function: Callable[[], None]) -> None:
        """Whichever check comes first: what is compared with must be from before the factory's first call."""
        _ = self._plain
        function()

    @cached_property
    def _plain(self) -> Plain:
        return Plain.of(self.case)

    @cached_property
    def _two_ranks(self) -> _OnRanks:
        sections = [Section("two_ranks", _steps_on_ranks), Section("sharded_export", _export_on_ranks)]
        batch = tiny_batch(self.case.family)
        with checkpoint_of(self.case.family) as files, tempfile.TemporaryDirectory() as directory:
            case = dataclasses.replace(self.case, refuses=(), files=files, directory=directory)
            results = on_ranks(sections, case)
            exported = None
            if results.has("sharded_export"):
                exported = logits_of(reloaded(directory), batch)
            with tiny_setup() as setup:
                plain = case.on_ranks(setup, replaced=False)
                return _OnRanks(results, step_of(plain, batch, setup), logits_of(plain, batch), exported)

    def check_two_ranks(self) -> None:
        """The replaced and the plain model, both sharded, and the plain one in one process."""
        found = self._two_ranks
        for replaced, sharded in found.results.of("two_ranks"):
            _compare(replaced, sharded, self.case.tolerance, "sharded over two ranks")
            _compare(replaced, found.step, max(self.case.tolerance, _ORDER), "on two ranks instead of one process")

    def check_sharded_export(self) -> None:
        """Export from two ranks, load in this process."""
        found = self._two_ranks
        found.results.of("sharded_export")
        require_equal({"logits": found.exported}, {"logits": found.logits}, "after reloading", _EXPORT_HINT)


@dataclass(frozen=True)
class _OnRanks:
    """What two ranks found; the plain model's step and logits in one process; and the exported model's logits."""

    results: RankResults
    step: Step
    logits: torch.Tensor
    exported: torch.Tensor | None


def check_replaces(case: ReplacementCase) -> None:
    """The rule hits what its globs hit, and the model calls each replacement in a forward pass."""
    with tiny_setup() as setup:
        plain, _ = case.build(setup, replaced=False)
        model, names = case.build(setup)
        modules = [name for name, _ in plain.named_modules(remove_duplicate=False) if name]
        hits = {name for name in modules for pattern in case.match if fnmatch.fnmatchcase(name, pattern)}
        require(bool(names), f"nothing is replaced: {', '.join(case.match)} matches no module")
        require(
            hits == set(names), f"{len(names)} modules are replaced, {len(hits)} match: {sorted(hits ^ set(names))}"
        )
        called: set[str] = set()
        for name in names:
            model.get_submodule(name).register_forward_hook(lambda *_, name=name: called.add(name))
        logits_of(model, tiny_batch(case.family))
        idle = sorted(set(names) - called)
        require(
            not idle,
            f"the model never calls {', '.join(idle[:3])}; match the module whose forward runs, and leave __call__ to "
            "nn.Module, whose hooks shard and record",
        )


def check_same_numbers(case: ReplacementCase, original: Plain) -> None:
    """From the same checkpoint, whose norms and biases are no ones and zeros."""
    with tiny_setup() as setup, checkpoint_of(case.family) as files:
        model, _ = case.build(setup, files=files)
        hint = "the formula differs from the original's, or the tolerance is too small for its rounding"
        for mode, wanted in original.numbers:
            found = mode.numbers(model, setup)
            allowed = _scaled(case.tolerance, {"": wanted.logits})
            how = f"with the replacement{mode.how}"
            require_close({"logits": found.logits}, {"logits": wanted.logits}, allowed, f"{how} the value", hint)
            _compare(found.step, wanted.step, case.tolerance, how)


def check_same_state(case: ReplacementCase) -> None:
    """Before and after a step's forward and backward pass, which may write nothing but gradients."""
    with tiny_setup() as setup, checkpoint_of(case.family) as files:
        plain, _ = case.build(setup, replaced=False, files=files)
        model, _ = case.build(setup, files=files)
        buffers = [name for name, _ in plain.named_buffers()]
        wanted, flags = state_of(plain), flags_of(plain)
        for when in ("after loading", "after a forward and a backward pass"):
            require_equal(state_of(model, buffers), wanted, f"{when}", "hold the original's tensors themselves")
            own = {name: value for name, value in flags_of(model).items() if name in flags}
            require_equal(own, {name: flags[name] for name in own}, f"{when}", "keep what the original says")
            model.train()
            step_of(model, tiny_batch(case.family), setup)
            model.eval()


def check_meta_build(case: ReplacementCase) -> None:
    """Memory that nobody fills holds NaN; what the model holds must be what a build without meta gives."""
    with tiny_setup() as setup:
        with junk_in_memory():
            model, names = case.build(setup)
        plain, _ = case.build(setup, replaced=False)
        require_equal(original_tensors(model), original_tensors(plain), "of the initial weights", _META_HINT)
        for name in names:
            context = case.context(plain, name, setup)
            direct = case.target.build(module=plain.get_submodule(name), module_fqn=name, context=context)
            built = model.get_submodule(name)
            wanted = {f"{name}.{key}": value for key, value in direct.named_buffers()}
            found = {f"{name}.{key}": value for key, value in built.named_buffers()}
            require_equal(found, wanted, "of the buffers", _META_HINT)


def check_half_precision(case: ReplacementCase, original: Plain) -> None:
    """The dtypes that leave each replaced module, in a model of bf16 weights."""
    with tiny_setup() as setup, checkpoint_of(case.family) as files:
        found: list[dict[str, list[torch.dtype]]] = []
        names = case.build(setup)[1]
        for is_replaced in (False, True):
            model, _ = case.build(setup, replaced=is_replaced, files=files)
            nn.Module.to(model, torch.bfloat16)
            dtypes: dict[str, list[torch.dtype]] = {}
            for name in names:
                hook = partial(note_dtypes, dtypes, name)
                model.get_submodule(name).register_forward_hook(hook)
            logits = logits_of(model, halved(tiny_batch(case.family)))
            require(bool(logits.isfinite().all()), "the logits are not finite")
            found.append(dtypes)
            if is_replaced:
                own_logits = logits
        hint = "compute in fp32 where it is needed, and give back the dtype that came in"
        plain, own = found
        require_equal(own, {name: plain[name] for name in own}, "the dtypes that it gives back", hint)
        hint = "the formula differs from the original's where the weights are bf16"
        allowed = max(case.tolerance, _HALF)
        require_close({"logits": own_logits}, {"logits": original.halved}, allowed, "in bf16 the value", hint)


def check_export(case: ReplacementCase) -> None:
    """After weights have moved, as in training, so that what was remembered of the loaded ones would show."""
    with (
        tiny_setup() as setup,
        checkpoint_of(case.family) as files,
        tempfile.TemporaryDirectory() as directory,
    ):
        batch = tiny_batch(case.family)
        model, _ = case.build(setup, files=files)
        step_of(model, batch, setup)
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
        wanted = logits_of(model, batch)
        export_model(model, directory)
        try:
            found = logits_of(reloaded(directory), batch)
        except Exception as error:
            require(False, f"plain transformers can't load what was exported: {described(error)}")
        allowed = _scaled(case.tolerance, {"": wanted})
        require_close({"logits": found}, {"logits": wanted}, allowed, "in the reloaded model the value", _EXPORT_HINT)


def check_second_model_untouched(case: ReplacementCase, original: Plain) -> None:
    """Look at the classes of the model and at the modules they are defined in."""
    with tiny_setup() as setup, checkpoint_of(case.family) as files:
        batch = tiny_batch(case.family)
        first, wanted = original.model, original.logits
        model, names = case.build(setup, files=files)
        step_of(model, batch, setup)
        after = definitions_of(first)
        for where, value in original.definitions.items():
            require(after.get(where) is value, f"it replaces {where} for every model; change this instance alone")
        second, _ = case.build(setup, replaced=False, files=files)
        for name in names:
            kinds = type(second.get_submodule(name)), type(first.get_submodule(name))
            require(kinds[0] is kinds[1], f"{name} of a second model is a {kinds[0].__name__}")
        require_equal({"logits": logits_of(second, batch)}, {"logits": wanted}, "of a second model", "")
        require_equal({"logits": logits_of(first, batch)}, {"logits": wanted}, "of a model made before", "")


def check_refusals(case: ReplacementCase) -> None:
    """Call the factory with each module that it must refuse."""
    with tiny_setup() as setup, torch.device("meta"):
        fqn = "model.layers.0.refused"
        context = case.context(tiny_skeleton(case.family), fqn, setup)
        for module in case.refuses:
            kind = type(module).__name__
            try:
                case.factory(module=module, module_fqn=fqn, context=context, **case.arguments)
            except ArgumentError:
                continue
            except Exception as error:
                require(False, f"for a {kind} it raises {described(error)}; raise hp_core.ArgumentError with a reason")
            require(False, f"it takes a {kind}; raise hp_core.ArgumentError where the formula or the layout differs")


_EXPORT_HINT = "weights must hold the original's values, in its layout, whenever they are read"
_META_HINT = "fill its own buffers in reset_buffers(), with what its constructor gives them"


def _steps_on_ranks(setup: DistributedSetup, case: ReplacementCase) -> tuple[Step, Step]:
    own = take_rows(tiny_batch(case.family), 2 * setup.rank, 2 * setup.rank + 2)
    # The plain one first, before a factory can change what both are made of.
    plain, replaced = (step_of(case.on_ranks(setup, replaced=one), own, setup) for one in (False, True))
    return replaced, plain


def _export_on_ranks(setup: DistributedSetup, case: ReplacementCase) -> None:
    model = case.on_ranks(setup, replaced=True)
    step_of(model, take_rows(tiny_batch(case.family), 0, 2), setup)
    export_model(model, case.directory)


def _compare(found: Step, wanted: Step, tolerance: float, how: str) -> None:
    hint = "the formula or its derivative differs from the original's, or the tolerance is too small for its rounding"
    require(
        abs(found.loss - wanted.loss) <= tolerance * max(1.0, abs(wanted.loss)),
        f"{how} the loss is {found.loss:.9g} instead of {wanted.loss:.9g}; {hint}",
    )
    allowed = _scaled(tolerance, wanted.gradients)
    require_close(found.gradients, wanted.gradients, allowed, f"{how} the gradient", hint)


def _scaled(tolerance: float, wanted: Mapping[str, torch.Tensor]) -> float:
    """A tolerance relative to the largest value, that is absolute where all are below one."""
    return tolerance / min(1.0, max(largest(wanted), 1e-30))
