"""bagua_hvd on Ray, under Horovod's paths: executors, and support for Ray Train (bagua_hvd.ray.train). docs/ray.md.

    worker.py      an actor that is a rank, the placement of such actors, their results
    runner.py      Coordinator, RayExecutor
    elastic.py     RayHostDiscovery, ElasticRayExecutor
    train.py       BaguaConfig, for Ray Train V2
    utils.py, ray_logger.py     under Horovod's names
"""
try:
    import ray  # noqa: F401
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError("bagua_hvd.ray needs Ray: pip install 'bagua_hvd[ray]'", name="ray") from missing

from bagua_hvd.ray.elastic import ElasticRayExecutor, RayHostDiscovery
from bagua_hvd.ray.runner import Coordinator, RayExecutor
from bagua_hvd.ray.worker import BaseHorovodWorker

__all__ = ["BaseHorovodWorker", "Coordinator", "ElasticRayExecutor", "RayExecutor", "RayHostDiscovery"]
