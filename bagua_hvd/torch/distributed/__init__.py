"""The torch.distributed backend "bagua". torch 2.5 and later finds it by itself, older versions need this import.

    torch.distributed.init_process_group("bagua")           # or "cpu:bagua,cuda:nccl"

See docs/torch-distributed.md.
"""
from bagua_hvd import register_with_torch as _register
from bagua_hvd.torch.distributed.group import ProcessGroup, process_set_of
from bagua_hvd.torch.distributed.options import Options

__all__ = ["Options", "ProcessGroup", "process_set_of"]

_register()
