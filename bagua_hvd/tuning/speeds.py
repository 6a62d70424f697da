"""Speeds of codecs, measured while this process computes."""
import statistics
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter_ns

import numpy as np

from bagua_hvd.codecs import Codec

_SAMPLE = 1 << 16           # elements
_TIMES = 5


def _ps(codec: Codec) -> tuple[int, int]:
    values = np.random.default_rng(0).standard_normal(_SAMPLE).astype(np.float32)
    encoding, decoding = [], []
    for _ in range(_TIMES):
        began = perf_counter_ns()
        code = codec.encode(values)
        between = perf_counter_ns()
        codec.decode(code, values.dtype, _SAMPLE)
        encoding.append(between - began)
        decoding.append(perf_counter_ns() - between)
    return tuple(round(statistics.median(taken) * 1000 / _SAMPLE) for taken in (encoding, decoding))  # type: ignore


def speeds(codecs: Sequence[Codec]) -> Future[list[tuple[int, int]]]:
    """For each codec, (ps to encode an element, ps to decode one), in float32; a thread that starts now measures."""
    pool = ThreadPoolExecutor(1, "codecs' speeds")
    found = pool.submit(lambda: [_ps(codec) for codec in codecs])
    pool.shutdown(wait=False)
    return found
