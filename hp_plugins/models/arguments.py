"""Arguments that the builders of transformers models share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from hp_core.errors import ArgumentError

Pretrained = Annotated[str | None, Field(description="Hugging Face directory or hub id; its weights are loaded.")]
Revision = Annotated[str | None, Field(description="Branch, tag or commit of a hub id.")]
Config = Annotated[
    dict[str, Any] | None,
    Field(
        description="Configuration values: on top of the pretrained ones, or, with model_type, the whole "
        "configuration of a model with initial weights. A key the family does not have is an error."
    ),
]
MasterDtype = Annotated[
    Literal["float32", "bfloat16"],
    Field(description="Dtype of the master weights. bfloat16 is pure bf16: small updates vanish."),
]
Attention = Annotated[
    Literal["sdpa", "eager"],
    Field(description="Attention code. Others are refused: they would let packed documents see each other."),
]
Generation = Annotated[
    dict[str, Any] | None,
    Field(description="Settings on top of the pretrained generation_config.json, which exports of the model hold."),
]
RemoteCode = Annotated[bool, Field(description="Run the model code a hub id or directory brings.")]


def check_revision(pretrained: str | None, revision: str | None) -> None:
    """Raise `ArgumentError` for a revision of nothing."""
    if revision is not None and pretrained is None:
        raise ArgumentError("revision", "has no effect without pretrained", "leave revision out")
