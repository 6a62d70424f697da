"""Backends that run an estimator's ranks."""
from collections.abc import Callable, Sequence
from typing import Any

import pyspark

from bagua_hvd.spark.runner import run


class Backend:
    """Subclass it to train by other means than Spark's own tasks."""

    def run(self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: dict[str, Any] = {},  # noqa: B006
            env: dict[str, str] | None = None) -> list[Any]:
        """Calls fn(*args, **kwargs) on every rank with these environment variables; returns the results by rank."""
        raise NotImplementedError

    def num_processes(self) -> int:
        """The number of ranks."""
        raise NotImplementedError


class SparkBackend(Backend):
    """Runs the ranks by bagua_hvd.spark.run().

    Args:
        num_proc: None: spark.default.parallelism. env: environment variables of the ranks. kwargs: of run().
    """

    def __init__(self, num_proc: int | None = None, env: dict[str, str] | None = None, **kwargs: Any) -> None:
        self._num_proc = num_proc
        self._env = env or {}
        self._kwargs = kwargs

    def run(self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: dict[str, Any] = {},  # noqa: B006
            env: dict[str, str] | None = None) -> list[Any]:
        return run(fn, args, kwargs, self.num_processes(), env={**(env or {}), **self._env}, **self._kwargs)

    def num_processes(self) -> int:
        if self._num_proc is None:
            return pyspark.SparkContext.getOrCreate().defaultParallelism
        return self._num_proc
