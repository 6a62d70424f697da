import pytest

from world import TRANSPORTS, World

# Every number of ranks, and every transport with few and with many; the equations do not depend on the transport.
WORLDS = [("inproc", 1), ("inproc", 2), ("inproc", 3), ("inproc", 4), ("inproc", 5), ("inproc", 8),
          ("shm", 2), ("shm", 5), ("tcp", 3), ("tcp", 8)]
assert {transport for transport, _ in WORLDS} == set(TRANSPORTS)


@pytest.fixture(scope="module", params=WORLDS, ids=lambda p: f"{p[0]}-{p[1]}")
def world(request):
    """n ranks as threads, over a transport."""
    transport, n = request.param
    with World(n, transport) as w:
        yield w
