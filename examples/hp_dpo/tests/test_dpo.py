"""The numbers by hand, the rows and their errors, and whole runs that don't depend on how a step is cut."""

from __future__ import annotations

import json
import math
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import peft
import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from hp_core import ArgumentError, DistributedSetup, InputError, Problem, module_replacement, shard_model
from hp_core.model.vocabulary import vocabulary_of
from hp_core.testing import tiny_model, trainer_checks
from hp_core.testing.setups import tiny_setup
from hp_dpo.data import preferences
from hp_dpo.loss import DpoLoss, PairLogProbs
from hp_dpo.reference import Reference, answer_log_probs
from hp_dpo.trainer import DpoTrainer

HERE = Path(__file__).parents[1]
RECIPE = (HERE / "recipe.yaml").read_text(encoding="utf-8").replace("examples/hp_dpo", str(HERE))
PAIR = {"prompt": "ab", "chosen": "cd", "rejected": "e"}


class Letters:
    """A token for each character."""

    name, eos_id, vocab_size, fingerprint = "letters", 0, 128, "letters"

    def encode_batch(self, texts):
        return [[ord(letter) for letter in text] for text in texts]

    def decode(self, ids):
        return "".join(map(chr, ids))

    def save(self, directory):
        raise NotImplementedError


def read(path: Path, *rows: dict, **settings):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return preferences(files=str(path), tokenizer=Letters(), **{"max_seq_len": 12, **settings})


@trainer_checks(DpoTrainer, recipe=RECIPE)
def test_promises(check):
    """One test for each: any micro-batches, any ranks, empty rows, resuming, export and more."""
    check()


# The loss.


def by_hand(logits, rows, reference, beta, smoothing):
    """Plain torch, pair by pair and token by token: the loss of each pair."""
    losses = []
    for pair, (chosen, rejected) in enumerate(rows):
        sums = [sum(F.log_softmax(logits[pair, t], -1)[token] for t, token in one) for one in (chosen, rejected)]
        z = beta * ((sums[0] - reference[pair, 0]) - (sums[1] - reference[pair, 1]))
        losses.append(-(1 - smoothing) * torch.sigmoid(z).log() - smoothing * torch.sigmoid(-z).log())
    return torch.stack(losses)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_values_and_gradients_are_those_of_plain_torch(smoothing):
    torch.manual_seed(0)
    logits = torch.randn(2, 6, 5, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(2, 2, dtype=torch.float64)
    labels = torch.tensor([[-100, 3, 1, -100, 4, -100], [2, -100, -100, 0, 1, -100]])
    answers = torch.tensor([[0, 1, 1, 0, 2, 0], [1, 0, 0, 2, 2, 0]])
    found = DpoLoss(beta=0.3, label_smoothing=smoothing)(
        model_output=PairLogProbs(answer_log_probs(logits, {"labels": labels, "answers": answers}), reference),
        labels=labels,
    )
    rows = [([(1, 3), (2, 1)], [(4, 4)]), ([(0, 2)], [(3, 0), (4, 1)])]
    wanted = by_hand(logits, rows, reference, 0.3, smoothing)
    assert torch.allclose(found["loss"], wanted, rtol=1e-12)
    gradients = [torch.autograd.grad(one.mean(), logits, retain_graph=True)[0] for one in (found["loss"], wanted)]
    assert torch.allclose(*gradients, rtol=1e-10)


def test_rewards_by_hand():
    pairs = PairLogProbs(torch.tensor([[-1.0, -3.0], [-2.0, -2.0]]), torch.tensor([[-2.0, -2.0], [-2.0, -2.0]]))
    found = DpoLoss(beta=0.5)(model_output=pairs, labels=torch.zeros(2, 1))
    assert found["chosen_reward"].tolist() == [0.5, 0]
    assert found["rejected_reward"].tolist() == [-0.5, 0]
    assert found["reward_margin"].tolist() == [1, 0]
    assert found["reward_accuracy"].tolist() == [1, 0]
    assert found["loss"].tolist() == pytest.approx([math.log(1 + math.exp(-1)), math.log(2)])


# Rows.


def test_a_row_is_the_prompt_with_both_answers(tmp_path):
    row = read(tmp_path / "a.jsonl", PAIR).train[0]
    assert row["input_ids"].tolist() == [97, 98, 99, 100, 0, 97, 98, 101, 0, 0, 0, 0]
    assert row["labels"].tolist() == [-100, 99, 100, 0, -100, -100, 101, 0, *[-100] * 4]
    assert row["answers"].tolist() == [0, 1, 1, 1, 0, 0, 2, 2, 0, 0, 0, 0]
    assert row["position_ids"].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2]
    assert row["is_padding"].tolist() == [False] * 9 + [True] * 3


def test_faulty_rows_are_told_all_at_once_with_their_lines(tmp_path):
    rows = [
        PAIR,
        {"prompt": "ab", "chosen": "cd"},
        {**PAIR, "rejected": "cd"},
        {**PAIR, "chosen": ""},
        {"chosen": "cd", "rejected": "e"},
    ]
    with pytest.raises(InputError) as caught:
        read(tmp_path / "a.jsonl", *rows)
    text = str(caught.value)
    for line, told in (
        (2, "rejected: is missing; the row has: prompt, chosen"),
        (3, "rejected: is the same as chosen"),
        (4, "chosen: is empty"),
        (5, "prompt: is missing or empty"),
    ):
        assert f"a.jsonl:{line}: {told}" in text


def test_what_a_tokenizer_of_texts_can_not_read_is_told_with_its_line(tmp_path):
    messages = {"prompt": [{"role": "user", "content": "hi"}], "chosen": "a", "rejected": "b"}
    with pytest.raises(InputError) as caught:
        read(tmp_path / "a.jsonl", PAIR, {**PAIR, "prompt": 3}, messages, {**PAIR, "chosen": ""})
    text = str(caught.value)
    for line, told in (
        (2, "prompt: is 3, neither a text nor a list of messages"),
        (3, "chosen: messages need another tokenizer; write tokenizer: {name: pretrained, path: …}"),
        (4, "chosen: is empty"),
    ):
        assert f"a.jsonl:{line}: {told}" in text


def test_a_pair_that_is_too_long_is_an_error_or_left_out(tmp_path):
    long = {**PAIR, "prompt": "a" * 20}
    with pytest.raises(ArgumentError, match=r"1 of 2 pairs .* 12 tokens; .*a.jsonl:2, has 45, its prompt 20") as caught:
        read(tmp_path / "a.jsonl", PAIR, long)
    assert caught.value.hint == "write max_seq_len: 45, or too_long: drop"
    datasets = read(tmp_path / "a.jsonl", PAIR, long, too_long="drop")
    assert len(datasets.train) == 1
    assert datasets.train.report.dropped_documents == 1


def test_the_same_prompt_is_never_in_both_parts(tmp_path):
    rows = [{**PAIR, "prompt": f"{n % 50:02d}", "chosen": f"c{n // 50}"} for n in range(100)]
    datasets = read(tmp_path / "a.jsonl", *rows, validation_fraction=0.3)
    parts = [{tuple(one[i]["input_ids"][:2]) for i in range(len(one))} for one in (datasets.train, datasets.validation)]
    assert not parts[0] & parts[1]
    assert len(parts[0] | parts[1]) == 50


TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}:{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


@pytest.fixture
def chat_tokenizer(tmp_path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from hp_plugins.tokenizers.pretrained import pretrained

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={one: number for number, one in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", bos_token="<s>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(tmp_path / "tokenizer")
    return pretrained(str(tmp_path / "tokenizer"))


def test_messages_are_rendered_and_the_prompt_is_what_both_share(tmp_path, chat_tokenizer):
    def turn(role, content):
        return {"role": role, "content": content}

    prompt, good, bad = turn("user", "hi"), turn("assistant", "yes"), turn("assistant", "no")
    explicit = {"prompt": [prompt], "chosen": [good], "rejected": [bad]}
    implicit = {"chosen": [prompt, good], "rejected": [prompt, bad]}
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in (explicit, implicit)))
    train = preferences(files=str(path), max_seq_len=80, tokenizer=chat_tokenizer).train
    one, other = (train[index] for index in (0, 1))
    assert all((one[name] == other[name]).all() for name in ("input_ids", "labels", "answers"))
    texts = [chat_tokenizer.spell(one["labels"][one["answers"] == which].tolist()) for which in (1, 2)]
    assert texts == ["yes</s>", "no</s>"]
    path.write_text(json.dumps({**explicit, "chosen": [good, prompt]}) + "\n")
    with pytest.raises(InputError, match=r"a.jsonl:1: chosen: holds a turn of role 'user'"):
        preferences(files=str(path), max_seq_len=80, tokenizer=chat_tokenizer)


@pytest.mark.parametrize("template", [None, TEMPLATE.split("\n")[0] + "\n{% endfor %}"], ids=["prompts", "none"])
def test_of_a_chat_only_what_the_assistant_generates_is_a_target(tmp_path, chat_tokenizer, template):
    """Not its headers, which a template without a generation prompt writes with the answer, nor what tools say."""
    turns = [
        {"role": role, "content": text} for role, text in (("assistant", "see"), ("tool", "3"), ("assistant", "a"))
    ]
    row = {"prompt": [{"role": "user", "content": "hi"}], "chosen": turns, "rejected": turns[:1]}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    settings = {} if template is None else {"chat_template": template}
    train = preferences(files=str(tmp_path / "a.jsonl"), max_seq_len=150, tokenizer=chat_tokenizer, **settings).train
    pair = train[0]
    for which, text in ((1, "see</s>a</s>"), (2, "see</s>")):
        targets = pair["labels"][(pair["answers"] == which) & (pair["labels"] != -100)]
        assert chat_tokenizer.spell(targets.tolist()) == text
    assert train.report.targets == len(chat_tokenizer.encode_batch(["see</s>a</s>see</s>"])[0])


def test_what_a_row_says_of_training_a_turn_is_heeded(tmp_path, chat_tokenizer):
    prompt = {"role": "user", "content": "hi"}
    turns = [{"role": "assistant", "content": text} for text in ("see", "a")]
    path, settings = tmp_path / "a.jsonl", {"max_seq_len": 150, "tokenizer": chat_tokenizer}

    def row(first):
        return {"prompt": [prompt], "chosen": [{**turns[0], "train": False}, turns[1]], "rejected": [first]}

    path.write_text(json.dumps(row(turns[0])) + "\n")
    pair = preferences(files=str(path), **settings).train[0]
    targets = pair["labels"][(pair["answers"] == 1) & (pair["labels"] != -100)]
    assert chat_tokenizer.spell(targets.tolist()) == "a</s>"
    path.write_text(json.dumps(row({**turns[0], "train": False})) + "\n")
    with pytest.raises(InputError, match=r"a.jsonl:1: rejected: holds nothing that is trained"):
        preferences(files=str(path), **settings)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"images": ["a.png"]}, "images: holds images, and pairs are texts"),
        ({"chosen": [{"role": "assistant", "content": "a", "weight": 0.5}]}, r"chosen\[0\]: has a weight"),
        ({"chosen": [{"role": "assistant", "content": "a", "wait": 1}]}, r"chosen\[0\].wait: unknown key"),
        ({"chosen": [{"role": "assistant", "content": " "}]}, "chosen: is empty"),
    ],
)
def test_what_can_be_no_answer_is_told_by_its_place(tmp_path, chat_tokenizer, changes, told):
    def turn(role, content):
        return {"role": role, "content": content}

    row = {"prompt": [turn("user", "hi")], "chosen": [turn("assistant", "yes")], "rejected": [turn("assistant", "no")]}
    (tmp_path / "a.jsonl").write_text(json.dumps({**row, **changes}) + "\n")
    with pytest.raises(InputError, match=f"a.jsonl:1: {told}"):
        preferences(files=str(tmp_path / "a.jsonl"), max_seq_len=150, tokenizer=chat_tokenizer)


def test_a_prompt_that_a_template_leaves_nothing_of_is_told(tmp_path, chat_tokenizer):
    row = {"prompt": [{"role": "user", "content": " "}]}
    row |= {name: [{"role": "assistant", "content": name}] for name in ("chosen", "rejected")}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    bare = (
        "{% for m in messages %}{{ m['content'] | trim }}{% if m['role'] == 'assistant' %}</s>{% endif %}{% endfor %}"
    )
    with pytest.raises(InputError, match=r"a.jsonl:1: prompt: has no tokens, or others, before one of the answers"):
        preferences(files=str(tmp_path / "a.jsonl"), max_seq_len=80, tokenizer=chat_tokenizer, chat_template=bare)


def test_an_answer_that_another_begins_with_is_told_as_such(tmp_path, chat_tokenizer):
    prompt, good = ({"role": role, "content": "hi"} for role in ("user", "assistant"))
    row = {"chosen": [prompt, good], "rejected": [prompt]}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(InputError, match=r"a.jsonl:1: rejected: is what the other begins with"):
        preferences(files=str(tmp_path / "a.jsonl"), max_seq_len=80, tokenizer=chat_tokenizer)


# Runs.


SHORT = (
    "training.train_epochs=null",
    "training.train_iters=3",
    "training.log_every=1",
    "training.global_batch_size=4",
    "evaluation.every=0",
)


def metrics(run) -> list[list[float]]:
    names = ("loss", "grad_norm", "reward_margin", "reward_accuracy", "tokens", "eval_loss", "eval_reward_margin")
    return [[row[name] for name in names if name in row] for row in run.rows]


def test_numbers_do_not_depend_on_ranks_or_accumulation(hp_run):
    runs = [hp_run(RECIPE, *SHORT, f"training.micro_batch_size={size}") for size in (4, 2, 1)]
    runs += [hp_run(RECIPE, *SHORT, f"training.micro_batch_size={size}", nproc=2) for size in (2, 1)]
    for run in runs[1:]:
        for found, wanted in zip(metrics(run), metrics(runs[0]), strict=True):
            assert found == pytest.approx(wanted, rel=1e-5, abs=1e-5)
    # Before the first step the policy is the reference.
    assert runs[0].losses[0] == pytest.approx(math.log(2), abs=1e-6)


def test_a_step_of_an_odd_number_of_pairs_counts_each_once(hp_run, tmp_path):
    lines = (HERE / "pairs.jsonl").read_text(encoding="utf-8").splitlines()[:5]
    (tmp_path / "five.jsonl").write_text("\n".join(lines) + "\n")
    five = (
        *SHORT,
        f"dataset.files={tmp_path / 'five.jsonl'}",
        "dataset.validation_fraction=0",
        "evaluation.at_end=false",
    )
    runs = [
        hp_run(RECIPE, *five, "training.micro_batch_size=1"),
        hp_run(RECIPE, *five, "training.micro_batch_size=4"),
        hp_run(RECIPE, *five, "training.micro_batch_size=2", nproc=2),
    ]
    for run in runs[1:]:
        for found, wanted in zip(metrics(run), metrics(runs[0]), strict=True):
            assert found == pytest.approx(wanted, rel=1e-5, abs=1e-5)


def test_a_resumed_run_is_the_one_that_was_never_stopped(hp_run):
    whole = hp_run(RECIPE, *SHORT, "training.micro_batch_size=2")
    first = hp_run(RECIPE, *SHORT, "training.micro_batch_size=2", "training.stop_after=1")
    rest = hp_run(RECIPE, *SHORT, "training.micro_batch_size=2", f"checkpoint.resume={first.directory}")
    # Its rows are those of the first part too, or its own alone.
    assert metrics(rest)[-3:] == metrics(whole)[-3:]


def test_beta_and_label_smoothing_act(hp_run):
    runs = [
        hp_run(RECIPE, *SHORT, "training.micro_batch_size=4", override)
        for override in ("loss_fn.beta=0.1", "loss_fn.beta=0.5", "loss_fn.label_smoothing=0.3")
    ]
    assert len({run.losses[-1] for run in runs}) == 3


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["dataset.tokenizer=null"], "tokenizer"),
        (["loss_fn=causal_lm"], "loss_fn: TokenLoss|loss_fn: .* is no loss of pairs; write loss_fn: hp-dpo:dpo"),
        (["loss_fn=null"], "loss_fn: ModelOutputLoss is no loss of pairs"),
        (["dataloader.collate_fn=rows"], "dataloader.collate_fn: rows can't be: pairs are put together in one way"),
        (["trainer.reference=/nowhere"], "trainer.reference: "),
        (["model.config.vocab_size=200"], "the tokenizer bytes has 257 tokens"),
        (["dataset={name: python_docs, max_files: 30, max_seq_len: 64, tokenizer: bytes}"], "its rows are no pairs"),
    ],
)
def test_what_does_not_fit_is_refused(hp_run, overrides, told):
    with pytest.raises(InputError, match=told):
        hp_run(RECIPE, *SHORT, "training.micro_batch_size=4", *overrides)


def test_loss_parallelism_is_refused_by_name(hp_run):
    cut = ("accelerator.tp_size=2", "accelerator.loss_parallel=true")
    with pytest.raises(InputError, match=r"accelerator.loss_parallel: true can't be") as caught:
        hp_run(RECIPE, *SHORT, "training.micro_batch_size=4", *cut, nproc=2)
    assert [one.hint for one in caught.value.problems] == ["remove it"]


@pytest.mark.parametrize("key", ["cp_size", "pp_size"])
def test_parallelism_that_cuts_pairs_or_models_is_refused(hp_run, key):
    with pytest.raises(InputError, match=f"accelerator.{key}: 2 can't be"):
        hp_run(RECIPE, *SHORT, "training.micro_batch_size=4", f"accelerator.{key}=2", nproc=2)


def test_tensor_ranks_give_the_same_numbers(hp_run):
    alone = hp_run(RECIPE, *SHORT, "training.micro_batch_size=4")
    cut = hp_run(RECIPE, *SHORT, "training.micro_batch_size=4", "accelerator.tp_size=2", nproc=2)
    for found, wanted in zip(metrics(cut), metrics(alone), strict=True):
        assert found == pytest.approx(wanted, rel=1e-5, abs=1e-5)


EXPERTS = (
    "model={name: causal_lm, config: {model_type: mixtral, vocab_size: 257, hidden_size: 32, intermediate_size: 48,"
    " num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 256,"
    " num_local_experts: 4, num_experts_per_tok: 2}}"
)


def test_ranks_that_share_experts_give_the_same_numbers(hp_run):
    alone = hp_run(RECIPE, *SHORT, EXPERTS, "training.micro_batch_size=4")
    shared = hp_run(RECIPE, *SHORT, EXPERTS, "training.micro_batch_size=2", "accelerator.ep_size=2", nproc=2)
    for found, wanted in zip(metrics(shared), metrics(alone), strict=True):
        assert found == pytest.approx(wanted, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("nproc", [1, 2])
def test_both_models_compute_in_bf16(hp_run, nproc):
    """To the last bit, both models say the same of an answer before the first step."""
    half = ("training.micro_batch_size=2", "mixed_precision.param_dtype=bfloat16", "optimizer.lr=0.001")
    run = hp_run(RECIPE, *SHORT, *half, nproc=nproc)
    exact = hp_run(RECIPE, *SHORT, "training.micro_batch_size=2", "optimizer.lr=0.001", nproc=nproc)
    assert run.losses[0] == pytest.approx(math.log(2), abs=1e-8)
    assert run.losses[1:] != exact.losses[1:]
    assert run.losses == pytest.approx(exact.losses, rel=0.1)
    assert run.losses[-1] < run.losses[0]


def test_another_reference_is_another_run_and_the_same_model_the_same(hp_run, tmp_path):
    from hp_core.export.export import export_checkpoint

    trained = hp_run(RECIPE, *SHORT, "training.micro_batch_size=4")
    export_checkpoint(trained.directory, tmp_path / "model")
    start = ("training.micro_batch_size=4", f"model={{name: causal_lm, pretrained: {tmp_path / 'model'}}}")
    own = hp_run(RECIPE, *SHORT, *start)
    named = hp_run(RECIPE, *SHORT, *start, f"trainer.reference={tmp_path / 'model'}")
    assert metrics(named) == metrics(own)
    other = hp_run(RECIPE, *SHORT, "training.micro_batch_size=4", f"trainer.reference={tmp_path / 'model'}")
    assert other.losses[0] != pytest.approx(math.log(2), abs=1e-6)


# Adapters.


def lora_policy(scale: float = 0.1, *, distributed_setup: DistributedSetup) -> torch.nn.Module:
    """A frozen model with an adapter, which adds nothing where the scale is 0."""
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"], lora_dropout=0.0)
    torch.manual_seed(3)
    model = peft.get_peft_model(tiny_model("llama", vocab_size=257), config)
    for name, one in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(one, std=scale)
    shard_model(model, distributed_setup)
    return model


def _gradients(environment):
    with tiny_setup(environment) as setup:
        policy = lora_policy(distributed_setup=setup)
        base = tiny_model("llama", vocab_size=257).eval()
        reference = Reference.of(SimpleNamespace(setup=setup), policy, None, None, {})
        inputs = {"input_ids": torch.arange(12).view(2, 6), "use_cache": False}
        labels = torch.tensor([[1, 2, -100, 4, 5, -100]] * 2)
        pairs = {"labels": labels, "answers": torch.tensor([[1, 1, 0, 2, 2, 0]] * 2)}
        found = reference.log_probs(inputs, pairs)
        with torch.no_grad():
            assert torch.allclose(found, answer_log_probs(base(**inputs).logits, pairs), atol=1e-5)
        assert policy.training
        policy_log_probs = answer_log_probs(policy(**inputs).logits, pairs)
        assert not torch.allclose(policy_log_probs, found)
        DpoLoss()(model_output=PairLogProbs(policy_log_probs, found), labels=labels)["loss"].sum().backward()
        gradients = {
            name: one.grad.full_tensor() if hasattr(one.grad, "full_tensor") else one.grad
            for name, one in policy.named_parameters()
            if one.requires_grad
        }
        return {name: one / setup.world_size for name, one in gradients.items()}


@pytest.mark.filterwarnings("ignore")
def test_without_its_adapter_the_policy_is_the_reference(hp_ranks):
    (alone,) = hp_ranks(_gradients, 1)
    assert len(alone) == 6
    for found in hp_ranks(_gradients, 2):
        for name, wanted in alone.items():
            assert float(wanted.abs().max()) > 0
            assert torch.allclose(found[name], wanted, rtol=1e-4, atol=1e-7), name


@pytest.mark.filterwarnings("ignore")
def test_a_model_with_an_adapter_is_trained_beside_itself(hp_run):
    model = "model={_target_: test_dpo.lora_policy, scale: 0.0}"
    longer = [one.replace("train_iters=3", "train_iters=20") for one in SHORT]
    start = (*longer, model, "optimizer.lr=0.02")
    whole, half = "training.micro_batch_size=2", "training.micro_batch_size=1"
    run = hp_run(RECIPE, *start, whole)
    assert run.losses[0] == pytest.approx(math.log(2), abs=1e-6)
    assert run.rows[-1]["eval_loss"] < math.log(2) - 0.01
    assert run.manifest["export"]["possible"] is True
    for size in (whole, half):
        other = hp_run(RECIPE, *start, size, nproc=2)
        assert other.losses == pytest.approx(run.losses, rel=1e-3)
    first = hp_run(RECIPE, *start, whole, "training.stop_after=10")
    rest = hp_run(RECIPE, *start, whole, f"checkpoint.resume={first.directory}")
    assert metrics(rest)[-3:] == metrics(run)[-3:]


def test_the_reference_knows_no_dropout_and_draws_nothing():
    model = tiny_model("gpt2").train()
    for one in model.modules():
        if isinstance(one, torch.nn.Dropout):
            one.p = 0.5
    pairs = {"labels": torch.tensor([[1, 2, 3, 4]]), "answers": torch.tensor([[1, 1, 2, 2]])}
    inputs = {"input_ids": torch.arange(4)[None], "use_cache": False}
    state = torch.get_rng_state()
    found = [Reference(model).log_probs(inputs, pairs) for _ in range(2)]
    assert torch.equal(*found)
    assert torch.equal(torch.get_rng_state(), state)
    assert not found[0].requires_grad
    assert model.training
    assert not torch.equal(answer_log_probs(model(**inputs).logits, pairs), found[0])


class PartlyFrozen(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))

    @contextmanager
    def disable_adapter(self):
        yield

    def forward(self, input_ids, use_cache):
        return SimpleNamespace(logits=self.weight[input_ids])


def test_a_reference_that_would_move_is_refused():
    trainer = SimpleNamespace(problem=lambda path, message, hint: f"trainer.{path}: {message}; {hint}")
    run = SimpleNamespace(setup=SimpleNamespace(device=torch.device("cpu")))
    with pytest.raises(InputError, match="what is trained is more than the adapter"):
        Reference.of(run, PartlyFrozen(), None, trainer, {})


class Bigrams(torch.nn.Module):
    """A model of no library, without a configuration: each token says what follows it."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(257, 257)

    def get_input_embeddings(self):
        return self.table

    def forward(self, input_ids, position_ids, use_cache):
        return SimpleNamespace(logits=self.table(input_ids))


def bigrams(*, distributed_setup: DistributedSetup) -> torch.nn.Module:
    model = Bigrams()
    shard_model(model, distributed_setup)
    return model


def test_a_model_without_the_size_of_its_vocabulary_in_its_configuration_is_trained(hp_run):
    run = hp_run(RECIPE, *SHORT, "training.micro_batch_size=4", f"model={{_target_: {__name__}.bigrams}}")
    assert run.losses[0] == pytest.approx(math.log(2), abs=1e-6)
    assert run.losses[-1] < run.losses[0]
    assert vocabulary_of(Bigrams()) == vocabulary_of(tiny_model("llama", vocab_size=257)) == 257
    assert vocabulary_of(torch.nn.Linear(2, 2)) is None


class HalvedMLP(torch.nn.Module):
    """Computes something else than the MLP that it replaces."""

    def __init__(self, mlp):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj

    def forward(self, x):
        return self.down_proj(torch.relu(self.gate_proj(x)) * self.up_proj(x)) / 2


@module_replacement
def halved(module, module_fqn, context) -> torch.nn.Module:
    return HalvedMLP(module)


def drawn_policy(*, distributed_setup: DistributedSetup) -> torch.nn.Module:
    """Its weights come from the global random stream."""
    config = LlamaConfig(
        vocab_size=300, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
    )
    model = LlamaForCausalLM(config)
    shard_model(model, distributed_setup)
    return model


@pytest.mark.parametrize(
    "override",
    [
        f"plan_overrides=[{{match: '*.mlp', replace_module: {{_target_: {__name__}.halved}}}}]",
        f"model={{_target_: {__name__}.drawn_policy}}",
    ],
    ids=["replaced", "drawn"],
)
def test_the_default_reference_is_the_policy_before_its_first_step(hp_run, override):
    run = hp_run(RECIPE, *SHORT, "training.micro_batch_size=4", override)
    assert run.losses[0] == pytest.approx(math.log(2), abs=1e-6)
    assert run.losses[-1] < run.losses[0]


def test_a_reference_in_which_answers_see_each_other_is_refused(monkeypatch):
    def leaks(model, device):
        raise InputError(Problem("does not keep packed documents apart", path="model"))

    monkeypatch.setattr("hp_dpo.reference.check_isolation", leaks)
    trainer = SimpleNamespace(problem=lambda path, message: f"trainer.{path}: {message}")
    with pytest.raises(InputError, match=r"trainer.reference: does not keep packed documents apart"):
        Reference(tiny_model("llama")).require_isolation(torch.device("cpu"), trainer)
