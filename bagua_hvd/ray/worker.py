"""An actor that is a rank: its process calls the user's functions."""
import os
import socket
from collections.abc import Callable
from typing import Any

import ray

from bagua_hvd.job import basics
from bagua_hvd.job.elastic_worker import RemovedFromJob
from bagua_hvd.job.environment import get_env_rank_and_size
from bagua_hvd.ray import ray_logger

BECAUSE_OF = "bagua_hvd_because_of"


class BaseHorovodWorker:
    """A class for ray.remote() to make an actor of.

    Args:
        world_rank, world_size: for HOROVOD_RANK and HOROVOD_SIZE; an executor sets them once all actors exist.
    Attributes:
        executable: the object created by start_executable(); or None.
    """

    def __init__(self, world_rank: int = 0, world_size: int = 1) -> None:
        self.executable: Any = None
        self.update_env_vars({"HOROVOD_HOSTNAME": self.node_id(), "HOROVOD_RANK": str(world_rank),
                              "HOROVOD_SIZE": str(world_size)})

    def node_id(self) -> str:
        """Ray's id of the node."""
        return ray.get_runtime_context().get_node_id()

    def hostname(self) -> str:
        """The node's host name."""
        return socket.gethostname()

    def get_gpu_ids(self) -> list[str]:
        """The GPUs that Ray gave to this actor."""
        return [str(gpu) for gpu in ray.get_gpu_ids()]

    def update_env_vars(self, env_vars: dict[str, Any]) -> None:
        """Sets environment variables of this process, values as text."""
        os.environ.update({name: str(value) for name, value in env_vars.items()})

    def env_vars(self) -> dict[str, str]:
        """The environment of this process."""
        return dict(os.environ)

    def set_queue(self, queue: Any) -> None:
        """Sets the destination of this process's ray_logger.log(); None discards the messages."""
        ray_logger.configure(queue)

    def start_executable(self, executable_cls: Callable[..., Any] | None = None, executable_args: Any = None,
                         executable_kwargs: Any = None) -> None:
        """Creates the object that execute() passes to its functions; class None: there is no object."""
        if executable_cls:
            self.executable = executable_cls(*(executable_args or []), **(executable_kwargs or {}))

    def execute(self, func: Callable[[Any], Any]) -> Any:
        """Calls func(executable). See run()."""
        return self.run(func, (self.executable,), {})

    def run(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls func(*args, **kwargs). If it raises, this rank leaves the job, so that the others do not wait for it.

        The exception gets an attribute `bagua_hvd_because_of`: the rank whose loss preceded it; None: there is none.
        """
        try:
            return func(*args, **kwargs)
        except BaseException as error:
            lost = basics.context().first_loss().rank if basics.is_initialized() else None
            setattr(error, BECAUSE_OF, lost)
            basics.shutdown()
            raise

    def run_elastic(self, func: Callable[..., Any]) -> tuple[int, Any] | None:
        """Returns (rank, func(executable)); None: this rank has no slot in the elastic job any more. See run()."""
        try:
            result = self.execute(func)
        except RemovedFromJob:
            return None
        rank, _ = get_env_rank_and_size()
        basics.shutdown()           # the process stays for a while, and the others may need a rendezvous without it
        return rank, result
