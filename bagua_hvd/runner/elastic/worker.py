"""HostUpdateResult under Horovod's path."""
from bagua_hvd.job.elastic_worker import HostUpdateResult

__all__ = ["HostUpdateResult"]
