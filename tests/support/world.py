"""n ranks as n threads of this process, over any transport: the whole core without a launcher."""
import itertools
import os
import threading
from functools import partial

import numpy as np

from bagua_hvd.core import native
from bagua_hvd.core.context import Context
from bagua_hvd.job.environment import Options
from bagua_hvd.job.rendezvous import Rendezvous, gather_endpoints

DTYPES = {
    "uint8": native.UINT8, "int8": native.INT8, "uint16": native.UINT16, "int16": native.INT16,
    "int32": native.INT32, "int64": native.INT64, "float16": native.FLOAT16, "float32": native.FLOAT32,
    "float64": native.FLOAT64, "bool": native.BOOL, "bfloat16": native.BFLOAT16,
}
TRANSPORTS = ["inproc", "shm", "tcp"]

_scopes = itertools.count()


def bfloat16_bits(values):
    """float32 values as bfloat16 bits, rounded to nearest even. NumPy has no such type."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bits(bits):
    """The float32 values of bfloat16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def storage(dtype):
    """The NumPy type of the memory of a tensor with this dtype."""
    return np.dtype(np.uint16 if dtype == "bfloat16" else dtype)


class World:
    """Starts n contexts. `run(fn)` calls fn(rank, context) on one thread per rank; returns results in rank order.

    `path`: BAGUA_HVD_ALLREDUCE, `negotiation`: BAGUA_HVD_NEGOTIATION, or lists with each rank's. `hosts`: for
    transport "auto", each rank's host name; ranks with the same name share memory.
    """

    def __init__(self, n, transport="inproc", path="", timeout_ms=20000, hosts=None, negotiation=None, **more):
        self.n = n
        hosts = hosts or [None] * n
        paths = path if isinstance(path, list) else [path] * n
        shapes = negotiation if isinstance(negotiation, list) else [negotiation] * n
        self._inproc = native.lib.bhvd_inproc_world_create(n) if transport == "inproc" else None
        secret = os.urandom(32)
        self._rendezvous = None if transport == "inproc" else Rendezvous(secret)
        scope = f"test.{next(_scopes)}"

        def create(rank, _):
            options = Options(**{
                "rank": rank, "size": n, "local_rank": rank, "local_size": n, "transport": transport,
                "rendezvous_host": "127.0.0.1", "rendezvous_port": self._rendezvous.port if self._rendezvous else 0,
                "scope": scope, "host_id": hosts[rank], "secret": secret, "inproc_world": self._inproc,
                "start_timeout_ms": 20000, "timeout_ms": timeout_ms, "heartbeat_timeout_ms": 0,
                "allreduce_path": paths[rank], "streams": 1, "negotiation": shapes[rank], "negotiation_fanout": 0,
                **more})
            return Context(options, partial(gather_endpoints, options))

        self.contexts = [None] * n
        self.contexts = self.run(create)

    def run(self, fn):
        results, errors = [None] * self.n, [None] * self.n

        def call(rank):
            try:
                results[rank] = fn(rank, self.contexts[rank])
            except BaseException as error:
                errors[rank] = error

        threads = [threading.Thread(target=call, args=(rank,), daemon=True) for rank in range(self.n)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        hung = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
        assert not hung, f"ranks {hung} hang; errors of the others: {errors}"
        for error in errors:
            if error is not None:
                raise error
        return results

    def close(self):
        self.run(lambda rank, context: context.close())
        if self._inproc:
            native.lib.bhvd_inproc_world_destroy(self._inproc)
        if self._rendezvous:
            self._rendezvous.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def view(array, dtype, out=None, shape=None):
    """A TensorView of NumPy memory. out: the array to write, "in place", or None: the core allocates."""
    dst = 0 if out is None else array.ctypes.data if isinstance(out, str) else out.ctypes.data
    return native.TensorView(array.ctypes.data, dst, shape or array.shape, DTYPES[dtype], (array, out))


def result(operation, index, dtype, row_shape=()):
    """The memory that the core allocated, as an array."""
    nbytes, dim0, owner = operation.result(index)
    data = bytes(native.buffer(owner, nbytes)) if nbytes else b""
    return np.frombuffer(data, storage(dtype)).reshape((dim0, *row_shape))
