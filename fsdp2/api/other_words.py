"""A table of what to write instead of arguments of FSDP1, DDP and DeepSpeed, for messages."""

from __future__ import annotations

from typing import Any

_BLOCKS = "call fully_shard on each block and then on the model, or fsdp2.auto_shard(model, blocks=BlockClass)"
_STRATEGIES = (
    "FULL_SHARD is the default, SHARD_GRAD_OP is reshard_after_forward=False, NO_SHARD is strategy='replicate', "
    "HYBRID_SHARD is a mesh of two dims, mesh=init_device_mesh(device, (replicas, shards), "
    "mesh_dim_names=('replicate', 'shard'))"
)
_NOTHING = "leave it out, it is always so"

INSTEAD = {
    "auto_wrap_policy": _BLOCKS,
    "backward_prefetch": "leave it out, the order is learned; see module.set_modules_to_backward_prefetch()",
    "bucket_cap_mb": "leave it out, a call of fully_shard is a bucket",
    "cpu_offload": "offload_policy=CPUOffloadPolicy()",
    "device_id": "torch.cuda.set_device(local_rank) before; the mesh says which kind of device",
    "device_ids": "torch.cuda.set_device(local_rank) before; the mesh says which kind of device",
    "device_mesh": "mesh=",
    "find_unused_parameters": _NOTHING,
    "forward_prefetch": "leave it out, the order is learned; see module.set_modules_to_forward_prefetch()",
    "gradient_as_bucket_view": _NOTHING,
    "ignored_modules": "ignored_params={p for module in ignored for p in module.parameters()}",
    "ignored_parameters": "ignored_params=",
    "ignored_states": "ignored_params=",
    "limit_all_gathers": _NOTHING,
    "mixed_precision": "mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)",
    "param_init_fn": (
        "build the model under torch.device('meta'), call fully_shard, then model.to_empty(device=...) and initialize"
    ),
    "process_group": "mesh=DeviceMesh.from_group(process_group, device_type)",
    "sharding_strategy": _STRATEGIES,
    "static_graph": _NOTHING,
    "sync_module_states": (
        "fsdp2.broadcast_parameters(module) before fully_shard; or, of a state dict, torch.distributed.checkpoint."
        "state_dict.set_model_state_dict(model, state_dict, options=StateDictOptions(full_state_dict=True, "
        "broadcast_from_rank0=True)) after it"
    ),
    "use_orig_params": _NOTHING,
    "zero_stage": "strategy='zero1', 'zero2' or 'zero3'",
}
"""For each keyword of another system, what to write here."""


def instead_of(word: str) -> str:
    """A message that says what to write for the keyword ``word`` of another system, with the whole table; else ""."""
    if word not in INSTEAD:
        return ""
    table = "".join(f"\n  {each}: {instead}" for each, instead in INSTEAD.items())
    return f"For '{word}=' write: {INSTEAD[word]}. The words of FSDP1 and DDP, and what to write for them:{table}"


def explain_mixed_precision(policy: Any) -> str:
    """A message that says what to write for ``policy``, if it is FSDP1's ``MixedPrecision`` or None; else ""."""
    if policy is None:
        return "For no mixed precision, leave the argument out or pass MixedPrecisionPolicy()."
    if "MixedPrecision" not in {kind.__name__ for kind in type(policy).__mro__}:
        return ""
    names = ("param_dtype", "reduce_dtype", "buffer_dtype", "cast_forward_inputs")
    given = [(name, getattr(policy, name)) for name in names if getattr(policy, name, None) is not None]
    written = ", ".join(f"{name}={value}" for name, value in given)
    return f"That is FSDP1's MixedPrecision: write fsdp2.MixedPrecisionPolicy({written})."


def explain_offload(policy: Any) -> str:
    """A message that says what to write for ``policy``, if it is FSDP1's ``CPUOffload``; else ""."""
    if "CPUOffload" not in {kind.__name__ for kind in type(policy).__mro__}:
        return ""
    ours = "CPUOffloadPolicy" if getattr(policy, "offload_params", False) else "OffloadPolicy"
    return f"That is FSDP1's CPUOffload: write fsdp2.{ours}()."
