import pytest


@pytest.fixture(scope="module")
def local_ray():
    """A Ray of one node with four CPUs."""
    import ray

    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100_000_000, log_to_driver=False)
    yield
    ray.shutdown()
