"""The plan of a run's model: made from the recipe, shown to plugins, and kept for whoever asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from hp_core.config.plan_override import PlanOverride
from hp_core.errors import InputError, Problem
from hp_core.parallel.injection import Injection, inject
from hp_core.parallel.plan.activations import Activations
from hp_core.parallel.plan.exchange import Settings
from hp_core.parallel.plan.model_plan import ModelPlan, plan_model

if TYPE_CHECKING:
    from hp_core.parallel.setup import DistributedSetup


@dataclass
class Planner:
    """Plans the model of a run by the recipe's `plan_overrides`; `on_plan` is the hook that is shown the plan.

    `plan` and `injections` are those of the first model that was planned, None and empty before.
    """

    overrides: Sequence[PlanOverride] = ()
    on_plan: Callable[..., Any] | None = None
    plan: ModelPlan | None = None
    injections: tuple[Injection, ...] = ()

    def prepare(
        self, model: PreTrainedModel, setup: DistributedSetup, activations: Activations | None = None
    ) -> ModelPlan:
        """Plan `model`, on meta with its modules replaced, show the plan, and put the user's code into the model.

        `activations` is what has been done about those.

        Raises:
            InputError: see `plan_model` and `inject`; or a plugin refuses the plan.
        """
        plan = plan_model(
            model,
            setup.sizes,
            self.overrides,
            Settings(setup.accelerator, setup.fsdp, setup.precision),
        )
        plan = replace(plan, activations=activations or plan.activations)
        if self.on_plan is not None:
            self.on_plan(plan=plan)
        injections = inject(model, self.overrides, setup)
        if self.plan is None:
            self.plan, self.injections = plan, injections
        return plan

    def lines(self) -> Iterator[str]:
        """Yield what the run's console is told: what a rank holds and keeps, and the user's code that was put in."""
        if self.plan is not None and self.plan.sizes.world > 1:
            yield self.plan.summary()
        if self.plan is not None:
            yield from self.plan.activations.lines()
        yield from map(str, self.injections)

    def require_applied(self) -> None:
        """Refuse a model builder that left the recipe's contracts aside.

        Raises:
            InputError: there are some, and nothing was planned.
        """
        asked = any(
            one.has_contract or one.inner_wrapper is not None or one.local_compute_fn is not None
            for one in self.overrides
        )
        if asked and self.plan is None:
            hint = "a model builder finishes its skeleton with hp_core.finish_model(model, distributed_setup)"
            raise InputError(Problem("the model was built without its sharding contract", "plan_overrides", hint=hint))
