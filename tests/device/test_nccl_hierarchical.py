"""NCCL within hosts, the CPU transports between them (native/gpu/nccl_hierarchical.c).

As in test_nccl.py, no GPU is used; host ids simulate hosts. The fake's number of launched groups identifies the path of
an operation: two per rank for a hierarchical allreduce, one if NCCL connects all ranks, none if staged.
"""
import numpy as np
import pytest

from bagua_hvd.core import native, vectors
from bagua_hvd.job import environment
from device_arrays import FakePlacement, fake_cuda, nccl_steps, open_device, own_device, sums_overwritten_in_flight
from gpu_hosts import FOR_ALLREDUCE, ONLY, REDUCED, groups, on_hosts, placements
from two_levels import environments
from values import make, reduced
from world import result, view

# Equal hosts, round-robin ranks, unequal hosts, a host with a single rank.
LAYOUTS = ["AABB", "ABAB", "AAB", "ABBBC"]
COUNTS = [1, 5, 4099, 0, 300]


@pytest.fixture(params=LAYOUTS, scope="module")
def world(request):
    with on_hosts(request.param) as world:
        yield world


@pytest.mark.parametrize("dtype", REDUCED)
def test_allreduce(world, dtype):
    """One tensor, and several as one vector; in place and not. The sums are exact, so equal to the CPU's."""
    n, at = world.n, placements(world.n)

    def call(rank, context):
        values = [make(dtype, count, rank, n) for count in COUNTS]
        arrays = [at[rank].array(x, dtype) for x in values]
        out = at[rank].empty((COUNTS[2],), dtype)
        context.post(native.ALLREDUCE, f"one.{dtype}", [arrays[2].view(out)], op=native.OP_MAX).wait()
        context.post(native.ALLREDUCE, f"many.{dtype}", [array.view(array) for array in arrays]).wait()
        return values, out.numpy(), [array.numpy() for array in arrays]

    before = groups()
    outcomes = world.run(call)
    assert groups() - before == 4 * n
    inputs = [values for values, *_ in outcomes]
    for _, maxima, sums in outcomes:
        np.testing.assert_array_equal(maxima, reduced(dtype, native.OP_MAX, [values[2] for values in inputs]))
        for i, total in enumerate(sums):
            np.testing.assert_array_equal(total, reduced(dtype, native.OP_SUM, [values[i] for values in inputs]))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16", "int32"])
def test_averages_and_factors(world, dtype):
    """Small integers, whose sums are exact: then factors round as on the CPU, and results are equal."""
    n, at = world.n, placements(world.n)
    factors = {"postscale_factor": 3.0} if dtype == "int32" else {"prescale_factor": 0.5, "postscale_factor": 3.0}

    def call(rank, context):
        values = make(dtype, 1000, rank, n)
        array, host = at[rank].array(values, dtype), values.copy()
        context.post(native.ALLREDUCE, f"gpu.{dtype}", [array.view(array)], op=native.OP_AVERAGE, **factors).wait()
        context.post(native.ALLREDUCE, f"host.{dtype}", [view(host, dtype, "in place")], op=native.OP_AVERAGE,
                     **factors).wait()
        return array.numpy(), host

    before = groups()
    for got, expected in world.run(call):
        np.testing.assert_array_equal(got.view(np.uint8), expected.view(np.uint8))
    assert groups() - before == 2 * n


def test_real_numbers(world):
    """|got - sum| <= n eps sum |x|, the bound of any order of n - 1 additions; all ranks get equal bits."""
    n, at = world.n, placements(world.n)
    inputs = np.random.default_rng(5).standard_normal((n, 50_000)).astype(np.float32)

    def call(rank, context):
        array = at[rank].array(inputs[rank])
        context.post(native.ALLREDUCE, "real", [array.view(array)]).wait()
        return array.numpy()

    outcomes = world.run(call)
    bound = n * np.finfo(np.float32).eps * np.abs(inputs).astype(np.float64).sum(0)
    assert np.all(np.abs(outcomes[0] - inputs.astype(np.float64).sum(0)) <= bound)
    for values in outcomes[1:]:
        np.testing.assert_array_equal(values, outcomes[0])


def test_what_moves_data(world):
    """Broadcast from every rank by NCCL; staged single-level operations; results on the host."""
    n, at = world.n, placements(world.n)

    def call(rank, context):
        results = []
        for root in range(n):
            array = at[rank].array(make("int16", 70_001, rank, n), "int16")
            context.post(native.BROADCAST, f"root.{root}", [array.view(array)], root_rank=root).wait()
            results.append(array.numpy())
        part = at[rank].array(np.full((rank, 2), rank, np.float32))
        gathered = context.post(native.ALLGATHER, "gather", [part.view()])
        sent = at[rank].array(np.arange(n * (n - 1) // 2 * 2, dtype=np.float32).reshape(-1, 2) + 1000 * rank)
        exchanged = context.post(native.ALLTOALL, "exchange", [sent.view()], splits=list(range(n)))
        scattered = at[rank].array(make("float32", 2 * n, rank, n))
        rows = at[rank].empty((2,), "float32")
        context.post(native.REDUCESCATTER, "scatter", [scattered.view(rows)]).wait()
        gathered.wait()
        exchanged.wait()
        assert gathered.device_rows(0) is None and exchanged.device_rows(0) is None
        got = result(gathered, 0, "float32", (2,)), result(exchanged, 0, "float32", (2,))
        copy = np.zeros(40, np.float32)
        array = at[rank].array(np.full(40, 2.0, np.float32))
        context.post(native.ALLREDUCE, "to the host", vectors.views_into([array.view()], copy)).wait()
        return results, got, rows.numpy(), copy

    before = groups()
    outcomes = world.run(call)
    assert groups() - before >= n * n + 2 * n
    expected = np.concatenate([np.full((rank, 2), rank, np.float32) for rank in range(n)])
    sums = sum(make("float32", 2 * n, rank, n) for rank in range(n))
    for rank, (results, got, rows, copy) in enumerate(outcomes):
        for root, values in enumerate(results):
            np.testing.assert_array_equal(values, make("int16", 70_001, root, n))
        np.testing.assert_array_equal(got[0], expected)
        first = rank * (rank - 1) // 2
        np.testing.assert_array_equal(got[1], np.concatenate(
            [1000 * other + np.arange(2 * first, 2 * (first + rank)).reshape(-1, 2) for other in range(n)]))
        np.testing.assert_array_equal(rows, sums[2 * rank:2 * rank + 2])
        np.testing.assert_array_equal(copy, np.full(40, 2.0 * n))


def test_the_frameworks_stream_orders_everything(world):
    at = placements(world.n)

    def call(rank, context):
        return sums_overwritten_in_flight(at[rank], rank, context, 8)

    for copies in world.run(call):
        for step, values in enumerate(copies):
            np.testing.assert_array_equal(values, np.full(5000, sum(rank + step for rank in range(world.n))))


def test_tensors_that_are_not_there_yet_hold_up_nobody():
    """After the agreement, an operation is requested once its tensors are ready; others may overtake it."""
    with on_hosts("AABB") as world:
        at = placements(4)

        def call(rank, context):
            array = at[rank].array(np.full(100, rank + 1.0, np.float32))
            context.post(native.ALLREDUCE, "agree", [array.view(array)]).wait()
            release = fake_cuda().hold(at[rank].current) if rank == 0 else None
            late = context.post(native.ALLREDUCE, "late", [array.view(array)])
            context.post(native.BARRIER, "early").wait()
            was_done = late.done()
            context.post(native.BARRIER, "seen").wait()
            if release:
                release()
            late.wait()
            return was_done, array.numpy()

        for was_done, values in world.run(call):
            assert not was_done
            np.testing.assert_array_equal(values, np.full(100, 40.0))


def test_process_sets_and_joined_ranks():
    with on_hosts("AABB") as world:
        at = placements(4)

        def call(rank, context):
            added = context.post(native.PROCESS_SET_ADD, "add", splits=[0, 1, 3])
            added.wait()
            part, total = (at[rank].array(np.full(8, rank + 1.0, np.float32)) for _ in range(2))
            if rank != 2:
                context.post(native.ALLREDUCE, "part", [part.view(part)], process_set=added.value).wait()
            context.post(native.ALLREDUCE, "all", [total.view(total)]).wait()
            context.post(native.PROCESS_SET_REMOVE, "remove", root_rank=added.value).wait()
            if rank != 3:
                context.post(native.ALLREDUCE, "joined", [total.view(total)]).wait()
            context.post(native.JOIN, "join").wait()
            return part.numpy(), total.numpy()

        before = groups()
        outcomes = world.run(call)
        assert groups() - before == 2 * 3 + 2 * 4 + 2 * 4
    for rank, (part, total) in enumerate(outcomes):
        np.testing.assert_array_equal(part, np.full(8, 3.0 if rank == 2 else 7.0))
        np.testing.assert_array_equal(total, np.full(8, 10.0 if rank == 3 else 30.0))


# ----------------------------------------------------------------------------------------------------------- paths


def groups_of(world, devices):
    """The number of groups that an allreduce, a broadcast, a reducescatter and an alltoall launch, over all ranks."""
    def call(rank, context):
        placement = FakePlacement(devices[rank])
        array = placement.array(np.full(4 * world.n, rank + 1.0, np.float32))
        counts = []
        kinds = {native.ALLREDUCE: array, native.BROADCAST: array,
                 native.REDUCESCATTER: placement.empty((4,), "float32"), native.ALLTOALL: None}
        for kind, output in kinds.items():
            context.post(native.BARRIER, f"before.{kind}").wait()
            before = groups()
            context.post(native.BARRIER, f"begin.{kind}").wait()
            more = {"splits": [4] * world.n} if kind == native.ALLTOALL else {}
            context.post(kind, f"x.{kind}", [array.view(output)], **more).wait()
            context.post(native.BARRIER, f"end.{kind}").wait()
            counts.append(groups() - before)
        np.testing.assert_array_equal(array.numpy(), np.full(4 * world.n, sum(range(1, world.n + 1))))
        return counts

    outcomes = world.run(call)
    assert all(counts == outcomes[0] for counts in outcomes)
    return outcomes[0]


@pytest.mark.parametrize("levels, expected", [(0, [4, 4, 4, 4]), (FOR_ALLREDUCE, [8, 4, 4, 4]), (ONLY, [8, 4, 0, 0])])
def test_what_was_asked_for(levels, expected):
    with on_hosts("AABB", levels) as world:
        assert groups_of(world, [own_device(rank) for rank in range(4)]) == expected


def test_one_host_has_one_level():
    with on_hosts("AA") as world:
        assert groups_of(world, [own_device(rank) for rank in range(2)]) == [2, 2, 2, 2]


@pytest.mark.parametrize("letters, expected", [("AABB", [8, 4, 0, 0]), ("ABAB", [0, 0, 0, 0])])
def test_hosts_with_different_versions(monkeypatch, letters, expected):
    """NCCL within each host if its members have the same version, else staged."""
    devices = [own_device(rank) for rank in range(2)]
    monkeypatch.setenv("BHVD_FAKE_NCCL_VERSION", "22000")
    devices += [open_device(rank) for rank in (2, 3)]
    with on_hosts(letters, 0) as world:
        assert groups_of(world, devices) == expected


def test_a_shared_gpu_on_one_host_is_the_end_of_it_on_all():
    with on_hosts("AABB") as world:
        assert groups_of(world, [own_device(rank) for rank in (0, 1, 2, 2)]) == [0, 0, 0, 0]


@pytest.mark.parametrize("variables, levels", [
    ({}, 0), ({"BAGUA_HVD_NCCL": "local"}, 2), ({"HOROVOD_HIERARCHICAL_ALLREDUCE": "1"}, 1),
    ({"HOROVOD_HIERARCHICAL_ALLREDUCE": "1", "BAGUA_HVD_NCCL": "local"}, 2), ({"BAGUA_HVD_NCCL": "0"}, 0)])
def test_variables(variables, levels):
    assert environment.read_options(variables).nccl_hierarchical == levels


def test_a_wrong_variable():
    with pytest.raises(ValueError, match="BAGUA_HVD_NCCL='far': expected one of 0, 1, local"):
        environment.read_options({"BAGUA_HVD_NCCL": "far"})


# -------------------------------------------------------------------------------------------------------- failures


def _hosts(letters):
    variables = environments(letters, {"BAGUA_HVD_NCCL": "local"})
    for rank, mine in enumerate(variables):
        mine["BHVD_FAKE_CUDA_UUID"] = f"gpu{rank}"
    return variables


def test_processes(run_ranks):
    for rank in run_ranks(4, nccl_steps, arguments={"steps": 5}, env=_hosts("AABB")):
        assert "mean 1.0 10" in rank.output


def test_an_error_of_nccl_on_one_host_ends_the_job_on_all(run_ranks):
    env = _hosts("AABB")
    env[3]["BHVD_FAKE_NCCL_FAIL_AFTER"] = "6"
    for rank in run_ranks(4, nccl_steps, arguments={"steps": 100_000}, env=env):
        assert "failed: rank 3: NCCL 2.21.5 with CUDA 13.0 on GPU 0: it failed" in rank.output


def test_a_rank_that_dies_leaves_no_stream_hanging(run_ranks):
    ranks = run_ranks(4, nccl_steps, arguments={"steps": 100_000, "dying": 1}, env=_hosts("AABB"), check=False)
    for rank in (0, 2, 3):
        assert "failed: rank 1 was lost" in ranks[rank].output
