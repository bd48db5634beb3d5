from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_core.data.protocols import Tokenizer, TrainableTokenizer
from hp_core.errors import ArgumentError, InputError
from hp_plugins.tokenizers.bpe import bpe, sample
from hp_plugins.tokenizers.byte_level import byte_tokenizer
from hp_plugins.tokenizers.pretrained import pretrained

TEXTS = [f"the cat number {number} sat on the mat, naïve café 日本語 🙂\n" for number in range(50)]
any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return bpe(vocab_size=300).train(TEXTS, data_fingerprint="texts", cache_dir=tmp_path_factory.mktemp("cache"))


@given(text=any_text)
def test_bytes_are_the_ids(text: str) -> None:
    tokenizer = byte_tokenizer()
    (ids,) = tokenizer.encode_batch([text])
    assert bytes(ids) == text.encode()
    assert tokenizer.decode([*ids, tokenizer.eos_id]) == text


def test_bytes_have_257_ids_and_decode_anything() -> None:
    tokenizer = byte_tokenizer()
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (257, 256)
    assert tokenizer.decode([0x61, 0xFF, 256, 0x62]) == "a\ufffdb"


def test_components_keep_the_protocols() -> None:
    assert isinstance(byte_tokenizer(), Tokenizer)
    assert isinstance(bpe(), TrainableTokenizer)
    assert not isinstance(byte_tokenizer(), TrainableTokenizer)


@settings(deadline=None)
@given(text=any_text)
def test_bpe_gives_the_text_back(learned: Tokenizer, text: str) -> None:
    (ids,) = learned.encode_batch([text])
    assert learned.decode([*ids, learned.eos_id]) == text
    assert learned.eos_id not in ids


def test_bpe_learns_and_keeps_the_end_token_out_of_documents(learned: Tokenizer) -> None:
    assert learned.vocab_size == 300
    (ids,) = learned.encode_batch([TEXTS[0]])
    assert len(ids) < len(TEXTS[0].encode()) / 2
    (spelled,) = learned.encode_batch(["<|endoftext|>"])
    assert learned.eos_id not in spelled
    assert learned.decode(spelled) == "<|endoftext|>"


def learn(cache_dir: Path, results: Any) -> None:
    tokenizer = bpe(vocab_size=320).train(TEXTS, data_fingerprint="texts", cache_dir=cache_dir)
    results.put((tokenizer.fingerprint, tokenizer.encode_batch(TEXTS[:3])))


def test_bpe_is_the_same_in_another_process(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=learn, args=(tmp_path / "one", results))
    process.start()
    other = results.get(timeout=60)
    process.join(20)
    tokenizer = bpe(vocab_size=320).train(TEXTS, data_fingerprint="texts", cache_dir=tmp_path / "two")
    assert (tokenizer.fingerprint, tokenizer.encode_batch(TEXTS[:3])) == other


def test_a_cached_bpe_reads_no_documents(tmp_path: Path) -> None:
    def unreadable() -> Iterator[str]:
        raise AssertionError("read")
        yield ""

    first = bpe(vocab_size=300).train(TEXTS, data_fingerprint="texts", cache_dir=tmp_path)
    second = bpe(vocab_size=300).train(unreadable(), data_fingerprint="texts", cache_dir=tmp_path)
    assert second.fingerprint == first.fingerprint
    with pytest.raises(AssertionError, match="read"):
        bpe(vocab_size=300).train(unreadable(), data_fingerprint="others", cache_dir=tmp_path)


def test_a_damaged_bpe_is_learned_again(tmp_path: Path) -> None:
    first = bpe(vocab_size=300).train(TEXTS, data_fingerprint="texts", cache_dir=tmp_path)
    (path,) = tmp_path.glob("*/tokenizer.json")
    path.write_text(path.read_text()[:100])
    assert (
        bpe(vocab_size=300).train(TEXTS, data_fingerprint="texts", cache_dir=tmp_path).fingerprint == first.fingerprint
    )


@pytest.mark.parametrize("sample_bytes", [None, 1000])
def test_an_error_in_the_documents_comes_through(tmp_path: Path, sample_bytes: int | None) -> None:
    def broken() -> Iterator[str]:
        yield "fine"
        raise InputError("a.jsonl:2: not valid JSON")

    with pytest.raises(InputError, match=r"a\.jsonl:2"):
        bpe(sample_bytes=sample_bytes).train(broken(), data_fingerprint="x", cache_dir=tmp_path)


def test_every_bpe_setting_changes_the_result(tmp_path: Path) -> None:
    def train(**settings: int) -> Tokenizer:
        return bpe(**{"vocab_size": 300, **settings}).train(TEXTS, data_fingerprint="texts", cache_dir=tmp_path)

    assert train(vocab_size=280).vocab_size == 280
    assert train(min_frequency=1000).vocab_size == 257
    assert train(sample_bytes=100).vocab_size < 300
    fingerprints = {bpe().fingerprint, bpe(vocab_size=300).fingerprint, bpe(min_frequency=3).fingerprint}
    assert len(fingerprints | {bpe(sample_bytes=None).fingerprint}) == 4


def test_bpe_needs_all_bytes_and_the_end_token() -> None:
    with pytest.raises(ArgumentError, match="vocab_size: 256 is below 257"):
        bpe(vocab_size=256)


def test_a_sample_is_bounded_even_and_free_of_order() -> None:
    texts = [f"{number:04d}" for number in range(1000)]
    taken = sample(texts, 400)
    assert len(taken) == 100
    assert sample(texts[::-1], 400) == taken
    assert 300 < sum(map(int, taken)) / 100 < 700
    assert sample(["é" * 100], 11) == ["é" * 5]
    assert sample([], 10) == []


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_saved_tokenizers_give_the_same_ids_in_transformers(kind: str, learned: Tokenizer, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = byte_tokenizer() if kind == "bytes" else learned
    tokenizer.save(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    texts = [*TEXTS[:5], " leading", "don't  \t\x00\x7f", "日本🙂"]
    assert loaded(texts)["input_ids"] == tokenizer.encode_batch(texts)
    assert loaded.eos_token_id == tokenizer.eos_id
    assert [loaded.decode(ids) for ids in tokenizer.encode_batch(texts)] == texts


def test_pretrained_loads_what_was_saved(learned: Tokenizer, tmp_path: Path) -> None:
    learned.save(tmp_path / "first")
    tokenizer = pretrained(str(tmp_path / "first"))
    assert tokenizer.encode_batch(TEXTS) == learned.encode_batch(TEXTS)
    assert tokenizer.encode_batch([]) == []
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (learned.vocab_size, learned.eos_id)
    assert tokenizer.decode([*learned.encode_batch(["a b"])[0], tokenizer.eos_id]) == "a b"
    tokenizer.save(tmp_path / "second")
    assert pretrained(str(tmp_path / "second")).encode_batch(TEXTS) == learned.encode_batch(TEXTS)
    assert pretrained(str(tmp_path / "first")).fingerprint == tokenizer.fingerprint


def with_template(directory: Path, template: str) -> str:
    """A saved tokenizer that adds special tokens of its own."""
    from tokenizers import Tokenizer as FastBackend
    from tokenizers import processors

    byte_tokenizer().save(directory)
    backend = FastBackend.from_file(str(directory / "tokenizer.json"))
    backend.add_special_tokens(["<s>"])
    backend.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[("<s>", 257), ("<|endoftext|>", 256)]
    )
    backend.save(str(directory / "tokenizer.json"))
    return str(directory)


@pytest.mark.parametrize(
    ("template", "ids"), [("<s> $A", [257, 97]), ("<s> $A <|endoftext|>", [257, 97]), ("$A", [97])]
)
def test_pretrained_keeps_the_rule_for_bos_and_takes_eos_off(tmp_path: Path, template: str, ids: list[int]) -> None:
    tokenizer = pretrained(with_template(tmp_path, template))
    assert tokenizer.encode_batch(["a"]) == [ids]
    assert tokenizer.encode_batch(["a<|endoftext|><|endoftext|>"]) == [[*ids, 256, 256]]
    assert tokenizer.vocab_size == 258


def test_a_fingerprint_follows_the_bos_rule(tmp_path: Path) -> None:
    one = pretrained(with_template(tmp_path / "one", "<s> $A"))
    two = pretrained(with_template(tmp_path / "two", "$A"))
    assert one.fingerprint != two.fingerprint


def test_a_document_beyond_the_models_length_is_no_warning(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    byte_tokenizer().save(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_max_length": 8}))
    assert len(pretrained(str(tmp_path)).encode_batch(["x" * 100])[0]) == 100
    assert caplog.records == []
    assert capfd.readouterr().err == ""


def test_pretrained_needs_an_end_token(tmp_path: Path) -> None:
    byte_tokenizer().save(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    settings = json.loads(config.read_text())
    del settings["eos_token"]
    config.write_text(json.dumps(settings))
    with pytest.raises(ArgumentError, match="has no end token; name one with eos_token"):
        pretrained(str(tmp_path))
    assert pretrained(str(tmp_path), eos_token="<|endoftext|>").eos_id == 256
    with pytest.raises(ArgumentError, match="'<end>' is not in the vocabulary"):
        pretrained(str(tmp_path), eos_token="<end>")


@pytest.mark.parametrize("path", ["./none", "/none/at/all", "~/none-at-all", "a/b/c"])
def test_a_missing_directory_is_named_without_asking_the_hub(path: str) -> None:
    with pytest.raises(ArgumentError, match="there is no directory"):
        pretrained(path)


def test_a_hub_name_without_a_network_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for path in ("nobody/nothing", str(tmp_path)):
        with pytest.raises(ArgumentError, match="no tokenizer can be loaded from") as caught:
            pretrained(path)
        assert "\n" not in str(caught.value)
