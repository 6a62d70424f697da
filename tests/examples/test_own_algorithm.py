"""The example of a custom algorithm trains, and matches its equation."""
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("sklearn")

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.long
@pytest.mark.parametrize("n", [1, 3])
def test_learns_from_ranks_with_different_digits(run_ranks, n):
    output = run_ranks(n, EXAMPLES / "own_algorithm.py", arguments=["--steps", "200"], timeout=115)[0].output
    assert "algorithm: D2" in output
    assert float(re.search(r"test accuracy of the mean model: ([\d.]+) %", output)[1]) >= 85


def equation():
    import numpy as np

    import bagua_hvd.torch as hvd
    from workers import SGD, F, assert_trains_as, gradient

    sys.path.insert(0, str(EXAMPLES))
    from own_algorithm import D2

    def simulate(n, places, xs):
        """x^(t+1) = W (2 x^t - x^(t-1) - (step^t - step^(t-1)))"""
        optimizers, before, step_before = [SGD() for _ in range(n)], None, None
        w = np.zeros((n, n))
        for i in range(n):
            for j, weight in ((i, 2 / 3), (i - 1, 1 / 6), ((i + 1) % n, 1 / 6)):
                w[i, j] += weight
        for t in range(100):
            x = np.array(xs, float)
            step = x - [optimizers[i](v, gradient(i, t, v.astype(F))) for i, v in enumerate(x)]
            inner = x - step if t == 0 else 2 * x - before - (step - step_before)
            before, step_before, xs = x, step, w @ inner
            yield xs

    hvd.init()
    assert_trains_as(D2(), simulate, apart=True, exact=False)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_equals_its_equation(run_ranks, n):
    run_ranks(n, equation, env={"HOROVOD_ELASTIC": "1", "BAGUA_DEFAULT_BUCKET_SIZE": "800"})
