"""torchtitan's own models, parallelized, trained and clipped by torchtitan's own functions.

Usage:
    torchrun --nproc-per-node 2 torchtitan_training.py [--chunked-loss] [--checkpoint-activations] [--compile]
    torchrun --nproc-per-node 4 torchtitan_training.py [--replicate 2 | --tensor 2 | --experts 2] [--backend ...]
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.distributed.full_dtensor import parallelize_inputs
from torchtitan.distributed.spmd_types import annotate_input_spmd_types
from torchtitan.distributed.utils import clip_grad_norm_, get_spmd_context, set_spmd_backend
from torchtitan.models.llama3.parallelize import parallelize_llama
from torchtitan.models.qwen3.parallelize import parallelize_qwen3
from torchtitan_models import LENGTH, VOCABULARY, build, configuration
from trial import Report, finish, gradient_norm, implementation, mean_over_ranks, part

STEPS, ROWS, MAX_NORM, RATE = 4, 8, 0.5, 0.5


def tokens(step: int) -> tuple[Tensor, Tensor]:
    """Inputs and labels of all ranks, (ROWS, LENGTH) each."""
    generator = torch.Generator().manual_seed(step)
    drawn = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def make_sharded(options: argparse.Namespace, reference: Any) -> tuple[Any, ParallelDims]:
    """Made on meta, parallelized, materialized, and given the reference's values."""
    parallelism = ParallelismConfig(
        data_parallel_replicate_degree=options.replicate,
        data_parallel_shard_degree=-1,
        tensor_parallel_degree=options.tensor,
        expert_parallel_degree=options.experts,
        spmd_backend=options.backend,
    )
    set_spmd_backend(options.backend)
    parallel_dims.device_type = "cpu"  # torchtitan takes CUDA for granted
    dims = ParallelDims.from_config(parallelism, dist.get_world_size())
    dims.build_mesh()
    with torch.device("meta"):
        model = configuration(experts=options.experts > 1, parallelism=parallelism).build()
    training = TrainingConfig(mixed_precision_param="float32", mixed_precision_reduce="float32")
    model = (parallelize_qwen3 if options.experts > 1 else parallelize_llama)(
        model,
        parallel_dims=dims,
        training=training,
        parallelism=parallelism,
        compile_config=CompileConfig(enable=options.compile, components=["model"], backend="aot_eager"),
        ac_config=FullAC.Config() if options.checkpoint_activations else None,
        dump_folder="",
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # torchtitan's divide factor of 1 needs NCCL otherwise
    model.to_empty(device="cpu")
    model.init_states(buffer_device=torch.device("cpu"))
    options_for_whole = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, reference.state_dict(), options=options_for_whole)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    return model, dims


def annotate(dims: ParallelDims, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """This rank's rows as the backend takes them."""
    if dims.spmd_backend == "partial_dtensor":
        return inputs, labels
    convert = parallelize_inputs if dims.spmd_backend == "full_dtensor" else annotate_input_spmd_types
    inputs, labels, _ = convert(dims, inputs, labels, {})
    return inputs, labels


def make_loss(options: argparse.Namespace, model: Any) -> Any:
    """torchtitan's loss over the vocabulary, whole or in four chunks of the sequence."""
    if not options.chunked_loss:
        return CrossEntropyLoss.Config().build()
    loss = ChunkedLossWrapper.Config(num_chunks=4).build()
    loss.set_lm_head(model.lm_head)
    model._skip_lm_head = True
    return loss


def main() -> None:
    """Train both, and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicate", type=int, default=1)
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--experts", type=int, default=1, help="ranks of expert parallelism")
    parser.add_argument("--backend", default="partial_dtensor")
    parser.add_argument("--chunked-loss", action="store_true")
    parser.add_argument("--checkpoint-activations", action="store_true")
    parser.add_argument("--compile", action="store_true", help="each block, as torchtitan does")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    reference = build(experts=options.experts > 1)
    model, dims = make_sharded(options, reference)
    loss_of, expected_loss_of = make_loss(options, model), CrossEntropyLoss.Config().build()
    # Not Adam: a gradient of the wrong scale would not show in the next loss.
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    expected_optimizer = torch.optim.SGD(reference.parameters(), lr=RATE)
    report = Report(implementation(model))
    batch_mesh = dims.get_mesh("batch") if dims.dp_replicate * dims.dp_shard > 1 else None
    rank, size = (batch_mesh.get_local_rank(), batch_mesh.size()) if batch_mesh else (0, 1)
    valid = torch.tensor(float(ROWS * LENGTH))
    for step in range(STEPS):
        inputs, labels = tokens(step)
        with get_spmd_context(parallel_dims=dims, spmd_typechecking=False)():
            rows, row_labels = annotate(dims, part(inputs, rank, size), part(labels, rank, size))
            loss, _ = loss_of(model(rows), row_labels, valid)
            loss.backward()
        norm = clip_grad_norm_(list(model.parameters()), MAX_NORM, ep_enabled=options.experts > 1)
        expected_loss, _ = expected_loss_of(reference(inputs), labels, valid)
        expected_loss.backward()
        # A DTensor stands for the sum over all ranks, a plain tensor for this rank's rows.
        total = loss.full_tensor().item() if isinstance(loss, DTensor) else mean_over_ranks(loss) * size
        report.add("loss", total, expected_loss.item())
        report.add("gradient norm", norm.item(), gradient_norm(reference))
        torch.nn.utils.clip_grad_norm_(reference.parameters(), MAX_NORM)
        for each in (optimizer, expected_optimizer):
            each.step()
            each.zero_grad()
    report.add_parameters(model, reference)
    finish(report)


if __name__ == "__main__":
    main()
