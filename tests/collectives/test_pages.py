"""Large newly allocated results use huge pages where the system has them."""
import resource
from pathlib import Path

import numpy as np
import pytest

from bagua_hvd.core import native
from world import World, view

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
NBYTES = 64 << 20       # malloc returns it to the system each time
TRIALS = 3


@pytest.mark.skipif(not HUGE_PAGES.exists() or "[never]" in HUGE_PAGES.read_text(), reason="the system has none")
def test_a_result_costs_few_page_faults():
    source = np.arange(NBYTES // 4, dtype=np.float32)
    with World(1, "inproc") as world:

        def call(rank, context):
            out = np.empty_like(source)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            context.post(native.ALLREDUCE, "sum", [view(source, "float32", out)], op=native.OP_SUM).wait()
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, np.array_equal(out, source)

        # The system may have no huge page at the moment, but hardly in every trial.
        trials = [result for _ in range(TRIALS) for result in world.run(call)]
    assert all(right for _, right in trials)
    # Small pages at both ends, and some more where memory is fragmented.
    assert min(faults for faults, _ in trials) < NBYTES // 4096 // 8
