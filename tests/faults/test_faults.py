"""Every fault of docs/results/faults.md once: no rank hangs, no process or file is left behind, no result is wrong.

measure.py measures how long it takes until all ranks know.
"""
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import pytest

from faults import FAULTS
from job import SIZE, make_zygote
from network import Network
from tests.laboratory.hosts import why_impossible
from trial import run

LIMIT_SECONDS = 10
LANES = 8                       # jobs at a time; they mostly wait
NO_HOSTS = why_impossible()


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory):
    """{name of a fault to test: a future of its Outcome}; all run at once."""
    chosen = {item.callspec.params["fault"].name for item in request.session.items
              if "outcomes" in getattr(item, "fixturenames", ())}
    folder = tmp_path_factory.mktemp("faults")
    network = None if NO_HOSTS else Network(SIZE * LANES)
    lanes = SimpleQueue()
    for lane in range(LANES):
        lanes.put(network and network.links[SIZE * lane:SIZE * (lane + 1)])
    zygote = make_zygote(folder)

    def run_in_a_lane(number, fault):
        links = lanes.get()
        try:
            place = folder / str(number)
            place.mkdir()
            return run(fault, place, zygote, number, LIMIT_SECONDS, links)
        finally:
            lanes.put(links)

    with ThreadPoolExecutor(LANES) as pool:
        yield {fault.name: pool.submit(run_in_a_lane, number, fault) for number, fault in enumerate(FAULTS)
               if fault.name in chosen and not (fault.needs_root and NO_HOSTS)}
    if network:
        network.close()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
@pytest.mark.timeout(300)
def test_fault(fault, outcomes):
    if fault.needs_root and NO_HOSTS:
        pytest.skip(NO_HOSTS)
    outcome = outcomes[fault.name].result()
    assert not outcome.problems, "\n".join(outcome.problems)
    assert (outcome.hang, outcome.wrong) == (False, 0)
    assert (outcome.seconds is not None) == fault.fails
