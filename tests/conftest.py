import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import ranks
from bagua_hvd.job import basics
from fake_ssh import FakeSsh
from launcher import Launcher, wait_until
from ssh_hosts import Namespaces, SshHosts
from world import TRANSPORTS, World

HERE = Path(__file__).parent
os.environ.setdefault("HOROVOD_START_TIMEOUT", ranks.START_SECONDS)
# For this process and the jobs that it starts, as in ranks.py.
os.environ |= {"BAGUA_FULL_STEPS": "0", "BAGUA_FULL_STEP_BITS": "32"}
# Hypothesis draws the same examples in every run, without a time limit: the machine may be busy.
settings.register_profile("tests", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")
# The longest files start first, so that no process of `make test` runs one alone at the end.
LONGEST = [HERE / name for name in (
    "native/test_native.py", "keras/test_fit.py", "faults/test_faults.py", "runner/test_namespaces.py",
    "runner/test_ssh.py", "elastic/test_digits.py", "collectives/test_hosts.py", "keras/test_algorithms.py",
    "runner/test_launch.py", "runner/test_run.py", "examples/test_torch_char_lm.py",
    "examples/test_tensorflow2_digits.py", "runner/test_engines.py", "runner/test_run_mpi.py",
    "runner/test_mpi_transport.py", "collectives/test_collectives.py", "hostile/test_running_job.py",
    "primitives/test_c_lp_s.py", "torch_distributed/test_torch_tests.py", "lightning/test_trainer.py",
    "torch/test_matrix.py", "bench/test_bench.py")]
assert all(path.exists() for path in LONGEST)


# Tests that `make test` leaves to `make test-long`: groups of ssh hosts and namespaces, complete trainings, most
# examples, more ranks than a small machine can run, tests marked `long`, and all but a diagonal of the products of
# parameters (see diagonal()).
LONG_FIXTURES = {"ssh_hosts", "namespaces"}
LONG_FILES = [HERE / name for name in (
    "elastic/test_digits.py", "runner/test_run_ssh.py", "runner/test_slurm.py", "soak/test_soak.py",
    *(f"examples/test_{name}.py" for name in (
        "keras_several_hosts", "lightning_digits", "torch_cached_dataset", "torch_char_lm",
        "torch_ddp_digits", "torch_elastic_digits", "torch_load_balancing")))]
LONG_FOLDERS = {HERE / "ray", HERE / "spark"}
SHORT = {"test_ranks_of_two_hosts", "test_a_lost_connection", "test_hosts_come_and_go"}    # of the long fixtures
MOST_RANKS = 5      # threads of one test
assert all(path.exists() for path in [*LONG_FILES, *LONG_FOLDERS])


def is_long(item):
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    world = parameters.get("world", 0)      # a number of ranks, or a tuple with one, or with a letter for each rank
    parts = world if isinstance(world, tuple) else (world,)
    numbers = [part for part in parts if isinstance(part, int)] or [len(parts[0])]
    return (item.path in LONG_FILES or item.path.parent in LONG_FOLDERS
            or max(numbers) > MOST_RANKS
            or (bool(LONG_FIXTURES & set(item.fixturenames)) and item.originalname not in SHORT))


def coordinates(item):
    """The test's point in each parametrization, as a set."""
    parameters = dict(item.callspec.params)
    found = set()
    for mark in item.iter_markers("parametrize"):       # one mark can set several names
        names = mark.args[0].replace(" ", "").split(",") if isinstance(mark.args[0], str) else mark.args[0]
        found.add((tuple(names), *(id(parameters.pop(name, None)) for name in names)))
    return found | {(name, id(value)) for name, value in parameters.items()}


def fewer_ranks(items):
    """Drops variants with more than four ranks, and those with two where there are some with three."""
    if not any(point[0] == ("n",) for point in coordinates(items[0])):
        return items
    numbers = {item.callspec.params["n"] for item in items}
    spared = {n for n in numbers if n > max(4, min(numbers))} | ({2} if 3 in numbers else set())
    return [item for item in items if item.callspec.params["n"] not in spared]


def diagonal(items):
    """A subset of one test's variants that contains each value of each parameter."""
    chosen, seen = [], set()
    for new in (all, any):
        for item in items:
            points = coordinates(item)
            if item not in chosen and new(point not in seen for point in points):
                chosen.append(item)
                seen |= points
    return chosen


@pytest.hookimpl(tryfirst=True)     # before -m selects
def pytest_collection_modifyitems(items):
    places = {path: place for place, path in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(LONGEST)))
    products = {}
    for item in items:
        if is_long(item):
            item.add_marker(pytest.mark.long)
        elif hasattr(item, "callspec") and not item.get_closest_marker("long"):
            products.setdefault((item.path, item.originalname), []).append(item)
    for product in products.values():
        for item in set(product) - set(diagonal(fewer_ranks(product))):
            item.add_marker(pytest.mark.long)


@pytest.fixture
def run_ranks(tmp_path):
    """ranks.run_ranks in the test's own folder."""
    return lambda n, function, **options: ranks.run_ranks(tmp_path, n, function, **options)


@pytest.fixture
def growing_job(monkeypatch):
    """A job with only this process, which other ranks can join."""
    basics.shutdown()
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    monkeypatch.setattr(basics.runtime, "shared_numbers", None)
    basics.init()
    yield
    basics.shutdown()


@pytest.fixture
def launcher(tmp_path):
    """A Launcher; the test fails when a process is left behind."""
    # A background job of a script ignores SIGINT, and one under nohup SIGHUP; child processes would inherit that.
    previous = {signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler),
                signal.SIGHUP: signal.signal(signal.SIGHUP, signal.SIG_DFL)}
    result = Launcher(tmp_path)
    try:
        yield result
    finally:
        left = result.close()
        for number, handler in previous.items():
            signal.signal(number, handler)
    assert not left, f"processes left behind: {left}"


@pytest.fixture
def fake_ssh(launcher):
    """A FakeSsh."""
    return FakeSsh(launcher)


@pytest.fixture
def ssh_hosts(tmp_path_factory):
    """An SshHosts; the test fails when a process is left behind on a host."""
    hosts = SshHosts(tmp_path_factory.mktemp("ssh"))
    try:
        yield hosts
        wait_until(lambda: not hosts.left())
    finally:
        hosts.close()


@pytest.fixture
def namespaces(tmp_path_factory):
    """A Namespaces with three hosts."""
    hosts = Namespaces(tmp_path_factory.mktemp("namespaces"), 3)
    yield hosts
    hosts.close()


# Every path of an allreduce: links over each transport, and shared memory where available. The number of ranks matters
# to the algorithm of a path, not to the transport.
PATHS = {("inproc", ""): (1, 2, 3, 5, 8), ("inproc", "ring"): (2, 3, 5, 8), ("shm", ""): (1, 2, 3, 5, 8),
         ("shm", "ring"): (3, 8), ("tcp", ""): (2, 5)}
assert {transport for transport, _ in PATHS} == set(TRANSPORTS)


@pytest.fixture(scope="module", params=[(*path, n) for path, ranks in PATHS.items() for n in ranks],
                ids=lambda p: f"{p[0]}{'-' + p[1] if p[1] else ''}-{p[2]}")
def world(request):
    """n ranks as threads, on one path."""
    transport, path, n = request.param
    with World(n, transport, path) as w:
        yield w
