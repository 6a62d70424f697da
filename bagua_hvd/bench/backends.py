"""The same collectives through bagua_hvd, torch.distributed's gloo and mpi4py.

A backend turns (op, tensor) into a function of no arguments that makes one blocking call and returns the result. All
buffers are torch tensors; MPI sees them through numpy. Allreduce and broadcast overwrite the tensor. The results of the
other collectives are new tensors in bagua_hvd (its interface) and one reused tensor in gloo and MPI (theirs).
"""
import argparse
import datetime
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bagua_hvd.core import variables

GLOO_TIMEOUT_SECONDS = 120
Call = Callable[[], Any]        # makes one call, and returns its result


def _name(tensor):
    return f"bench.{tensor.numel()}"


def _filling(result, function, *arguments):
    """A Call of a function that writes its result to the tensor `result`."""
    def call():
        function(*arguments)
        return result

    return call


class Bagua:
    """The public interface of bagua_hvd.torch; with an algorithm, allreduce is the algorithm's, over a bucket."""

    def __init__(self, options: argparse.Namespace) -> None:
        import bagua_hvd.torch as hvd
        from bagua_hvd import algorithms

        hvd.init()
        self.hvd = hvd
        self.rank, self.size = hvd.rank(), hvd.size()
        self.communicate: Any = algorithms.get(options.algorithm).communicate if options.algorithm else None

    def barrier(self) -> None:
        self.hvd.barrier()

    def allreduce(self, tensor: torch.Tensor) -> Call:
        if self.communicate:
            return self._bucket_allreduce(tensor, _name(tensor))
        return functools.partial(self.hvd.allreduce_, tensor, op=self.hvd.Sum, name=_name(tensor))

    def _bucket_allreduce(self, tensor, name):
        from bagua_hvd.torch.frontend import frontend
        from bagua_hvd.training.buckets import Bucket, Member

        view = frontend.view(tensor, tensor)
        bucket = Bucket(name, {0: Member(name, tuple(tensor.shape), view.dtype)})
        bucket.place(0, view)
        return _filling(tensor, lambda: self.communicate(bucket, self.hvd.global_process_set).wait())

    def broadcast(self, tensor: torch.Tensor) -> Call:
        return functools.partial(self.hvd.broadcast_, tensor, 0, name=_name(tensor))

    def allgather(self, tensor: torch.Tensor) -> Call:
        return functools.partial(self.hvd.allgather, tensor, name=_name(tensor))

    def alltoall(self, tensor: torch.Tensor) -> Call:
        return functools.partial(self.hvd.alltoall, tensor, name=_name(tensor))

    def reducescatter(self, tensor: torch.Tensor) -> Call:
        return functools.partial(self.hvd.reducescatter, tensor, op=self.hvd.Sum, name=_name(tensor))

    def many(self, tensors: Sequence[torch.Tensor]) -> Call:
        hvd = self.hvd
        names = [f"bench.gradient.{index}" for index in range(len(tensors))]

        def call():
            handles = [
                hvd.allreduce_async_(tensor, op=hvd.Sum, name=name)
                for tensor, name in zip(tensors, names, strict=True)
            ]
            for handle in handles:
                hvd.synchronize(handle)
            return tensors

        return call

    def close(self) -> None:
        self.hvd.shutdown()


class Gloo:
    """torch.distributed with the gloo backend, over loopback TCP when all ranks are on this host.

    Args:
        store: a torch.distributed store, for the rendezvous.
    """

    def __init__(self, store: torch.distributed.Store, rank: int, size: int) -> None:
        import torch.distributed as dist

        timeout = datetime.timedelta(seconds=GLOO_TIMEOUT_SECONDS)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
        self.dist, self.rank, self.size = dist, rank, size

    def barrier(self) -> None:
        self.dist.barrier()

    def allreduce(self, tensor: torch.Tensor) -> Call:
        return _filling(tensor, self.dist.all_reduce, tensor)

    def broadcast(self, tensor: torch.Tensor) -> Call:
        return _filling(tensor, self.dist.broadcast, tensor, 0)

    @staticmethod
    def _into(collective, tensor, count):
        output = tensor.new_empty(count)
        return _filling(output, collective, output, tensor)

    def allgather(self, tensor: torch.Tensor) -> Call:
        return self._into(self.dist.all_gather_into_tensor, tensor, tensor.numel() * self.size)

    def alltoall(self, tensor: torch.Tensor) -> Call:
        return self._into(self.dist.all_to_all_single, tensor, tensor.numel())

    def reducescatter(self, tensor: torch.Tensor) -> Call:
        return self._into(self.dist.reduce_scatter_tensor, tensor, tensor.numel() // self.size)

    def many(self, tensors: Sequence[torch.Tensor]) -> Call:
        def call():
            for work in [self.dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
                work.wait()
            return tensors

        return call

    def close(self) -> None:
        self.dist.destroy_process_group()


class Mpi:
    """mpi4py on the tensors' own memory."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self.MPI, self.comm = MPI, MPI.COMM_WORLD
        self.rank, self.size = self.comm.Get_rank(), self.comm.Get_size()

    def barrier(self) -> None:
        self.comm.Barrier()

    def allreduce(self, tensor: torch.Tensor) -> Call:
        return _filling(tensor, self.comm.Allreduce, self.MPI.IN_PLACE, tensor.numpy())

    def broadcast(self, tensor: torch.Tensor) -> Call:
        return _filling(tensor, self.comm.Bcast, tensor.numpy(), 0)

    @staticmethod
    def _into(collective, tensor, count):
        output = tensor.new_empty(count)
        return _filling(output, collective, tensor.numpy(), output.numpy())

    def allgather(self, tensor: torch.Tensor) -> Call:
        return self._into(self.comm.Allgather, tensor, tensor.numel() * self.size)

    def alltoall(self, tensor: torch.Tensor) -> Call:
        return self._into(self.comm.Alltoall, tensor, tensor.numel())

    def reducescatter(self, tensor: torch.Tensor) -> Call:
        return self._into(self.comm.Reduce_scatter_block, tensor, tensor.numel() // self.size)

    def many(self, tensors: Sequence[torch.Tensor]) -> Call:
        arrays = [tensor.numpy() for tensor in tensors]

        def call():
            self.MPI.Request.Waitall([self.comm.Iallreduce(self.MPI.IN_PLACE, array) for array in arrays])
            return tensors

        return call

    def close(self) -> None:
        pass        # mpi4py finalizes MPI at exit

    def abort(self) -> None:
        """Called after a failure: a rank that merely exits would wait in MPI_Finalize for the others."""
        self.comm.Abort(1)


def create(name: str, options: argparse.Namespace, folder: str) -> Bagua | Gloo | Mpi:
    """The backend in a rank of its own job, Bagua for other names; gloo's rendezvous is a file in `folder`."""
    if name == "mpi":
        return Mpi()
    if name == "gloo":
        rank, size = variables.read("HOROVOD_RANK"), variables.read("HOROVOD_SIZE")
        return Gloo(torch.distributed.FileStore(os.path.join(folder, "gloo"), size), rank, size)
    return Bagua(options)


def create_gloo_within(bagua: Bagua) -> Gloo:
    """Gloo between the ranks of a running bagua_hvd job."""
    from bagua_hvd.job.environment import read_options

    store = None
    if bagua.rank == 0:
        # A job of one rank has no other address to listen on.
        host = read_options().listen_host
        store = torch.distributed.TCPStore(host, 0, bagua.size, is_master=True, wait_for_workers=False)
    meeting_point = bagua.hvd.broadcast_object(store and (host, store.port), root_rank=0)
    if store is None:
        store = torch.distributed.TCPStore(*meeting_point, bagua.size, is_master=False)
    return Gloo(store, bagua.rank, bagua.size)
