"""The step bridge: passes tensors of a graph to Python while the graph runs, and takes the results back.

The reducer (reduction/reducer.py) and the algorithms work on memory and Python calls. A Bridge connects them to eager
code, tf.function graphs, Keras' train steps and XLA-compiled steps alike, with the same code:

    bridge = Bridge(put, wait)
    reduced = bridge.exchange(gradients)        # in a train step, traced or eager

When that step runs, it calls `put(index, view)` for each gradient when it is computed, in any order, and `wait()` once,
after all puts have returned. exchange() then yields the content of the views' memory. Views are in place (src == dst):
put() starts the communication and returns, wait() blocks until it is done. So, for a Reducer, put is "keep the view for
Source.view(index), then reducer.gradient_ready(index)", and wait is "reducer.synchronize()".

Threads: both are called on threads of TensorFlow that hold the GIL for the call; calls for one Bridge never overlap.
They must not run TensorFlow ops.

Memory: it lives as long as `view.owner`. An Operation keeps its owners until it has ended, so a step that is abandoned
between put() and wait() leaves no dangling pointers. Code that holds views must release them after wait().

Errors: an exception in put() or wait() makes the step fail with a tf.errors.OpError that contains its message:
InvalidArgumentError for ValueError, FailedPreconditionError when ranks disagree or before init(), UnknownError for the
rest. The exception itself is `bridge.failure`, until the next exchange succeeds. In eager mode, exceptions of other
classes pass through, as those of signal handlers must. After a failure the user of the Bridge clears its own state
(Reducer.synchronize does so by itself; after a failure elsewhere in the step call Reducer.reset()).

Deadlock: wait() blocks a thread of TensorFlow, but only after all puts it needs; the waits of a graph and of the
functions that it calls are in program order, the same on all ranks. See docs/decisions/frontends.md.
"""
import itertools
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from bagua_hvd.core import native
from bagua_hvd.core.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from bagua_hvd.core.native import TensorView, ffi
from bagua_hvd.job import basics
from bagua_hvd.tensorflow import xla
from bagua_hvd.tensorflow.collective_ops import filled
from bagua_hvd.tensorflow.graphs import as_written, compiled_by_xla, order, run_independently
from bagua_hvd.tensorflow.native_ops import ops, release

_bridges: weakref.WeakValueDictionary = weakref.WeakValueDictionary()
_ids = itertools.count()


class Bridge:
    """Connects graphs to two Python functions; see the module.

    Must live as long as the functions that use it; graphs of tf.compat.v1 keep it alive.

    Args:
        put: put(index, view) with an in-place TensorView. wait: wait().
        differentiate: maps the gradients of an exchange's outputs to those of its inputs, both in its order. Its
            exceptions end the tape's gradient(). None: no gradient flows through.
    Attributes:
        failure: the exception that made the last exchange fail, or None.
    """

    def __init__(self, put: Any, wait: Any, differentiate: Any = None) -> None:
        self._put = put
        self._wait = wait
        self.differentiate = differentiate or (lambda gradients: [None] * len(gradients))
        self._lock = threading.Lock()
        self.failure: BaseException | None = None
        # Functions that contain an exchange, and those around these.
        self._graphs: weakref.WeakSet = weakref.WeakSet()
        self._id = next(_ids)
        _bridges[self._id] = self

    @as_written
    def exchange(self, tensors: Sequence[tf.Tensor], indices: Iterable[int] | None = None,
                 in_turn: bool = False) -> Any:
        """The tensors after put() and wait(), as a list; runs them now in eager mode, else when the graph runs.

        Args:
            tensors: a list of dense tensors.
            indices: the index that put() gets for each of them; None: 0, 1, ...
            in_turn: put() follows all exchanges and collectives traced before, in programs of XLA too.
        """
        tensors = list(map(tf.convert_to_tensor, tensors))
        indices = range(len(tensors)) if indices is None else indices
        if not tensors:
            return []
        if tf.executing_eagerly():
            # All tensors exist already: one op, because here the overhead of an op exceeds its work.
            self.failure = None
            try:
                return list(ops.bagua_hvd_bridge_exchange(tensors, bridge=self._id, indices=list(indices)))
            except tf.errors.UnknownError:
                failure: Any = self.failure
                if failure is None or isinstance(failure, HorovodInternalError):
                    raise
            self.failure = None
            raise failure
        graph = tf.compat.v1.get_default_graph()
        again = self._enter(graph) or in_turn
        if compiled_by_xla():
            return _exchange_compiled(self._id, tensors, indices, again)
        buffers = []
        with tf.control_dependencies(order.write() if again else order.first(order.write)):
            for index, tensor in zip(indices, tensors, strict=True):
                [buffer] = ops.bagua_hvd_bridge_put([tensor], bridge=self._id, indices=[index], name="HorovodBridgePut")
                run_independently(buffer)
                buffers.append(buffer)
        outputs = list(ops.bagua_hvd_bridge_wait(buffers, bridge=self._id, name="HorovodBridgeWait"))
        with tf.control_dependencies(outputs):
            order.write()
        return outputs

    def _enter(self, graph):
        """Records an exchange in this graph. Returns whether there was one already, also in its conditions or loops."""
        again = graph in self._graphs
        while hasattr(graph, "outer_graph"):
            self._graphs.add(graph)
            graph = graph.outer_graph
        with tf.init_scope():
            in_session = not tf.executing_eagerly()
        if in_session:      # a session may run either of two exchanges, and scripts keep nothing else alive
            graph._bagua_hvd_bridges = {*getattr(graph, "_bagua_hvd_bridges", ()), self}
        return again


def _exchange_compiled(id, tensors, indices, again):
    @tf.custom_gradient
    def call(*tensors):     # functions may outlive the Bridge
        return xla.exchange(id, tensors, indices, again), lambda *gradients: _find(id).differentiate(gradients)

    return list(call(*tensors))


@tf.RegisterGradient("BaguaHvdBridgeExchange")
@tf.RegisterGradient("BaguaHvdBridgeWait")
def _gradient(op, *gradients):
    """Second-order gradients: gradients were reduced while a tape was open."""
    return _find(op.get_attr("bridge")).differentiate(filled(op.outputs, gradients))


@tf.RegisterGradient("BaguaHvdBridgePut")
def _gradient_of_put(op, gradient):
    """Wait's gradient covers both ops."""
    return gradient


def _find(id):
    bridge = _bridges.get(id)
    if bridge is None:
        raise HorovodInternalError("the optimizer or tape that this graph was traced with has been deleted: keep a "
                                   "reference to it while the graph is in use")
    return bridge


def take_interruption() -> BaseException | None:
    """The exception, a lost rank or a change of hosts, that ended a step on a Bridge; None: neither."""
    failures = [bridge.failure for bridge in _bridges.values()]
    _forget_failures()
    for failure in failures:
        lost = isinstance(failure, HorovodInternalError) and failure.status not in (
            native.ERR_MISMATCH, native.ERR_UNSUPPORTED)
        if lost or isinstance(failure, HostsUpdatedInterrupt):
            return failure
    return None


def _forget_failures(*_):
    for bridge in list(_bridges.values()):
        bridge.failure = None


basics.runtime.on_context_change(_forget_failures)  # of the previous job


def _status(error):
    """The native status by which the ops choose their error class."""
    status = getattr(error, "status", None)
    if status is not None:
        return status
    if isinstance(error, ValueError):
        return native.ERR_ARGUMENT
    # A HorovodInternalError raised in Python has no status: not initialized.
    return native.ERR_UNSUPPORTED if isinstance(error, HorovodInternalError) else native.ERR_SYSTEM


def _message(error):
    plain = isinstance(error, (HorovodInternalError, ValueError))
    return str(error) if plain else f"{type(error).__name__}: {error}"


def _run(id, error, function, *arguments):
    """Calls a Bridge's function, by its name, for native code; writes its exception to the native `error`."""
    bridge = None
    try:
        bridge = _find(id)
        with bridge._lock:
            getattr(bridge, function)(*arguments)
    except BaseException as raised:
        if bridge is not None:
            bridge.failure = raised
        return native.fill_error(error, _status(raised), _message(raised))
    if function == "_wait":
        bridge.failure = None
    return native.OK


@ffi.def_extern(name="bhvd_python_put", error=native.ERR_SYSTEM)
def _python_put(id, index, tensor, memory, error):
    # Python owns the memory from here on, also when put() fails: it may have kept the view.
    owner = ffi.gc(memory, release)
    address = int(ffi.cast("uintptr_t", tensor.dst))
    view = TensorView(address, address, tuple(tensor.shape[0:tensor.ndim]), tensor.dtype, owner)
    return _run(id, error, "_put", index, view)


@ffi.def_extern(name="bhvd_python_wait", error=native.ERR_SYSTEM)
def _python_wait(id, error):
    return _run(id, error, "_wait")
