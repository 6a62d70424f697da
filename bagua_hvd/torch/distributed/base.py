"""The base of a group: its ranks, posting of operations, their names and Works, and groups of other devices.

In groups such as "cpu:bagua,cuda:nccl" another backend serves some device. torch takes a process group that is written
in Python as the whole group and ignores other names in the string. So this module makes the other groups, when the
first tensor of their device comes: on all ranks, since these call alike.
"""
import functools
import inspect
import itertools
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from bagua_hvd.core import objects
from bagua_hvd.job import basics, process_sets
from bagua_hvd.torch.compiled import uncompiled
from bagua_hvd.torch.distributed.options import Options
from bagua_hvd.torch.distributed.point_to_point import PointToPoint
from bagua_hvd.torch.distributed.works import Waiter, Work

_GROUPS = {"gloo": "ProcessGroupGloo", "nccl": "ProcessGroupNCCL"}


class Group(dist.ProcessGroup):
    """A process group: some ranks of the job.

    Args:
        store: the group's own torch store. rank: in the group. ranks: their ranks in the job, in the group's order.
        timeout: of its operations, a timedelta. options: Options or None. started: see stop().
    """

    _backends: dict[str, str] | None = None     # by device

    def __init__(self, store: Any, rank: int, ranks: Any, timeout: Any, options: Any = None,
                 started: int | None = None) -> None:
        super().__init__(rank, len(ranks))
        self._rank, self._ranks = rank, ranks
        self._started = started
        self.options = Options() if options is None else options
        if not isinstance(self.options, Options):
            raise ValueError(f"pg_options of \"bagua\" are bagua_hvd.torch.distributed.Options, not {options!r}")
        self._timeout = timeout.total_seconds()
        self._context = basics.context()
        self._set = process_sets.of_members(self._context, sorted(ranks), basics.size())
        assert self._set.process_set_id is not None     # of_members() registered it
        self._id = self._set.process_set_id
        # Index of each group rank among the ranks of the process set, which are in job order; None: the same order.
        order = sorted(range(len(ranks)), key=ranks.__getitem__)
        self._places: list[int] | None = None if order == sorted(order) else [order.index(i) for i in range(len(ranks))]
        # No other group has or had it: the first rank chooses.
        self._key = objects.broadcast_object(self._context, os.urandom(8).hex(), ranks[0], rank == 0, "c10d.key",
                                             self._id)
        # The given store may hold entries of an earlier attempt of the job, or of another group with this name.
        self._store = dist.PrefixStore(f"bagua_hvd/{self._key}", store)
        self._numbers = itertools.count()
        self._number = -1       # of the last operation
        self._waiter = Waiter()
        self._coalesced: list[Work] | None = None       # since _start_coalescing()
        self._point_to_point = PointToPoint(self._context, self._key, rank, ranks, self._id)

    def __init_subclass__(cls, **keywords):
        """Lets c10d's methods call the group of their device, by the names that this version of torch has.

        Excludes all methods from torch.compile, which cannot trace them; DDP calls some within compiled models.
        """
        super().__init_subclass__(**keywords)
        for name, method in list(vars(cls).items()):
            if inspect.isfunction(method):
                if hasattr(dist.ProcessGroup, name):
                    method = _on_its_device(name, method)
                setattr(cls, name, uncompiled(method))

    def _seconds(self, opts):
        timeout = getattr(opts, "timeout", None)
        return timeout.total_seconds() if timeout is not None and timeout > timedelta(0) else self._timeout

    def _begin(self, what):
        """The name of the next operation, and its description in messages."""
        self._number = number = next(self._numbers)
        return f"c10d.{self._key}.{number}", f"{what} number {number} of a group of {len(self._ranks)} ranks"

    def _post(self, kind, name, views=(), opts=None, **fields):
        """opts: c10d's options; if they say that the caller waits, so does this call."""
        return self._context.post(kind, name, views, process_set=self._id,
                                  blocking=not getattr(opts, "asyncOp", True), **fields)

    def _work(self, operation, outputs, what, opts=None, finish=None, source=-1):
        work = Work(operation, outputs, what, self._seconds(opts), finish, source)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    @staticmethod
    def _one(given, what):
        if len(given) != 1:
            raise ValueError(f"{what} takes one tensor for each rank, not {len(given)}")
        return given[0]

    def _place(self, rank):
        return rank if self._places is None else self._places[rank]

    # ------------------------------------------------------------------------------------ groups of other devices ----

    def _map_backends(self):
        """The backend of each device; empty if the group is not registered yet."""
        if self._backends is None:
            config = dist.distributed_c10d._world.pg_backend_config.get(self)
            if config is None:
                return {}
            self._backends = dist.BackendConfig(dist.Backend(config)).get_device_backend_map()
            self._others: dict[str, dist.ProcessGroup] = {}     # by backend
        return self._backends

    @property
    def _device_types(self):        # torch asks whether the group serves the CPU
        return [torch.device(name) for name in self._map_backends()]

    @uncompiled
    def _get_backend(self, device):
        return self._other_on(device) or self

    def _other_on(self, device):
        """The group for the device; None: this one."""
        backend = self._map_backends().get(device.type, "bagua")
        if backend == "bagua":
            return None
        if backend not in self._others:
            self._others[backend] = self._make(backend, device)
        return self._others[backend]

    def _make(self, backend, device):
        if backend not in _GROUPS or not hasattr(dist, _GROUPS[backend]):
            raise ValueError(f'backend "bagua" can be combined with {" and ".join(_GROUPS)}, not with {backend!r} for '
                             f"{device.type} (or this torch has none)")
        store = dist.PrefixStore(f"{device.type}/{backend}", self._store)
        group = dist.ProcessGroup(store, self._rank, len(self._ranks))
        kind = getattr(dist.ProcessGroup.BackendType, backend.upper())
        own = getattr(dist, _GROUPS[backend])(store, self._rank, len(self._ranks), timedelta(seconds=self._timeout))
        group._set_default_backend(kind)
        group._register_backend(torch.device(device.type), kind, own)
        return group


def _on_its_device(name, method):
    """A method that is called on the group for the device of its first dense tensor."""

    @functools.wraps(method)
    def call(self, *arguments, **keywords):
        tensor = _first_tensor((*arguments, *keywords.values()))
        other = None if tensor is None or tensor.is_sparse else self._other_on(tensor.device)
        return method(self, *arguments, **keywords) if other is None else getattr(other, name)(*arguments, **keywords)

    return call


def _first_tensor(given):
    for each in given:
        found = _first_tensor(each) if isinstance(each, (list, tuple)) else each
        if isinstance(found, torch.Tensor):
            return found
    return None
