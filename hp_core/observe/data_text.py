"""A survey of the data as text: targets in colour on a terminal, between marks elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from hp_core.data.inspection import ShownDocument, ShownRow
from hp_core.data.survey import SourceFacts, SplitFacts, Survey

_BAR_WIDTH = 40
_TRAINED = "green"
_MARKS = ("⟦", "⟧")


def say_survey(survey: Survey, split: str) -> None:
    """Print the survey to the standard output; its samples are of `split`."""
    console = Console(file=sys.stdout, highlight=False, emoji=False, soft_wrap=True)
    for row in survey.rows:
        console.print(_row_text(row, split, colours=console.is_terminal))
    for line in _lines(survey):
        console.print(line, markup=False)


def _row_text(row: ShownRow, split: str, *, colours: bool) -> Text:
    text = Text(f"{split} row {row.index:,}")
    text.append(f": {_many(len(row.documents), 'document')}")
    text.append(f", {row.padding:,} of padding\n" if row.padding else "\n")
    for document in row.documents:
        text.append(_document_text(document, colours=colours))
        text.append("\n")
    return text


def _document_text(document: ShownDocument, *, colours: bool) -> Text:
    text = Text(f"--- {document.location or 'document'}: {document.tokens:,} tokens, {document.trained:,} targets\n")
    for segment in document.segments:
        visible = _visible(segment.text)
        if not segment.trained:
            text.append(visible, style="dim")
        elif colours:
            text.append(visible, style=_TRAINED)
        else:
            text.append(f"{_MARKS[0]}{visible}{_MARKS[1]}")
    text.append("\n")
    return text


def _visible(text: str) -> str:
    r"""The text with what a terminal would act on, or not show, as an escape such as `\x1b`."""
    return "".join(one if one.isprintable() or one in "\n\t" else repr(one)[1:-1] for one in text)


def _lines(survey: Survey) -> Iterator[str]:
    for split in survey.splits:
        yield from _split_lines(split)
    if survey.lengths:
        yield "tokens of a document:"
        largest = max(count for _, _, count in survey.lengths)
        width = max(len(f"{low:,}-{high:,}") for low, high, _ in survey.lengths)
        for low, high, count in survey.lengths:
            bar = "#" * -(-count * _BAR_WIDTH // largest)
            yield f"  {f'{low:,}-{high:,}':>{width}}  {bar:<{_BAR_WIDTH}}  {count:,}"
    if survey.num_documents is None:
        yield "this dataset doesn't tell its documents: no lengths, no duplicates"
        return
    yield f"{_many(survey.num_duplicates, 'repeated document')} of {survey.num_documents:,}"
    for one in survey.duplicates:
        yield f"  {one.repeated} repeats {one.first}"


def _split_lines(split: SplitFacts) -> Iterator[str]:
    name = f"{split.name} (the first documents of the stream)" if split.is_beginning else split.name
    line = f"{name}: {split.rows:,} rows of {split.max_seq_len:,} tokens"
    report = split.report
    if report is not None:
        line += f" ({report.fill:.1%} full), {report.tokens:,} tokens, {report.targets:,} targets"
        line += f" from {_many(report.documents, 'document')}{report.told_images()}{report.told()}"
    yield line
    for source in split.sources:
        yield f"  {source.name}: {_source_line(source)}"


def _source_line(source: SourceFacts) -> str:
    report = source.report
    epoch = "" if source.epoch_rows == report.rows else f", {source.epoch_rows:,} of an epoch"
    return (
        f"{report.rows:,} rows{epoch}, {report.tokens:,} tokens, {report.targets:,} targets from "
        f"{_many(report.documents, 'document')}{report.told_images()}{report.told()}"
    )


def _many(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
