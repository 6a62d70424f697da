"""The emulated network: rates and delays, changed at run time. Upper bounds hold on a busy machine, too."""
import os
import re
import subprocess
import time
from pathlib import Path

import pytest

from bagua_hvd.bench.predict import bytes_per_s
from tests.laboratory import plain
from tests.laboratory.hosts import PREFIX, Hosts, why_impossible

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(why_impossible() is not None or not os.path.exists("/dev/net/tun"),
                       reason="needs root, iproute2 and /dev/net/tun"),
]
RATE = bytes_per_s("100mbit")
BURST = 1.1         # data in flight when the measurement began


def test_hosts_follow_hosts():
    """A process that is still in a namespace keeps it, but not the names that the next hosts need."""
    with Hosts(2, "1gbit") as hosts:
        inside = subprocess.Popen(["ip", "netns", "exec", hosts.names[0], "sleep", "60"])
        while not subprocess.run(["ip", "netns", "pids", hosts.names[0]], capture_output=True, check=True).stdout:
            time.sleep(0.01)
    try:
        with Hosts(2, "1gbit") as hosts:
            assert hosts.count == 2
    finally:
        inside.kill()
        inside.wait()


def test_rates_and_delays():
    with Hosts(3, "100mbit", delay=5) as hosts:
        assert 10e-3 <= plain.round_trip(hosts, times=10) < 100e-3
        found = plain.throughput(hosts, seconds=1)
        assert all(0.3 * RATE < rate <= BURST * RATE for rate in found)
        report = hosts.carrier.report()
        assert report.dropped == 0 and report.packets > 1000 and 0 < report.share < 1
        assert report.nbytes > 3 * 0.3 * RATE

        hosts.change(host=0, up="10mbit")       # its receiving rate is unchanged
        slow = [rate <= 0.2 * RATE for rate in plain.throughput(hosts, seconds=1)]
        assert sorted(slow) == [False, False, True]
        hosts.change(delay=20)
        assert plain.round_trip(hosts, times=5) >= 40e-3
    assert not [name for name in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout.split()
                if (maker := re.match(rf"{PREFIX}(\d+)-", name)) and not Path("/proc", maker[1]).exists()]
