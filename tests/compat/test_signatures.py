"""Every name of horovod_api.py exists on every path, with Horovod's parameters, order and defaults.

Tier C names may be missing if docs/migrating-from-horovod.md says so.
"""
import contextlib
import enum
import importlib
import inspect
import re
import subprocess
import sys

import horovod_api
import migration_page
import pytest

ROWS = list(horovod_api.rows())
EXCUSED = frozenset(migration_page.absent_names())
ABSENT = object()
FRAMEWORKS = ("torch", "tensorflow")
# Keras' default backend is TensorFlow.
NEEDS = {**{name: name for name in (*FRAMEWORKS, "ray")}, "keras": "tensorflow", "spark": "pyspark"}


def import_module(place):
    """Module `place` of bagua_hvd, or ABSENT."""
    if (package := NEEDS.get(place.split(".")[0])):
        pytest.importorskip(package)
    name = "bagua_hvd" if place == "." else f"bagua_hvd.{place}"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not name.startswith(error.name):
            raise
        return ABSENT


def find(path):
    """`path` from bagua_hvd on, or ABSENT."""
    place, name = path.rsplit(".", 1)
    return getattr(import_module(place), name, ABSENT)


def _make_optimizer():
    torch = pytest.importorskip("torch")
    plain = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
    return find("torch.DistributedOptimizer")(plain)


def _make_loader():
    mixin, base = find("data.AsyncDataLoaderMixin"), find("data.BaseDataLoader")
    if ABSENT in (mixin, base):
        return ABSENT

    class Loader(mixin, base):
        def __len__(self):
            return 0

        def _iterate(self):
            return iter(())

    return Loader()


def _make_ray_executor(name, **arguments):
    executor = find(f"ray.{name}")
    return executor(executor.create_settings(), **arguments)


def _call(path, *args, **kwargs):
    function = find(path)
    return ABSENT if function is ABSENT else function(*args, **kwargs)


# The namespaces of horovod_api.py that are objects: how to make one in a job of one rank.
OBJECTS = {
    "@optimizer": _make_optimizer,
    "@compression": lambda: find("torch.Compression"),
    "@tensorflow_compression": lambda: find("tensorflow.Compression"),
    "@compressor": lambda: find("torch.compression.Compressor"),
    "@process_set": lambda: _call("common.process_sets.ProcessSet", [0]),
    "@state": lambda: _call("torch.elastic.TorchState", epoch=0),
    "@sampler": lambda: _call("torch.elastic.ElasticSampler", [0, 1, 2]),
    "@loader": _make_loader,
    "@ray_executor": lambda: _make_ray_executor("RayExecutor", num_workers=1),
    "@elastic_ray_executor": lambda: _make_ray_executor("ElasticRayExecutor"),
    "@store": lambda: find("spark.common.store.Store"),
    "@ray_worker": lambda: object.__new__(find("ray.BaseHorovodWorker")),
}


@contextlib.contextmanager
def at(place):
    """Yields the object that has the namespace's names as attributes, or ABSENT."""
    if not place.startswith("@"):
        yield import_module(place)
        return
    basics = import_module("common.basics")
    running = basics.is_initialized()
    basics.init()
    try:
        yield OBJECTS[place]()
    finally:
        if not running:
            basics.shutdown()


def table_parameters(signature):
    """`f(a, b=(), *c, **d)` as [("a", None), ("b", "()"), ("*c", None), ("**d", None)]."""
    inside = re.fullmatch(r"\w+\((.*)\)", signature)[1]
    pairs = [part.split("=") for part in inside.split(", ")] if inside else []
    return [(pair[0], pair[1] if len(pair) > 1 else None) for pair in pairs]


def default_text(value):
    """The default as the table writes it."""
    if value is inspect.Parameter.empty:
        return None
    if value is find("common.process_sets.global_process_set"):
        return "global_process_set"
    if isinstance(value, type):
        return {"NoneCompressor": "Compression.none"}[value.__name__]
    return repr(int(value)) if isinstance(value, enum.IntEnum) else repr(value)


def check_signature(function, signature):
    expected = table_parameters(signature.replace("=Average", "=0"))
    prefix = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    own = list(inspect.signature(function).parameters.values())
    actual = [(prefix.get(parameter.kind, "") + parameter.name, default_text(parameter.default)) for parameter in own]
    # Both `**kwargs` are last; ours may have more keywords before it.
    if expected and expected[-1][0].startswith("**"):
        assert actual.pop() == expected.pop()
        own.pop()
    assert actual[:len(expected)] == expected
    by_position = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    assert all(parameter.kind in by_position for parameter in own[:len(expected)])
    # A call written for Horovod must have all of our required arguments.
    assert all(extra.default is not inspect.Parameter.empty or extra.kind in prefix for extra in own[len(expected):])


@pytest.mark.parametrize("tier, place, signature", ROWS,
                         ids=[f"{tier}-{place}-{signature.split('(')[0]}" for tier, place, signature in ROWS])
def test_name(tier, place, signature):
    name = signature.split("(")[0]
    with at(place) as parent:
        value = getattr(parent, name, ABSENT) if parent is not ABSENT else ABSENT
        if tier == "C" and f"{place}.{name}" in EXCUSED:
            assert value is ABSENT, f"docs/migrating-from-horovod.md says that {place}.{name} is not there"
            return
        assert value is not ABSENT, f"{place}.{name} is missing"
        if "(" in signature:
            check_signature(value, signature)


@pytest.mark.parametrize("package", [
    "torch", *(pytest.param(one, marks=pytest.mark.long) for one in ("tensorflow", "keras"))])
def test_first_import(package):
    """A script can import any package first: none depends on an earlier import of another."""
    pytest.importorskip("tensorflow" if package == "keras" else package)
    done = subprocess.run([sys.executable, "-c", f"import bagua_hvd.{package}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_paths_lead_to_the_same_objects(framework):
    """A script may mix `hvd.allreduce` and `from horovod.torch.mpi_ops import allreduce`.

    The exception: tensorflow and tensorflow.keras are two interfaces.
    """
    found = {}
    for _, place, signature in ROWS:
        name = signature.split("(")[0]
        if place.startswith("tensorflow.keras"):
            continue
        if place.split(".")[0] == framework and name not in ("run", "elastic"):
            value = getattr(import_module(place), name, ABSENT)
            if value is not ABSENT:
                assert found.setdefault(name, value) is value, name


def test_basics_of_every_front_end():
    """The object that third-party code uses: it has init, rank, size and the process sets."""
    for place in ("torch.mpi_ops", "tensorflow.mpi_ops", "tensorflow.keras", "keras"):
        _basics = find(f"{place}._basics")
        _basics.init()
        assert (_basics.rank(), _basics.size(), _basics.is_initialized()) == (0, 1, True), place
        assert _basics._get_process_set_ids_and_ranks() == {0: [0]}
        _basics.shutdown()
        with pytest.raises(ValueError, match="has not been initialized"):
            _basics._get_process_set_ids_and_ranks()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_constants(framework):
    hvd = import_module(framework)
    assert [hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product] == [0, 1, 2, 3, 4, 5]
    assert all(isinstance(op, int) for op in (hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product))


def test_facts_of_the_build():
    hvd = import_module("torch")
    assert hvd.gloo_built() is True
    assert hvd.mpi_built() is True and hvd.mpi_enabled() is False
    assert type(hvd.nccl_built()) is int
    assert issubclass(hvd.HorovodInternalError, RuntimeError)
    hvd.shutdown()
    with pytest.raises(ValueError):
        hvd.mpi_threads_supported()


def test_exceptions():
    exceptions = import_module("common.exceptions")
    assert import_module("torch").HorovodInternalError is exceptions.HorovodInternalError
    assert issubclass(exceptions.HostsUpdatedInterrupt, RuntimeError)
    assert exceptions.HostsUpdatedInterrupt(True).skip_sync is True
    assert issubclass(exceptions.HorovodVersionMismatchError, ImportError)
    error = exceptions.HorovodVersionMismatchError("torch", "1", "2")
    assert (error.name, error.version, error.installed_version) == ("torch", "1", "2")


@pytest.mark.parametrize("place", sorted({place for _, place, _ in ROWS if place[0] not in "@."}))
def test_every_public_function_is_documented(place):
    module = import_module(place)
    if module is ABSENT:
        pytest.skip(f"bagua_hvd.{place} is not there")
    for key, value in vars(module).items():
        if not key.startswith("_") and inspect.isfunction(value) and value.__module__.startswith("bagua_hvd"):
            assert value.__doc__, f"{place}.{key}"
