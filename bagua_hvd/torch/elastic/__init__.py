"""Elastic training for torch: `@hvd.elastic.run` around a function of a TorchState. The loop is in job/elastic.py.

    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0)

    @hvd.elastic.run
    def train(state): ...       # commit() after every few batches; starts where the state says
"""
import importlib

from bagua_hvd.core import variables
from bagua_hvd.job.elastic import runs
from bagua_hvd.torch.elastic.sampler import ElasticSampler
from bagua_hvd.torch.elastic.state import TorchState

__all__ = ["ElasticSampler", "TorchState", "run"]

if variables.read("HOROVOD_ELASTIC"):
    # The first optimizer of a process imports it, which takes seconds. After init() the other ranks would wait.
    importlib.import_module("torch._dynamo")

run = runs(__name__)
