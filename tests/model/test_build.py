"""Models are the same for any number of ranks, and the same as transformers' own."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from hp_core.config.models import FsdpConfig, MixedPrecisionConfig
from hp_core.errors import ArgumentError
from hp_core.model.config import model_config
from hp_core.testing.ranks import run_ranks
from tests.model.tiny import COMMON, FAMILIES, LLAMA, LLAMA_TIED, QWEN3_MOE, a_setup, build, whole


def digests(model) -> dict[str, str]:
    found = {name: whole(tensor) for name, tensor in model.state_dict().items()}
    found |= {f"buffer {name}": buffer for name, buffer in model.named_buffers()}
    return {
        name: hashlib.sha256(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in found.items()
    }


def digests_on_ranks(environment, config, fsdp, arguments):
    with a_setup(environment, fsdp=fsdp) as setup:
        model = build(setup, config, **arguments)
        shards = [p.to_local().clone() for p in model.parameters()]
        others = [torch.zeros_like(shard) for shard in shards]
        del others
        return digests(model), [tuple(p.to_local().shape) for p in model.parameters()]


@pytest.mark.parametrize("family", FAMILIES)
def test_initial_weights_do_not_depend_on_the_ranks(family):
    with a_setup() as setup:
        alone = digests(build(setup, FAMILIES[family]))
    fsdp, hsdp = FsdpConfig(), FsdpConfig(dp_replicate_size=2)
    for found, _ in run_ranks(digests_on_ranks, 2, FAMILIES[family], fsdp, {}):
        assert found == alone
    for found, _ in run_ranks(digests_on_ranks, 4, FAMILIES[family], hsdp, {}):
        assert found == alone


@pytest.mark.parametrize("family", FAMILIES)
def test_initial_weights_have_the_family_s_own_distribution(family):
    with a_setup() as setup:
        ours = build(setup, FAMILIES[family])
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(ours.config).state_dict()
    assert set(theirs) == set(ours.state_dict())
    for name, tensor in ours.state_dict().items():
        other = theirs[name]
        assert tensor.dtype == other.dtype
        if tensor.numel() > 200:
            assert tensor.float().std().item() == pytest.approx(other.float().std().item(), rel=0.25, abs=1e-6), name
        elif other.unique().numel() == 1:
            assert torch.equal(tensor, other), name


def test_the_seed_decides_and_no_two_layers_are_alike():
    with a_setup() as setup:
        first = build(setup, LLAMA)
    with a_setup(seed=8) as setup:
        other = build(setup, LLAMA)
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(first.state_dict()[name], other.state_dict()[name])
    assert not torch.equal(first.state_dict()[name], first.state_dict()[name.replace("0", "1")])


@pytest.mark.parametrize("family", FAMILIES)
def test_buffers_equal_those_of_a_normal_build(family):
    with a_setup() as setup:
        ours = build(setup, FAMILIES[family])
    theirs = dict(AutoModelForCausalLM.from_config(ours.config).named_buffers())
    assert set(theirs) == {name for name, _ in ours.named_buffers()}
    for name, buffer in ours.named_buffers():
        assert torch.equal(buffer, theirs[name]), name


def saved(tmp_path: Path, config) -> Path:
    with a_setup() as setup:
        build(setup, config).save_pretrained(tmp_path / "model", max_shard_size="50KB")
    return tmp_path / "model"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_hugging_face_directory_loads_as_transformers_loads_it(tmp_path, family):
    path = saved(tmp_path, FAMILIES[family])
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with a_setup(seed=99) as setup:
        ours = build(setup, pretrained=str(path))
    assert digests(ours) == digests(theirs)
    ids = torch.arange(20)[None]
    assert torch.equal(ours.eval()(ids).logits, theirs.eval()(ids).logits)
    for found, _ in run_ranks(digests_on_ranks, 2, {}, FsdpConfig(), {"pretrained": str(path)}):
        assert found == digests(theirs)


class CountingFile:
    """A safetensors file that counts the bytes its slices are asked for."""

    read = 0

    def __init__(self, *arguments, **keywords) -> None:
        self._file = safe_open(*arguments, **keywords)

    def __getattr__(self, name):
        return getattr(self._file, name)

    def __exit__(self, *arguments) -> None:
        self._file.__exit__(*arguments)

    def get_slice(self, name):
        return CountingSlice(self._file.get_slice(name))


class CountingSlice:
    def __init__(self, slice_) -> None:
        self._slice = slice_

    def __getattr__(self, name):
        return getattr(self._slice, name)

    def __getitem__(self, index):
        tensor = self._slice[index]
        CountingFile.read += tensor.numel() * tensor.element_size()
        return tensor


def bytes_read(environment, path):
    from transformers import modeling_utils

    modeling_utils.safe_open = CountingFile
    with a_setup(environment) as setup:
        build(setup, pretrained=path)
    return CountingFile.read


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_every_rank_reads_only_its_own_shards(tmp_path, family):
    path = saved(tmp_path, FAMILIES[family])
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    (alone,) = run_ranks(bytes_read, 1, str(path))
    assert alone == pytest.approx(size, rel=0.1)
    for world_size in (2, 4):
        each = run_ranks(bytes_read, world_size, str(path))
        assert max(each) == pytest.approx(alone / world_size, rel=0.02)
        assert sum(each) == pytest.approx(alone, rel=0.02)


def test_tied_weights_stay_one_parameter():
    with a_setup() as setup:
        model = build(setup, LLAMA_TIED)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert "lm_head.weight" not in dict(model.named_parameters())


def tied_gradient(environment):
    with a_setup(environment) as setup:
        model = build(setup, LLAMA_TIED)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        ids = torch.arange(40).reshape(2, 20)
        model(ids).logits.square().mean().backward()
        return whole(model.lm_head.weight.grad), whole(model.lm_head.weight).detach()


def test_tied_gradient_is_the_sum_of_both_parts():
    # Gradients are sums over the ranks; both ranks see the same rows here.
    alone, weight = tied_gradient(None)
    for gradient, same_weight in run_ranks(tied_gradient, 2):
        torch.testing.assert_close(gradient, 2 * alone, rtol=1e-5, atol=1e-8)
        assert torch.equal(weight, same_weight)


def test_mixed_precision_computes_in_bf16_and_keeps_fp32_masters():
    with a_setup(precision=MixedPrecisionConfig(param_dtype="bfloat16")) as setup:
        model = build(setup, LLAMA)
        logits = model(torch.arange(10)[None]).logits
        logits.float().sum().backward()
        assert logits.dtype == torch.bfloat16
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("config", "path", "message", "hint"),
    [
        ({"model_type": "lama"}, "config.model_type", "'lama' is no causal language model", "llama"),
        ({**LLAMA, "hiden_size": 3}, "config.hiden_size", "unknown key", "hidden_size"),
        ({**LLAMA, "hidden_size": "wide"}, "config.hidden_size", "expected int, got str", ""),
        ({"hidden_size": 3}, "config", "model_type is missing", "pretrained"),
    ],
)
def test_a_wrong_config_is_refused_by_key(config, path, message, hint):
    with a_setup() as setup, pytest.raises(ArgumentError) as caught:
        build(setup, config)
    assert caught.value.path == path
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_what_is_no_model_directory_is_refused(tmp_path):
    with a_setup() as setup:
        with pytest.raises(ArgumentError, match="no such directory"):
            build(setup, pretrained=str(tmp_path / "nothing"))
        with pytest.raises(ArgumentError, match="can't read a model configuration"):
            build(setup, pretrained=str(tmp_path))


def test_weight_files_that_do_not_fit_are_refused(tmp_path):
    path = saved(tmp_path, LLAMA)
    with a_setup() as setup:
        with pytest.raises(ArgumentError, match="is missing"):
            build(setup, {"num_hidden_layers": 3}, pretrained=str(path))
        with pytest.raises(ArgumentError, match="has no place in the model"):
            build(setup, {"num_hidden_layers": 1}, pretrained=str(path))
        with pytest.raises(ArgumentError, match="don't fit the model"):
            build(setup, {"intermediate_size": 40}, pretrained=str(path))
        for file in path.glob("*.safetensors"):
            file.unlink()
        with pytest.raises(ArgumentError, match=r"no \*.safetensors file"):
            build(setup, pretrained=str(path))


def test_experts_of_a_checkpoint_are_stored_one_by_one(tmp_path):
    names = set()
    for file in saved(tmp_path, QWEN3_MOE).glob("*.safetensors"):
        with safe_open(file, "pt") as handle:
            names |= set(handle.keys())
    assert "model.layers.0.mlp.experts.3.gate_proj.weight" in names


def test_attention_code_that_a_family_lacks_is_told_at_its_argument() -> None:
    config = {"model_type": "gemma2", **COMMON, "head_dim": 8}
    with a_setup() as setup, pytest.raises(ArgumentError, match="does not support 'sdpa'") as caught:
        build(setup, config)
    assert (caught.value.path, caught.value.hint) == ("attn_implementation", "write attn_implementation: eager")


def test_a_pretrained_model_of_another_kind_is_none_for_a_builder_that_says_which_it_has(tmp_path):
    model_config(LLAMA).save_pretrained(tmp_path)
    with pytest.raises(ArgumentError, match=r"holds a 'llama', which is no reader") as caught:
        model_config({}, pretrained=str(tmp_path), model_types={"gpt2"}, kind="reader")
    assert caught.value.path == "pretrained"
    assert model_config({}, pretrained=str(tmp_path), model_types={"llama"}).model_type == "llama"
