"""bagua_hvd on Ray, at Horovod's paths: executors, and what Ray Train needs (bagua_hvd.ray.train). docs/ray.md.

    worker.py      an actor that is a rank
    placement.py   where the actors of a job of fixed size are
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
