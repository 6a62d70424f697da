"""For Ray Train V2: connects the ranks of any DataParallelTrainer, whatever framework their loop uses.

    trainer = DataParallelTrainer(loop, backend_config=BaguaConfig(), scaling_config=ScalingConfig(num_workers=4))

TorchTrainer needs no backend_config: hvd.init() uses the torch.distributed group that it creates.
"""
import os
import socket
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.train.backend import Backend, BackendConfig

from bagua_hvd.job import basics
from bagua_hvd.job.probe import interface_names
from bagua_hvd.ray.runner import Coordinator


@contextmanager
def _leaves_at_end():
    """Wraps a rank's training loop: a rank whose loop raises leaves the job, so that the others do not wait for it."""
    try:
        yield
    finally:
        basics.shutdown()


@dataclass
class BaguaConfig(BackendConfig):
    """The backend_config of a trainer.

    Args:
        nics: names of the allowed interfaces; None: the one towards the trainer's controller.
        timeout_s: seconds until all ranks must have called hvd.init().
    """

    nics: Any = None
    timeout_s: int = 300

    @property
    def backend_cls(self) -> type:
        """For Ray Train."""
        return _BaguaBackend

    @property
    def train_func_context(self) -> Any:
        """For Ray Train."""
        return _leaves_at_end

    def to_dict(self) -> dict[str, Any]:
        """For Ray Train's records."""
        return {"nics": sorted(interface_names(self.nics) or ()), "timeout_s": self.timeout_s}


def _place():
    return socket.gethostname(), ray.get_runtime_context().get_node_id()


def _set(variables):
    os.environ.update(variables)


class _BaguaBackend(Backend):
    """Runs in the trainer's controller, which hosts the rendezvous."""

    share_cuda_visible_devices = True       # as Horovod's scripts expect: hvd.local_rank() is the GPU's number
    _coordinator: Coordinator | None = None

    def on_start(self, worker_group: Any, backend_config: BaguaConfig) -> None:
        self._coordinator = Coordinator(backend_config)
        environments = self._coordinator.environments(worker_group.execute(_place))
        ray.get([worker_group.execute_single_async(rank, _set, environment)
                 for rank, environment in enumerate(environments)])

    def on_shutdown(self, worker_group: Any, backend_config: BaguaConfig) -> None:
        if self._coordinator is not None:
            self._coordinator.close()
            self._coordinator = None
