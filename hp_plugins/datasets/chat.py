"""Conversations from files or the Hub, of which the answers are trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from hp_core.data.build import Part, build_data
from hp_core.data.cache import cache_directory
from hp_core.data.chat.encoder import ChatEncoder, ChatSettings, TrainOn
from hp_core.data.chat.formats import ConversationFormat, FormatName, named_format
from hp_core.data.chat.mapping import mapped_format
from hp_core.data.chat.template import ChatTokenizer
from hp_core.data.columns import RowColumns
from hp_core.data.images.pixels import ImageTransform
from hp_core.data.images.protocol import ImageTokenizer
from hp_core.data.images.references import ImageRules
from hp_core.data.layout import Layout
from hp_core.data.protocols import Datasets, MeshContext, Tokenizer, TrainableTokenizer
from hp_core.data.reading import Reading
from hp_core.data.records import Source
from hp_core.data.sources import FileSource, expand_files
from hp_core.errors import ArgumentError
from hp_plugins.datasets.arguments import (
    BlockDocuments,
    CacheDir,
    FaultyRows,
    LongDocuments,
    MaxErrors,
    MaxSeqLen,
    NumProc,
    PackingRule,
    Streaming,
    ValidationFraction,
    block_size,
)
from hp_plugins.datasets.sources import Files, HubConfig, HubId, SourceSpec, Split, Temperature, parts_of, rows_of

Format = Annotated[FormatName | None, Field(description="How conversations stand in a row; null is `messages`.")]
Mapped = Annotated[
    dict[str, Any] | None,
    Field(
        description="A format of your own, instead: `{messages: dialog, role: who}` or `{user: ask, assistant: say}`."
    ),
]


class ChatSource(SourceSpec):
    """A source of conversations."""

    format: Format = None
    mapping: Mapped = None


def chat(
    files: Files = None,
    hub_id: HubId = None,
    hub_config: HubConfig = None,
    split: Split = None,
    format: Format = None,
    mapping: Mapped = None,
    sources: Annotated[
        dict[str, ChatSource] | None,
        Field(description="Several sources by name, instead of files: files or hub_id, format, weight and more."),
    ] = None,
    temperature: Temperature = None,
    train_on: Annotated[TrainOn, Field(description="Every answer, the last one only, or prompts too.")] = "assistant",
    token_weights: Annotated[
        bool, Field(description="Let turns have a `weight`, which the loss takes as `token_weights`.")
    ] = False,
    chat_template: Annotated[
        str | None, Field(description="A chat template, as text or a .jinja file, instead of the tokenizer's.")
    ] = None,
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, Field(description="Variables for the chat template, such as `enable_thinking: false`.")
    ] = None,
    date: Annotated[
        str | None, Field(description="The date, such as '2026-01-31', for a chat template that prints today's.")
    ] = None,
    max_seq_len: MaxSeqLen = 1024,
    packing: PackingRule = "best_fit",
    length_policy: LongDocuments = "drop",
    validation_fraction: ValidationFraction = 0.0,
    validation_files: Annotated[
        str | list[str] | None, Field(description="Files to validate on, instead of a fraction.")
    ] = None,
    cache_dir: CacheDir = None,
    columns: Annotated[
        list[str] | None,
        Field(description="Numeric fields of a row that the loss takes: one number for each conversation."),
    ] = None,
    num_proc: NumProc = None,
    on_error: FaultyRows = "fail",
    max_errors: MaxErrors = None,
    streaming: Streaming = False,
    block_documents: BlockDocuments = None,
    image_dir: Annotated[
        str | None, Field(description="What paths of images are relative to; null is the folder of the data files.")
    ] = None,
    image_urls: Annotated[bool, Field(description="Fetch images that are given as http URLs.")] = False,
    max_row_pixels: Annotated[
        Annotated[int, Field(ge=1)] | None,
        Field(
            description="Pixels of images in a row at most, however many tokens it has; null is any number. A "
            "conversation of more is too long for a row."
        ),
    ] = None,
    *,
    tokenizer: Tokenizer | TrainableTokenizer | None,
    transform: ImageTransform | None = None,
    mesh_context: MeshContext | None = None,
) -> Datasets:
    """Conversations, as a chat template renders them; each answer and its stop token are targets, and nothing else.

    `files` and `hub_id` are those of `text`. A row is a conversation in one of the formats `messages` (OpenAI),
    `sharegpt`, `alpaca` and `prompt_completion`, or one that a `mapping` describes. `sources` are several of these by
    name, each with a `format` or `mapping` of its own; for their weights and `temperature` see `text`.

    The template is the tokenizer's, or `chat_template`, which is saved with the trained model then. What of its text
    is an answer is found by its generation marks, or else by rendering the conversation with other answers; a template
    for which that can't be told is refused. `train_on: last` trains the last answer only, `all` prompts too. A turn
    with `train: false` isn't trained. With `token_weights`, a turn's `weight` is what each of its tokens counts for.

    With a processor as tokenizer, turns may hold images: as parts `{type: image}` with `path`, `bytes`, `base64` or
    `url`, or as `<image>` in a text; those without a value are the row's `images` (or `image`), in order. What stands
    for an image is never cut. A damaged image is a faulty row.

    Conversations of more than `max_seq_len` tokens are left out and counted, unless `length_policy` says otherwise.
    All other arguments are those of `text`, streams included.
    """
    if not isinstance(tokenizer, ChatTokenizer):
        what = "none is given" if tokenizer is None else f"a {type(tokenizer).__name__} has no chat template"
        hint = "write `tokenizer: {name: pretrained, path: …}`"
        raise ArgumentError("tokenizer", f"chats need a finished tokenizer with special tokens: {what}", hint)
    block = block_size(
        streaming,
        block_documents,
        validation_fraction=validation_fraction,
        beforehand={"num_proc": num_proc, "cache_dir": cache_dir} if validation_files is None else {},
        unstreamed={"sources": sources, "temperature": temperature},
    )
    _check_images(tokenizer, {"image_dir": image_dir, "image_urls": image_urls, "max_row_pixels": max_row_pixels})
    settings = ChatSettings(
        named_format("messages"),
        train_on,
        token_weights,
        chat_template,
        dict(chat_template_kwargs or {}),
        date,
        RowColumns.of(columns),
        ImageRules(None if image_dir is None else Path(image_dir).expanduser(), image_urls),
    )
    alone: dict[str, Any] = {"files": files, "hub_id": hub_id, "hub_config": hub_config, "split": split}
    alone |= {"format": format, "mapping": mapping}
    parts = parts_of(ChatSource, sources, temperature, alone, partial(_part, settings))
    datasets = build_data(
        parts,
        tokenizer=tokenizer,
        layout=Layout(max_seq_len, packing, length_policy, max_row_pixels),
        reading=Reading(cache_directory(cache_dir), num_proc, on_error, max_errors),
        validation_fraction=validation_fraction,
        validation_parts=_validation_parts(validation_files, sources, settings, format, mapping),
        temperature=temperature,
        block_documents=block,
        mesh_context=mesh_context,
        transform=transform,
    )
    if chat_template is None:
        return datasets
    return replace(datasets, tokenizer=tokenizer.with_chat_template(chat_template))


def _part(settings: ChatSettings, name: str, spec: ChatSource, within: str) -> Part:
    source = rows_of(spec, within=within)
    chosen = replace(settings, format=_format(spec.format, spec.mapping, within), images=_rules(settings, source))
    encoder = partial(ChatEncoder.of, chosen)
    return Part(name, source, encoder, weight=spec.weight, loss_weight=spec.loss_weight)


def _rules(settings: ChatSettings, source: Source) -> ImageRules:
    """Where the images of a source are: by default beside its files, if these are in one folder."""
    if settings.images.directory is not None or not isinstance(source, FileSource):
        return settings.images
    folders = {path.resolve().parent for path in source.paths}
    return replace(settings.images, directory=folders.pop()) if len(folders) == 1 else settings.images


def _check_images(tokenizer: ChatTokenizer, given: Mapping[str, object]) -> None:
    """Refuse arguments about images where there can be none. Raises `ArgumentError`."""
    name = next((name for name, value in given.items() if value), None)
    if name is not None and not isinstance(tokenizer, ImageTokenizer):
        hint = "write `tokenizer: {name: processor, path: …}`"
        raise ArgumentError(name, "has no effect with a tokenizer that knows no images", hint)
    directory = given["image_dir"]
    if isinstance(directory, str) and not Path(directory).expanduser().is_dir():
        raise ArgumentError("image_dir", f"there is no directory {directory!r}")


def _validation_parts(
    files: str | list[str] | None,
    sources: Mapping[str, ChatSource] | None,
    settings: ChatSettings,
    name: FormatName | None,
    mapping: Mapping[str, Any] | None,
) -> list[Part]:
    """The part of the validation files, which have the format of the training data."""
    if files is None:
        return []
    formats = {(spec.format, repr(spec.mapping)): spec for spec in (sources or {}).values()}
    if len(formats) > 1:
        hint = "use validation_fraction, or give all sources the same format"
        raise ArgumentError("validation_files", "their format can't be told: the sources' formats differ", hint)
    for spec in formats.values():
        name, mapping = spec.format, spec.mapping
    source = FileSource(expand_files(files, argument="validation_files"))
    chosen = replace(settings, format=_format(name, mapping, ""), images=_rules(settings, source))
    return [Part("", source, partial(ChatEncoder.of, chosen))]


def _format(name: FormatName | None, mapping: Mapping[str, Any] | None, within: str) -> ConversationFormat:
    if mapping is None:
        return named_format(name or "messages")
    if name is not None:
        raise ArgumentError(f"{within}mapping", "format and mapping are both given", "drop one of them")
    return mapped_format(mapping, f"{within}mapping")
