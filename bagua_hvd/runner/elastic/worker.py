"""HostUpdateResult, where Horovod has it."""
from bagua_hvd.job.elastic_worker import HostUpdateResult

__all__ = ["HostUpdateResult"]
