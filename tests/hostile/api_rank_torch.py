"""A rank that calls every public collective with hostile arguments (test_api.py): python api_rank_torch.py CALLS SEED.

In each round all ranks call the same function, with equal arguments or each with its own. A call may return, or raise a
ValueError, a TypeError or a HorovodInternalError; anything else ends the job. If one rank posts an operation and
another rejects it, a barrier of that name, which disagrees, ends it. After each round an allreduce must be correct.
Prints how many calls had each ending.
"""
import contextlib
import random
import sys
import warnings

import numpy as np
import torch
from hostile_arguments import SHAPES, Arguments, run_rounds

import bagua_hvd.torch as hvd
from bagua_hvd import codecs, primitives
from bagua_hvd.core import native
from bagua_hvd.core.context import Context
from bagua_hvd.job import basics

ALLOWED = (ValueError, TypeError, hvd.HorovodInternalError)
ADASUM_ONLY = "Adasum does not support non-global process sets."        # a NotImplementedError, as in Horovod
DTYPES = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64,
          torch.bool, torch.bfloat16, torch.complex64, torch.complex128, torch.uint16, torch.float8_e5m2]
posted = []             # (full name, process set) of this rank's operations in this round


def record_posts():
    post = Context.post

    def recording(self, kind, name, *args, process_set=0, **others):
        operation = post(self, kind, name, *args, process_set=process_set, **others)
        if kind not in (native.JOIN, native.PROCESS_SET_ADD, native.PROCESS_SET_REMOVE):
            posted.append((name, process_set))
        return operation

    Context.post = recording


class TorchArguments(Arguments):
    """Tensors of torch."""

    def tensor(self):
        rng = self.rng
        if not self.hostile():
            return torch.ones(rng.choice([(6,), (4, 3), (2,)]), dtype=rng.choice([torch.float32, torch.int64]))
        tensor = torch.zeros(rng.choice(SHAPES), dtype=rng.choice(DTYPES))
        ways = [
            lambda: tensor.t() if tensor.ndim == 2 else tensor, lambda: tensor[::2] if tensor.ndim else tensor,
            lambda: tensor.expand(3, *tensor.shape), lambda: tensor.to("meta"), lambda: tensor.numpy(), lambda: None,
            lambda: tensor.tolist(), lambda: rng.choice(self.numbers), lambda: self.empty_storage(tensor),
            lambda: torch.ones(4, requires_grad=True), lambda: torch.eye(3).to_sparse(), lambda: tensor[None].imag,
            lambda: torch.nn.Parameter(torch.ones(2, 2)), lambda: torch.ones(3, 3).to_sparse_csr(), lambda: "tensor",
            lambda: torch.quantize_per_tensor(torch.ones(4), 1.0, 0, torch.qint8), lambda: tensor.__class__,
            lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), lambda: np.ones((3, 4)).T,
            lambda: torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last), lambda: torch.ones(2, 3, 4)[:, ::2],
            lambda: torch.conj(torch.ones(2, dtype=torch.complex64)), lambda: torch.inference_mode()(torch.ones)(3),
        ]
        try:
            return tensor if rng.random() < 0.5 else rng.choice(ways)()
        except (RuntimeError, TypeError):       # torch has no such tensor
            return tensor

    @staticmethod
    def empty_storage(tensor):
        tensor.untyped_storage().resize_(0)
        return tensor

    def ones(self, count):
        return torch.ones(count)

    def splits(self):
        return super().splits(
            torch.tensor([1, 1]), torch.tensor([1, 1], dtype=torch.int32), torch.ones(2, 2), torch.tensor(1),
            torch.ones(2, dtype=torch.int32, device="meta"))

    def array(self):
        rng = self.rng
        good = np.ones(rng.choice([1, 5, 64]), rng.choice([np.float32, np.float64]))
        ways = [good[::2], good.astype(">f4"), good.astype(np.int64), good.astype(object), np.ones((2, 3)).T,
                np.array(1.0), good.tobytes(), None, 5, torch.ones(3), np.zeros((0, 3), np.float32), np.array(["a"]),
                np.frombuffer(bytes(16), np.float32), np.ones(4, np.complex64), np.datetime64("2020"), np.zeros(0)]
        return rng.choice(ways) if self.hostile() else good

    def codec(self):
        known = [codecs.minmax_uint8, codecs.sign, codecs.float16, codecs.sign_rms]
        return self.rng.choice([None, 5, "sign", type, *known]) if self.hostile() else self.rng.choice(known)


def calls(a, blocking):
    """By name: functions without arguments. Blocking ones only if all ranks make equal calls."""
    reduced = a.reduction()
    scattered = {name: value for name, value in reduced.items() if name != "average"}
    named, of_set = {"name": a.name()}, {"process_set": reduced["process_set"]}
    root, tensor, tensors, splits, array = a.any_number(0), a.tensor(), a.tensors(), a.splits(), a.array()
    group, codec, topology, round_ = a.process_set(), a.codec(), a.any_number("ring"), a.any_number(0)
    coded = {"seed": a.any_number(None), "hierarchical": a.any_number(False), **named}
    state = primitives.ErrorState(5, 2) if a.hostile() else None
    exchange = a.any_number("allgather")
    count = array.size if isinstance(array, np.ndarray) else 1
    replicas = primitives.Replicas(*(None if a.hostile() else np.zeros(count, np.float32) for _ in range(3)))
    result = {
        "allreduce_async": lambda: hvd.allreduce_async(tensor, **named, **reduced),
        "allreduce_async_": lambda: hvd.allreduce_async_(tensor, **named, **reduced),
        "grouped_allreduce_async": lambda: hvd.grouped_allreduce_async(tensors, **named, **reduced),
        "grouped_allreduce_async_": lambda: hvd.grouped_allreduce_async_(tensors, **named, **reduced),
        "allgather_async": lambda: hvd.allgather_async(tensor, **named, **of_set),
        "grouped_allgather_async": lambda: hvd.grouped_allgather_async(tensors, **named, **of_set),
        "broadcast_async": lambda: hvd.broadcast_async(tensor, root, **named, **of_set),
        "broadcast_async_": lambda: hvd.broadcast_async_(tensor, root, **named, **of_set),
        "alltoall_async": lambda: hvd.alltoall_async(tensor, splits, **named, **of_set),
        "reducescatter_async": lambda: hvd.reducescatter_async(tensor, **named, **scattered),
        "grouped_reducescatter_async": lambda: hvd.grouped_reducescatter_async(tensors, **named, **scattered),
        "c_fp_s": lambda: primitives.c_fp_s(array, group, prescale_factor=reduced["prescale_factor"], **named),
        "c_lp_s": lambda: primitives.c_lp_s(array, group, codec, error=state, exchange=exchange, **coded),
        "d_fp_s": lambda: primitives.d_fp_s(array, group, topology, round_, **named),
        "d_lp_s": lambda: primitives.d_lp_s(array, group, codec, replicas, **coded),
        "poll": lambda: hvd.poll(root),
        "synchronize": lambda: hvd.synchronize(root),
    }
    if not blocking:
        return result
    compression = {"compression": a.compression()}
    sparse = tensor if a.hostile() else torch.eye(3).to_sparse()
    ranks = a.ranks()
    return result | {
        "allreduce": lambda: hvd.allreduce(tensor, **named, **reduced, **compression),
        "allreduce_": lambda: hvd.allreduce_(tensor, **named, **reduced),
        "grouped_allreduce": lambda: hvd.grouped_allreduce(tensors, **named, **reduced, **compression),
        "grouped_allreduce_": lambda: hvd.grouped_allreduce_(tensors, **named, **reduced),
        "sparse_allreduce_async": lambda: hvd.sparse_allreduce_async(sparse, named["name"], reduced["op"], **of_set)(),
        "allgather": lambda: hvd.allgather(tensor, **named, **of_set),
        "grouped_allgather": lambda: hvd.grouped_allgather(tensors, **named, **of_set),
        "broadcast": lambda: hvd.broadcast(tensor, root, **named, **of_set),
        "broadcast_": lambda: hvd.broadcast_(tensor, root, **named, **of_set),
        "alltoall": lambda: hvd.alltoall(tensor, splits, **named, **of_set),
        "reducescatter": lambda: hvd.reducescatter(tensor, **named, **scattered, **compression),
        "grouped_reducescatter": lambda: hvd.grouped_reducescatter(tensors, **named, **scattered, **compression),
        "join": lambda: hvd.join(root),
        "barrier": lambda: hvd.barrier(**of_set),
        "broadcast_object": lambda: hvd.broadcast_object(array, root, **named),
        "allgather_object": lambda: hvd.allgather_object(array, **named),
        "broadcast_parameters": lambda: hvd.broadcast_parameters(tensors, root),
        "add_process_set": lambda: hvd.add_process_set(ranks),
        "remove_process_set": lambda: hvd.remove_process_set(**of_set),
    }


def finish(result, wait):
    """Waits for an asynchronous call's result; removes a new process set again."""
    if isinstance(result, hvd.ProcessSet):
        hvd.remove_process_set(result)
    elif hasattr(result, "wait"):
        result.wait()
    elif wait and isinstance(result, int):
        hvd.synchronize(result)


def disagree(everyones):
    """Ends the operations that others posted and this rank did not."""
    ended = []
    mine = everyones[hvd.rank()]
    for name, process_set in sorted({each for theirs in everyones for each in theirs if each not in mine}):
        with contextlib.suppress(*ALLOWED):         # the set may lack this rank
            ended.append(basics.context().post(native.BARRIER, name, process_set=process_set))
    return ended


def run_round(number, shared, own, sets, endings):
    alike = shared.random() < 0.6
    hostility = shared.choice([0.1, 0.3, 0.8])
    a = TorchArguments(hvd, shared if alike else own, sets, number, hostility, alike, (torch.tensor(1), torch.ones(2)))
    seed = shared.getrandbits(60)
    if alike:
        a.rng = random.Random(seed)
    functions = calls(a, alike)
    name = random.Random(seed).choice(sorted(functions))
    posted.clear()
    result, error = None, None
    try:
        result = functions[name]()
    except ALLOWED as refused:
        error = refused
    except NotImplementedError as refused:
        if str(refused) != ADASUM_ONLY:
            raise
        error = refused
    if not alike:
        waiting = disagree(hvd.allgather_object(list(posted), name=f"posted.{number}"))
    try:
        finish(result, name.endswith(("_async", "_async_")))
    except ALLOWED as failed:
        error = failed
    for operation in [] if alike else waiting:
        with contextlib.suppress(*ALLOWED):
            operation.wait()
    kinds = (*ALLOWED, NotImplementedError)
    endings[name][next(kind.__name__ for kind in kinds if isinstance(error, kind)) if error else "returned"] += 1
    for removed in sets[1:3]:
        if alike and removed.process_set_id is None:
            hvd.add_process_set(removed)
    total = hvd.allreduce(torch.arange(3) * (hvd.rank() + 1), op=hvd.Sum, name=f"right.{number % 7}")
    assert total.tolist() == [0, 3, 6], (name, total)
    return name, error


def main(count, seed):
    warnings.simplefilter("ignore")
    record_posts()
    run_rounds(hvd, run_round, count, seed)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
