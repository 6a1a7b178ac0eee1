"""The training loop: what happens at each step, and every so many steps."""

from __future__ import annotations

import math

import torch
from torch import Tensor

import fsdp2
from fsdp2 import FSDPModule, StepMetrics
from lm.batches import BatchLayout, ShuffledWindows
from lm.build import Precision, build_sharded
from lm.checkpoints import RunCheckpoints
from lm.data import Corpus
from lm.distributed import Ranks
from lm.errors import UserError
from lm.evaluation import held_out_loss, spread_windows
from lm.interruption import StopRequest
from lm.model import Transformer, next_byte_loss
from lm.optimization import CosineSchedule, clip_gradients, make_optimizer, set_learning_rate
from lm.options import Options
from lm.parallelism import Arrangement, make_meshes
from lm.reporting import Reporter
from lm.run_directory import RunDirectory

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
HELD_OUT_WINDOWS = 128
"""How many windows of the held-out text an evaluation during training looks at."""


class Trainer:
    """A sharded model, its optimizer and its place in the data. Every rank has one, and calls it alike."""

    def __init__(self, options: Options, ranks: Ranks, corpus: Corpus, run: RunDirectory) -> None:
        """Build the model, and load the run's last checkpoint where `--resume` asks for it. A collective.

        Raises:
            UserError: the options do not fit the number of ranks, or the checkpoint does not fit the data.
        """
        self._options = options
        self._ranks = ranks
        self._corpus = corpus
        self.arrangement = Arrangement(replicate=options.replicate, tp=options.tp, world_size=ranks.world_size)
        self._layout = BatchLayout(
            batch=options.batch,
            accumulate=options.accumulate,
            rank=self.arrangement.data_rank(ranks.rank),
            world_size=self.arrangement.data_world_size,
        )
        self._windows = ShuffledWindows(corpus.train, context=options.context, seed=options.seed)
        self._schedule = CosineSchedule(
            peak=options.learning_rate, warmup_steps=options.warmup_steps, total_steps=options.steps
        )
        self.model = build_sharded(
            options.model_size,
            seed=options.seed,
            meshes=make_meshes(self.arrangement, ranks.device.type),
            precision=choose_precision(options, ranks.device),
            offload=options.offload,
            checkpoint_blocks=options.activation_checkpoint,
        )
        self._trained = compiled(self.model, options.compile)
        self._optimizer = make_optimizer(self.model, weight_decay=options.weight_decay)
        self.step = 0
        """Updates done."""
        self._saved_step = 0
        self._checkpoints = RunCheckpoints(
            run.checkpoints,
            self.model,
            self._optimizer,
            fingerprint=corpus.fingerprint(),
            keep=options.keep_checkpoints,
            asynchronous=options.asynchronous_checkpoints,
        )
        if options.resume:
            self.step = self._saved_step = self._checkpoints.restore()
        # What a step costs. Evaluations and checkpoints are left out of it.
        self._metrics = fsdp2.metrics(self.model, first_step=self.step, write=None)

    def train(self, stop: StopRequest, reporter: Reporter) -> bool:
        """Train to the last step and save; return False where a signal stopped and saved the run before.

        A collective. `reporter` counts on every rank; `stop` may be requested on any.
        """
        with self._metrics:
            stopped = self._train(stop, reporter)
        self._save(reporter)
        self._checkpoints.close()
        return not stopped

    def _train(self, stop: StopRequest, reporter: Reporter) -> bool:
        """Train to the last step; return whether a signal has stopped it before."""
        options = self._options
        while self.step < options.steps:
            loss, gradient_norm = self._update()
            is_due = self._due(options.log_every) or self.step == options.steps
            measured = self._metrics.step(options.batch * options.context, gradient_norm=gradient_norm, reports=is_due)
            if measured is not None and self._log(loss, measured, stop, reporter):
                return True
            with self._metrics.paused():
                if self._due(options.evaluate_every) and self.step < options.steps:
                    reporter.held_out(self.step, self.held_out_loss(HELD_OUT_WINDOWS))
                if self._due(options.checkpoint_every):
                    self._save(reporter)
        return False

    def held_out_loss(self, window_count: int) -> float:
        """Return the loss in nats per byte on `window_count` windows of the held-out text. A collective."""
        context = self._options.context
        return held_out_loss(
            self.model,
            self._corpus.held_out,
            spread_windows(self._corpus.held_out, context=context, count=window_count),
            context=context,
            rows=len(self._layout.samples(step=0, microbatch=0)),
            ranks=self._ranks,
            arrangement=self.arrangement,
        )

    def _update(self) -> tuple[Tensor, Tensor]:
        """Do one step; return this rank's mean loss and the norm of all gradients before clipping, scalars.

        Gradients stay on each rank until the last microbatch, and are then averaged over the ranks at once; those of a
        compiled model are averaged in each, within its graph.
        """
        accumulate = self._options.accumulate
        total = torch.zeros((), device=self._ranks.device)
        for microbatch in range(accumulate):
            if not self._options.compile:
                reduce_gradients_in_backward(self.model, microbatch == accumulate - 1)
            samples = self._layout.samples(self.step, microbatch)
            inputs, targets = (part.to(self._ranks.device) for part in self._windows.batch(samples))
            loss = next_byte_loss(self._trained, inputs, targets) / accumulate
            loss.backward()
            total += loss.detach()
        gradient_norm = clip_gradients(self.model, max_norm=self._options.clip)
        set_learning_rate(self._optimizer, self._schedule(self.step))
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.step += 1
        return total, gradient_norm

    def _log(self, loss: Tensor, measured: StepMetrics, stop: StopRequest, reporter: Reporter) -> bool:
        """Report the last update; return whether any rank was asked to stop. A collective.

        Raises:
            UserError: the loss, over all ranks, is no longer a finite number.
        """
        loss_sum, stop_requests = self._ranks.sum([loss, stop.requested])
        # Also the mean over the data-parallel ranks: all ranks of a tensor-parallel group have the same loss.
        mean_loss = loss_sum / self._ranks.world_size
        if not math.isfinite(mean_loss):
            raise UserError(
                f"the loss is {mean_loss} at step {self.step}: go back with --resume and a lower "
                "--learning-rate or --clip"
            )
        reporter.training(self.step, loss=mean_loss, learning_rate=self._schedule(self.step - 1), measured=measured)
        return stop_requests > 0

    def _due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    def _save(self, reporter: Reporter) -> None:
        """Write a checkpoint, unless there is one of this step or none are wanted. A collective."""
        if self._options.checkpoint_every == 0 or self.step == self._saved_step:
            return
        path = self._checkpoints.save(self.step)
        self._saved_step = self.step
        reporter.saved(self.step, path)


def choose_precision(options: Options, device: torch.device) -> Precision:
    """Turn the names of dtypes into dtypes; `auto` is bfloat16 on a GPU, unless the parameters are already."""
    param, reduce = (DTYPES[name] for name in (options.param_dtype, options.reduce_dtype))
    if options.dtype != "auto":
        compute = DTYPES[options.dtype]
    elif device.type == "cuda" and param == torch.float32:
        compute = torch.bfloat16
    else:
        compute = torch.float32
    return Precision(compute=compute, param=param, reduce=reduce)


def compiled(model: Transformer, backend: str) -> Transformer:
    """What to train in the place of `model`: it in one graph; itself if there is no `backend`.

    Evaluation and sampling, whose shapes differ, stay eager.
    """
    if not backend:
        return model
    return torch.compile(model, backend=backend, fullgraph=True)  # type: ignore[return-value]


def reduce_gradients_in_backward(model: Transformer, last_microbatch: bool) -> None:
    """Choose whether the next backward of `model` reduces gradients: only the last microbatch's does."""
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(last_microbatch)
    model.set_is_last_backward(last_microbatch)
