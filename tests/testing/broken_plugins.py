"""Hook plugins that each break one promise, and two that keep them all."""

from __future__ import annotations

from typing import Any

import torch

from hp_core import InputError, hookimpl


class Everything:
    """Keeps every promise, with every hook that this version calls."""

    hp_requires = ">=0.1"

    @hookimpl(wrapper=True)
    def build_model(self, config, distributed_setup, peft_config, activation_checkpoint, activation_swap):
        return (yield)

    @hookimpl(wrapper=True)
    def replace_module(self, module, module_fqn, context):
        return (yield)

    @hookimpl
    def on_plan(self, plan):
        assert plan.explain()

    @hookimpl
    def save_state(self, run):
        return {"step": run.state.step}

    @hookimpl
    def load_state(self, run, state):
        assert state["step"] == run.state.step

    @hookimpl
    def build_loss(self, config):
        return None

    @hookimpl
    def bind_model(self, loss_fn, model, distributed_setup):
        self.model = model

    @hookimpl(wrapper=True)
    def build_dataset(self, config, transform, tokenizer, mesh_context, training_config):
        return (yield)

    @hookimpl(wrapper=True)
    def build_dataloader(self, dataset, collate_fn, batch_sampler, batch_size, dp_world_size, max_seq_len, seed):
        return (yield)

    @hookimpl
    def build_optimizer(self, config, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    @hookimpl(wrapper=True)
    def build_lr_scheduler(self, config, optimizer, train_iters):
        return (yield)

    @hookimpl
    def on_train_start(self, run):
        pass

    @hookimpl(wrapper=True)
    def prepare_model_inputs(self, loss_fn, model_inputs, loss_inputs):
        inputs = yield
        return {**inputs, "output_hidden_states": True}

    @hookimpl
    def on_step_end(self, run, step):
        pass

    @hookimpl
    def on_evaluate(self, run, evaluation):
        pass

    @hookimpl
    def on_checkpoint(self, run, path):
        assert path.is_dir()

    @hookimpl
    def on_train_end(self, run, report):
        pass

    @hookimpl
    def on_exception(self, run, error):
        pass


class Watches:
    """Keeps every promise."""

    @hookimpl(specname="on_step_end")
    def watch(self, step):
        return f"ignored {step}"


everything = Everything()
watches = Watches()


# loads


class Misspelt:
    @hookimpl
    def on_step_ends(self, step):
        pass


class Undecorated(Watches):
    def on_train_end(self, report):
        pass


class AsksForMore:
    @hookimpl
    def on_step_end(self, step, loss):
        pass


class ForAnotherVersion(Watches):
    hp_requires = ">=99"


# called


class RefusesThePlan(Watches):
    @hookimpl
    def on_plan(self, plan):
        raise InputError(f"{plan.total_parameters} parameters are too many")


class Replaces(Watches):
    @hookimpl(wrapper=True)
    def replace_module(self):
        return (yield)


# results


class BuildsText:
    @hookimpl
    def build_loss(self):
        return "cross entropy"


class BuildsParameters:
    @hookimpl
    def build_optimizer(self, model):
        return list(model.parameters())


class PreparesPairs:
    @hookimpl(wrapper=True)
    def prepare_model_inputs(self):
        return list((yield).items())


class BuildsRows:
    @hookimpl
    def build_dataset(self):
        return [1, 2, 3]


# arguments


class WritesEvaluation:
    @hookimpl
    def on_evaluate(self, evaluation):
        evaluation["perplexity"] = 1.0


class WritesMetrics:
    @hookimpl
    def on_step_end(self, run):
        run.metrics["mine"] = 1.0


class CountsForItself:
    @hookimpl
    def on_step_end(self, run):
        run.state.skipped_nonfinite += 1


class NudgesWeights:
    @hookimpl
    def on_step_end(self, run):
        run.model.lm_head.weight.data.mul_(0.999)


class SwapsRows:
    """Two rows of the embedding change places, which no sum sees."""

    @hookimpl
    def on_step_end(self, run):
        weight = run.model.get_input_embeddings().weight.data
        weight[[0, 1]] = weight[[1, 0]]


class ClearsTheHead:
    @hookimpl
    def bind_model(self, model):
        model.get_output_embeddings().weight.data.zero_()


class Reseeds:
    @hookimpl
    def on_step_end(self, run):
        torch.manual_seed(0)


class Freezes:
    @hookimpl
    def on_train_start(self, run):
        run.model.get_input_embeddings().requires_grad_(False)


class DropsLabels:
    @hookimpl(wrapper=True)
    def prepare_model_inputs(self, model_inputs):
        inputs = yield
        model_inputs.pop("use_cache")
        return inputs


class MasksTokens:
    @hookimpl(wrapper=True)
    def prepare_model_inputs(self, loss_inputs):
        inputs = yield
        loss_inputs["labels"][:, 0] = -100
        return inputs


# runs


class Stumbles:
    @hookimpl
    def on_train_end(self, report: Any):
        raise KeyError("nothing")
