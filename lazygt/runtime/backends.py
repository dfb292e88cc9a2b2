"""Which of torch.distributed's backends a session's ranks talk through."""

from __future__ import annotations

import torch.distributed as dist


def backend_for(device: str, world_size: int, gpus: int) -> str:
    """The backend for ``world_size`` ranks on a machine of ``gpus`` GPUs.

    NCCL for CUDA tensors when each rank has a GPU of its own; it refuses a shared one.
    """
    slow = device != "cuda" or why_gloo(device, world_size, gpus)
    return "gloo" if slow else "cpu:gloo,cuda:nccl"


def why_gloo(device: str, world_size: int, gpus: int) -> str:
    """Why ranks on GPUs use Gloo, which copies what they exchange to the host and back.

    Empty where they use NCCL, and for ranks on CPUs.
    """
    if device != "cuda" or world_size == 1:
        return ""
    if world_size > gpus:
        return (
            f"{world_size} workers share {gpus} GPU{'s' * (gpus != 1)}, and NCCL takes one rank a "
            f"GPU: collectives go through Gloo and the host's memory, which is much slower. Use at "
            f"most {gpus} worker{'s' * (gpus != 1)} here"
        )
    if not dist.is_nccl_available():
        return "this torch has no NCCL: collectives go through Gloo and the host's memory"
    return ""
