"""What happens between a model of images and text and its language model, on ranks that share the work.

A rank whose rows hold no image would leave the vision tower out, and the others would wait for it: FSDP2 gathers a
tower's parameters on all ranks or on none. So it takes a blank image through the tower and adds nothing of it. Ranks
that share sequences all see whole rows, images included; the sequences are cut where the language model begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from hp_core.errors import InputError, Problem, RunError
from hp_core.parallel.context.sequence import SLICE, SequenceSlice
from hp_core.parallel.setup import DistributedSetup

# What a model is called with for rows without an image: the inputs of one image that no row refers to.
BLANK_IMAGE = "blank_image"
# Positions in time, height and width, (rows, tokens, 3), beside those in the text (M-RoPE).
AXIS_POSITIONS = "axis_positions"
# What a model of images needs of a sequence that ranks share before it is cut.
UNCUT = frozenset({"input_ids", "position_ids", AXIS_POSITIONS})
# What transformers calls the features that take the place of tokens, and those that are added in layers.
_FEATURES = ("pooler_output", "deepstack_features")
# What it calls them where models give them back. Nothing trains on them, and FSDP2 warns of the views that they are.
_GIVEN_BACK = frozenset({"image_outputs", "image_hidden_states"})
_DEEPSTACK, _VISIBLE = "deepstack_visual_embeds", "visual_pos_masks"


def with_axis_positions(model_inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs as transformers takes them: positions (4, rows, tokens) in the text, in time, height and width."""
    given = dict(model_inputs)
    axes = given.pop(AXIS_POSITIONS, None)
    if axes is not None:
        given["position_ids"] = torch.cat([given["position_ids"][None], axes.permute(2, 0, 1)])
    return given


@runtime_checkable
class SeesImages(Protocol):
    """A part of a transformers model that turns images into features."""

    def get_image_features(self, *args: Any, **kwargs: Any) -> Any:
        """The features of images, in an output that holds them as `pooler_output`."""
        ...


def sees_images(model: nn.Module) -> bool:
    """Whether a model takes images beside text."""
    return isinstance(model, PreTrainedModel) and isinstance(model.base_model, SeesImages)


def has_axes(model: nn.Module) -> bool:
    """Whether a model tells its tokens' places in time, height and width apart."""
    assert isinstance(model, PreTrainedModel)
    rope = model.config.get_text_config().to_dict().get("rope_parameters") or {}
    return "mrope_section" in rope


def outside_language_model(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of what images go through before the language model: towers and projectors, by FQN."""
    assert isinstance(model, PreTrainedModel)
    # By identity: FSDP2 gives modules other classes, and parameters may be tied.
    inner = {id(one) for one in model.get_decoder().parameters()}
    return {
        f"{model.base_model_prefix}.{name}": one
        for name, one in model.base_model.named_parameters()
        if id(one) not in inner
    }


def join_images(model: PreTrainedModel, setup: DistributedSetup) -> None:
    """Prepare a model that takes images for rows without any, and for ranks that share sequences.

    Raises:
        InputError: it has no language model of its own that sequences could be cut for.
    """
    decoder = model.get_decoder()
    if decoder is model.base_model or not isinstance(decoder, nn.Module):
        message = f"{type(model).__name__} has no language model apart from its vision tower"
        raise InputError(Problem(message, path="model", hint="use a family of transformers that has"))
    if setup.sizes.pp > 1:
        message = f"{type(model).__name__} takes images, which a pipeline can't carry"
        raise InputError(Problem(message, path="accelerator.pp_size", hint="remove 'pp_size'"))
    joint = _Joint(has_axes(model))
    model.base_model.register_forward_pre_hook(joint.enter, with_kwargs=True)
    decoder.register_forward_pre_hook(joint.hand_over, with_kwargs=True)
    model.register_forward_hook(_without_features)


class _Joint:
    """One call of a model on its way: what its language model is to be given beside what the model hands to it."""

    def __init__(self, has_axes: bool) -> None:
        self._has_axes = has_axes
        self._nothing: torch.Tensor | None = None
        self._slice: SequenceSlice | None = None

    def enter(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Take what the vision tower must not see out of the call, and a blank image through it."""
        given = dict(kwargs)
        # The tower attends within images, which are whole.
        self._slice = given.pop(SLICE, None)
        blank = given.pop(BLANK_IMAGE, None)
        positions = given.get("position_ids")
        if self._has_axes and isinstance(positions, torch.Tensor) and positions.ndim == 2:
            # Some families forget which of them are those in the text, and with that where documents begin.
            given["position_ids"] = positions.expand(4, -1, -1)
        assert isinstance(model, SeesImages)
        self._nothing = None if blank is None else _nothing_of(model.get_image_features(**blank, return_dict=True))
        return args, given

    def hand_over(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Add nothing to the embeddings, and cut the sequences to this rank's part."""
        del model
        given, self_slice, nothing = dict(kwargs), self._slice, self._nothing
        self._slice = self._nothing = None
        embeddings = given.get("inputs_embeds")
        if not isinstance(embeddings, torch.Tensor):
            if nothing is None and self_slice is None:
                return args, given
            raise RunError("model: its language model is not given embeddings, so images can't be joined with text")
        if nothing is not None:
            given["inputs_embeds"] = embeddings + nothing.to(embeddings)
        if self_slice is None:
            return args, given
        if embeddings.shape[1] == len(self_slice.all_positions):
            given = dict(_cut(given, self_slice.positions))
        return args, {**given, SLICE: self_slice}


def _without_features(model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    del model, args
    if not isinstance(output, ModelOutput) or _GIVEN_BACK.isdisjoint(output):
        return output
    return type(output)(**{name: value for name, value in output.items() if name not in _GIVEN_BACK})


def _nothing_of(output: Mapping[str, Any]) -> torch.Tensor:
    """Zero, which depends on all features that the model uses: so their gradients are zero, not missing.

    Of what is left unused, a tower's last layers in some families, nobody has gradients.
    """
    features = [one for name in _FEATURES for one in _tensors(output.get(name))]
    return torch.stack([one.float().sum() * 0.0 for one in features]).sum()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)


def _cut(given: Mapping[str, Any], positions: torch.Tensor) -> Iterator[tuple[str, Any]]:
    """What a language model is given, for the tokens at these positions alone."""
    rows, length = given["inputs_embeds"].shape[:2]
    seen = given.get(_VISIBLE)
    for name, value in given.items():
        if name == _DEEPSTACK and value is not None and seen is not None:
            # One row for each token of an image, in the order of all rows' tokens.
            own = seen.new_zeros((rows, length), dtype=torch.long)
            own[seen] = torch.arange(int(seen.sum()), device=seen.device)
            chosen = own[:, positions][seen[:, positions]]
            yield name, [one[chosen] for one in value]
        elif not isinstance(value, torch.Tensor):
            yield name, value
        elif name == "position_ids" and value.ndim == 3:
            yield name, value[:, :, positions]
        elif value.shape[:2] == (rows, length):
            yield name, value[:, positions]
        else:
            yield name, value
