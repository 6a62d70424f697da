"""Bytes beside a training: each exchange waits for the other end; an end that is gone is an error."""
import os
import subprocess
import sys

import pytest

from bagua_hvd.bench.traffic import Traffic

# Of this process alone: the port is always the same.
ADDRESS = f"127.77.{os.getpid() // 250 % 250}.{1 + os.getpid() % 250}"


def test_an_exchange_takes_both_ends():
    with Traffic(0, ADDRESS, 1 << 20) as one:
        with Traffic(1, ADDRESS, 1 << 20) as other:
            for _ in range(3):
                one.begin()
                other.begin()
                one.end()
                other.end()
            one.begin()
        with pytest.raises(EOFError, match="the traffic beside the training ended"):
            one.end()


@pytest.mark.parametrize("module", ["train", "algorithms"])
def test_traffic_is_between_two_ranks(module):
    where = "--backends" if module == "train" else "--algorithms"
    done = subprocess.run([sys.executable, "-m", f"bagua_hvd.bench.{module}", "-np", "3", where, "none", "tcp"],
                          capture_output=True, text=True, timeout=110)
    assert done.returncode == 2 and "tcp is traffic between two ranks, not 3" in done.stderr
