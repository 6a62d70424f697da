"""Groups such as "cpu:bagua,cuda:nccl", in which another backend serves some device.

torch takes a process group that is written in Python as the whole group and ignores other names in the string. So this
module makes the other groups, when the first tensor of their device comes: on all ranks, since these call alike.
"""
import functools
import inspect
from datetime import timedelta

import torch
import torch.distributed as dist

from bagua_hvd.torch.distributed.base import Group

_GROUPS = {"gloo": "ProcessGroupGloo", "nccl": "ProcessGroupNCCL"}


class OtherDevices(Group):
    """A group that passes tensors of other devices to the group that serves them."""

    _backends: dict[str, str] | None = None     # by device

    def __init_subclass__(cls, **keywords):
        """Lets c10d's methods call the other group, by the names that this version of torch has."""
        for name, method in list(vars(cls).items()):
            if inspect.isfunction(method) and hasattr(dist.ProcessGroup, name):
                setattr(cls, name, _on_its_device(name, method))
        super().__init_subclass__(**keywords)

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
