"""The digits examples of TensorFlow and Keras, shortened, on two real ranks."""
import re
from pathlib import Path

import pytest

pytest.importorskip("tensorflow")
pytest.importorskip("sklearn")

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.long
@pytest.mark.timeout(260)
@pytest.mark.parametrize("example, arguments", [
    ("tensorflow2_digits.py", ["--algorithm", "bytegrad"]),
    ("tensorflow2_digits.py", ["--xla"]),
    ("tensorflow2_keras_digits.py", ["--algorithm", "bytegrad"]),
    ("tensorflow2_keras_digits.py", ["--weighted"]),
])
def test_learns_and_keeps_ranks_equal(run_ranks, example, arguments):
    results = run_ranks(2, EXAMPLES / example, arguments=[*arguments, "--epochs", "8"], timeout=240)
    output = results[0].output
    assert "parameters identical on all ranks: yes" in output
    assert float(re.search(r"test accuracy: ([\d.]+) %", output)[1]) >= 95
    assert int(re.search(r"bytes sent per step and rank: (\d+)", output)[1]) > 0
