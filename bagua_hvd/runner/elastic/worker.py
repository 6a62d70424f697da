"""HostUpdateResult, where Horovod has it."""
from bagua_hvd.common.elastic_worker import HostUpdateResult

__all__ = ["HostUpdateResult"]
