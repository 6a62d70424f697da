import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from world import TRANSPORTS, World  # noqa: E402

# Every path an allreduce can take: over links on each transport, and through shared memory where there is some.
PATHS = [("inproc", ""), ("inproc", "ring"), ("shm", ""), ("shm", "ring"), ("tcp", "")]
assert {transport for transport, _ in PATHS} == set(TRANSPORTS)


@pytest.fixture(scope="module", params=[(*path, n) for path in PATHS for n in (1, 2, 3, 5, 8)],
                ids=lambda p: f"{p[0]}{'-' + p[1] if p[1] else ''}-{p[2]}")
def world(request):
    transport, path, n = request.param
    with World(n, transport, path) as w:
        yield w
