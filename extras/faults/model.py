"""The model that faults are put into: blocks of equal size that may run in any order, and its reference."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from extras.torch_gaps.checks import WIDTH, batch, expect_same, expect_same_gradients, squared_output
from extras.torch_gaps.registry import Trial

BLOCKS = 4
ORDER = tuple(range(BLOCKS))


class Net(nn.Module):
    """Attributes say what a forward does: ranks may be given different ones.

    Attributes:
        order: of the blocks; some may be left out, or come twice.
        checkpointed: blocks that are computed again in backward.
        cut_after: the output is that of this block, and no head follows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.order: Sequence[int] = ORDER
        self.checkpointed: Sequence[int] = ()
        self.cut_after: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        """(rows, WIDTH) to the same."""
        for index in self.order:
            block = self.blocks[index]
            x = checkpoint(block, x, use_reentrant=False) if index in self.checkpointed else block(x)
            if index == self.cut_after:
                return x
        out: Tensor = self.head(x)
        return out


class Trained:
    """The sharded model of one rank, and the plain one.

    Attributes:
        trial: where it runs.
        model: sharded block by block.
        plain: the same before sharding.
        step: batches that were used.
    """

    def __init__(self, trial: Trial, *, hybrid: bool = False, bfloat16: bool = False) -> None:
        torch.manual_seed(0)
        self.trial = trial
        self.model = Net()
        self.plain = copy.deepcopy(self.model)
        self.step = 0
        arguments = {}
        if hybrid:
            sizes = (2, trial.world_size // 2)
            arguments["mesh"] = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
        if bfloat16:
            arguments["mp_policy"] = trial.api.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for block in self.model.blocks:
            trial.api.fully_shard(block, **arguments)
        trial.api.fully_shard(self.model, **arguments)

    def loss(self) -> Tensor:
        """Of this rank's next batch."""
        self.step += 1
        return squared_output(self.model, batch(self.trial.rank, self.step))

    def checked_loss(self) -> Tensor:
        """The same; it is what the plain model has if it runs as this rank's does.

        Raises:
            Wrong: it is not: the rank has computed with other parameters.
        """
        loss = self.loss()
        self.plain.order, self.plain.cut_after = self.model.order, self.model.cut_after
        with torch.no_grad():
            expect_same(loss.detach(), squared_output(self.plain, batch(self.trial.rank, self.step)), "the loss")
        self.plain.order, self.plain.cut_after = ORDER, None
        return loss

    def train(self) -> None:
        """A forward and a backward; the loss is checked."""
        self.checked_loss().backward()

    def evaluate(self) -> None:
        """A forward without gradients."""
        with torch.no_grad():
            self.loss()

    def expect_right_gradients(self, models: Sequence[Net] | None = None) -> None:
        """A step of all ranks, without what was before, has the gradients of the plain model.

        ``models``: what each rank runs, plain; by default the same.

        Raises:
            Wrong: it has others.
        """
        self.model.zero_grad()
        self.plain.zero_grad()
        self.step = 100
        self.train()
        for rank in range(self.trial.world_size):
            plain = self.plain if models is None else models[rank]
            (squared_output(plain, batch(rank, self.step)) / self.trial.world_size).backward()
        expect_same_gradients(self.model, self.plain)
