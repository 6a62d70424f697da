"""Elastic training for torch: `@hvd.elastic.run` around a function of a TorchState. The loop is in job/elastic.py.

    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0)

    @hvd.elastic.run
    def train(state): ...       # commit() after every few batches; begins where the state says
"""
import importlib
from collections.abc import Callable
from typing import Any

from bagua_hvd.core import variables
from bagua_hvd.job.elastic import reset, run_fn
from bagua_hvd.torch.elastic.sampler import ElasticSampler
from bagua_hvd.torch.elastic.state import TorchState

__all__ = ["ElasticSampler", "TorchState", "run"]

if variables.read("HOROVOD_ELASTIC"):
    # The first optimizer of a process imports it, for seconds. After init() the other ranks would wait for that.
    importlib.import_module("torch._dynamo")


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: `func` goes on when ranks are lost or the hosts change.

    Before the first call of `func` and after every change, the state is synchronized from rank 0. No collective may be
    called before that: ranks that join later begin there.

    Args:
        func: function whose first argument is the state, such as a TorchState.
    Returns:
        A function with the same arguments and result. Exceptions other than HorovodInternalError and
        HostsUpdatedInterrupt pass through it.
    """
    return run_fn(func, reset)
