"""A network that comes up shortly after the job starts: ranks that cannot reach each other yet try again."""
import os
import subprocess
import sys
import time

import pytest

from network import Network
from tests.laboratory.hosts import why_impossible

PROGRAM = """
import os, pathlib, sys
from bagua_hvd.job import basics
pathlib.Path(sys.argv[1], f"begun {os.environ['HOROVOD_RANK']}").touch()
basics.init()
print("ranks:", basics.size())
basics.shutdown()
"""


@pytest.mark.skipif(why_impossible() is not None, reason=str(why_impossible()))
def test_a_route_that_comes_late(tmp_path):
    with Network(2) as network, network.job(2) as variables:
        first, second = network.links
        route = ["ip", "-n", second.namespace, "route"]
        subprocess.run([*route, "add", "unreachable", f"{first.address}/32"], check=True)
        job = subprocess.Popen(
            [sys.executable, "-m", "bagua_hvd.runner.launch", "-np", "2", sys.executable, "-m",
             "tests.laboratory.hosts", sys.executable, "-c", PROGRAM, str(tmp_path)],
            env={**os.environ, **variables}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            while len(list(tmp_path.iterdir())) < 2 and job.poll() is None:
                time.sleep(0.05)
            time.sleep(1)               # they have tried in the meantime
            subprocess.run([*route, "del", "unreachable", f"{first.address}/32"], check=True)
            output, _ = job.communicate(timeout=60)
        finally:
            job.kill()
    assert job.returncode == 0 and output.count("ranks: 2") == 2, output
