"""RayExecutor on a Ray of one node: the ranks' results are returned, and failed ranks do not block the others."""
import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'ray[train]'")

from ray.util.placement_group import placement_group, remove_placement_group  # noqa: E402
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # noqa: E402

from bagua_hvd.ray import Coordinator, ElasticRayExecutor, RayExecutor  # noqa: E402
from bagua_hvd.ray.worker import _cause  # noqa: E402

pytestmark = [pytest.mark.usefixtures("local_ray"), pytest.mark.timeout(600)]
START_SECONDS = 300         # two ranks that import torch, on a busy machine


@pytest.fixture
def executor(request):
    settings = RayExecutor.create_settings(timeout_s=START_SECONDS)
    made = RayExecutor(settings, **getattr(request, "param", {"num_workers": 2}))
    yield made
    made.shutdown()


def place_and_sum(factor):
    def main(own):
        import numpy as np
        import torch

        import bagua_hvd.torch as hvd

        hvd.init()
        total = hvd.allreduce(torch.tensor(np.full(3, hvd.rank() + 1.0) * own), op=hvd.Sum).tolist()
        return hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_size(), total

    return main, [factor]


@pytest.mark.parametrize("executor", [{"num_workers": 3}, {"num_hosts": 1, "num_workers_per_host": 3}], indirect=True)
def test_run(executor):
    executor.start()
    assert executor.run(*place_and_sum(2)) == [(rank, 3, rank, 3, 1, [12.0] * 3) for rank in range(3)]
    # The ranks are still connected, and run_remote() is run() without the wait.
    assert [result[-1] for result in ray.get(executor.run_remote(*place_and_sum(1)))] == [[6.0] * 3] * 3


def test_execute(executor):
    class Counter:
        def __init__(self, start, step=1):
            self.value, self.step = start, step

        def next(self):
            self.value += self.step
            return self.value

    executor.start(Counter, [10], {"step": 5}, {"OF_THE_USER": "x"})
    assert executor.execute(lambda counter: counter.next()) == [15, 15]
    assert executor.execute_single(lambda counter: counter.next()) == 20
    assert executor.execute(lambda counter: counter.next()) == [25, 20]
    variables = executor.execute(lambda _: __import__("os").environ.copy())
    assert [own["OF_THE_USER"] for own in variables] == ["x", "x"]
    assert [own["HOROVOD_LOCAL_RANK"] for own in variables] == ["0", "1"]


def test_messages_of_the_ranks_reach_the_callbacks(executor):
    def main():
        import bagua_hvd.torch as hvd
        from bagua_hvd.ray import ray_logger

        hvd.init()
        for step in range(3):
            ray_logger.log({"rank": hvd.rank(), "step": step})

    executor.start()
    got = []
    executor.run(main, callbacks=[got.append])
    assert sorted((message["rank"], message["step"]) for message in got) == [(r, s) for r in (0, 1) for s in range(3)]


def test_messages_after_the_run_with_callbacks_are_lost(executor):
    def main(executable=None):
        from bagua_hvd.ray import ray_logger

        ray_logger.log({"step": 0})
        return True

    executor.start()
    got = []
    assert executor.run(main, callbacks=[got.append]) == [True] * 2
    assert ray.get(executor.run_remote(main)) == [True] * 2 and executor.execute_single(main)
    assert got == [{"step": 0}] * 2


def test_a_rank_that_raises_does_not_hold_up_the_others(executor):
    def main():
        import torch

        import bagua_hvd.torch as hvd

        hvd.init()
        if hvd.rank() == 1:
            raise KeyError("of rank 1")
        try:
            hvd.allreduce(torch.ones(2))
        except hvd.HorovodInternalError:
            return "went on"

    executor.start()
    references = executor.run_remote(main)
    with pytest.raises(KeyError, match="of rank 1"):
        ray.get(references[1])
    assert ray.get(references[0], timeout=START_SECONDS) == "went on"
    with pytest.raises(KeyError, match="of rank 1"):
        executor.start()
        executor.run(main)


@pytest.mark.parametrize("call", ["run", "execute"])
def test_the_error_is_that_of_the_rank_that_failed_first(executor, monkeypatch, call):
    """The other rank's error, a consequence, is reported earlier; and no rank keeps waiting."""
    monkeypatch.setenv("BAGUA_HVD_GRACE_SECONDS", str(START_SECONDS))

    def main(executable=None):
        import time

        import torch

        import bagua_hvd.torch as hvd

        hvd.init()
        if hvd.rank() == 1:
            hvd.barrier()
            hvd.shutdown()          # the others notice before the driver does
            time.sleep(2)
            raise KeyError("of rank 1")
        hvd.barrier()
        hvd.allreduce(torch.ones(2))

    executor.start()
    with pytest.raises(KeyError, match="of rank 1"):
        getattr(executor, call)(main)


def test_a_rank_whose_execute_raises_does_not_hold_up_the_others(executor):
    def main(executable):
        import torch

        import bagua_hvd.torch as hvd

        hvd.init()
        if hvd.rank() == 1:
            raise ValueError("rank one is ill")
        hvd.allreduce(torch.ones(1))

    executor.start()
    with pytest.raises(ValueError, match="rank one is ill"):
        executor.execute(main)
    assert ray.get(executor.run_remote(lambda: 1), timeout=START_SECONDS) == [1, 1]
    with pytest.raises(ZeroDivisionError):
        executor.execute_single(lambda executable: 1 / 0)


@pytest.mark.parametrize("because_of, cause", [
    ({0: None}, (0, True)), ({0: 1}, (0, False)), ({0: 1, 1: None}, (1, True)), ({0: 1, 1: 2}, (1, False)),
    ({2: 0, 0: 1, 1: 0}, (2, True)),        # each blames the other: the first
])
def test_cause(because_of, cause):
    class Error(Exception):
        def __init__(self, rank):
            self.cause = Exception()
            self.cause.bagua_hvd_because_of = rank

    assert _cause({rank: Error(before) for rank, before in because_of.items()}) == cause


def test_a_rank_that_dies_is_an_error_that_names_it(executor, monkeypatch):
    monkeypatch.setenv("BAGUA_HVD_GRACE_SECONDS", str(START_SECONDS))

    def main():
        import os
        import signal
        import time

        import bagua_hvd.torch as hvd

        hvd.init()
        hvd.barrier()
        if hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(600)
        hvd.barrier()

    executor.start()
    with pytest.raises(ray.exceptions.RayActorError, match="^rank 1 died. The actor died unexpectedly"):
        executor.run(main)
    with pytest.raises(ray.exceptions.RayActorError, match="^rank 1 died. The actor died"):
        executor.run(main)


def test_start_again_after_shutdown_and_nothing_is_left(executor):
    for _ in range(2):
        executor.start()
        assert [result[-1] for result in executor.run(*place_and_sum(1))] == [[3.0] * 3] * 2
        executor.shutdown()
    with pytest.raises(RuntimeError, match=r"call start\(\) first"):
        executor.run(lambda: None)


def test_no_room():
    settings = RayExecutor.create_settings(placement_group_timeout_s=1)
    with pytest.raises(TimeoutError, match="no room for 9 workers"):
        RayExecutor(settings, num_workers=9).start()


def test_no_room_in_the_callers_placement_group():
    @ray.remote(num_cpus=1)
    def start():
        settings = RayExecutor.create_settings(placement_group_timeout_s=1)
        with pytest.raises(TimeoutError, match="the current placement group has had no room for 2 workers"):
            RayExecutor(settings, num_workers=2).start()
        return True

    group = placement_group([{"CPU": 1}])
    try:
        inside = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)
        assert ray.get(start.options(scheduling_strategy=inside).remote(), timeout=START_SECONDS)
    finally:
        remove_placement_group(group)


@pytest.mark.parametrize("arguments, words", [
    ({}, "either num_workers, or num_hosts"),
    ({"num_workers": 2, "num_hosts": 1}, "either num_workers, or num_hosts"),
    ({"num_workers": 0}, "1 or more"),
    ({"num_workers": 2, "gpus_per_worker": 1}, "use_gpu is False"),
    ({"num_workers": 2, "use_gpu": True, "gpus_per_worker": 0.5}, "1 or more"),
    ({"num_workers": 2, "reset_limit": 3}, "give min_workers"),
    ({"num_hosts": 2, "min_workers": 1}, "jobs of fixed size"),
])
def test_numbers_that_exclude_each_other(arguments, words):
    with pytest.raises(ValueError, match=words):
        RayExecutor(RayExecutor.create_settings(), **arguments)


def test_settings_may_be_left_to_the_defaults():
    RayExecutor(None, num_workers=2).shutdown()
    RayExecutor(None, min_workers=2).shutdown()
    ElasticRayExecutor(None).shutdown()


def test_coordinator_of_interleaved_ranks():
    coordinator = Coordinator(RayExecutor.create_settings(nics="lo, eth0"))
    for rank, host in enumerate("abba"):
        coordinator.register(f"host-{host}", f"node-{host}", rank)
    places = coordinator.finalize_registration()
    assert coordinator.hostnames == {"host-a", "host-b"} and coordinator.world_size == 4
    assert [(place["HOROVOD_LOCAL_RANK"], place["HOROVOD_CROSS_RANK"]) for _, place in sorted(places.items())] == [
        ("0", "0"), ("0", "1"), ("1", "1"), ("1", "0")]
    assert {(place["HOROVOD_LOCAL_SIZE"], place["HOROVOD_CROSS_SIZE"]) for place in places.values()} == {("2", "2")}
    variables = coordinator.establish_rendezvous()
    assert variables["HOROVOD_GLOO_IFACE"] == "eth0,lo"
    assert int(variables["HOROVOD_GLOO_RENDEZVOUS_PORT"]) == coordinator.rendezvous.port
    coordinator.close()
