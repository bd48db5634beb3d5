"""Whether a model computes the same when its sequences are cut: tried on a few short rows before it is trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.masking_utils import sdpa_mask

from hp_core.errors import InputError, Problem
from hp_core.parallel.agreement import gathered
from hp_core.parallel.context.attention import METHODS, attention_name, register, score_problems
from hp_core.parallel.context.method import PATH, exchange_problems
from hp_core.parallel.context.sequence import SLICE, own_part
from hp_core.parallel.dtypes import DTYPES
from hp_core.parallel.setup import DistributedSetup
from hp_core.training.evaluation import evaluating

# Tokens of a row for each rank.
_LENGTH = 16
# How far, relative to their norm, the logits of a token may be apart by rounding alone.
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.25}
# Where a router nearly ties, rounding sends a token to another expert: so few of a rank's tokens may differ.
_FEW = 1 / 8
_HINT = "remove 'cp_size'"


def require_same_when_cut(model: PreTrainedModel, setup: DistributedSetup) -> None:
    """Refuse a model that computes something else when its sequences are cut among ranks. Every rank calls it.

    Short rows of packed documents are run whole and cut, without gradients. What they are too short to show is read
    from what the model gives to its attention: a window or chunk in a mask that the attention isn't told of.

    Raises:
        InputError: on all ranks, where any of them sees a difference.
    """
    family = model.config.model_type
    inputs = _rows(model, setup)
    with evaluating(model), _recorded(setup) as calls:
        whole = _logits(model, inputs, setup)
        _raise_on_all(calls.problems, setup)
        _require_attention_in_layers(model, calls.number, setup)
        calls.number = 0
        part, _ = own_part(inputs, {"labels": inputs["input_ids"]}, setup)
        own = _logits(model, part, setup)
        untold = calls.number - calls.told
    if untold:
        message = f"{family}: {untold} attentions are not told which part of a sequence they are given"
        calls.problems.append(Problem(message, path=PATH, hint=_HINT))
    elif _differ(own, whole[:, part[SLICE].positions.to(whole.device)], _tolerance(model, setup)):
        message = f"{family} computes other logits when its sequences are cut, so it would train on other numbers"
        calls.problems.append(Problem(message, path=PATH, hint=_HINT))
    _raise_on_all(calls.problems, setup)


@dataclass
class _Calls:
    """Stands for the attention and the masks of a trial's model, and notes what they are given."""

    setup: DistributedSetup
    number: int = 0
    told: int = 0
    problems: list[Problem] = field(default_factory=list)
    # By where their data are, as a model may give a view; they are held, so that no other can be there.
    masks: dict[int, tuple[torch.Tensor, int | None]] = field(default_factory=dict)

    def mask(self, *, local_size: int | None = None, **options: Any) -> torch.Tensor:
        """transformers' mask, also where it would leave it out; `local_size` is its window or chunk."""
        mask = sdpa_mask(**{**options, "local_size": local_size, "allow_is_causal_skip": False})
        assert mask is not None
        self.masks[mask.data_ptr()] = mask, local_size
        return mask

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **options: Any,
    ) -> Any:
        """As transformers calls it."""
        self.number += 1
        self.told += SLICE in options
        method = self.setup.accelerator.cp_method
        if SLICE not in options:
            self.problems += score_problems(module, options)
            self.problems += self._mask_problems(module, attention_mask, options.get("sliding_window"))
            if method == "ulysses":
                self.problems += exchange_problems(query.shape[1], self.setup.accelerator)
        return METHODS[method](module, query, key, value, attention_mask, **options)

    def _mask_problems(self, module: nn.Module, mask: torch.Tensor | None, window: int | None) -> Iterator[Problem]:
        name = type(module).__name__
        if mask is None:
            return
        if mask.data_ptr() not in self.masks:
            yield Problem(f"{name} is given a mask that the model makes itself", path=PATH, hint=_HINT)
            return
        local_size = self.masks[mask.data_ptr()][1]
        if local_size != window:
            in_mask = "no window" if local_size is None else f"a window or chunk of {local_size} tokens"
            in_attention = "none" if window is None else f"one of {window}"
            message = f"the mask of {name} has {in_mask}, and the attention itself is told of {in_attention}"
            yield Problem(message, path=PATH, hint=_HINT)


@contextmanager
def _recorded(setup: DistributedSetup) -> Iterator[_Calls]:
    calls, name = _Calls(setup), attention_name(setup)
    register(name, calls.attend, calls.mask)
    try:
        yield calls
    finally:
        register(name, METHODS[setup.accelerator.cp_method], sdpa_mask)


def _rows(model: PreTrainedModel, setup: DistributedSetup) -> dict[str, Any]:
    """A row of one document, and one of several that end within the parts of ranks; the same on all ranks."""
    length = _LENGTH * setup.sizes.cp
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(0, model.config.get_text_config().vocab_size, (2, length), generator=generator)
    documents = [torch.arange(3), torch.arange(length - 8), torch.arange(5)]
    positions = torch.stack([torch.arange(length), torch.cat(documents)])
    return {"input_ids": input_ids, "position_ids": positions, "use_cache": False}


def _logits(model: PreTrainedModel, inputs: dict[str, Any], setup: DistributedSetup) -> torch.Tensor:
    """(rows, tokens, classes), or a tensor rank's own part of the classes."""
    placed = {name: value if isinstance(value, bool) else value.to(setup.device) for name, value in inputs.items()}
    logits: torch.Tensor = model(**placed).logits
    return logits


def _differ(own: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> bool:
    distances = (own.double() - wanted.double()).norm(dim=-1)
    differing = distances > tolerance * wanted.double().norm(dim=-1)
    return bool(differing.double().mean() > _FEW)


def _tolerance(model: PreTrainedModel, setup: DistributedSetup) -> float:
    computed_in = setup.precision.param_dtype
    return _TOLERANCES[DTYPES[computed_in] if computed_in else model.dtype]


def _require_attention_in_layers(model: PreTrainedModel, number: int, setup: DistributedSetup) -> None:
    """Ranks of a pipeline have other layers; the others repeat theirs."""
    found = sum(gathered(number, setup)) * setup.sizes.pp // setup.world_size
    num_layers = model.config.get_text_config().num_hidden_layers
    if found < num_layers:
        message = (
            f"{model.config.model_type}: {num_layers - found} of {num_layers} layers don't use transformers' attention "
            "functions, and would see this rank's part of a sequence alone"
        )
        raise InputError(Problem(message, path=PATH, hint=_HINT))


def _raise_on_all(problems: Sequence[Problem], setup: DistributedSetup) -> None:
    found = [problem for of_rank in gathered(list(problems), setup) for problem in of_rank]
    if found:
        raise InputError(list(dict.fromkeys(found)))
