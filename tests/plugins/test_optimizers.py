"""Which parameter is trained how, and that nothing else moves."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from hp_core.errors import ArgumentError
from hp_core.testing.ranks import run_ranks
from hp_plugins.optimizers.adamw import AdamW
from hp_plugins.optimizers.chained import ChainedOptimizer
from hp_plugins.optimizers.groups import ParameterGroup, not_decayed
from hp_plugins.optimizers.muon import Muon
from hp_plugins.optimizers.sgd import SGD
from hp_plugins.optimizers.whole_matrix import WholeMatrixMuon
from tests.model.tiny import GPT2, LLAMA, LLAMA_TIED, QWEN3_MOE, a_setup, build, whole

FAMILIES = {"llama": LLAMA, "llama_tied": LLAMA_TIED, "qwen3_moe": QWEN3_MOE, "gpt2": GPT2}
# Parts of the names of norms, biases and embeddings in these families.
EXEMPT = ("norm", "ln_", "bias", "embed_tokens", "wte", "wpe")


def exempt(name: str) -> bool:
    return any(part in name for part in EXEMPT)


def make(config: dict):
    with a_setup() as setup:
        return build(setup, config)


@pytest.fixture
def llama():
    return make(LLAMA)


def with_gradients(model: nn.Module, value: float | None = 0.0) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            gradient = torch.zeros_like(parameter)
            if value is None:
                gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = gradient
    return model


def changes(model: nn.Module, optimizer, steps: int = 1) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Each parameter, whole, before and after."""
    before = {name: whole(p.detach()).clone() for name, p in model.named_parameters()}
    for _ in range(steps):
        optimizer.step()
    return {name: (before[name], whole(p.detach())) for name, p in model.named_parameters()}


def names_of(model: nn.Module, optimizer) -> list[str]:
    """The names of the parameters that the optimizer holds, with repetitions."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return sorted(names[p] for group in optimizer.param_groups for p in group["params"])


# Weight decay (X9).


def decayed(setup, config):
    model = with_gradients(build(setup, config))
    # Norms and biases start at one and zero, where a decay of zeros would not show.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5)
    return changes(model, AdamW(lr=1e-3, weight_decay=0.1, model=model).get_optimizer())


def check_decay(config: dict, found: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
    for name, (before, after) in found.items():
        if exempt(name):
            assert torch.equal(after, before), name
        else:
            torch.testing.assert_close(after, before * 0.9999, rtol=1e-6, atol=0, msg=name)
    assert ("lm_head.weight" in found) == (config in (LLAMA, QWEN3_MOE))


@pytest.mark.parametrize("family", FAMILIES)
def test_zero_gradients_decay_matrices_and_nothing_else(family):
    with a_setup() as setup:
        check_decay(FAMILIES[family], decayed(setup, FAMILIES[family]))


def on_ranks(environment):
    """Everything that is tried on several ranks, in one go: processes take longer to start than to do this."""
    with a_setup(environment) as setup:
        return {
            "decay": {family: decayed(setup, FAMILIES[family]) for family in ("llama", "gpt2")},
            "frozen": {name: frozen(setup, name) for name in ("adamw", "muon")},
        }


@pytest.fixture(scope="module")
def two_ranks():
    return run_ranks(on_ranks, 2)


def test_zero_gradients_decay_matrices_and_nothing_else_on_shards(two_ranks):
    for found in two_ranks:
        for family, changed in found["decay"].items():
            check_decay(FAMILIES[family], changed)


class MyRMSNorm(nn.Module):
    """A norm of no known class whose weight is no vector."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 2))


class FusedExperts(nn.Module):
    """As gpt-oss has them: a stack of matrices and a stack of biases."""

    def __init__(self) -> None:
        super().__init__()
        self.down_proj = nn.Parameter(torch.ones(4, 3, 3))
        self.down_proj_bias = nn.Parameter(torch.ones(4, 3))


def test_norms_and_stacked_biases_of_any_class_are_not_decayed():
    model = nn.ModuleDict(
        {"n": MyRMSNorm(), "experts": FusedExperts(), "emb": nn.Embedding(3, 2), "out": nn.Linear(2, 2)}
    )
    names = {parameter: name for name, parameter in model.named_parameters()}
    assert {names[p] for p in not_decayed(model)} == {"n.weight", "experts.down_proj_bias", "emb.weight", "out.bias"}
    first, _ = Muon(lr=0.1, adamw_lr=0.1, model=model).get_optimizer().optimizers
    assert names_of(model, first) == ["out.weight"]


# Groups.


BUILDS = {
    "adamw": lambda model, groups=(): AdamW(lr=1e-3, groups=groups, model=model).get_optimizer(),
    "muon": lambda model, groups=(): Muon(lr=1e-3, adamw_lr=1e-4, groups=groups, model=model).get_optimizer(),
    "sgd": lambda model, groups=(): SGD(lr=1e-3, weight_decay=0.2, groups=groups, model=model).get_optimizer(),
}


@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_is_in_exactly_one_group(name, family):
    model = make(FAMILIES[family])
    optimizer = BUILDS[name](model)
    assert names_of(model, optimizer) == sorted(dict(model.named_parameters()))
    assert all(group["params"] for group in optimizer.param_groups)


@pytest.mark.parametrize("name", BUILDS)
def test_groups_set_rate_and_decay_and_freeze(llama, name):
    groups = [
        ParameterGroup(match="*.q_proj.weight", lr=0.5),
        ParameterGroup(match=["*norm*", "lm_head.*"], weight_decay=0.3),
        ParameterGroup(match="*.0.mlp.*", frozen=True),
    ]
    optimizer = BUILDS[name](with_gradients(llama, None), groups)
    plain = BUILDS[name](make(LLAMA))
    settings = {
        parameter: (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    names = dict(llama.named_parameters())
    rates = {group["lr"] for group in plain.param_groups}
    for fqn, parameter in names.items():
        if ".0.mlp." in fqn:
            assert parameter not in settings
            assert not parameter.requires_grad
            continue
        rate, decay = settings[parameter]
        assert parameter.requires_grad
        assert rate == 0.5 if "q_proj" in fqn else rate in rates, fqn
        if "norm" in fqn or "lm_head" in fqn:
            assert decay == 0.3, fqn
        else:
            assert decay == (0.0 if exempt(fqn) else 0.2 if name == "sgd" else 0.1), fqn
    for fqn, (before, after) in changes(llama, optimizer).items():
        assert torch.equal(before, after) == (".0.mlp." in fqn), fqn


def test_a_rate_of_zero_is_a_rate(llama):
    group = ParameterGroup(match="*embed*", lr=0.0, weight_decay=0.0)
    optimizer = AdamW(lr=1e-3, groups=[group], model=with_gradients(llama, None)).get_optimizer()
    found = changes(llama, optimizer)
    assert [name for name, (before, after) in found.items() if torch.equal(before, after)] == [
        "model.embed_tokens.weight"
    ]


@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.parametrize(
    ("groups", "path", "message", "hint"),
    [
        (
            [{"match": "lm_head.weight"}, {"match": ["*norm*", "model.embed_token.weight"]}],
            "groups[1].match",
            "'model.embed_token.weight' matches no parameter",
            "did you mean 'model.embed_tokens.weight'?",
        ),
        ([{"match": "???"}], "groups[0].match", "'???' matches no parameter", "named like 'model.embed_tokens.weight'"),
        (
            [{"match": "*norm*"}, {"match": "*.1.*"}],
            "groups[1].match",
            "'*.1.*' matches 'model.layers.1.input_layernorm.weight', which groups[0] matches too",
            "a parameter belongs to one group",
        ),
        ([{"match": "*", "frozen": True}], "groups", "every parameter is frozen", "drop `frozen: true`"),
    ],
)
def test_groups_that_make_no_sense_are_refused(llama, name, groups, path, message, hint):
    with pytest.raises(ArgumentError) as caught:
        BUILDS[name](llama, [ParameterGroup(**group) for group in groups])
    assert caught.value.path == path
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_two_patterns_of_one_group_may_overlap(llama):
    optimizer = AdamW(lr=1e-3, groups=[ParameterGroup(match=["*norm*", "*.1.*"], lr=0.5)], model=llama).get_optimizer()
    assert names_of(llama, optimizer) == sorted(dict(llama.named_parameters()))


FROZEN = [ParameterGroup(match=["*.mlp.*", "*.input_layernorm.weight", "lm_head.weight"], frozen=True)]


def frozen(setup, name):
    model = build(setup, LLAMA)
    optimizer = BUILDS[name](model, FROZEN)
    before = {fqn: whole(p.detach()).clone() for fqn, p in model.named_parameters()}
    for _ in range(2):
        model(torch.arange(20).reshape(2, 10)).logits.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    moved = [fqn for fqn, p in model.named_parameters() if not torch.equal(before[fqn], whole(p.detach()))]
    return sorted(moved), names_of(model, optimizer)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_frozen_parameters_stay_and_the_others_move(two_ranks, name):
    names = [fqn for fqn, _ in make(LLAMA).named_parameters()]
    kept = sorted(n for n in names if ".mlp." not in n and "input_layernorm" not in n and n != "lm_head.weight")
    with a_setup() as setup:
        alone = frozen(setup, name)
    for moved, held in [alone, *(found["frozen"][name] for found in two_ranks)]:
        assert moved == kept
        assert held == kept


# Muon.


HEAD_AND_ENDS = {
    "llama": {"model.embed_tokens.weight", "lm_head.weight"},
    "llama_tied": {"model.embed_tokens.weight"},
    "qwen3_moe": {"model.embed_tokens.weight", "lm_head.weight"},
    "gpt2": {"transformer.wte.weight", "transformer.wpe.weight"},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_muon_takes_the_matrices_and_adamw_the_rest(family):
    model = make(FAMILIES[family])
    muon, adamw = Muon(lr=0.02, adamw_lr=1e-3, weight_decay=0.1, model=model).get_optimizer().optimizers
    assert isinstance(muon, WholeMatrixMuon)
    assert isinstance(adamw, torch.optim.AdamW)
    shapes = {name: p.ndim for name, p in model.named_parameters()}
    matrices = {name for name, ndim in shapes.items() if ndim > 1} - HEAD_AND_ENDS[family]
    assert set(names_of(model, muon)) == matrices
    assert set(names_of(model, adamw)) == set(shapes) - matrices
    if family == "qwen3_moe":
        assert "model.layers.0.mlp.gate.weight" in matrices
        assert shapes["model.layers.0.mlp.experts.down_proj"] == 3
    assert {group["lr"] for group in muon.param_groups} == {0.02}
    assert {group["lr"] for group in adamw.param_groups} == {1e-3}
    decays = {p: group["weight_decay"] for group in adamw.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        if parameter in decays:
            assert decays[parameter] == (0.0 if exempt(name) else 0.1), name


def test_muon_s_settings_reach_its_parts(llama):
    muon, adamw = (
        Muon(
            lr=0.02,
            adamw_lr=1e-3,
            momentum=0.8,
            nesterov=False,
            ns_steps=3,
            adjust_lr_fn="match_rms_adamw",
            adamw_betas=(0.8, 0.7),
            adamw_eps=1e-5,
            model=llama,
        )
        .get_optimizer()
        .optimizers
    )
    group = muon.param_groups[0]
    assert (group["momentum"], group["nesterov"], group["ns_steps"]) == (0.8, False, 3)
    assert group["adjust_lr_fn"] == "match_rms_adamw"
    assert (adamw.param_groups[0]["betas"], adamw.param_groups[0]["eps"]) == ((0.8, 0.7), 1e-5)


def test_muon_without_a_matrix_is_refused():
    with pytest.raises(ArgumentError, match="no trainable matrix for Muon; write name: adamw"):
        Muon(lr=0.1, adamw_lr=0.1, model=nn.Embedding(3, 2))


# Several as one.


def chained(model: nn.Module) -> ChainedOptimizer:
    return Muon(lr=0.02, adamw_lr=1e-3, model=model).get_optimizer()


def test_a_chained_state_goes_round(llama):
    with_gradients(llama, None)
    optimizer = chained(llama)
    optimizer.step()
    state = optimizer.state_dict()
    expected = changes(llama, optimizer)
    with torch.no_grad():
        for name, parameter in llama.named_parameters():
            parameter.copy_(expected[name][0])
    again = chained(llama)
    again.load_state_dict(state)
    for name, (before, after) in changes(llama, again).items():
        assert torch.equal(before, expected[name][0])
        assert torch.equal(after, expected[name][1]), name
    with pytest.raises(ValueError, match="zip"):
        again.load_state_dict({"optimizers": state["optimizers"][:1]})


@pytest.mark.parametrize("reload", [False, True])
def test_a_schedule_reaches_both_parts(llama, reload):
    optimizer = chained(llama)
    if reload:
        optimizer.load_state_dict(optimizer.state_dict())
    scheduler = LambdaLR(optimizer, lambda step: 1 / (step + 1))
    optimizer.step()
    scheduler.step()
    muon, adamw = optimizer.optimizers
    assert {group["lr"] for group in muon.param_groups} == {0.01}
    assert {group["lr"] for group in adamw.param_groups} == {5e-4}
    with_gradients(llama, None)
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in llama.parameters())


def test_a_chained_optimizer_takes_no_closure(llama):
    with pytest.raises(ValueError, match="no closure"):
        chained(llama).step(lambda: 0.0)


def test_the_kernel_is_fused_where_there_is_one(llama):
    assert all(group["fused"] for group in AdamW(lr=1e-3, model=llama).get_optimizer().param_groups)
    assert all(group["fused"] for group in chained(llama).optimizers[1].param_groups)
    plain = AdamW(lr=1e-3, fused=False, model=llama).get_optimizer()
    assert not any(group["fused"] for group in plain.param_groups)
    meta = AdamW(lr=1e-3, model=nn.Linear(2, 2, device="meta")).get_optimizer()
    assert not any(group["fused"] for group in meta.param_groups)
