"""baguarun on three hosts: network namespaces, which share neither memory nor loopback."""
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from launcher import wait_until

pytestmark = pytest.mark.timeout(300)

EXAMPLE = Path(__file__).parents[2] / "examples" / "torch_digits.py"
# Rank, host and init()'s numbers, which must equal the environment's; then a sum over all ranks.
REPORT = """
import json, os, socket, sys
from bagua_hvd.core import objects
from bagua_hvd.job import basics as hvd
hvd.init()
names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
numbers = [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()]
assert [int(os.environ["HOROVOD_" + name]) for name in names] == numbers
total = sum(objects.allgather_object(hvd.context(), 2.0 ** hvd.rank(), "total"))
sys.stdout.write(json.dumps([socket.gethostname(), *numbers, total]) + "\\n")
"""


def report(launcher, namespaces, *arguments, on=0):
    """[[host, rank, size, local rank, local size, cross rank, cross size, sum], ...] in rank order."""
    env = {**namespaces.environment, "HOROVOD_START_TIMEOUT": "100"}
    done = launcher.run(*arguments, sys.executable, "-c", REPORT, env=env, timeout=120, prefix=namespaces.enter(on))
    assert done.returncode == 0, done.stderr
    # One line for each host connected by ssh, and nothing else.
    said = [line for line in done.stderr.splitlines() if line.startswith("baguarun")]
    hosts = re.findall(r"(h\d):", arguments[-1])
    assert sorted(said) == [f"baguarun: {host}: connected by ssh" for host in hosts if host != f"h{on}"]
    lines = [json.loads(line.partition(">:")[2]) for line in done.stdout.splitlines()]
    return sorted(lines, key=lambda line: line[1])


def test_local_and_cross_ranks(launcher, namespaces):
    assert report(launcher, namespaces, "-np", 6, "-H", "h0:2,h1:2,h2:2") == [
        ["h0", 0, 6, 0, 2, 0, 3, 63.0], ["h0", 1, 6, 1, 2, 0, 3, 63.0],
        ["h1", 2, 6, 0, 2, 1, 3, 63.0], ["h1", 3, 6, 1, 2, 1, 3, 63.0],
        ["h2", 4, 6, 0, 2, 2, 3, 63.0], ["h2", 5, 6, 1, 2, 2, 3, 63.0]]


def test_unequal_slots_on_hosts_other_than_the_launchers(launcher, namespaces):
    assert report(launcher, namespaces, "-np", 4, "-H", "h1:1,h2:3") == [
        ["h1", 0, 4, 0, 1, 0, 2, 15.0], ["h2", 1, 4, 0, 3, 1, 2, 15.0],
        ["h2", 2, 4, 1, 3, 0, 1, 15.0], ["h2", 3, 4, 2, 3, 0, 1, 15.0]]


def test_another_host_is_not_local_where_foreign_addresses_can_be_bound(namespaces):
    """With ip_nonlocal_bind, as on hosts that take over each other's addresses."""
    code = ("from bagua_hvd.runner.common.util.hosts import is_local; "
            "open('/proc/sys/net/ipv4/ip_nonlocal_bind', 'w').write('1'); "
            "print([is_local(f'10.0.0.{n}') for n in (1, 2, 77)])")
    subprocess.run([*namespaces.enter(0), "ip", "address", "add", "10.0.0.77/24", "dev", "eth0"], check=True)
    command = [*namespaces.enter(0), sys.executable, "-c", code]
    assert subprocess.run(command, capture_output=True, text=True, timeout=60).stdout == "[True, False, True]\n"


def test_training(launcher, namespaces):
    done = launcher.run("-np", 6, "-H", "h0:2,h1:2,h2:2", sys.executable, EXAMPLE, timeout=280,
                        env={**namespaces.environment, "HOROVOD_START_TIMEOUT": "100"}, prefix=namespaces.enter(0))
    assert done.returncode == 0, done.stderr
    assert "[0]<stdout>:parameters identical on all ranks: yes" in done.stdout
    accuracy = re.search(r"accuracy[^\d]*([\d.]+)", done.stdout)
    assert float(accuracy[1]) > 90


def test_a_port_that_is_closed_between_two_hosts(launcher, namespaces):
    """h1 and h2 can reach the launcher, but not each other."""
    namespaces.separate(1, 2)
    done = launcher.run("-np", 3, "-H", "h0:1,h1:1,h2:1", "true", env=namespaces.environment, timeout=60,
                        prefix=namespaces.enter(0))
    assert done.returncode == 1
    # Each host tries all others, so either of the two may report it first.
    assert any(f"host h{one} reaches host h{other} at none of 10.0.0.{other + 1} (eth0), 127.0.0.1 (lo): open the ports"
               in done.stderr for one, other in ((1, 2), (2, 1))), done.stderr


def test_a_host_that_is_cut_off(launcher, namespaces):
    """No connection is closed: the ssh client and the agent detect it, with the same limits as the ranks."""
    popen = launcher.start("-np", 2, "-H", "h0:1,h2:1", sys.executable, "-c",
                           "import time; print('up'); time.sleep(600)", prefix=namespaces.enter(0), env={
                               **namespaces.environment, "BAGUA_HVD_HEARTBEAT_TIMEOUT_SECONDS": "1",
                               "HOROVOD_GLOO_TIMEOUT_SECONDS": "1"})
    for _ in range(2):
        assert popen.stdout.readline().endswith(b"up\n")
    namespaces.cut(2)
    _, stderr = popen.communicate(timeout=120)
    assert popen.returncode == 255 and b"the connection to host h2 was lost" in stderr
    wait_until(lambda: not launcher.processes(), 120)


def test_a_suspended_launcher_hears_why_the_agents_stopped_their_ranks(launcher, namespaces):
    popen = launcher.start("-np", 1, "-H", "h2:1", sys.executable, "-c",
                           "import time; print('up'); time.sleep(600)", prefix=namespaces.enter(0), env={
                               **namespaces.environment, "BAGUA_HVD_HEARTBEAT_TIMEOUT_SECONDS": "1",
                               "HOROVOD_GLOO_TIMEOUT_SECONDS": "1"})
    assert popen.stdout.readline().endswith(b"up\n")
    popen.send_signal(signal.SIGSTOP)
    time.sleep(15)
    popen.send_signal(signal.SIGCONT)
    _, stderr = popen.communicate(timeout=120)
    assert popen.returncode == 128 + signal.SIGTERM
    assert b"baguarun: host h2: nothing came from the launcher for 12 s, so its ranks are stopped: " in stderr


TRAIN = """
import hashlib, json, sys
sys.path.insert(0, sys.argv[1])
import torch
from torch.nn.functional import cross_entropy
from torch_digits import Net, accuracy, digits
import bagua_hvd.torch as hvd
hvd.init()

def train(model, op, batches, loss, **rates):
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), **rates), model.named_parameters(), op=op)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for x, y in batches:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    assert all(torch.equal(flat, other) for other in hvd.allgather(flat[None]))
    return flat

# Small whole numbers and few steps by a power of two: 24 bits hold every sum, so nothing is ever rounded.
torch.manual_seed(1 + hvd.rank())
exact = torch.nn.Linear(4, 3000, bias=False)
exact.weight.data = torch.randint(-2, 3, exact.weight.shape).float()
whole = [(torch.randint(-1, 2, (2, 4)).float(), torch.randint(-2, 3, (2, 3000)).float()) for _ in range(3)]
bits = train(exact, hvd.Sum, whole, lambda found, wanted: (found - wanted).square().sum() / 2, lr=1 / 64)

training, test = digits()
torch.manual_seed(1)
model = Net()
parts = [tuple(column[step * 80 + hvd.rank() * 16:][:16] for column in training.tensors) for step in range(17)] * 2
flat = train(model, hvd.Average, parts, cross_entropy, lr=0.1, momentum=0.9)
if hvd.rank() == 0:
    print(json.dumps([hashlib.sha256(bits.numpy().tobytes()).hexdigest(), accuracy(model, test), flat.tolist()]))
"""


def test_hierarchical_and_flat_allreduce_train_alike(launcher, namespaces):
    """On unequal hosts: bit for bit if no sum is rounded, otherwise within the effect of the order of additions."""
    found = []
    for path in ("ring", ""):
        done = launcher.run("-np", 5, "-H", "h0:2,h1:1,h2:2", sys.executable, "-c", TRAIN, EXAMPLE.parent, timeout=145,
                            env={**namespaces.environment, "HOROVOD_START_TIMEOUT": "100", "BAGUA_HVD_ALLREDUCE": path},
                            prefix=namespaces.enter(0))
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout.partition(">:")[2]))
    (ring_bits, ring_accuracy, ring), (bits, accuracy, hierarchical) = found
    assert bits == ring_bits
    assert accuracy > 0.6 and abs(accuracy - ring_accuracy) <= 2 / 360       # of 360 images
    torch.testing.assert_close(torch.tensor(hierarchical), torch.tensor(ring), rtol=1e-3, atol=1e-5)
