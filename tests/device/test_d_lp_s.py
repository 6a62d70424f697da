"""D_LP_S of tensors on a device whose kernels encode, with replicas in device memory.

No GPU is used: the driver is a fake (fake_cuda.c), the kernels are compiled for the CPU. Expected: the same operation
in host memory, replicas bit for bit.
"""
import os
import signal

import numpy as np
import pytest

from bagua_hvd.core import native
from bagua_hvd.core.exceptions import HorovodInternalError
from bagua_hvd.primitives import Replicas
from device_arrays import (
    FakePlacement,
    fake_cuda,
    fake_device_with_kernels,
    fake_devices_with_kernels_but_one,
    own_device,
)
from device_codes import CODED, SHAPES, WORLDS, assert_equal, values
from low_precision import CODECS
from world import World, view

STEPS = 3
FLOAT32 = next(codec for codec in CODECS if codec.name == "float32")


@pytest.fixture
def world(n, transport):
    with World(n, transport) as world:
        yield world


def post(context, name, views, codec, replicas, step=0, **arguments):
    count = sum(int(np.prod(each.shape)) for each in views)
    context.post(native.D_LP_S, name, views, owner=replicas, **replicas.fields(count), **codec.fields(seed=7 + step),
                 **arguments).wait()


def kept(replicas):
    return [array for array in (replicas.own, replicas.left, replicas.right) if array is not None]


def replicas_of(rank, count, n, missing=()):
    """Replicas that are equal on all ranks that hold them."""
    starts = [np.random.default_rng([i % n, count]).standard_normal(count).astype(np.float32)
              for i in (rank, rank - 1, rank + 1)]
    return Replicas(*(None if i in missing else start for i, start in enumerate(starts)))


class Both:
    """The same steps in host memory and on the device, each with its own replicas."""

    def __init__(self, rank, context, device, dtype, shapes, missing=(), **arguments):
        self.rank, self.context, self.dtype, self.shapes = rank, context, dtype, shapes
        self.placement, self.arguments = FakePlacement(device), arguments
        self.n, self.count = context.process_set_size(0), sum(int(np.prod(shape)) for shape in shapes)
        self.on_host, self.on_device = (replicas_of(rank, self.count, self.n, missing) for _ in range(2))

    def step(self, codec, step=0, on_host=False):
        """on_host: in this step, all values are on the host."""
        host = values(self.dtype, self.shapes, self.rank, self.n, step)
        views = [view(x, self.dtype, "in place") for x in host]
        arrays = [] if on_host else [self.placement.array(x.copy(), self.dtype) for x in host]
        name = f"{codec}.{self.dtype}.{self.shapes}.{self.arguments}"
        post(self.context, f"host.{name}", views, codec, self.on_host, step, **self.arguments)
        post(self.context, f"gpu.{name}", [array.view(array) for array in arrays] or views, codec, self.on_device, step,
             **self.arguments)
        for array, x in zip(arrays, host, strict=not on_host):
            np.testing.assert_array_equal(array.numpy().view(np.uint8), x.view(np.uint8))   # updated, or only read

    def results(self):
        return list(zip(kept(self.on_device), kept(self.on_host), strict=True))


CASES = [("float32", SHAPES), ("float32", [(1027,)]), ("float16", [(1027,)]), ("bfloat16", SHAPES),
         ("float64", [(515,)])]


@WORLDS
@pytest.mark.parametrize("codec", CODED, ids=lambda codec: f"{codec.name}{codec.parameter or ''}")
def test_every_codec(world, codec):
    """Several tensors and one, every dtype; after the first step the replicas are in device memory only."""
    device = fake_device_with_kernels()
    before = fake_cuda().launches()

    def call(rank, context):
        results = []
        for dtype, shapes in CASES:
            both = Both(rank, context, device, dtype, shapes)
            for step in range(STEPS):
                both.step(codec, step)
            results += both.results()
        return results

    assert_equal(world.run(call))
    assert fake_cuda().launches() - before >= 4 * STEPS * len(CASES) * world.n


@pytest.mark.parametrize("n, transport", [(3, "shm")])
def test_segments_and_replicas_that_are_not_kept(world):
    device = fake_device_with_kernels()

    def call(rank, context):
        results = []
        for codec, count, missing in ((CODED[3], 2 * (1 << 18) + 1, ()), (CODED[0], 40, (1,)), (CODED[1], 40, (0, 2))):
            both = Both(rank, context, device, "float32", [(count,)], missing)
            both.step(codec)
            results += both.results()
        return results

    assert_equal(world.run(call))


@pytest.mark.parametrize("n, transport", [(3, "shm")])
def test_each_rank_encodes_where_it_can(world):
    """The last rank's device has no kernels, yet all ranks send the same bytes."""
    devices = fake_devices_with_kernels_but_one(world.n)

    def call(rank, context):
        results = []
        for codec in CODED[::2]:
            both = Both(rank, context, devices[rank], "float32", SHAPES)
            for step in range(STEPS):
                both.step(codec, step)
            results += both.results()
        return results

    assert_equal(world.run(call))


@pytest.mark.parametrize("n, transport", [(2, "shm")])
def test_replicas_move_between_the_device_and_the_host(world):
    """Begins with a codec without kernels; then alternates device and host steps, with reads in between."""
    device = fake_device_with_kernels()

    def call(rank, context):
        both, results = Both(rank, context, device, "float32", [(50,)]), []
        for step, codec in enumerate([FLOAT32, CODED[0], CODED[1], CODED[0], FLOAT32, CODED[4]]):
            both.step(codec, step, on_host=step == 3)
            if step == 1:
                results += [(got.copy(), expected.copy()) for got, expected in both.results()]
        return results + both.results()

    assert_equal(world.run(call))


MIXED = {"before": (-5 / 3, 1 / 3, 1 / 3), "after": (0.5, 1, 0, 0.25)}


@pytest.mark.parametrize("n, transport", [(1, "inproc"), (3, "shm")])
@pytest.mark.parametrize("by_nccl", [False, True])
def test_values_mixed_with_replicas(world, by_nccl):
    """Encoded mixtures; results in several tensors and in one; results of a single replica."""
    devices = [own_device(rank) if by_nccl else fake_device_with_kernels() for rank in range(world.n)]

    def call(rank, context):
        results = []
        for (dtype, shapes), mixed in [*((case, MIXED) for case in CASES),
                                       (CASES[0], MIXED | {"after": (0, 1, 0, 0)}), (CASES[1], {"before": (-1, 0, 0)})]:
            both = Both(rank, context, devices[rank], dtype, shapes, **mixed)
            for step in range(STEPS):
                both.step(CODED[0], step)
            results += both.results()
        return results

    assert_equal(world.run(call))


def test_only_codes_cross_the_link():
    """Between the first step, which copies the replicas to the device, and their next reading."""
    with World(1, "inproc") as world:
        both = Both(0, world.contexts[0], fake_device_with_kernels(), "float32", [(100_000,)])
        both.step(CODED[0])
        cuda, (x,) = fake_cuda(), values("float32", [(100_000,)], 0, 1)
        array = both.placement.array(x)
        cuda.synchronize(both.placement.current)
        before = cuda.link_bytes()
        post(both.context, "counted", [array.view(array)], CODED[0], both.on_device, **MIXED)
        assert cuda.link_bytes() - before < 1.01 * CODED[0].size("float32", x.size)


def test_in_two_levels_the_host_encodes():
    """Also on a single host, where the value is the mean of its ranks'."""
    for hosts in (["a", "a", "b", "b"], ["a", "a"]):
        with World(len(hosts), "auto", hosts=hosts) as world:
            device = fake_device_with_kernels()
            before = fake_cuda().launches()

            def call(rank, context, device=device):
                both = Both(0, context, device, "float32", [(500,)], hierarchical=1)
                both.rank = rank
                both.step(CODED[0])
                return both.results()

            assert_equal(world.run(call))
            assert fake_cuda().launches() == before


@pytest.mark.parametrize("n, transport", [(2, "shm")])
def test_a_checkpoint_holds_the_replicas(world):
    """Saved after two steps and loaded into new memory; from then on both continue identically."""
    device, codec = fake_device_with_kernels(), CODED[1]

    def call(rank, context):
        both = Both(rank, context, device, "float32", [(300,)])
        for step in range(4):
            if step == 2:
                fresh = Replicas(*np.zeros((3, 300), np.float32))
                assert fresh.load_state_dict(both.on_device.state_dict())
                both.on_device = fresh
            both.step(codec, step)
        return both.results()

    assert_equal(world.run(call))


@pytest.mark.parametrize("n, transport", [(2, "shm")])
def test_what_fails_changes_no_replicas(world):
    device = fake_device_with_kernels()

    def call(rank, context):
        both = Both(rank, context, device, "float32", [(40,)])
        both.step(CODED[1])
        before = [array.copy() for array in kept(both.on_device)]
        both.step(CODED[1], 1)
        (x,) = values("float32", [(40,)], rank, 2)
        array = both.placement.array(x)
        with pytest.raises(HorovodInternalError, match="Mismatched"):
            post(context, "bad", [array.view(array)], CODED[1] if rank else CODED[0], both.on_device)
        assert all((now != then).any() for now, then in zip(kept(both.on_device), before, strict=True))
        return both.results()

    assert_equal(world.run(call))


# ------------------------------------------------------------------------------------------------------------ by NCCL


@pytest.mark.parametrize("n, transport", [(1, "inproc"), (2, "shm"), (3, "tcp")])
@pytest.mark.parametrize("codec", [CODED[0], CODED[2], CODED[4], CODED[-3]], ids=lambda codec: codec.name)
def test_every_codec_by_nccl(world, codec):
    """The first operation is staged before the ranks agree on NCCL; a later one is staged too."""
    devices = [own_device(rank) for rank in range(world.n)]
    before = fake_cuda().nccl_groups()

    def call(rank, context):
        results = []
        for dtype, shapes in CASES[:4]:
            both = Both(rank, context, devices[rank], dtype, shapes)
            for step in range(STEPS):
                both.step(codec, step)
            if dtype == "float32":
                both.step(FLOAT32, STEPS)
                both.step(codec, STEPS + 1)
            results += both.results()
        return results

    assert_equal(world.run(call))
    groups = (STEPS * 4 + 2) * world.n if world.n > 1 else 0
    assert fake_cuda().nccl_groups() - before >= groups


# ----------------------------------------------------------------------------------------------- processes, failures


def _job(dying=None):
    """The program of a rank with its own GPU: steps until one fails; in the third rank `dying` is killed."""
    import bagua_hvd.torch as hvd

    hvd.init()
    rank, context = hvd.rank(), hvd.mpi_ops.basics.context()
    placement, replicas = FakePlacement(own_device(0)), replicas_of(rank, 3000, hvd.size())
    array = placement.array(np.full(3000, rank, np.float32))
    try:
        for step in range(100_000):
            if step == 2 and rank == dying:
                os.kill(os.getpid(), signal.SIGKILL)
            post(context, "x", [array.view(array)], CODED[1], replicas, step)
    except HorovodInternalError as failure:
        placement.cuda.synchronize(placement.current)       # no stream hangs afterwards
        print("failed:", failure)
    assert all(np.isfinite(replica).all() for replica in kept(replicas))
    print(f"{step} steps, {fake_cuda().nccl_groups()} groups")


def _own_gpus(n):
    return [{"BHVD_FAKE_CUDA_UUID": f"gpu{rank}"} for rank in range(n)]


def test_an_error_of_nccl_ends_the_job_on_all_ranks(run_ranks):
    env = _own_gpus(3)
    env[1]["BHVD_FAKE_NCCL_FAIL_AFTER"] = "5"
    for rank in run_ranks(3, _job, env=env):
        assert "failed: rank 1: NCCL 2.21.5 with CUDA 13.0 on GPU 0: it failed" in rank.output


def test_a_rank_that_dies_leaves_no_stream_hanging(run_ranks):
    ranks = run_ranks(3, _job, arguments={"dying": 1}, env=_own_gpus(3), check=False)
    for rank in (0, 2):
        assert "failed: rank 1 was lost" in ranks[rank].output
        assert "2 steps, " in ranks[rank].output and ", 0 groups" not in ranks[rank].output
