"""Every public name is annotated and documented, so that editors show parameters, defaults and results."""
import importlib
import inspect
import re

import pytest

import bagua_hvd.core.version as anchor

PACKAGE = anchor.__name__.partition(".")[0]
MODULES = [
    "torch", "torch.elastic", "torch.ddp", "torch.distributed", "tensorflow", "tensorflow.elastic", "tensorflow.keras",
    "tensorflow.data.compute_service", "keras", "keras.callbacks", "keras.elastic", "algorithms", "primitives",
    "codecs", "data", "runner.run_function", "runner.elastic.discovery", "job.statistics", "common.util", "lightning",
    "ray", "ray.train", "spark", "spark.torch", "spark.keras", "spark.lightning",
]
FRONT_ENDS = ["torch", "tensorflow", "tensorflow.keras", "keras"]
NEEDED = {"tensorflow": "tensorflow", "keras": "keras", "lightning": "lightning", "ray": "ray.train",     # by folder
          "spark": "pyspark.sql"}


def load(name):
    folder = name.partition(".")[0]
    if folder in NEEDED:
        pytest.importorskip(NEEDED[folder])
    return importlib.import_module(f"{PACKAGE}.{name}")


def public(module):
    """(name, function) of the module's public functions and methods that are defined in bagua_hvd."""
    names = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
    for name in names:
        value = getattr(module, name)
        if inspect.ismodule(value) or not str(getattr(value, "__module__", "")).startswith(PACKAGE):
            continue
        if inspect.isfunction(value):
            whole = module.__name__.count(".") == 1 or module.__name__.endswith(".keras")
            if value.__module__ == module.__name__ or whole or name in ("run", "run_fn"):
                yield name, value
        elif inspect.isclass(value) and value.__module__ in (module.__name__, *OFFERED):
            for method, function in vars(value).items():
                function = function.fget if isinstance(function, property) else getattr(function, "__func__", function)
                if inspect.isfunction(function) and (not method.startswith("_") or method == "__init__"):
                    yield f"{name}.{method}", function


# Modules of the classes that scripts use or derive from; other classes that a module imports are not its API.
OFFERED = tuple(f"{PACKAGE}.{name}" for name in (
    "job.process_sets", "job.elastic", "core.exceptions", "torch.sync_batch_norm", "torch.optimizer",
    "torch.functions", "torch.elastic.state", "torch.elastic.sampler", "algorithms.base", "training.buckets", "codecs",
    "data.data_loader_base", "torch.distributed.group", "torch.distributed.operations", "torch.distributed.options",
    "torch.compression", "tensorflow.compression", "lightning.strategy", "tensorflow.data.compute_service",
    "ray.runner", "ray.elastic", "ray.train", "spark.common.store", "spark.common.estimator",
    "spark.torch",
))


def unannotated(function):
    try:
        signature = inspect.signature(function)
    except ValueError:
        return False
    parameters = [p for p in signature.parameters.values() if p.name not in ("self", "cls")]
    return any(p.annotation is p.empty for p in parameters) or signature.return_annotation is signature.empty


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_is_annotated(name):
    functions = dict(public(load(name)))
    assert functions
    assert [name for name, function in functions.items() if unannotated(function)] == []


def unexplained(function):
    """Parameters that the docstring does not mention."""
    shown = inspect.getdoc(function) or ""
    return [name for name in inspect.signature(function).parameters if not re.search(rf"\b{name}\b", shown)]


@pytest.mark.parametrize("name", FRONT_ENDS)
def test_help_is_complete(name):
    module = load(name)
    functions = {name: function for name, function in public(module) if "." not in name}
    assert {"allreduce", "broadcast", "DistributedOptimizer", "init", "statistics"} <= functions.keys()
    assert {name: unexplained(function) for name, function in functions.items() if unexplained(function)} == {}
    assert [name for name, function in functions.items() if not inspect.getdoc(function)] == []
    for word in ("Args:", "Raises:"):
        assert word in inspect.getdoc(module.allreduce)
    widths = {name: max(map(len, function.__doc__.splitlines())) for name, function in functions.items()}
    assert [name for name, width in widths.items() if width > 120] == []


def test_help_says_nothing_of_parameters_that_are_not_there():
    keras = load("keras")
    doc = inspect.getdoc(keras.DistributedOptimizer)
    assert "\n    compression: " in doc and "\n    groups: " in doc
    assert "backward_passes_per_step" not in doc and "divide that sum" not in doc and "\n    process_set: " not in doc


def test_reductions_are_integers_with_names():
    hvd = importlib.import_module(f"{PACKAGE}.torch")
    assert str(hvd.Sum) == f"{hvd.Sum}" == "1"      # on every Python: the core parses it
    assert [int(op) for op in (hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product)] == [0, 1, 2, 3, 4, 5]
    assert hvd.Sum.name == "Sum" and hvd.Sum == 1


def test_the_package_says_that_it_is_typed():
    assert (importlib.resources.files(PACKAGE) / "py.typed").is_file()
