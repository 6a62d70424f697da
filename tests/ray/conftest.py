import pytest


@pytest.fixture(scope="module", autouse=True)
def environment_of_ray():
    """What the processes of a Ray that a test starts have from here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        # By default 15: beside tests of the same session that keep all cores busy, workers get a thirtieth of them.
        patch.setenv("RAY_worker_niceness", "0")
        yield


@pytest.fixture(scope="module")
def local_ray():
    """The address of a Ray of one node with four CPUs, to which this process is connected."""
    import ray

    made = ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100_000_000, log_to_driver=False)
    yield made.address_info["address"]
    ray.shutdown()
