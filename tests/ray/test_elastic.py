"""Elastic jobs on a Ray of several nodes: a rank dies, and the others continue from the last commit."""
import threading

import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'ray[train]'")

from ray.cluster_utils import Cluster  # noqa: E402

from bagua_hvd.ray import ElasticRayExecutor, RayExecutor, RayHostDiscovery, elastic  # noqa: E402
from bagua_hvd.ray.worker import Messages  # noqa: E402

pytestmark = pytest.mark.timeout(300)
BATCHES = 30


@pytest.fixture
def nodes(patiently):
    """A Ray of two nodes with one CPU each; add_node() adds one."""
    cluster = patiently(lambda: Cluster(initialize_head=True, head_node_args={
        "num_cpus": 1, "object_store_memory": 100_000_000, "include_dashboard": False}))
    patiently(lambda: cluster.add_node(num_cpus=1, object_store_memory=100_000_000))
    ray.init(address=cluster.address, log_to_driver=False)
    cluster.wait_for_nodes()
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def node_with_gpus(patiently, monkeypatch):
    """A Ray of one node that claims to have the GPUs 4 and 5 of its host."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    cluster = patiently(lambda: Cluster(initialize_head=True, head_node_args={
        "num_cpus": 2, "num_gpus": 2, "object_store_memory": 100_000_000, "include_dashboard": False}))
    ray.init(address=cluster.address, log_to_driver=False)
    yield
    ray.shutdown()
    cluster.shutdown()


def train(batches, dies=None):
    """A rank's function that sums ones over the ranks; returns (rank, size at the end, batches, sums of the sizes)."""
    def main():
        import os
        import time

        import torch

        import bagua_hvd.torch as hvd
        from bagua_hvd.ray import ray_logger

        hvd.init()
        state = hvd.elastic.TorchState(batch=0, sizes=[])

        @hvd.elastic.run
        def loop(state):
            while state.batch < batches:
                size = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
                if dies is not None and hvd.rank() == 1 and hvd.size() == 2 and state.batch == dies:
                    os._exit(9)
                state.sizes = [*state.sizes, size]
                state.batch += 1
                ray_logger.log({"batch": state.batch, "size": size})
                time.sleep(0.05)
                state.commit()

        loop(state)
        return hvd.rank(), hvd.size(), state.batch, state.sizes

    return main


def test_discovery(nodes):
    assert list(RayHostDiscovery().find_available_hosts_and_slots().values()) == [1, 1]
    assert RayHostDiscovery(cpus_per_slot=2).find_available_hosts_and_slots() == {}
    assert RayHostDiscovery(use_gpu=True).find_available_hosts_and_slots() == {}
    with pytest.raises(ValueError, match="a slot must need CPUs or GPUs"):
        RayHostDiscovery(cpus_per_slot=0)


def test_a_rank_that_dies_is_survived(nodes):
    settings = ElasticRayExecutor.create_settings(min_num_proc=1, num_proc=2)
    executor = ElasticRayExecutor(settings, env_vars={"OF_THE_USER": "x"})
    executor.start()
    got = []
    results = executor.run(train(BATCHES, dies=10), callbacks=[got.append])
    [(rank, size, batches, sizes)] = results
    assert (rank, size, batches) == (0, 1, BATCHES) and len(sizes) == BATCHES
    # Rank 0 may or may not have the sum of the batch in which the other one died.
    both = sizes.count(2.0)
    assert both in (10, 11) and sizes == [2.0] * both + [1.0] * (BATCHES - both)
    assert {message["size"] for message in got} == {1.0, 2.0}
    executor.shutdown()


def test_a_node_that_comes_is_used(nodes):
    executor = RayExecutor(RayExecutor.create_settings(timeout_s=60), num_workers=2, min_workers=2, max_workers=3)
    executor.start()
    added = []

    def grow(message):
        if message["batch"] == 3 and not added:
            added.append(nodes.add_node(num_cpus=1, object_store_memory=100_000_000))

    results = executor.run(train(400), callbacks=[grow])
    assert [result[:3] for result in results] == [(rank, 3, 400) for rank in range(3)]
    assert results[0][3][0] == 2.0 and results[0][3][-1] == 3.0
    with pytest.raises(NotImplementedError, match="come and go"):
        executor.execute_single(lambda _: None)


def test_the_queue_of_the_messages_is_on_the_drivers_node(nodes):
    """On another node it would be lost with that node, and the job with it."""
    for _ in range(6):
        with Messages([print]) as messages:
            assert messages.queue.empty()
            actor = ray._private.state.actors(messages.queue.actor._actor_id.hex())
            assert actor["Address"]["NodeID"] == ray.get_runtime_context().get_node_id()


def test_no_rank_is_made_after_the_end(nodes, monkeypatch):
    """Ctrl-C comes right before the first rank is created."""
    asked, ended = threading.Event(), threading.Event()

    def living(original=elastic._nodes):
        if threading.current_thread().name == "elastic worker":
            asked.set()
            ended.wait()
        return original()

    def interrupted(messages):
        if asked.is_set():
            raise KeyboardInterrupt

    monkeypatch.setattr(elastic, "_nodes", living)
    monkeypatch.setattr(Messages, "deliver", interrupted)
    executor = ElasticRayExecutor(ElasticRayExecutor.create_settings(min_num_proc=1, max_num_proc=1))
    executor.start()
    with pytest.raises(KeyboardInterrupt):
        executor.run(lambda: None)
    ended.set()
    for thread in threading.enumerate():
        if thread.name == "elastic worker":
            thread.join()
    assert not ray._private.state.actors()


def test_what_all_ranks_raise_ends_the_job(nodes):
    def main(executable):
        import bagua_hvd.torch as hvd

        hvd.init()
        raise KeyError(f"at the beginning of {executable}")

    executor = RayExecutor(RayExecutor.create_settings(), num_workers=2, min_workers=2)
    executor.start(str, ["it"])
    with pytest.raises(RuntimeError) as raised:
        executor.execute(main)
    assert "at the beginning of it" in str(raised.value) + str(raised.value.__cause__)


def test_a_rank_sees_all_gpus_of_its_node(node_with_gpus):
    def main():
        import os

        import bagua_hvd.torch as hvd

        hvd.init()
        see = hvd.elastic.run(lambda state: hvd.allgather_object(os.environ["CUDA_VISIBLE_DEVICES"]))
        return see(hvd.elastic.TorchState(batch=0))

    executor = ElasticRayExecutor(ElasticRayExecutor.create_settings(num_proc=2, min_num_proc=2), use_gpu=True,
                                  cpus_per_slot=0)
    executor.start()
    assert executor.run(main) == [["4,5", "4,5"]] * 2
