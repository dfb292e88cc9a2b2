"""What a session's ranks talk through."""

from __future__ import annotations

import torch.distributed as dist

#: Sockets and shared memory of the host, from and to which tensors on a GPU are copied.
HOST = "host"
#: The same, and for tensors on GPUs torch.distributed.
NCCL = "nccl"


def backend_for(device: str, world_size: int, gpus: int) -> str:
    """The backend for ``world_size`` ranks on a machine of ``gpus`` GPUs.

    NCCL for CUDA tensors when each rank has a GPU of its own; it refuses a shared one.
    """
    slow = device != "cuda" or why_host(device, world_size, gpus)
    return HOST if slow else NCCL


def why_host(device: str, world_size: int, gpus: int) -> str:
    """Why ranks on GPUs copy what they exchange to the host and back.

    Empty where they use NCCL, and for ranks on CPUs.
    """
    if device != "cuda" or world_size == 1:
        return ""
    if world_size > gpus:
        return (
            f"{world_size} workers share {gpus} GPU{'s' * (gpus != 1)}, and NCCL takes one rank a "
            f"GPU: collectives go through the host's memory, which is much slower. Use at most "
            f"{gpus} worker{'s' * (gpus != 1)} here"
        )
    if not dist.is_nccl_available():
        return "this torch has no NCCL: collectives go through the host's memory"
    return ""
