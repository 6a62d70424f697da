import pytest

TRIES = 5


@pytest.fixture(scope="module", autouse=True)
def environment_of_ray():
    """Environment variables for the processes of a Ray that a test starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        # Default 15: beside tests of the same session that use all cores, workers get a thirtieth of them.
        patch.setenv("RAY_worker_niceness", "0")
        # Defaults 60 and 30 s for all workers' imports and for Ray's first process: too short on a busy machine.
        patch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "300")
        patch.setenv("RAY_gcs_server_port_wait_time_s", "120")
        yield


@pytest.fixture(scope="session")
def patiently():
    """Returns a function that starts a node, and retries when Ray gives up (after 30 s, which cannot be set)."""
    def start(node):
        for tries_left in reversed(range(TRIES)):
            try:
                return node()
            except Exception as failure:
                if "timed out during startup" not in str(failure) or not tries_left:
                    raise

    return start


@pytest.fixture(scope="module")
def local_ray(patiently):
    """The address of a Ray with one node and four CPUs; this process is connected to it."""
    import ray

    made = patiently(lambda: ray.init(
        num_cpus=4, include_dashboard=False, object_store_memory=100_000_000, log_to_driver=False))
    yield made.address_info["address"]
    ray.shutdown()
