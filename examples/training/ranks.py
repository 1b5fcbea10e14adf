"""The end of a program with one process per rank."""

import os
import sys

import torch.distributed as dist


def leave() -> None:
    """Wait for all ranks and leave the process group. With Gloo the process ends here, with status 0."""
    # Not `get_backend`, which does not know the backend of a group that `init_device_mesh` has made.
    gloo = "nccl" not in str(dist.get_backend_config())
    dist.barrier()  # a rank that ends while another still sends to it ends the other too
    if gloo:
        end_process()
    dist.destroy_process_group()


def end_process() -> None:
    """Exit without Python's finalization, with status 0.

    A thread of Gloo frees the tensors of a collective after its end, and a thread that takes the GIL during
    finalization aborts the process. These threads outlive destroy_process_group, because torch's caches keep the group.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
