"""A recipe that trains a tiny model in a second, and the parts of it that nothing else provides."""

from __future__ import annotations

import copy
from typing import Annotated

import numpy as np
from pydantic import Field
from torch import nn
from torch.optim import SGD

from hp_core.data.protocols import IGNORED_LABEL, Datasets, Sample
from hp_core.model.replacement.contract import ReplacementContext, module_replacement

# Everything a run can do, in three steps: evaluations, checkpoints, micro-batches with uneven targets.
TINY_RECIPE = """\
model:
  name: causal_lm
  config:
    model_type: llama
    vocab_size: 96
    hidden_size: 32
    intermediate_size: 48
    num_hidden_layers: 2
    num_attention_heads: 4
    num_key_value_heads: 2
    head_dim: 8
    max_position_embeddings: 64
dataset:
  _target_: hp_core.testing.parts.numbered_rows
  validation_rows: 2
optimizer: {name: adamw, lr: 1.0e-2}
training:
  train_iters: 3
  global_batch_size: 4
  seed: 3
evaluation: {every: 2}
checkpoint: {save_every: 2}
"""


class NumberedRows:
    """`num_rows` rows; row r counts up in steps of r + 2, and its labels are shifted by one.

    Rows differ in how many labels they have, so that a mean of means would show; those of `silent` have none. They
    are cut into `documents` of about one length.
    """

    report = None

    def __init__(
        self,
        num_rows: int,
        length: int,
        vocab: int,
        silent: set[int],
        columns: tuple[str, ...] = (),
        documents: int = 1,
    ) -> None:
        self.num_rows, self.max_seq_len, self.vocab, self.silent = num_rows, length, vocab, silent
        self.columns, self.documents = columns, documents
        self.fingerprint = f"numbered-{num_rows}-{length}-{vocab}-{sorted(silent)}-{columns}"
        if documents > 1:
            self.fingerprint += f"-{documents}"

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> Sample:
        """Row -1 is the last row, or whatever a caller makes of it."""
        ids = (np.arange(self.max_seq_len + 1) * (index + 2) + index) % self.vocab
        labels = ids[1:].copy()
        labels[: index % (self.max_seq_len - 2)] = IGNORED_LABEL
        if index in self.silent:
            labels[:] = IGNORED_LABEL
        positions = np.arange(self.max_seq_len) % -(-self.max_seq_len // self.documents)
        sample: Sample = {"index": index, "input_ids": ids[:-1], "labels": labels, "position_ids": positions}
        for number, name in enumerate(self.columns):
            sample[name] = np.full(self.max_seq_len, 1.0 + number + index % 3, dtype=np.float32)  # type: ignore[literal-required]
        return sample


def numbered_rows(
    num_rows: Annotated[int, Field(ge=1, description="Rows of the training set.")] = 24,
    length: Annotated[int, Field(ge=4, description="Tokens in a row.")] = 16,
    vocab: Annotated[int, Field(ge=2, description="Tokens are numbers below it.")] = 96,
    silent: Annotated[list[int] | None, Field(description="Training rows without a label.")] = None,
    validation_rows: Annotated[int, Field(ge=0, description="Rows of the validation set.")] = 0,
    columns: Annotated[list[str] | None, Field(description="Names of arrays of positive numbers to add.")] = None,
    documents: Annotated[int, Field(ge=1, description="Documents in a row.")] = 1,
) -> Datasets:
    """Rows that need no files, for tests of plugins."""
    names = tuple(columns or ())
    validation = NumberedRows(validation_rows, length, vocab, set(), names, documents) if validation_rows else None
    return Datasets(NumberedRows(num_rows, length, vocab, set(silent or []), names, documents), validation)


def plain_descent(*, model: nn.Module) -> SGD:
    """Steps in proportion to the gradients, so that small differences stay small."""
    return SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)


@module_replacement
def same_again(module: nn.Module, module_fqn: str, context: ReplacementContext) -> nn.Module:
    """A module of the same class around the same tensors, so that `replace_module` has something to do."""
    del module_fqn, context
    again = copy.copy(module)
    for name, value in vars(module).items():
        if isinstance(value, dict):
            vars(again)[name] = value.copy()
    return again
