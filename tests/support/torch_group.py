"""torch.distributed groups among the ranks of a test."""
import os
from datetime import timedelta


def start(file, backend="bagua", seconds=40, **options):
    """Makes the default group of ranks that share only a file, without launcher variables. Returns (rank, size)."""
    import torch.distributed as dist

    import bagua_hvd.torch.distributed  # noqa: F401  (registers the backend)

    rank, size = int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])
    for name in [name for name in os.environ if name.startswith("HOROVOD_") and name != "HOROVOD_START_TIMEOUT"]:
        del os.environ[name]
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(backend, init_method=f"file://{file}", rank=rank, world_size=size,
                            timeout=timedelta(seconds=seconds), **options)
    return rank, size
