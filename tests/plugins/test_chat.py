"""The chat dataset as a recipe builds it: files, masks, lengths, packing and what is refused."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hp_core.data import parallel, writing
from hp_core.data.protocols import Datasets, MeshContext, RowDataset
from hp_core.data.streaming import Cursor, StreamBatches
from hp_core.errors import ArgumentError, InputError
from hp_plugins.datasets.chat import ChatSource, chat
from hp_plugins.tokenizers.bpe import bpe
from hp_plugins.tokenizers.byte_level import byte_tokenizer
from hp_plugins.tokenizers.pretrained import pretrained
from tests.data.chat.styles import CHATML, STYLES, Style, Turn
from tests.data.chat.test_masks import CHATS, answers, encode, encoder, expected_runs, normal

ROWS = [{"messages": turns} for turns in CHATS.values()]
Piece = tuple[list[int], list[int], list[float]]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HP_CACHE_DIR", str(tmp_path / "cache"))


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def build(tmp_path: Path, rows: list[dict[str, Any]], style: Style = STYLES["chatml"], **arguments: Any) -> Datasets:
    given = {"max_seq_len": 512, "tokenizer": style.tokenizer(), **arguments}
    return chat(files=write(tmp_path / "a.jsonl", rows), **given)


def pieces(rows: RowDataset) -> list[Piece]:
    """The ids, labels and weights of the documents, or pieces of them, in the rows."""
    found: list[Piece] = []
    for number in range(len(rows)):
        row: Any = rows[number]
        tokens = ~row["is_padding"]
        starts = np.flatnonzero((row["position_ids"] == 0) & tokens).tolist()
        weights = row.get("token_weights", np.zeros(len(tokens)))
        for begin, end in zip(starts, [*starts[1:], int(tokens.sum())], strict=True):
            found.append(tuple(row_part[begin:end].tolist() for row_part in (row["input_ids"], row["labels"], weights)))
    return found


def kept(labels: list[int]) -> list[int]:
    return [label for label in labels if label != -100]


# Styles with tokenizers and closings of every kind, on which all lengths are tried.
TRIED = ("llama_2", "qwen_3", "glm")


@pytest.mark.parametrize("style", STYLES.values(), ids=lambda style: style.name)
def test_labels_are_the_answers_and_their_stop_tokens_at_any_length(style: Style, tmp_path: Path) -> None:
    """Without packing, a row is a conversation; the longest fits 512 tokens."""
    documents = [encode(encoder(style), turns) for turns in CHATS.values()]
    size = len(documents[1].ids)
    for max_seq_len in (6, 17, 40, size - 1, size, size + 1, 512) if style.name in TRIED else (17, size - 1, size):
        for policy in ("drop", "truncate", "truncate_eos", "split"):
            options = {"max_seq_len": max_seq_len, "length_policy": policy, "packing": "none"}
            left, expected = [], []
            for one in documents:
                trained, size = one.trained, len(one.ids)
                assert trained is not None
                if policy == "drop" and size > max_seq_len:
                    continue
                shown = trained[1:] if policy == "split" else trained[1 : min(max_seq_len, size)]
                targets = one.ids[1:][: len(shown)][shown].tolist()
                if policy == "truncate_eos" and size > max_seq_len and shown[-1]:
                    targets[-1] = style.tokenizer().eos_id
                expected.append(targets)
            expected = [targets for targets in expected if targets]
            if not expected:
                with pytest.raises(InputError, match="nothing to predict"):
                    build(tmp_path, ROWS, style, **options)
                continue
            left = [kept(labels) for _, labels, _ in pieces(build(tmp_path, ROWS, style, **options).train)]
            if policy == "split":
                assert list(chain(*left)) == list(chain(*expected))
            else:
                assert left == expected


@pytest.mark.parametrize("style", STYLES.values(), ids=lambda style: style.name)
def test_decoded_labels_are_the_answers(style: Style, tmp_path: Path) -> None:
    for packing in ("best_fit", "sequential", "none"):
        found = pieces(build(tmp_path, ROWS, style, packing=packing, max_seq_len=300).train)
        spelled = sorted(style.tokenizer().spell(kept(labels)).replace(" ", "") for _, labels, _ in found)
        texts = ["".join(expected_runs(style, turns, set(answers(turns)))) for turns in CHATS.values()]
        assert spelled == sorted(normal(style, text).replace(" ", "") for text in texts)


def test_nothing_is_added_behind_the_stop_token(tmp_path: Path) -> None:
    style = STYLES["llama_3"]
    ((ids, labels, _),) = pieces(build(tmp_path, [{"messages": CHATS["one turn"]}], style).train)
    assert style.tokenizer().spell(ids[-1:]) == "<|eot_id|>"
    assert labels[-1] == -100
    assert ids.count(style.tokenizer().eos_id) == 2


FORMATS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "messages": ({}, {"messages": CHATS["one turn"]}),
    "sharegpt": (
        {"format": "sharegpt"},
        {"conversations": [{"from": "human", "value": "What is it?"}, {"from": "gpt", "value": "It is this."}]},
    ),
    "alpaca": ({"format": "alpaca"}, {"instruction": "What is it?", "output": "It is this."}),
    "prompt_completion": ({"format": "prompt_completion"}, {"prompt": "What is it?", "completion": "It is this."}),
    "mapping": ({"mapping": {"user": "q", "assistant": "a"}}, {"q": "What is it?", "a": "It is this."}),
}


@pytest.mark.parametrize(("options", "row"), FORMATS.values(), ids=FORMATS.keys())
def test_every_format_gives_the_same_rows(tmp_path: Path, options: dict[str, Any], row: dict[str, Any]) -> None:
    (piece,) = pieces(build(tmp_path, [row], **options).train)
    (plain,) = pieces(build(tmp_path, [{"messages": CHATS["one turn"]}]).train)
    assert piece == plain
    assert STYLES["chatml"].tokenizer().spell(kept(piece[1])) == "It is this.<|im_end|>"


def test_what_is_trained_is_chosen_by_the_recipe(tmp_path: Path) -> None:
    spell = STYLES["chatml"].tokenizer().spell

    def trained(**options: Any) -> str:
        ((_, labels, _),) = pieces(build(tmp_path, [{"messages": CHATS["three turns"]}], **options).train)
        return spell(kept(labels))

    assert trained() == "It is this.<|im_end|>hello world<|im_end|>on the mat<|im_end|>"
    assert trained(train_on="last") == "on the mat<|im_end|>"
    assert trained(train_on="all").startswith("user\nWhat is it?<|im_end|>\n<|im_start|>assistant\nIt is this.")


def test_weights_come_as_a_column(tmp_path: Path) -> None:
    turns: list[Turn] = [dict(turn) for turn in CHATS["three turns"]]
    turns[1]["weight"], turns[3]["weight"] = 0.5, 0
    ((_, labels, weights),) = pieces(build(tmp_path, [{"messages": turns}], token_weights=True).train)
    spell = STYLES["chatml"].tokenizer().spell
    found = {w: spell([x for x, v in zip(labels, weights, strict=True) if v == w]) for w in (0.5, 1.0)}
    assert found == {0.5: "It is this.<|im_end|>", 1.0: "on the mat<|im_end|>"}
    assert {w for x, w in zip(labels, weights, strict=True) if x == -100} == {0.0}
    with pytest.raises(InputError, match=r"a\.jsonl:1: messages\[1\]: has the weight 0\.5; weights need token_weights"):
        build(tmp_path, [{"messages": turns}])


@pytest.mark.parametrize(("weight", "loss_weight", "product"), [(2.0**100, 2.0**100, "inf"), (1e-30, 1e-30, "0")])
def test_weights_whose_product_float32_cannot_hold_are_refused(
    tmp_path: Path, weight: float, loss_weight: float, product: str
) -> None:
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": weight}]}]
    sources = {"one": ChatSource(files=write(tmp_path / "one.jsonl", rows), loss_weight=loss_weight)}
    problem = rf"^sources\.one\.loss_weight: times the weight \S+ of a token is {product} in float32"
    with pytest.raises(ArgumentError, match=problem):
        chat(sources=sources, token_weights=True, tokenizer=STYLES["chatml"].tokenizer())


@pytest.mark.parametrize("streaming", [False, True])
def test_a_column_cannot_be_called_as_the_weights_are(tmp_path: Path, streaming: bool) -> None:
    rows = [{**row, "token_weights": 7} for row in ROWS]
    named = {"columns": ["token_weights"], "streaming": streaming}
    with pytest.raises(ArgumentError, match=r"^columns: 'token_weights' is what the weights of tokens"):
        build(tmp_path, rows, token_weights=True, **named)
    assert build(tmp_path, rows, **named).train[0]["token_weights"].max() == 7  # type: ignore[typeddict-item]


def test_conversations_without_a_target_are_counted_and_left_out(tmp_path: Path) -> None:
    silent = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b", "train": False}]
    report = build(tmp_path, [{"messages": silent}, *ROWS]).train.report
    assert report is not None
    assert (report.documents, report.untargeted_documents) == (len(ROWS), 1)
    with pytest.raises(InputError, match="1 without a trained token"):
        build(tmp_path, [{"messages": silent}])


def test_faulty_rows_end_the_run_or_are_counted(tmp_path: Path) -> None:
    rows = [*ROWS[:2], {"messages": [{"role": "user", "content": None}]}, {"messages": []}, *ROWS[2:]]
    with pytest.raises(InputError) as caught:
        build(tmp_path, rows)
    assert str(caught.value).splitlines() == [
        f"{tmp_path}/a.jsonl:3: messages[0].content: is null, not text",
        f"{tmp_path}/a.jsonl:4: messages: the conversation is empty",
    ]
    report = build(tmp_path, rows, on_error="skip").train.report
    assert report is not None
    assert (report.documents, report.faulty_rows) == (len(ROWS), 2)
    with pytest.raises(InputError, match="more faulty rows than the 1 of max_errors"):
        build(tmp_path, rows, on_error="skip", max_errors=1)


def test_another_process_encodes_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "PAYS_AFTER_SECONDS", 0.0)
    monkeypatch.setattr(writing, "_BATCH_ROWS", 2)
    rows = [*ROWS[:5], {"messages": []}, *ROWS[5:]]
    alone, shared = (
        build(tmp_path, rows, STYLES["glm"], num_proc=number, on_error="skip", cache_dir=str(tmp_path / f"{number}"))
        for number in (1, 2)
    )
    assert pieces(shared.train) == pieces(alone.train)
    assert shared.train.report == alone.train.report


def test_rows_of_csv_are_read_too(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('q,a\nWhat is it?,It is this.\n"x","007"\n')
    tokenizer = STYLES["chatml"].tokenizer()
    built = chat(
        files=str(tmp_path / "a.csv"),
        mapping={"user": "q", "assistant": "a"},
        tokenizer=tokenizer,
        packing="none",
    )
    found = [tokenizer.spell(kept(labels)) for _, labels, _ in pieces(built.train)]
    assert found == ["It is this.<|im_end|>", "007<|im_end|>"]


def test_chats_can_be_streamed(tmp_path: Path) -> None:
    rows: Any = build(tmp_path, ROWS, streaming=True, packing="none").train
    first = rows[0]
    spelled = STYLES["chatml"].tokenizer().spell(kept(first["labels"].tolist()))
    assert spelled in {"".join(expected_runs(STYLES["chatml"], turns, set(answers(turns)))) for turns in CHATS.values()}
    assert not (tmp_path / "cache").exists()
    for refused, value in (("validation_fraction", 0.5), ("temperature", 2.0), ("num_proc", 2)):
        with pytest.raises(ArgumentError, match=f"^{refused}: "):
            build(tmp_path, ROWS, streaming=True, **{refused: value})
    with pytest.raises(ArgumentError, match=r"^block_documents: has no effect without streaming"):
        build(tmp_path, ROWS, block_documents=3)


def test_sources_have_formats_of_their_own(tmp_path: Path) -> None:
    first = write(tmp_path / "one.jsonl", [{"messages": CHATS["one turn"]}])
    second = write(tmp_path / "two.jsonl", [{"q": "x", "a": "y"}])
    sources = {
        "one": ChatSource(files=first, loss_weight=0.5),
        "two": ChatSource(files=second, mapping={"user": "q", "assistant": "a"}),
    }
    tokenizer = STYLES["chatml"].tokenizer()
    built = chat(sources=sources, tokenizer=tokenizer)
    found = [(tokenizer.spell(kept(labels)), max(weights)) for _, labels, weights in pieces(built.train)]
    assert found == [("It is this.<|im_end|>", 0.5), ("y<|im_end|>", 1.0)]
    with pytest.raises(ArgumentError, match=r"^validation_files: their format can't be told"):
        chat(sources=sources, tokenizer=tokenizer, validation_files=first)
    broken = {"one": ChatSource(files=first, mapping={"usr": "q", "assistant": "a"})}
    with pytest.raises(ArgumentError, match=r"^sources\.one\.mapping\.usr: unknown key; did you mean 'user'"):
        chat(sources=broken, tokenizer=tokenizer)


def test_validation_has_the_format_and_the_template(tmp_path: Path) -> None:
    other = write(tmp_path / "b.jsonl", [{"q": "x", "a": "held out"}])
    rows = [{"q": f"{number}?", "a": f"answer {number}"} for number in range(20)]
    options: dict[str, Any] = {"mapping": {"user": "q", "assistant": "a"}}
    built = build(tmp_path, rows, validation_files=other, **options)
    assert built.validation is not None
    assert [STYLES["chatml"].tokenizer().spell(kept(one[1])) for one in pieces(built.validation)] == [
        "held out<|im_end|>"
    ]
    split = build(tmp_path, rows, validation_fraction=0.3, **options)
    assert split.validation is not None
    assert len(pieces(split.train)) + len(pieces(split.validation)) == 20


def test_a_template_of_the_recipe_is_used_and_saved(tmp_path: Path) -> None:
    other = CHATML.replace("turn.content", "('+' ~ turn.content)")
    (tmp_path / "other.jinja").write_text(other)
    row = [{"messages": CHATS["one turn"]}]
    plain = build(tmp_path, row)
    for given in (other, str(tmp_path / "other.jinja")):
        built = build(tmp_path, row, chat_template=given)
        ((ids, _, _),) = pieces(built.train)
        spelled = STYLES["chatml"].tokenizer().spell(ids)
        assert spelled.startswith("<|im_start|>user\n+What is it?")
        assert built.train.fingerprint != plain.train.fingerprint
        assert built.tokenizer is not None
        built.tokenizer.save(tmp_path / "saved")
        saved = pretrained(str(tmp_path / "saved"))
        assert saved.chat_template().render(CHATS["one turn"], None).text == spelled  # type: ignore[attr-defined]
    with pytest.raises(ArgumentError, match=r"^chat_template: .*none\.jinja' can't be read"):
        build(tmp_path, row, chat_template=str(tmp_path / "none.jinja"))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"tokenizer": None}, "tokenizer: chats need a finished tokenizer with special tokens: none is given"),
        ({"tokenizer": byte_tokenizer()}, "tokenizer: .*ByteTokenizer has no chat template; write `tokenizer: {name"),
        ({"tokenizer": bpe()}, "tokenizer: chats need a finished tokenizer"),
        ({"format": "alpaca", "mapping": {}}, "mapping: format and mapping are both given"),
        ({"mapping": {"user": "q"}}, "mapping: 'assistant' is missing"),
        ({"temperature": 2.0}, "temperature: has no effect without sources"),
        ({"hub_id": "a/b"}, "files: give either files or hub_id"),
        ({"split": "train"}, "split: has no effect on files"),
        ({"chat_template_kwargs": {"thinking": True}}, "chat_template_kwargs.thinking: changes nothing"),
        ({"date": "2026-01-31"}, "date: changes nothing"),
        ({"columns": ["labels"]}, r"columns\[0\]: a column can't be called 'labels'"),
        ({"max_seq_len": 1}, "max_seq_len: 1 is below 2"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(tmp_path: Path, arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{problem}"):
        build(tmp_path, ROWS, **arguments)


@pytest.mark.parametrize("size", [1, 2])
def test_streamed_conversations_are_those_of_a_whole_set(tmp_path: Path, size: int) -> None:
    """With weights, which a stream has to carry from block to row."""
    whole = build(tmp_path, ROWS, token_weights=True, packing="none")
    streams = []
    for rank in range(size):
        mesh_context = MeshContext(rank, size, rank, size)
        settings = {"token_weights": True, "packing": "none", "streaming": True, "block_documents": 3}
        streamed = build(tmp_path, ROWS, mesh_context=mesh_context, **settings).train.streamed
        assert streamed is not None
        assert streamed.columns == ("token_weights",)
        count = len(range(rank, len(ROWS), size))
        batches = StreamBatches(streamed, Cursor(), count, size, 1, 5)
        streams += [sample for given in batches.taken_from(streamed.stream.blocks(Cursor())) for sample in given]

    def content(row: Any) -> tuple[list[float], ...]:
        return tuple(row[name].tolist() for name in ("input_ids", "labels", "token_weights"))

    assert sorted(map(content, streams)) == sorted(content(whole.train[number]) for number in range(len(whole.train)))
