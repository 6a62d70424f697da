"""BAGUA_HVD_PORTS: all listeners use ports of one range, which a firewall can open."""
import random
import re
import socket
import sys

import pytest

# Each rank prints the listening ports of its process and of its launcher.
LISTENING = """
import os
from bagua_hvd.core import objects
from bagua_hvd.job import basics as hvd
hvd.init()
assert objects.allgather_object(hvd.context(), hvd.rank(), "before") == [0, 1, 2]
with open("/proc/net/tcp") as table:
    rows = [line.split() for line in table][1:]
ports = {row[9]: int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A"}
for pid in os.getpid(), os.getppid():
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            inode = os.readlink(f"/proc/{pid}/fd/{name}").removeprefix("socket:[").rstrip("]")
        except OSError:
            continue
        if inode in ports:
            print("listens", ports[inode], flush=True)
objects.allgather_object(hvd.context(), hvd.rank(), "after")
"""


def first_port():
    """The first port of an unused range, below those that the system assigns."""
    while True:
        first = random.randrange(12000, 30000)
        try:
            for port in range(first, first + 8):
                socket.create_server(("127.0.0.1", port)).close()
            return first
        except OSError:
            continue


@pytest.mark.parametrize("elastic", [(), ("--min-np", "3", "-H", "localhost:2,127.0.0.1:1")], ids=["static", "elastic"])
def test_everything_listens_there(launcher, elastic):
    first = first_port()
    done = launcher.run("-np", "3", *elastic, sys.executable, "-c", LISTENING,
                        env={"BAGUA_HVD_PORTS": f"{first}-{first + 7}", "BAGUA_HVD_TRANSPORT": "tcp"})
    assert done.returncode == 0, done.stderr
    ports = {int(port) for port in re.findall(r"listens (\d+)", done.stdout)}
    assert len(ports) == (5 if elastic else 4) and ports == set(range(first, first + len(ports))), ports


def test_too_few(launcher):
    first = first_port()
    popen = launcher.start("-np", "3", sys.executable, "-c", LISTENING,
                           env={"BAGUA_HVD_PORTS": f"{first}-{first + 1}", "BAGUA_HVD_TRANSPORT": "tcp"})
    stderr = popen.communicate(timeout=60)[1].decode()
    assert popen.returncode == 1
    assert (f"cannot listen on 127.0.0.1:{first}-{first + 1}: no port of BAGUA_HVD_PORTS is free: widen the range or "
            "unset it") in stderr, stderr


@pytest.mark.parametrize("text", ["20001-20000", "0", "1-70000", "many"])
def test_what_is_no_range(launcher, text):
    done = launcher.run("-np", "2", "true", env={"BAGUA_HVD_PORTS": text})
    assert done.returncode == 2
    assert f"BAGUA_HVD_PORTS='{text}': expected a port, or a range such as 20000-20100" in done.stderr
