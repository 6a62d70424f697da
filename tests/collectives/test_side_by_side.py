"""Several collectives on their way between two ranks at once, over sockets."""
import time

import numpy as np

from bagua_hvd.core import native
from world import World, view

LARGE = 16 << 20            # elements: far more than sockets hold
LIMIT_S = 60


def post(context, name, array, blocking=False):
    return context.post(native.ALLREDUCE, name, [view(array, "float32", "in place")], op=native.OP_SUM,
                        blocking=blocking)


def test_what_is_on_its_way_goes_on_while_nobody_waits():
    """A thread has waited for another operation and gone: the engine's own thread wakes for what began meanwhile."""
    def call(rank, context):
        large, small = np.full(LARGE, rank + 1.0, np.float32), np.full(1, rank + 1.0, np.float32)
        if rank:
            time.sleep(0.4)         # so that both begin while rank 0 waits for the small one ...
        handle = post(context, "large", large)
        if not rank:
            time.sleep(0.2)         # ... and its engine's thread sleeps
        post(context, "small", small, blocking=True).wait()
        deadline = time.monotonic() + LIMIT_S
        while not handle.done() and time.monotonic() < deadline:
            time.sleep(0.005)
        assert handle.done()
        handle.wait()
        assert small[0] == 3 and (large == 3).all()

    with World(2, "tcp", "ring", fusion_threshold=0) as world:
        world.run(call)


def test_a_small_one_ends_before_a_large_one():
    def call(rank, context):
        passed = False
        for attempt in range(20):
            large, small = np.full(LARGE, 1.0, np.float32), np.full(1, 1.0, np.float32)
            handle = post(context, f"large.{attempt}", large)
            post(context, f"small.{attempt}", small, blocking=True).wait()
            passed = passed or not handle.done()
            handle.wait()
            assert small[0] == 2 and (large == 2).all()
        return passed

    with World(2, "tcp", "ring", fusion_threshold=0) as world:
        assert all(world.run(call))
