"""The example of slow samples, shortened: training is the same with and without a cache, which holds every sample."""
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
diskcache = pytest.importorskip("diskcache", reason="not installed: pip install 'bagua_hvd[cache]'")

EXAMPLE = Path(__file__).parents[2] / "examples" / "torch_cached_dataset.py"


def test_same_training_from_the_cache(launcher):
    folder = launcher.folder / "cache"
    found = []
    for options in ((), ("--cache", folder), ("--cache", folder)):
        result = launcher.run("-np", "2", sys.executable, EXAMPLE, "--samples", "64", *options,
                              env={"OMP_NUM_THREADS": "1"})
        assert result.returncode == 0, result.stdout + result.stderr
        found.append(re.findall(r"(epoch \d): [\d.]+ s, (\d+ % right)", result.stdout))
    assert len(found[0]) == 3 and found[0] == found[1] == found[2]
    assert len(diskcache.Cache(str(folder))) == 64 + 1          # and the name of their data set
