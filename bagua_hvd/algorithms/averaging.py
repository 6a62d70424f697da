"""The mean of weights over the ranks, a building block of several algorithms."""
import numpy as np

from bagua_hvd.core.operations import Posted
from bagua_hvd.job.process_sets import ProcessSet
from bagua_hvd.primitives import c_fp_s
from bagua_hvd.training.buckets import Bucket

_IN_CACHE = 1 << 16         # elements


class Mean:
    """(1/n) sum_i x_i in flight; x_i: the values of a bucket at construction. One at a time for each bucket.

    n is the number of participating ranks: each appends a 1 to its values, and a rank in join() adds 0.

    Attributes:
        operation: the operation that wait() and difference() wait for.
    """

    def __init__(self, bucket: Bucket, group: ProcessSet) -> None:
        values = bucket.read(tail=1, workspace="mean of")
        values[-1] = 1
        self._sum = bucket.workspace("mean", values.size, values.dtype)
        self.operation: Posted = c_fp_s(values, group, average=False, out=self._sum, name=bucket.name)
        self._values = values[:-1]

    def wait(self) -> np.ndarray:
        """Blocks; returns the mean: flat, bit-equal on all ranks, valid until the bucket's next Mean is made."""
        self.operation.wait()
        mean, ranks = self._sum[:-1], self._sum[-1]
        mean /= ranks
        return mean

    def difference(self) -> np.ndarray:
        """As wait(), but returns the mean minus x_i."""
        self.operation.wait()
        difference, ranks = self._sum[:-1], self._sum[-1]
        for begin in range(0, difference.size, _IN_CACHE):
            part = slice(begin, begin + _IN_CACHE)
            difference[part] /= ranks
            difference[part] -= self._values[part]
        return difference
