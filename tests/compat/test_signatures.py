# ruff: noqa: E501  (one line for each signature)
"""The surface that scripts call: names and signatures, parameter by parameter, in their order and with their defaults."""
import importlib
import inspect
import re

import pytest

# One line each: module, then the signature as Horovod has it. Defaults that are objects are written as their names.
SIGNATURES = """
torch allreduce(tensor, average=None, name=None, compression=Compression.none, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=global_process_set)
torch allreduce_(tensor, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=global_process_set)
torch allreduce_async(tensor, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=global_process_set)
torch allreduce_async_(tensor, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=global_process_set)
torch grouped_allreduce(tensors, average=None, name=None, compression=Compression.none, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=global_process_set)
torch grouped_allreduce_(tensors, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=global_process_set)
torch grouped_allreduce_async(tensors, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=global_process_set)
torch grouped_allreduce_async_(tensors, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=global_process_set)
torch sparse_allreduce_async(tensor, name, op, process_set=global_process_set)
torch allgather(tensor, name=None, process_set=global_process_set)
torch allgather_async(tensor, name=None, process_set=global_process_set)
torch grouped_allgather(tensors, name=None, process_set=global_process_set)
torch grouped_allgather_async(tensors, name=None, process_set=global_process_set)
torch broadcast(tensor, root_rank, name=None, process_set=global_process_set)
torch broadcast_(tensor, root_rank, name=None, process_set=global_process_set)
torch broadcast_async(tensor, root_rank, name=None, process_set=global_process_set)
torch broadcast_async_(tensor, root_rank, name=None, process_set=global_process_set)
torch alltoall(tensor, splits=None, name=None, process_set=global_process_set)
torch alltoall_async(tensor, splits=None, name=None, process_set=global_process_set)
torch reducescatter(tensor, name=None, compression=Compression.none, op=Average, process_set=global_process_set, prescale_factor=1.0, postscale_factor=1.0)
torch reducescatter_async(tensor, name=None, op=Average, process_set=global_process_set, prescale_factor=1.0, postscale_factor=1.0)
torch grouped_reducescatter(tensors, name=None, compression=Compression.none, op=Average, process_set=global_process_set, prescale_factor=1.0, postscale_factor=1.0)
torch grouped_reducescatter_async(tensors, name=None, op=Average, process_set=global_process_set, prescale_factor=1.0, postscale_factor=1.0)
torch join(device=-1)
torch barrier(process_set=global_process_set)
torch synchronize(handle)
torch poll(handle)
torch init(comm=None, process_sets=None)
torch shutdown()
torch is_initialized()
torch rank()
torch size()
torch local_rank()
torch local_size()
torch cross_rank()
torch cross_size()
torch mpi_threads_supported()
torch mpi_enabled()
torch mpi_built()
torch gloo_enabled()
torch gloo_built()
torch nccl_built()
torch ddl_built()
torch ccl_built()
torch cuda_built()
torch rocm_built()
torch broadcast_parameters(params, root_rank)
torch broadcast_optimizer_state(optimizer, root_rank, model=None)
torch broadcast_object(obj, root_rank=0, name=None, process_set=global_process_set)
torch allgather_object(obj, name=None)
torch ProcessSet(ranks_or_comm)
torch add_process_set(process_set)
torch remove_process_set(process_set)
torch _check_has_gpu()
torch DistributedOptimizer(optimizer, named_parameters=None, compression=Compression.none, backward_passes_per_step=1, op=Average, gradient_predivide_factor=1.0, num_groups=0, groups=None, sparse_as_dense=False, process_set=global_process_set)
torch.mpi_ops is_homogeneous()
torch.mpi_ops handle_average_backwards_compatibility(op, average)
common.exceptions HostsUpdatedInterrupt(skip_sync)
common.exceptions HorovodVersionMismatchError(name, version, installed_version)
common.exceptions get_version_mismatch_message(name, version, installed_version)
common.util extension_available(ext_base_name, verbose=False)
common.util gpu_available(ext_base_name, verbose=False)
common.util mpi_built(verbose=False)
common.util gloo_built(verbose=False)
common.util nccl_built(verbose=False)
common.util ddl_built(verbose=False)
common.util ccl_built(verbose=False)
common.util check_extension(ext_name, ext_env_var, pkg_path, *args)
common.util check_installed_version(name, version, exception=None)
common.util env(**kwargs)
common.util get_average_backwards_compatibility_fun(reduce_ops)
common.util num_rank_is_power_2(num_rank)
common.util split_list(l, n)
common.util is_iterable(x)
common.util is_version_greater_equal_than(ver, target)
common.util _cache(f)
common.util get_ext_suffix()
common.util get_extension_full_path(pkg_path, *args)
""".strip().splitlines()

NAMES = {
    "torch": "Average Sum Adasum Min Max Product Compression global_process_set HorovodInternalError",
    "torch.mpi_ops": "HorovodAllreduce HorovodGroupedAllreduce HorovodAllgather HorovodGroupedAllgather HorovodBroadcast "
                     "HorovodAlltoall HorovodReducescatter HorovodGroupedReducescatter init shutdown rank size",
    "torch.compression": "Compression Compressor NoneCompressor FP16Compressor",
    "torch.functions": "broadcast_parameters broadcast_optimizer_state broadcast_object allgather_object",
    "common.exceptions": "HorovodInternalError HostsUpdatedInterrupt",
}


def import_module(name):
    if name.startswith("torch"):
        pytest.importorskip("torch")
    return importlib.import_module(f"bagua_hvd.{name}")


def parameters(signature):
    """`a, b=1` as [("a", None), ("b", "1")]."""
    inside = re.fullmatch(r"\w+\((.*)\)", signature)[1]
    pairs = [part.split("=") for part in inside.split(", ")] if inside else []
    return [(pair[0], pair[1] if len(pair) > 1 else None) for pair in pairs]


def default_text(value):
    """How the table writes a default."""
    from bagua_hvd.common.process_sets import global_process_set

    if value is inspect.Parameter.empty:
        return None
    if value is global_process_set:
        return "global_process_set"
    if isinstance(value, type):
        return {"NoneCompressor": "Compression.none"}[value.__name__]
    return repr(value)


@pytest.mark.parametrize("line", SIGNATURES, ids=lambda line: line.split("(")[0].replace(" ", "."))
def test_signature(line):
    module_name, signature = line.split(" ", 1)
    module = import_module(module_name)
    function = getattr(module, signature.split("(")[0])
    expected = parameters(signature.replace("=Average", "=0"))
    actual = []
    prefix = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    for parameter in inspect.signature(function).parameters.values():
        actual.append((prefix.get(parameter.kind, "") + parameter.name, default_text(parameter.default)))
    # Ours may have more keywords, after Horovod's.
    assert actual[:len(expected)] == expected
    own = list(inspect.signature(function).parameters.values())[len(expected):]
    assert all(parameter.default is not inspect.Parameter.empty for parameter in own)


@pytest.mark.parametrize("module_name", NAMES)
def test_names(module_name):
    module = import_module(module_name)
    missing = [name for name in NAMES[module_name].split() if not hasattr(module, name)]
    assert not missing


def test_constants():
    hvd = import_module("torch")
    assert [hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product] == [0, 1, 2, 3, 4, 5]
    assert all(type(op) is int for op in (hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product))


def test_facts_of_the_build():
    hvd = import_module("torch")
    assert hvd.gloo_built() is True
    assert hvd.mpi_built() is False and hvd.mpi_enabled() is False
    assert type(hvd.nccl_built()) is int
    assert issubclass(hvd.HorovodInternalError, RuntimeError)
    hvd.shutdown()
    with pytest.raises(ValueError):
        hvd.mpi_threads_supported()


def test_every_public_function_is_documented():
    for name in ("torch", "torch.mpi_ops", "torch.functions", "common.basics", "common.util", "common.process_sets"):
        module = import_module(name)
        for key, value in vars(module).items():
            if not key.startswith("_") and inspect.isfunction(value) and value.__module__.startswith("bagua_hvd"):
                assert value.__doc__, f"{name}.{key}"
