"""The paper's communication primitives over buckets: what an algorithm's `communicate` is made of.

Each posts one native operation and returns at once with its Operation. The bytes are the bucket's views, read and
overwritten in place by the core, which the caller must leave alone until the Operation has ended.

    c_fp_s   centralized, full precision, synchronous: allreduce
    c_lp_s   centralized, low precision, synchronous: alltoall of codes, mean of one's own chunk, allgather of its code

The names are those of BAGUA (Gan et al., arXiv:2107.01499).
"""
from typing import NamedTuple

from bagua_hvd.common import basics, native
from bagua_hvd.common.native import ffi


class Codec(NamedTuple):
    """A lossy encoding. name: its file in native/kernel. number: the core's."""

    name: str
    number: int

    def takes(self, dtype):
        """Whether it encodes elements of the native dtype."""
        return native.lib.bhvd_encoded_size(self.number, dtype, 1, ffi.NULL) > 0


minmax_uint8 = Codec("minmax_uint8", native.CODEC_MINMAX_UINT8)


class ErrorState:
    """The memory of error feedback, float32, zero at first.

    Attributes:
        worker: one element for each of the bucket: what encoding this rank's own values has lost so far.
        server: one element for each of a chunk: what encoding the mean of its chunk has lost so far.
    """

    def __init__(self, count, size):
        self.worker = ffi.new("float[]", max(count, 1))
        self.server = ffi.new("float[]", max(native.chunk_count(count, size), 1))

    def fits(self, count, size):
        """Whether it was made for `count` elements over `size` ranks."""
        return len(self.worker) == max(count, 1) and len(self.server) == max(native.chunk_count(count, size), 1)

    def state_dict(self):
        return {"worker": bytes(ffi.buffer(self.worker)), "server": bytes(ffi.buffer(self.server))}

    def load_state_dict(self, state):
        """Returns False, and changes nothing, when the state is of another size (another number of ranks)."""
        targets = {name: ffi.buffer(getattr(self, name)) for name in ("worker", "server")}
        if any(len(state[name]) != len(target) for name, target in targets.items()):
            return False
        for name, target in targets.items():
            target[:] = state[name]
        return True


def _address(array):
    return int(ffi.cast("uintptr_t", array))


def c_fp_s(bucket, group, average=True, prescale_factor=1.0, postscale_factor=1.0):
    """Sum or mean of the bucket over the ranks of `group`; bit-equal on all of them.

    Args:
        bucket: one dtype that allreduce takes; the same layout on all ranks.
        average: False for the sum.
        prescale_factor, postscale_factor: multiply before and after, together with the bucket's own factors.
    Returns:
        An Operation. Its wait() raises HorovodInternalError when ranks disagree or one is lost.
    """
    return basics.context().post(
        native.ALLREDUCE, bucket.name, bucket.views, process_set=group.process_set_id,
        op=native.OP_AVERAGE if average else native.OP_SUM,
        prescale_factor=bucket.prescale_factor * prescale_factor,
        postscale_factor=bucket.postscale_factor * postscale_factor,
    )


def c_lp_s(bucket, group, codec=minmax_uint8, error=None, average=True, prescale_factor=1.0, postscale_factor=1.0):
    """Sum or mean of the encoded bucket over the ranks of `group`, encoded again; bit-equal on all of them.

    Args:
        bucket: of a dtype that the codec takes; the same layout on all ranks.
        error: an ErrorState that fits the bucket, read and updated; None: what encoding loses is lost.
        average: False for the sum.
        prescale_factor, postscale_factor: multiply before and after, together with the bucket's own factors.
    Returns:
        An Operation. Its wait() raises HorovodInternalError when ranks disagree or one is lost.
    """
    return basics.context().post(
        native.C_LP_S, bucket.name, bucket.views, process_set=group.process_set_id,
        op=native.OP_AVERAGE if average else native.OP_SUM,
        prescale_factor=bucket.prescale_factor * prescale_factor,
        postscale_factor=bucket.postscale_factor * postscale_factor,
        codec=codec.number,
        worker_error=_address(error.worker) if error else 0,
        server_error=_address(error.server) if error else 0,
        owner=error,
    )
