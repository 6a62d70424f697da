"""The codecs' random numbers are uniform, and uncorrelated between seeds and between neighbours."""
import numpy as np
import pytest

from codec_random import uniform

COUNT = 1 << 20


@pytest.mark.parametrize("seed", [0, 1, 2, 12345, 2**64 - 1])
def test_uniform(seed):
    u = uniform(seed, COUNT).astype(np.float64)
    assert 0 < u.min() < u.max() < 1
    assert abs(u.mean() - 0.5) < 5 / np.sqrt(12 * COUNT)                          # five standard deviations
    counts, _ = np.histogram(u, bins=1024, range=(0, 1))
    chi_square = (np.square(counts - COUNT / 1024) / (COUNT / 1024)).sum()
    assert abs(chi_square - 1023) < 5 * np.sqrt(2 * 1023)


@pytest.mark.parametrize("a, b", [(0, 1), (1, 2), (7, 7 + 2**32), (0, 0x9E3779B97F4A7C15)])
def test_seeds_are_uncorrelated(a, b):
    x, y = uniform(a, COUNT).astype(np.float64) - 0.5, uniform(b, COUNT).astype(np.float64) - 0.5
    for lag in (0, 1, 7):
        assert abs((x[: COUNT - lag] * y[lag:]).mean()) < 5 / 12 / np.sqrt(COUNT)


@pytest.mark.parametrize("seed", [0, 3])
def test_neighbours_are_uncorrelated(seed):
    x = uniform(seed, COUNT).astype(np.float64) - 0.5
    for lag in (1, 2, 8, 32, 512, 65536):
        assert abs((x[:-lag] * x[lag:]).mean()) < 5 / 12 / np.sqrt(COUNT)
