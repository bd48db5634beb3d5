"""Training models of images and text on packed conversations."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from torch import nn
from transformers import PreTrainedModel

from hp_core.data.images.pixels import ImageTransform
from hp_core.data.images.protocol import ImageTokenizer
from hp_core.errors import InputError, Problem
from hp_core.parallel.context.sequence import own_part
from hp_core.parallel.images import (
    AXIS_POSITIONS,
    BLANK_IMAGE,
    UNCUT,
    has_axes,
    sees_images,
    with_axis_positions,
)
from hp_core.training.accounting import MicroBatch
from hp_core.training.evaluation import evaluating
from hp_core.training.startup import may_have_images
from hp_plugins.collators.images import IMAGES, ImageRows
from hp_plugins.trainers import text
from hp_plugins.trainers.probe_image import probe_row
from hp_plugins.trainers.text import TextTrainer

_HINT = "write `tokenizer: {name: processor, path: …}`"


class VLMTrainer(TextTrainer):
    """Next-token training on texts and images: a processor, its pixels, and the language model's packed rows."""

    takes_images: ClassVar[bool] = True

    processor: ImageTokenizer

    def _build_model(self) -> None:
        super()._build_model()
        if not sees_images(self.model):
            message = f"a {type(self.model).__name__} takes no images"
            raise InputError(Problem(message, path="model", hint="write model.name: image_text"))
        _require_positions_alone(self.model)

    def _build_model_assets(self) -> None:
        """Build the processor, which is the tokenizer too."""
        super()._build_model_assets()
        if not isinstance(self.tokenizer, ImageTokenizer):
            found = "null" if self.tokenizer is None else f"a {type(self.tokenizer).__name__}"
            raise InputError(Problem(f"is {found}, no processor of images", path="dataset.tokenizer", hint=_HINT))
        self.processor = self.tokenizer
        _check_image_token(self.model, self.processor)

    def _build_data_transform(self) -> None:
        """Build what reads a row's images and makes pixels of them."""
        self.transform = ImageTransform(self.processor)

    def _build_dataset(self) -> None:
        super()._build_dataset()
        splits = (self.datasets.train, self.datasets.validation, self.datasets.test)
        self._has_images = any(map(may_have_images, splits))
        if self._has_images:
            self._try_image()

    def _try_image(self) -> None:
        """Refuse a model that makes another number of features of an image than the processor writes tokens for it.

        Every rank calls it: with sharded weights a forward pass is a collective.
        """
        try:
            batch = ImageRows(self.processor, has_axes(self.model))([probe_row(self.processor)])
            prepared, _ = self.preforward(self._micro_batch(get_batch(iter([batch]))))
            with evaluating(self.model):
                self.forward(prepared)
        except (ValueError, RuntimeError, TypeError) as error:
            message = f"{type(self.model).__name__} can't take an image as {type(self.processor).__name__} makes it"
            raise InputError(Problem(f"{message}: {error}", path="dataset.tokenizer")) from error

    def _build_collate_fn(self) -> None:
        """Stack the rows as the recipe says, and put their images beside them."""
        super()._build_collate_fn()
        self.collate_fn = ImageRows(self.processor, has_axes(self.model), self._has_images, self.collate_fn)

    def _build_get_batch(self) -> None:
        super()._build_get_batch()
        self.get_batch = get_batch

    def preforward(self, micro_batch: MicroBatch) -> tuple[dict[str, Any], dict[str, Any]]:
        """As every trainer's, with the positions in the form that the model takes them in."""
        prepared, loss_inputs = super().preforward(micro_batch)
        return with_axis_positions(prepared), loss_inputs

    def token_counts(self, micro_batches: Sequence[MicroBatch]) -> dict[str, int]:
        """The tokens that the model is given, and how many of them stand for images."""
        given = sum(int(one.real_tokens.sum()) for one in micro_batches)
        # Ranks that share sequences all have the whole rows.
        speaks = self.setup.axis_rank("cp") == 0
        token = self.processor.image_token_id
        images = sum(int((one.model_inputs["input_ids"] == token).sum()) for one in micro_batches) if speaks else 0
        return {"input_tokens": given, "image_tokens": images}

    def _micro_batch(self, inputs: tuple[dict[str, Any], dict[str, Any]]) -> MicroBatch:
        if self.setup.sizes.cp > 1:
            # Images lie in whole sequences, which the model cuts when they are joined.
            inputs = own_part(*inputs, self.setup, whole=UNCUT)
        return MicroBatch.of(*inputs, self.contract)


def get_batch(iterator: Iterator[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The next batch as what the model and what the loss are called with: images to the model alone."""
    batch = dict(next(iterator))
    images, blank = batch.pop(IMAGES, {}), batch.pop(BLANK_IMAGE, None)
    axes = batch.pop(AXIS_POSITIONS, None)
    model_inputs, loss_inputs = text.get_batch(iter([batch]))
    others = {name: value for name, value in ((BLANK_IMAGE, blank), (AXIS_POSITIONS, axes)) if value is not None}
    return {**model_inputs, **images, **others}, loss_inputs


def _require_positions_alone(model: nn.Module) -> None:
    """Refuse a model that goes by the types of tokens, in its attention to images: packed rows have none.

    Families of M-RoPE make positions of them alone, which are given instead.
    """
    names = inspect.signature(type(model).forward).parameters
    own = [name for name in ("token_type_ids", "mm_token_type_ids") if name in names]
    if own and not has_axes(model):
        message = f"a {type(model).__name__} takes {own[0]}, by which it attends to images, and rows have none"
        raise InputError(Problem(message, path="model", hint="use another family of models"))


def _check_image_token(model: nn.Module, processor: ImageTokenizer) -> None:
    assert isinstance(model, PreTrainedModel)
    values = model.config.to_dict()
    own = values.get("image_token_id", values.get("image_token_index"))
    if own != processor.image_token_id:
        message = f"the model sets images in the place of token {own}, the processor writes {processor.image_token_id}"
        hint = f"write model.config.image_token_id: {processor.image_token_id}"
        raise InputError(Problem(message, path="model", hint=hint))
