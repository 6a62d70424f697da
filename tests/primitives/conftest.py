import itertools

import pytest

from world import TRANSPORTS, World


@pytest.fixture(scope="module", params=itertools.product(TRANSPORTS, (1, 2, 3, 4, 5, 8)),
                ids=lambda p: f"{p[0]}-{p[1]}")
def world(request):
    """n ranks as threads, over every transport."""
    transport, n = request.param
    with World(n, transport) as w:
        yield w
