"""The mean of weights over the ranks: what several algorithms are made of."""
from typing import Any

from bagua_hvd.algorithms.base import blocks
from bagua_hvd.job.process_sets import ProcessSet
from bagua_hvd.primitives import c_fp_s
from bagua_hvd.training.buckets import Bucket


class Mean:
    """(1/n) sum_i x_i on its way, x_i the values of a bucket when this was made. One at a time for each bucket.

    n is the number of ranks that take part: each adds a 1 behind its values, and one that is in join() a zero.

    Args:
        name: ranks match it by this; None: the bucket's.
    Attributes:
        values: x_i, flat, float32 (float64 for float64); as wait()'s result until the bucket's next Mean is made.
    """

    def __init__(self, bucket: Bucket, group: ProcessSet, name: str | None = None) -> None:
        values = bucket.read(tail=1, workspace="mean of")
        values[-1] = 1
        self._sum = bucket.workspace("mean", values.size, values.dtype)
        self._operation = c_fp_s(values, group, average=False, out=self._sum, name=name or bucket.name)
        self.values = values[:-1]

    def done(self) -> Any:
        """Whether wait() would return at once."""
        return self._operation.done()

    def wait(self) -> Any:
        """Blocks until it is there; a flat array, bit-equal on all ranks."""
        self._operation.wait()
        mean, ranks = self._sum[:-1], self._sum[-1]
        mean /= ranks
        return mean

    def wait_difference(self) -> Any:
        """The same, less x_i: what is to be added to the values to make them the mean."""
        self._operation.wait()
        difference, ranks = self._sum[:-1], self._sum[-1]
        for part in blocks(difference.size):
            difference[part] /= ranks
            difference[part] -= self.values[part]
        return difference


def mean(buckets: Any, group: ProcessSet) -> None:
    """Sets every bucket to its mean over the ranks. Blocks."""
    means = [Mean(bucket, group) for bucket in buckets]
    for bucket, pending in zip(buckets, means, strict=True):
        bucket.write(pending.wait())
