import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.testing._internal.two_tensor import TwoTensor

from hp_core import InputError
from hp_core.config.memory import ActivationCheckpointConfig, ActivationSwapConfig
from hp_core.errors import RunError
from hp_core.model.activation_checkpoint import checkpoint_activations
from hp_core.model.activation_swap import Region, Swap, Swapped, swap_activations, swap_of
from hp_core.model.saved_bytes import SavedBytes, saved_bytes
from hp_core.model.transfer import Transfer
from tests.model.tiny import QWEN3, QWEN3_MOE, a_setup, build

CONFIG = {**QWEN3, "num_hidden_layers": 4, "attention_dropout": 0.1}
IDS = torch.arange(2 * 64).reshape(2, 64) % 61
CPU = torch.device("cpu")
HOST = ActivationSwapConfig(mode="host")


def step(model: Any) -> tuple[dict[str, torch.Tensor], SavedBytes]:
    """All gradients of a step, and what its forward pass keeps."""
    torch.manual_seed(3)
    kept, loss = saved_bytes(
        model, lambda: model.model(input_ids=IDS, use_cache=False).last_hidden_state.float().square().mean()
    )
    loss.backward()
    found = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    model.zero_grad()
    return found, kept


def swapped(model: Any, *, mode: str = "off", patterns: list[str] | None = None) -> tuple[Any, list[str]]:
    other = copy.deepcopy(model)
    recomputed = checkpoint_activations(other, ActivationCheckpointConfig.model_validate({"mode": mode}))
    return other, swap_activations(other, ActivationSwapConfig(mode="host", modules=patterns), CPU, recomputed)


@pytest.fixture
def model() -> Any:
    with a_setup() as setup:
        yield build(setup, CONFIG)


# Of what is kept without: the device keeps at most, the host at least and at most.
SHARES = {"off": (0.03, 0.9, 1.0), "full": (0.04, 0.01, 0.05), "selective": (0.45, 0.01, 0.05)}


@pytest.mark.parametrize("mode", SHARES)
def test_gradients_are_the_same_to_the_last_bit_and_the_device_keeps_less(model: Any, mode: str) -> None:
    expected, without = step(model)
    other, names = swapped(model, mode=mode)
    gradients, kept = step(other)
    assert names == [f"model.layers.{index}" for index in range(4)]
    assert gradients.keys() == expected.keys()
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)
    most, least_host, most_host = SHARES[mode]
    assert kept.device <= most * without.device
    assert least_host * without.device <= kept.host <= most_host * without.device
    # Nothing of a step outlives it.
    assert swap_of(other).host_bytes == 0  # type: ignore[union-attr]


def test_what_is_not_kept_on_the_device_is_kept_on_the_host(model: Any) -> None:
    _, without = step(model)
    _, kept = step(swapped(model)[0])
    assert kept.device + kept.host == without.device


def test_experts_are_the_same_too() -> None:
    with a_setup() as setup:
        plain, other = build(setup, QWEN3_MOE), build(setup, QWEN3_MOE, activation_swap=HOST)
    expected, without = step(plain)
    gradients, kept = step(other)
    assert kept.device < 0.1 * without.device
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)


def test_patterns_name_what_is_swapped(model: Any) -> None:
    expected, without = step(model)
    other, names = swapped(model, patterns=["*.mlp", "model.layers.0.self_attn"])
    gradients, kept = step(other)
    assert names == ["model.layers.0.self_attn", *(f"model.layers.{index}.mlp" for index in range(4))]
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)
    assert 0.3 * without.device < kept.host < 0.7 * without.device


def test_modules_given_by_name_are_swapped_where_they_are_computed_again(model: Any) -> None:
    # transformers hands its hidden states to an attention by name.
    expected, _ = step(model)
    other = copy.deepcopy(model)
    attentions = ["*.self_attn"]
    checkpoint_activations(other, ActivationCheckpointConfig(mode="full", modules=attentions))
    swap_activations(other, ActivationSwapConfig(mode="host", modules=attentions), CPU)
    gradients, kept = step(other)
    assert kept.host >= 4 * IDS.numel() * QWEN3["hidden_size"] * 4
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)


def test_what_is_inside_a_recomputed_module_is_refused(model: Any) -> None:
    with pytest.raises(InputError) as caught:
        swapped(model, mode="full", patterns=["*.mlp"])
    (problem,) = caught.value.problems
    assert problem.path == "activation_swap.modules"
    assert problem.message.startswith("'model.layers.0.mlp' is inside 'model.layers.0', which is computed again")
    assert problem.hint == "swap 'model.layers.0' instead"


def test_a_pattern_without_a_hit_is_refused_at_its_place(model: Any) -> None:
    with pytest.raises(InputError) as caught:
        swapped(model, patterns=["*.mlp", "*.mpl"])
    assert [one.path for one in caught.value.problems] == ["activation_swap.modules[1]"]


def test_nothing_is_renamed_and_a_copy_runs_and_swaps_by_itself(model: Any) -> None:
    other, _ = swapped(model)
    assert list(other.state_dict()) == list(model.state_dict())
    twin = copy.deepcopy(other)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    gradients, kept = step(twin)
    assert gradients
    assert not any(one.any() for one in gradients.values())
    assert kept.host > 0
    assert swap_of(twin) is not swap_of(other)


def test_a_model_goes_through_a_file() -> None:
    module = nn.Sequential(nn.Linear(4, 3))
    swap_activations(module, ActivationSwapConfig(mode="host", modules=["0"]), CPU)
    module(given(2, 4)).sum().backward()
    other = pickle.loads(pickle.dumps(module))
    kept, _ = saved_bytes(other, lambda: other(given(2, 4)).sum())
    assert kept.host == 4 * 2 * 4


def test_without_gradients_nothing_is_copied(model: Any) -> None:
    other, _ = swapped(model)
    with torch.no_grad():
        kept, _ = saved_bytes(other, lambda: other(input_ids=IDS).logits.sum())
    assert kept.host == 0


class Computes(nn.Module):
    """A region of a test."""

    def __init__(self, compute: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.compute = compute

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.compute(given)


def a_region(compute: Callable[[torch.Tensor], torch.Tensor], swap: Swap | None = None) -> tuple[Computes, Swap]:
    region, swap = Computes(compute), swap or Swap(CPU)
    region.forward = Swapped(region.forward, region, "region", swap)  # type: ignore[method-assign]
    return region, swap


def given(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).requires_grad_()


def test_a_storage_is_copied_once_and_parameters_and_buffers_never() -> None:
    layer = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, momentum=None), nn.Sigmoid())
    module = nn.Sequential(layer)
    swap_activations(module, ActivationSwapConfig(mode="host", modules=["0"]), CPU)
    value = given(5, 4)
    kept, found = saved_bytes(module, lambda: module(value).sum())
    # Inputs of the linear and of the norm, what the sigmoid gave, and a mean and a deviation for each of 3 features.
    assert kept.host == 4 * (5 * 4 + 5 * 3 + 5 * 3 + 2 * 3)
    # What is left is the sum.
    assert kept.device == 4
    found.backward()
    squared, swap = a_region(lambda one: (one * one + one.T.mul(one.T).T) * one)
    found = squared(value)
    # The input, and the sum; the graph holds the input five times.
    assert swap.host_bytes == 2 * 4 * 5 * 4


@pytest.mark.parametrize(
    "compute",
    [
        lambda one: (one.T @ one)[:, 1:3].sin(),
        lambda one: one[:, ::2].exp() * one[:, 1::2].expand(2, 4, 3),
        lambda one: one.gather(1, one.argsort(1)).square(),
        lambda one: one[torch.tensor([3, 0, 0])] * one.as_strided((3, 6), (2, 1), 3),
        lambda one: torch.view_as_real(torch.fft.fft(one) * torch.fft.fft(one).conj()).exp(),
        lambda one: nn.functional.dropout(one.to(torch.bfloat16), 0.5).float().cos(),
        lambda one: one.to_sparse() @ one.T,
    ],
    ids=["product", "strides", "integers", "overlap", "complex", "bfloat16", "sparse"],
)
def test_any_tensor_comes_back_as_it_was(compute: Callable[[torch.Tensor], torch.Tensor]) -> None:
    plain, value = given(4, 6), given(4, 6)
    torch.manual_seed(1)
    compute(plain).sum().backward()
    region, _ = a_region(compute)
    torch.manual_seed(1)
    region(value).sum().backward()
    assert plain.grad is not None
    assert value.grad is not None
    assert torch.equal(value.grad, plain.grad)


def test_a_tensor_made_of_others_comes_back_as_such() -> None:
    value = TwoTensor(given(4).detach(), given(4).detach() + 1).requires_grad_()
    region, swap = a_region(lambda one: one.sin().exp())
    found = region(value)
    assert swap.host_bytes == 4 * 4 * 4
    found.sum().backward()
    gradient = value.grad
    assert isinstance(gradient, TwoTensor)
    for one, part in ((gradient.a, value.a), (gradient.b, value.b)):
        assert torch.equal(one, part.sin().exp() * part.cos())


def test_what_is_on_its_way_from_other_ranks_is_waited_for() -> None:
    region = Region(Swap(CPU), nn.Identity(), "region")
    packed = region.pack(AsyncCollectiveTensor(torch.arange(3.0)))
    region.leave()
    found = region.unpack(packed)
    assert type(found) is torch.Tensor
    assert torch.equal(found, torch.arange(3.0))


def test_the_place_of_a_storage_is_no_other_s_while_it_is_on_the_host() -> None:
    region = Region(Swap(CPU), nn.Identity(), "region")
    packed = region.pack(torch.arange(3.0))
    region.leave()
    others = [region.pack(torch.full((3,), float(number))) for number in range(100)]
    assert all(one.kept is not packed.kept for one in others)
    assert torch.equal(region.unpack(packed), torch.arange(3.0))


def test_what_is_kept_by_several_modules_is_copied_once() -> None:
    swap = Swap(CPU)
    regions = [a_region(lambda one: one.sin(), swap)[0] for _ in range(3)]
    value = given(8)
    found = sum(region(value) for region in regions)
    assert swap.host_bytes == 4 * 8
    found.sum().backward()  # type: ignore[union-attr]
    assert torch.equal(value.grad, 3 * value.detach().cos())  # type: ignore[arg-type]


def changes(one: torch.Tensor) -> torch.Tensor:
    found = one.exp()
    found.mul_(2)
    return found


def changes_an_input(one: torch.Tensor) -> torch.Tensor:
    between = one + 1
    found = between.sin()
    between.zero_()
    return found


@pytest.mark.parametrize("compute", [changes, changes_an_input])
def test_what_autograd_refuses_because_it_was_changed_is_refused(
    compute: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        compute(given(4)).sum().backward()
    with pytest.raises(RunError, match="region needs for its gradients was changed in place"):
        a_region(compute)[0](given(4)).sum().backward()


class Scaled(nn.Module):
    """Its weight times a buffer, which it may change after it has computed with it."""

    def __init__(self, *, changes_buffer: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(3.0))
        self.register_buffer("scale", torch.tensor(2.0))
        self.changes_buffer = changes_buffer

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        found = value * self.weight * self.scale
        if self.changes_buffer:
            self.scale.mul_(2)
        return found


def test_a_buffer_that_is_changed_after_it_was_computed_with_is_refused() -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        Scaled(changes_buffer=True)(given(4)).sum().backward()
    model = nn.Sequential(Scaled(changes_buffer=True))
    swap_activations(model, ActivationSwapConfig(mode="host", modules=["0"]), CPU)
    with pytest.raises(RunError, match="something that 0 needs for its gradients was changed in place"):
        model(given(4)).sum().backward()


def test_a_weight_that_is_changed_before_the_backward_pass_is_refused() -> None:
    model = nn.Sequential(Scaled())
    swap_activations(model, ActivationSwapConfig(mode="host", modules=["0"]), CPU)
    loss = model(given(4)).sum()
    with torch.no_grad():
        model[0].weight.mul_(2)  # type: ignore[operator, union-attr]
    with pytest.raises(RunError, match="something that 0 needs for its gradients was changed in place"):
        loss.backward()


def test_a_change_after_the_module_does_no_harm() -> None:
    value = given(4)
    region, _ = a_region(lambda one: one.exp())
    region(value).mul_(2).sum().backward()
    assert torch.equal(value.grad, 2 * value.detach().exp())  # type: ignore[arg-type]


def test_two_versions_of_a_storage_are_two() -> None:
    # The first is only looked at, which autograd can't know when it keeps it.
    looked_at = []

    def compute(one: torch.Tensor) -> torch.Tensor:
        between = one + 1
        looked_at.append(between.square())
        between.sigmoid_()
        return between.square()

    plain, value = given(4), given(4)
    compute(plain).sum().backward()
    a_region(compute)[0](value).sum().backward()
    assert torch.equal(value.grad, plain.grad)  # type: ignore[arg-type]


def test_gradients_of_gradients_and_a_second_backward_pass() -> None:
    value = given(4)
    region, swap = a_region(lambda one: one.sin().exp())
    found = region(value).sum()
    (first,) = torch.autograd.grad(found, value, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), value)
    plain = value.detach().clone().requires_grad_()
    (wanted,) = torch.autograd.grad(plain.sin().exp().sum(), plain, create_graph=True)
    assert torch.equal(first, wanted)
    assert torch.equal(second, torch.autograd.grad(wanted.sum(), plain)[0])
    del found, first
    gc.collect()
    assert len(swap.kept) == 0


def test_gradients_inside_a_module() -> None:
    def compute(one: torch.Tensor) -> torch.Tensor:
        (slope,) = torch.autograd.grad(one.sin().sum(), one, create_graph=True)
        return slope * one

    value, plain = given(4), given(4)
    a_region(compute)[0](value).sum().backward()
    compute(plain).sum().backward()
    assert torch.equal(value.grad, plain.grad)  # type: ignore[arg-type]


def test_a_module_that_fails_leaves_nothing_behind() -> None:
    made: list[weakref.ref[Any]] = []

    def compute(one: torch.Tensor) -> torch.Tensor:
        found = one.exp().exp()
        made.append(weakref.ref(found.untyped_storage()))
        raise ValueError

    region, swap = a_region(compute)
    with pytest.raises(ValueError, match=r"^$"):
        region(given(4))
    assert (len(swap.kept), made[0]()) == (0, None)


class Late:
    """An accelerator's module in torch whose second stream works as late as it may: when something waits for it.

    What is copied from memory that was given up by then is not what was there.
    """

    def __init__(self) -> None:
        self.queue: list[Callable[[], None]] = []
        self.is_side = False
        self.is_behind = False

    def Stream(self, device: torch.device) -> Any:  # noqa: N802
        return self

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.is_side = True
        yield
        self.is_side = False

    def current_stream(self, device: torch.device) -> Any:
        return self

    def wait_stream(self, stream: Any) -> None:
        self.is_behind = True

    def record_event(self) -> int:
        self.is_behind = False
        return len(self.queue)

    def wait_event(self, event: int) -> None:
        for number, copying in enumerate(self.queue[:event]):
            copying()
            self.queue[number] = lambda: None


class LateTransfer(Transfer):
    """Copies within the memory of the host with the streams of `Late`."""

    def __init__(self) -> None:
        self.late = Late()
        self.held: list[torch.Tensor] = []
        super().__init__(CPU, self.late)

    def hold(self, target: torch.Tensor, stream: Any) -> None:
        assert stream is self.late
        self.held.append(target)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert self.late.is_side
        assert self.late.is_behind
        reference = weakref.ref(source.untyped_storage())
        target.fill_(0xFF)

        def copying() -> None:
            storage = reference()
            if storage is not None:
                target.copy_(torch.empty(0, dtype=torch.uint8).set_(storage))

        self.late.queue.append(copying)


def late_layers() -> tuple[list[Computes], Swap]:
    swap = Swap(CPU, LateTransfer())
    return [a_region(lambda one: one.sin().exp() * 0.5, swap)[0] for _ in range(4)], swap


def test_an_accelerator_waits_for_its_copies_in_both_directions() -> None:
    layers, swap = late_layers()
    plain, value = given(16), given(16)
    expected, found = plain, value
    for layer in layers:
        expected = layer.compute(expected)
        found = layer(found)
    assert len(swap.kept) == 8
    expected.sum().backward()
    found.sum().backward()
    assert torch.equal(value.grad, plain.grad)  # type: ignore[arg-type]


def test_an_accelerator_fetches_ahead() -> None:
    layers, swap = late_layers()
    found = value = given(16)
    outputs = []
    for layer in layers:
        found = layer(found)
        outputs.append(found)
    back: list[int] = []
    to_device = swap.transfer.to_device
    swap.transfer.to_device = lambda host: (back.append(1), to_device(host))[1]  # type: ignore[method-assign]
    numbers = []
    for output in outputs:
        output.register_hook(lambda _: numbers.append(len(back)))
    found.sum().backward()
    assert value.grad is not None
    # Each keeps its input, whose sine it takes, and the exponential; nothing of the half.
    assert numbers == [0, 2, 4, 6]
    assert len(swap.transfer.held) == 6  # type: ignore[attr-defined]


def test_what_is_changed_while_an_accelerator_copies_it_is_refused() -> None:
    layers, _ = late_layers()
    value = given(16)
    between = layers[0](value)
    between.mul_(1)
    assert torch.isfinite(between).all()
    layers[1].compute = lambda one: one.clone()
    layers[0].compute = lambda one: one.exp()
    found = layers[0](between.detach().requires_grad_())
    found.mul_(3)
    layers[1](given(2))
    with pytest.raises(RunError, match="was changed in place, or freed"):
        found.sum().backward()


@pytest.mark.parametrize("values", [{"modules": ["*"]}, {"mode": "disk"}, {"mode": "host", "modules": []}])
def test_settings_without_effect_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"no effect|mode|modules"):
        ActivationSwapConfig.model_validate(values)
