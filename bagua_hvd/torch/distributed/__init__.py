"""The torch.distributed backend "bagua": importing this module registers it.

    import bagua_hvd.torch.distributed
    torch.distributed.init_process_group("bagua")           # or "cpu:bagua,cuda:nccl"

docs/torch-distributed.md.
"""
from torch.distributed import Backend as _Backend

from bagua_hvd.torch.distributed.group import ProcessGroup, create
from bagua_hvd.torch.distributed.options import Options
from bagua_hvd.torch.distributed.start import process_set_of

__all__ = ["Options", "ProcessGroup", "process_set_of"]

if "BAGUA" not in _Backend._plugins:
    _Backend.register_backend("bagua", create, extended_api=True, devices=["cpu", "cuda"])
