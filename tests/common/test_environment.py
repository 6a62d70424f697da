"""The environment becomes options, or an error."""
import base64
import re
import socket

import psutil
import pytest

from bagua_hvd.job import probe
from bagua_hvd.job.environment import local_address_towards, read_options
from bagua_hvd.job.server import join_address, listen, split_address

JOB = {
    "HOROVOD_RANK": "1", "HOROVOD_SIZE": "4", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_CROSS_RANK": "0", "HOROVOD_CROSS_SIZE": "2",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "4711",
    "_HOROVOD_SECRET_KEY": base64.b64encode(b"secret").decode(),
}


def test_without_a_launcher_there_is_one_rank():
    options = read_options({})
    assert (options.rank, options.size, options.local_rank, options.local_size) == (0, 1, 0, 1)
    assert (options.cross_rank, options.cross_size, options.transport) == (0, 1, "auto")
    assert options.fusion_threshold == 134217728 and options.cache_capacity == 1024
    assert options.start_timeout_ms == options.timeout_ms == options.heartbeat_timeout_ms == 30_000
    assert (options.stall_warning_ms, options.stall_shutdown_ms) == (60_000, 0)
    assert options.allreduce_path is None and not options.dynamic_process_sets


def test_a_job():
    options = read_options(JOB)
    assert (options.rank, options.size, options.local_rank, options.local_size) == (1, 4, 1, 2)
    assert (options.cross_rank, options.cross_size) == (0, 2)
    assert (options.rendezvous_host, options.rendezvous_port) == ("127.0.0.1", 4711)
    assert options.secret == b"secret" and options.listen_host == "127.0.0.1"
    assert read_options({**JOB, "HOROVOD_GLOO_RENDEZVOUS_ADDR": "localhost"}).rendezvous_host == "127.0.0.1"
    assert read_options({**JOB, "HOROVOD_GLOO_IFACE": "lo"}).listen_host == "127.0.0.1"


def test_interfaces_have_the_first_of_their_addresses():
    expected = {name: [address.address for address in found if address.family == socket.AF_INET]
                for name, found in psutil.net_if_addrs().items()}
    assert {name: address for name, address in probe.addresses() if "." in address} == {
        name: found[0] for name, found in expected.items() if found}


def test_addresses_of_ipv6():
    usable = {address.address for found in psutil.net_if_addrs().values() for address in found
              if address.family == socket.AF_INET6 and not re.match("fe80|::1", address.address)}
    assert {address for _, address in probe.addresses() if ":" in address} <= usable
    for family in socket.AF_INET, socket.AF_INET6:
        address = "127.0.0.1" if family == socket.AF_INET else "::1"
        with listen(address) as one, listen("::") as every, socket.create_connection((address, every.getsockname()[1])):
            assert one.family == family
    options = read_options({**JOB, "HOROVOD_GLOO_RENDEZVOUS_ADDR": "::1"})
    assert (options.rendezvous_host, options.listen_host) == ("::1", "::1")
    assert split_address(join_address("fd00::1", 4711)) == ("fd00::1", 4711)
    assert split_address(join_address("10.0.0.1", 4711)) == ("10.0.0.1", 4711)


def test_settings():
    options = read_options({
        "HOROVOD_FUSION_THRESHOLD": "0", "HOROVOD_CACHE_CAPACITY": "0", "HOROVOD_GLOO_TIMEOUT_SECONDS": "2.5",
        "HOROVOD_START_TIMEOUT": "7", "BAGUA_HVD_HEARTBEAT_TIMEOUT_SECONDS": "0",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "3", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "9",
        "HOROVOD_DYNAMIC_PROCESS_SETS": "1", "BAGUA_HVD_TRANSPORT": "TCP", "BAGUA_HVD_ALLREDUCE": "ring",
        "HOROVOD_ELASTIC": "0", "BAGUA_HVD_STREAMS": "4",
        "BAGUA_HVD_NEGOTIATION": "tree", "BAGUA_HVD_NEGOTIATION_FANOUT": "3",
    })
    assert options.fusion_threshold == 0 and options.cache_capacity == 0
    assert (options.timeout_ms, options.start_timeout_ms, options.heartbeat_timeout_ms) == (2500, 7000, 0)
    assert (options.stall_warning_ms, options.stall_shutdown_ms) == (3000, 9000)
    assert options.dynamic_process_sets and not options.elastic
    assert (options.transport, options.allreduce_path, options.streams) == ("tcp", "ring", 4)
    assert (options.negotiation, options.negotiation_fanout) == ("tree", 3)
    assert read_options({"HOROVOD_STALL_CHECK_DISABLE": "1"}).stall_warning_ms == 0
    with pytest.warns(UserWarning, match="HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"):
        assert read_options({"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "5"}).stall_shutdown_ms == 0


@pytest.mark.parametrize("name, value", [
    ("HOROVOD_SIZE", "two"), ("HOROVOD_SIZE", "0"), ("HOROVOD_RANK", "1"), ("HOROVOD_RANK", "-1"),
    ("HOROVOD_LOCAL_RANK", "1"), ("HOROVOD_CROSS_SIZE", "1.5"), ("HOROVOD_FUSION_THRESHOLD", "64MB"),
    ("HOROVOD_CACHE_CAPACITY", "-1"), ("HOROVOD_START_TIMEOUT", "soon"), ("HOROVOD_START_TIMEOUT", "0"),
    ("HOROVOD_GLOO_TIMEOUT_SECONDS", "nan"), ("HOROVOD_GLOO_TIMEOUT_SECONDS", "-1"), ("HOROVOD_ELASTIC", "yes"),
    ("HOROVOD_DYNAMIC_PROCESS_SETS", "true"), ("BAGUA_HVD_TRANSPORT", "pigeon"),
    ("BAGUA_HVD_STREAMS", "-1"), ("BAGUA_HVD_NEGOTIATION_FANOUT", "0"), ("BAGUA_HVD_STREAMS", "9"),
    ("HOROVOD_AUTOTUNE", "true"), ("HOROVOD_ELASTIC_TIMEOUT", "long"), ("BAGUA_DEFAULT_BUCKET_SIZE", "10MB"),
])
def test_malformed_values_are_named(name, value):
    with pytest.raises(ValueError) as caught:
        read_options({name: value})
    assert name in str(caught.value) and repr(value) in str(caught.value) and "expected" in str(caught.value)


def test_a_malformed_value_without_effect_has_none():
    read_options({"HOROVOD_CYCLE_TIME": "5ms"})


@pytest.mark.parametrize("name, value", [
    ("HOROVOD_GLOO_RENDEZVOUS_PORT", "0"), ("HOROVOD_GLOO_RENDEZVOUS_PORT", "70000"),
    ("HOROVOD_GLOO_IFACE", "no_such_interface"), ("_HOROVOD_SECRET_KEY", "not base64!"),
])
def test_malformed_rendezvous(name, value):
    with pytest.raises(ValueError, match=name) as caught:
        read_options({**JOB, name: value})
    # Errors do not show a secret.
    assert (value in str(caught.value)) == (name != "_HOROVOD_SECRET_KEY")


@pytest.mark.parametrize(
    "missing", ["HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT", "_HOROVOD_SECRET_KEY"]
)
def test_several_ranks_need_a_launcher(missing):
    with pytest.raises(ValueError, match="baguarun -np 4"):
        read_options({name: value for name, value in JOB.items() if name != missing})


def test_local_address():
    assert local_address_towards("127.0.0.1") == "127.0.0.1"
