"""Two small models out of torchtitan's parts: a dense Llama 3 and a Qwen 3 with routed experts.

torchtitan's own configurations of these sizes are for GPUs: their attention has no backward, or none at all, on a CPU.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torchtitan.config import ParallelismConfig
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import _EMBEDDING_INIT, _NORM_INIT, _build_llama3_layers, _output_linear_init
from torchtitan.models.llama3.model import Llama3Model
from torchtitan.models.qwen3 import _build_qwen3_moe_layers
from torchtitan.models.qwen3.model import Qwen3Model

LENGTH, VOCABULARY, WIDTH = 16, 48, 32


def configuration(*, experts: bool, parallelism: ParallelismConfig | None = None) -> Any:
    """A model of two layers; with the layouts of its tensors, if it will be parallelized."""
    layers = _layers_with_experts() if experts else _dense_layers()
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config = (Qwen3Model if experts else Llama3Model).Config(
        dim=WIDTH,
        vocab_size=VOCABULARY,
        tok_embeddings=Embedding.Config(num_embeddings=VOCABULARY, embedding_dim=WIDTH, param_init=_EMBEDDING_INIT),
        norm=RMSNorm.Config(normalized_shape=WIDTH, param_init=_NORM_INIT),
        lm_head=Linear.Config(in_features=WIDTH, out_features=VOCABULARY, param_init=_output_linear_init(WIDTH)),
        layers=layers,
    )
    if parallelism is not None:
        config.update_from_config(config=SimpleNamespace(parallelism=parallelism))
    return config


def _dense_layers() -> list[Any]:
    return _build_llama3_layers(
        n_layers=2,
        dim=WIDTH,
        n_heads=4,
        hidden_dim=44,
        rope=ComplexRoPE.Config(dim=WIDTH // 4, max_seq_len=LENGTH, theta=10000, scaling="none"),
        fuse_qkv=False,
        attn_backend="flex",
    )


def _layers_with_experts() -> list[Any]:
    return _build_qwen3_moe_layers(
        n_layers=2,
        dim=WIDTH,
        n_heads=4,
        n_kv_heads=2,
        head_dim=8,
        moe_hidden_dim=24,
        num_experts=4,
        top_k=2,
        fuse_qkv=False,
        attn_backend="flex",
        moe_comm_backend="standard",
        rope=CosSinRoPE.Config(dim=8, max_seq_len=LENGTH, theta=10000),
    )


def build(*, experts: bool) -> Any:
    """The model in one process, initialized as torchtitan does, the same on every rank."""
    torch.manual_seed(0)
    model = configuration(experts=experts).build()
    model.init_states(buffer_device=torch.device("cpu"))
    return model
