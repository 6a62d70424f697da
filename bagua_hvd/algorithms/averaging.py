"""The mean of weights over the ranks: what several algorithms are made of."""
from bagua_hvd.primitives import c_fp_s


class Mean:
    """(1/n) sum_i x_i on its way, x_i the values of a bucket when this was made.

    n is the number of ranks that take part: each adds a 1 behind its values, and one that is in join() a zero.

    Args:
        name: ranks match it by this; None: the bucket's.
    Attributes:
        values: x_i, flat, float32 (float64 for float64).
    """

    def __init__(self, bucket, group, name=None):
        self.values = bucket.read(tail=1)
        self.values[-1] = 1
        self._sum = self.values.copy()
        self._operation = c_fp_s(self._sum, group, average=False, name=name or bucket.name)
        self.values = self.values[:-1]

    def done(self):
        """Whether wait() would return at once."""
        return self._operation.done()

    def wait(self):
        """Blocks until it is there; a flat array, bit-equal on all ranks."""
        self._operation.wait()
        return self._sum[:-1] / self._sum[-1]


def mean(buckets, group):
    """Sets every bucket to its mean over the ranks. Blocks."""
    means = [Mean(bucket, group) for bucket in buckets]
    for bucket, pending in zip(buckets, means, strict=True):
        bucket.write(pending.wait())
