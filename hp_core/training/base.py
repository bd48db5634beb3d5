"""The base of every task trainer: explicit stages in a fixed order, and the only training loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hp_core.checkpoint.saver import Contents
from hp_core.config import TrainerConfig
from hp_core.data.order import GlobalOrder, StepBatches, evaluation_batches
from hp_core.data.protocols import Datasets, MeshContext, RowDataset
from hp_core.data.streaming import StreamBatches, StreamOrder
from hp_core.errors import noting
from hp_core.parallel.context.sequence import own_part
from hp_core.parallel.fsdp import require_sharded
from hp_core.parallel.setup import DistributedSetup
from hp_core.training.accounting import MicroBatch, StepCounts, StepLoss, on_device
from hp_core.training.built import as_lr_scheduler, as_optimizer, require_each_once, require_savable
from hp_core.training.columns import column_arguments
from hp_core.training.evaluation import Evaluation, evaluate, tell
from hp_core.training.feeding import SourceCounts, feed_of, keep_cursors
from hp_core.training.in_stages import of_one_length
from hp_core.training.loss import LossContract
from hp_core.training.meter import Meter, elapsed
from hp_core.training.metric_names import require_measured
from hp_core.training.persistence import contents_of, restore
from hp_core.training.reading import StepReader, Stoppable
from hp_core.training.run import Report, Run, tell_data
from hp_core.training.saving import Checkpointing
from hp_core.training.schedule import total_steps
from hp_core.training.startup import (
    checked_datasets,
    checked_loss,
    checked_model,
    freeze_unused,
    refuse_images,
    tell_frozen,
    told_of_the_loss,
)
from hp_core.training.state import RunState, seed_everything
from hp_core.training.step import Entries, Passes, accumulate_gradients, require_same_entries
from hp_core.training.stopping import StopAgreed, StopSignals
from hp_core.training.update import update
from hp_core.training.utilization import Utilization

GetBatch = Callable[[Iterator[Any]], tuple[dict[str, Any], dict[str, Any]]]


class BaseTrainer:
    """Builds the parts of a run in a fixed order and trains.

    A task trainer overrides the stages that its modality needs: `_build_model_assets`, `_build_data_transform`,
    `_build_collate_fn` and `_build_get_batch`. The rest, the loop included, is shared. `trains_texts` says that batches
    are rows of tokens with a label for each, on which `hp-train check` can try a loss, `takes_images` that they may
    have images.
    """

    trains_texts: ClassVar[bool] = False
    takes_images: ClassVar[bool] = False

    run: Run
    setup: DistributedSetup
    model: nn.Module
    loss_fn: nn.Module
    contract: LossContract
    entries: Entries = Entries()
    tokenizer: Any
    transform: Any
    collate_fn: Any
    datasets: Datasets
    order: GlobalOrder | StreamOrder
    batches: StepBatches | StreamBatches
    dataloader: Iterable[Any]
    get_batch: GetBatch
    optimizer: Optimizer
    lr_scheduler: LRScheduler
    num_steps: int
    last_step: int
    stop: StopSignals
    checkpoints: Checkpointing

    def __init__(self, *, config: TrainerConfig) -> None:
        self.config = config
        self.tokenizer = None
        self.transform = None

    def build(self, run: Run) -> None:
        """Build everything, and restore if the run resumes. Every rank calls it, then `train`."""
        self.run = run
        self._setup()
        self._build_model()
        self._build_loss()
        self._build_model_assets()
        self._build_data_transform()
        self._build_dataset()
        self._build_collate_fn()
        self._build_dataloader()
        self._build_get_batch()
        self._build_optimizer()
        self._build_lr_scheduler()
        self._restore()

    # Stages, in build order.

    def _setup(self) -> None:
        """Take the processes and meshes of the run, and seed: dropout differs by token rank and stage."""
        self.setup = self.run.setup
        seed_everything(self.config.training.seed, self.setup.random_rank)
        checkpoint = self.run.directory.checkpoint
        if checkpoint is not None:
            self.run.state = RunState.from_dict(checkpoint.trainer_state()["state"])

    def _build_model(self) -> None:
        """Build the model; what the hook returns is final."""
        built = self.run.plugins.hook.build_model(
            config=self.config,
            distributed_setup=self.setup,
            **self.config.model_features(),
        )
        self.model = checked_model(built, self.run)
        self.run.model = self.model

    def _build_loss(self) -> None:
        """Build the loss and show it the finished model."""
        hook = self.run.plugins.hook
        with told_of_the_loss("can't be built"):
            built = hook.build_loss(config=self.config)
        self.loss_fn, self.contract = checked_loss(built, self.run)
        with told_of_the_loss(f"{type(self.loss_fn).__name__} can't be bound to the model"):
            hook.bind_model(loss_fn=self.loss_fn, model=self.model, distributed_setup=self.setup)
        counts_more = type(self).token_counts is not BaseTrainer.token_counts
        require_measured(self.config.checkpoint.keep_best.metric, self.loss_fn, counts_more=counts_more)

    def _build_model_assets(self) -> None:
        """Build what turns raw data into model inputs: a tokenizer, a processor."""

    def _build_data_transform(self) -> None:
        """Build the transform of single samples, if the task has one."""

    def _build_dataset(self) -> None:
        """Build the data sets."""
        built = self.run.plugins.hook.build_dataset(
            config=self.config,
            transform=self.transform,
            tokenizer=self.tokenizer,
            mesh_context=self.mesh_context(),
            training_config=self.config.training,
        )
        self.datasets = checked_datasets(built, self.run, self.loss_fn, self.contract.columns)
        images = (self.datasets, type(self).__name__, self.takes_images)
        refuse_images(*images)
        freeze_unused(self.model, *images, self.run)
        tell_data(self.datasets, self.run)

    def _build_collate_fn(self) -> None:
        """Build what turns a list of samples into a batch; the loader's own when the task has none."""
        self.collate_fn = None

    def _build_dataloader(self) -> None:
        """Fix the global order and build the loader of this rank's share of it, from where the run stands."""
        feed = feed_of(self.datasets.train, self.run)
        self.order, self.batches = feed.order, feed.batches
        self.num_steps, self.last_step = feed.num_steps, feed.last_step
        self._source_counts = SourceCounts(self.datasets.train, self.order)
        self.dataloader = self._loader(self.datasets.train, self.batches)

    def _build_get_batch(self) -> None:
        """Build the function that takes a batch off the loader and splits it into model and loss inputs."""
        raise NotImplementedError(f"{type(self).__name__} does not implement _build_get_batch")

    def _build_optimizer(self) -> None:
        """Build the optimizer; each trainable parameter must be in exactly one group."""
        require_sharded(self.model, self.setup)
        built = self.run.plugins.hook.build_optimizer(config=self.config, model=self.model)
        self.optimizer = as_optimizer(built)
        require_each_once(self.optimizer, self.model)
        tell_frozen(self.model, self.run)
        self.run.optimizer = self.optimizer

    def _build_lr_scheduler(self) -> None:
        """Build the learning-rate schedule over the whole run."""
        built = self.run.plugins.hook.build_lr_scheduler(
            config=self.config, optimizer=self.optimizer, train_iters=total_steps(self.order, self.config.training)
        )
        self.lr_scheduler = as_lr_scheduler(built)
        require_savable(self.lr_scheduler)

    def _restore(self) -> None:
        """Load the checkpoint that the run goes on from."""
        checkpoint = self.run.directory.checkpoint
        if checkpoint is not None:
            restore(self.run, checkpoint, *self._restored, self.datasets.train.fingerprint)

    @property
    def _restored(self) -> tuple[nn.Module, nn.Module, Optimizer, LRScheduler]:
        return self.model, self.loss_fn, self.optimizer, self.lr_scheduler

    # The loop.

    def train(self) -> Report:
        """Take every step, evaluate and save where the recipe says, and finish."""
        run, state = self.run, self.run.state
        stops_early = self.last_step < self.num_steps
        if run.is_over(self.num_steps, self.last_step):
            return Report(state.step, run.metrics, None)
        run.plugins.hook.on_train_start(run=run)
        evaluation, stopped = None, False
        self.checkpoints = Checkpointing(run, self._contents)
        self.stop = StopSignals(run.console, lambda: self.checkpoints.is_saved)
        self._reader = StepReader(self.batches, self.contract, self.setup, self.stop, self.checkpoints)
        with run.console.training(first_step=state.step, num_steps=self.num_steps), self.stop, self.checkpoints:
            try:
                evaluation = self._take_steps()
                if self.config.checkpoint.save_last or stops_early:
                    self.checkpoints.save()
                if not stops_early:
                    evaluation = self._finish(evaluation)
            except StopAgreed:
                stopped = True
                self.checkpoints.save()
        if stopped:
            run.console.say(f"stopped after step {state.step}; --checkpoint.resume=latest goes on from there")
        elif not stops_early:
            run.record(finished=state.step)
        report = Report(state.step, run.metrics, evaluation.as_metrics(state.step) if evaluation else None, stopped)
        run.plugins.hook.on_train_end(run=run, report=report)
        return report

    def _take_steps(self) -> Evaluation | None:
        run, state = self.run, self.run.state
        evaluation: Evaluation | None = None
        self._meter = Meter(Utilization(self.model, run))
        iterator = iter(self.dataloader)
        if self._evaluation_is_due() and state.evaluated != state.step > 0:
            evaluation = self._evaluate(self.datasets.validation)
            self.checkpoints.complete(is_last=state.step == self.last_step)
        while state.step < self.last_step:
            with noting(partial(self._place, state.step + 1)):
                self.train_step(iterator)
                run.plugins.hook.on_step_end(run=run, step=state.step)
            # Before the checkpoint, which may be kept for what it finds.
            if self._evaluation_is_due():
                evaluation = self._evaluate(self.datasets.validation)
            if self.checkpoints.is_due():
                self.checkpoints.save()
        return evaluation

    def _evaluation_is_due(self) -> bool:
        every = self.config.evaluation.every
        return bool(every) and self.run.state.step % every == 0

    def train_step(self, iterator: Iterator[Any]) -> None:
        """One optimizer step: read, count, forward and backward each micro-batch, clip, update, log.

        Raises:
            StopAgreed: some rank was asked to stop; no step was taken.
        """
        started = time.perf_counter()
        state = self.run.state
        number = self.batches.micro_batches(self.order.step_size(state.position))
        micro_batches = self._reader.read(lambda: self._micro_batches(iterator, number), state.position)
        data_seconds = time.perf_counter() - started
        counts = self._reader.count(micro_batches)
        step_loss = StepLoss(self.contract, counts)
        norm: float | None = None
        skipped: str | None = None
        lr = float(self.optimizer.param_groups[0]["lr"])
        position = state.position
        state.step += 1
        state.position = self.order.advance(position)
        if not counts.is_empty:
            accumulate_gradients(micro_batches, self._passes, step_loss, self.setup)
            self.entries = require_same_entries(step_loss, self.entries, self.setup)
        if counts.is_empty or self._counts_nothing(counts, step_loss):
            self.optimizer.zero_grad(set_to_none=True)
            skipped = "no tokens"
            state.skipped_no_tokens += 1
        else:
            norm, skipped = update(self.run, self.optimizer, self.lr_scheduler, micro_batches, step_loss)
        tokens = 0 if skipped else counts.targets["labels"]
        state.tokens += tokens
        self._source_counts.add(state, position, is_trained=skipped is None)
        is_told = bool(skipped) or state.step % self.config.training.log_every == 0 or state.step == self.last_step
        seconds = elapsed(started, self.setup.device, to_the_end=is_told)
        computed = [] if skipped else micro_batches
        self._meter.add(tokens=tokens, computed=computed, seconds=seconds, data_seconds=data_seconds)
        if is_told:
            own = self.token_counts(micro_batches)
            row = self._meter.row(
                state, step_loss, norm=norm, lr=lr, skipped=skipped, tokens=tokens, own=own, setup=self.setup
            )
            self.run.log_step(row)
            self.checkpoints.require_metric(row)
            if state.step < self.last_step:
                self._meter.utilization.measure_peak()

    def token_counts(self, micro_batches: Sequence[MicroBatch]) -> Mapping[str, int]:
        """What the task counts of a step beside its targets, by the same names on all ranks; their sums are logged."""
        del micro_batches
        return {}

    def preforward(self, micro_batch: MicroBatch) -> tuple[dict[str, Any], dict[str, Any]]:
        """Move a micro-batch to the device and let the loss and plugins prepare the model's inputs."""
        model_inputs = on_device(micro_batch.model_inputs, self.setup.device)
        loss_inputs = on_device(micro_batch.loss_inputs, self.setup.device)
        prepared: dict[str, Any] = self.run.plugins.hook.prepare_model_inputs(
            loss_fn=self.loss_fn, model_inputs=model_inputs, loss_inputs=loss_inputs
        )
        return prepared, loss_inputs

    def forward(self, model_inputs: dict[str, Any]) -> Any:
        """Call the model."""
        return self.model(**model_inputs)

    def postforward(self, outputs: Any, loss_inputs: dict[str, Any]) -> Any:
        """Call the loss, with the columns it declares and no others: a scalar tensor or a dict of them."""
        columns = column_arguments(loss_inputs, self.contract.columns)
        return self.loss_fn(model_output=outputs, labels=loss_inputs["labels"], **columns)

    def _counts_nothing(self, counts: StepCounts, step_loss: StepLoss) -> bool:
        """Whether no rank's loss has an entry for any of the step's labels: a batch may hold some that nothing uses."""
        return counts.amounts["labels"] == 0 and self.setup.sum_on_host([step_loss.num_counted]) == [0]

    @property
    def _passes(self) -> Passes:
        return Passes(self.model, self.loss_fn, self._outputs_of, self.postforward)

    def _micro_batches(self, iterator: Iterator[Any], number: int) -> list[MicroBatch]:
        inputs = [self.get_batch(iterator) for _ in range(number)]
        if self.setup.sizes.pp > 1:
            inputs = of_one_length(inputs)
        return [self._micro_batch(one) for one in inputs]

    def _micro_batch(self, inputs: tuple[dict[str, Any], dict[str, Any]]) -> MicroBatch:
        if self.setup.sizes.cp > 1:
            inputs = own_part(*inputs, self.setup)
        return MicroBatch.of(*inputs, self.contract)

    def _outputs_of(self, micro_batch: MicroBatch) -> tuple[Any, dict[str, Any]]:
        model_inputs, loss_inputs = self.preforward(micro_batch)
        return self.forward(model_inputs), loss_inputs

    # Around the loop.

    def _place(self, step: int) -> str:
        return f"step {step}, rank {self.setup.rank}"

    def mesh_context(self) -> MeshContext:
        """Where this process stands, for data sets and collators."""
        return MeshContext.of(self.setup)

    def _loader(self, dataset: RowDataset, batches: Any) -> Iterable[Any]:
        loader: Iterable[Any] = self.run.plugins.hook.build_dataloader(
            config=self.config,
            dataset=dataset,
            collate_fn=self.collate_fn,
            batch_sampler=batches,
            batch_size=self.config.training.micro_batch_size,
            dp_world_size=self.setup.dp_size,
            max_seq_len=dataset.max_seq_len,
            seed=self.config.training.seed,
        )
        return loader

    def _evaluate(self, dataset: RowDataset | None, split: str = "eval") -> Evaluation | None:
        """Evaluate on the whole of a data set, if there is one, and log it."""
        if dataset is None or len(dataset) == 0:
            return None
        batches = evaluation_batches(
            len(dataset), self.setup.dp_rank, self.setup.dp_size, self.config.training.micro_batch_size
        )
        iterator = iter(self._loader(dataset, batches))
        micro_batches = Stoppable(
            lambda: self._micro_batch(self.get_batch(iterator)), len(batches), self.stop, self.setup
        )
        with noting(lambda: f"{split} after {self._place(self.run.state.step)}"):
            result = evaluate(micro_batches, self._passes, self.contract, self.setup)
        if micro_batches.is_stopped:
            raise StopAgreed
        tell(result, self.run, self.checkpoints, split)
        return result

    def _finish(self, evaluation: Evaluation | None) -> Evaluation | None:
        """After the last step: evaluate, unless that step was evaluated already, and measure the test set."""
        settings = self.config.evaluation
        if settings.at_end is not False:
            if not self._evaluation_is_due():
                evaluation = self._evaluate(self.datasets.validation)
            self._evaluate(self.datasets.test, "test")
        return evaluation

    def _contents(self) -> Contents:
        """Everything that resuming needs."""
        keep_cursors(self.batches, self.run)
        return contents_of(self.run, *self._restored, self.datasets.train.fingerprint)
