"""Elastic training for torch: `@hvd.elastic.run` around a function of a TorchState. The loop is in job/elastic.py.

    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0)

    @hvd.elastic.run
    def train(state): ...       # commit() after every few batches; begins where the state says
"""
from bagua_hvd.job.elastic import runs
from bagua_hvd.torch.elastic.sampler import ElasticSampler
from bagua_hvd.torch.elastic.state import TorchState

__all__ = ["ElasticSampler", "TorchState", "run"]

run = runs(__name__)
