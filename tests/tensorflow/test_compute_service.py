"""The compute service: tf.data pipelines in compute tasks, read by training tasks, in real processes."""
import os
import socket
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import pytest

from bagua_hvd.job import channel
from bagua_hvd.job.channel import Hello
from ports import has_ipv6

ELEMENTS = 40
SQUARES = [x * x for x in range(ELEMENTS)]


def pipeline():
    import tensorflow as tf

    return tf.data.Dataset.range(ELEMENTS).map(lambda x: x * x)


def read(dataset):
    return sorted(dataset.as_numpy_iterator())


def train(path):
    import tensorflow as tf

    import bagua_hvd.tensorflow as hvd
    from bagua_hvd.tensorflow.data import compute_service

    hvd.init()
    config = compute_service.TfDataServiceConfig.read(path, wait_for_file_creation=True)
    assert (config.dispatchers, config.workers_per_dispatcher, config.dispatcher_side) == (1, 2, "compute")
    # Each rank reads its own pass.
    assert read(pipeline().send_to_data_service(config, hvd.rank())) == SQUARES
    # Both workers compute the whole pipeline.
    twice = pipeline().send_to_data_service(config, hvd.rank(), processing_mode="parallel_epochs")
    assert read(twice) == sorted(2 * SQUARES)
    # The ranks share one pass.
    numbers = read(compute_service.send_to_data_service(pipeline(), config, hvd.rank(), reuse_dataset=True))
    assert sorted(sum(hvd.allgather_object(numbers), [])) == SQUARES
    # The ranks read in turn, an equal number of elements each.
    endless = tf.data.Dataset.range(2).repeat()
    turns = compute_service.send_to_data_service(endless.map(lambda x: x + 1), config, hvd.rank(), hvd.size(),
                                                 "parallel_epochs", reuse_dataset=True, round_robin=True)
    assert len(read(turns.take(6))) == 6
    with pytest.raises(ValueError, match="round_robin=True needs size"):
        compute_service.send_to_data_service(endless, config, hvd.rank(), round_robin=True)
    hvd.allreduce(tf.zeros([]))
    if hvd.rank() == 0:
        config.compute_client(verbose=2).shutdown()


@pytest.mark.long
def test_dispatcher_among_the_compute_tasks(run_ranks, launcher, tmp_path):
    path = tmp_path / "service.json"
    compute = launcher.start("-np", "2", sys.executable, "-m", "bagua_hvd.tensorflow.data.compute_worker", path)
    run_ranks(2, train, arguments={"path": str(path)}, timeout=100)
    _, errors = compute.communicate(timeout=60)
    assert compute.returncode == 0, errors
    assert not path.exists()


def train_with_dispatchers(path):
    """Ranks 0 and 1 train and dispatch, ranks 2 and 3 compute."""
    rank = int(os.environ["HOROVOD_RANK"])
    from bagua_hvd.tensorflow.data import compute_service, compute_worker

    if rank >= 2:
        os.environ.update(HOROVOD_RANK=str(rank - 2), HOROVOD_SIZE="2")
        with pytest.raises(ValueError, match="dispatchers=3 must divide the number of compute tasks, 2"):
            compute_worker.main(3, "training", path, 60)
        compute_worker.main(2, "training", path, 60)
        return
    import tensorflow as tf

    config = compute_service.TfDataServiceConfig.read(path, wait_for_file_creation=True)
    with pytest.raises(RuntimeError, match="dispatcher_side='training'"):
        compute_service.send_to_data_service(pipeline(), config, rank)
    with compute_service.tf_data_service(config, rank) as service:
        # Each dispatcher has one worker.
        dataset = pipeline().apply(tf.data.experimental.service.distribute("parallel_epochs", service))
        assert read(dataset) == SQUARES


def test_dispatchers_among_the_training_tasks(run_ranks, tmp_path):
    run_ranks(4, train_with_dispatchers, arguments={"path": str(tmp_path / "service.json")}, timeout=100)


def read_by_ipv6():
    from bagua_hvd.tensorflow.data.compute_service import (
        Registry,
        TfDataServiceConfig,
        compute_worker_fn,
        send_to_data_service,
    )

    with Registry(b"secret", "::1") as registry:
        config = TfDataServiceConfig(1, 1, "compute", [["::1", registry.port]], b"secret")
        worker = threading.Thread(target=compute_worker_fn, args=(config,))
        worker.start()
        assert read(send_to_data_service(pipeline(), config, 0)) == SQUARES
        config.shutdown()
        worker.join()


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_a_service_that_is_reached_by_ipv6(run_ranks):
    run_ranks(1, read_by_ipv6, timeout=100)


def check_config(path):
    from bagua_hvd.tensorflow.data.compute_service import TfDataServiceConfig

    with pytest.raises(FileNotFoundError):
        TfDataServiceConfig.read(path)
    config = TfDataServiceConfig(2, 3, "compute", [["127.0.0.1", 1]], b"\x00key", timeout=1)
    config.write(path)
    assert path.stat().st_mode & 0o077 == 0
    assert TfDataServiceConfig.read(str(path)) == TfDataServiceConfig.from_dict(config.to_dict()) == config
    with pytest.raises(AttributeError):
        config.timeout = 2
    with pytest.raises(TimeoutError, match="does not answer"):
        config.shutdown()
    for wrong in ((0, 1, "compute"), (1, 0, "compute"), (1, 1, "neither")):
        with pytest.raises(ValueError, match="expected"):
            TfDataServiceConfig(*wrong, [], b"")


def check_registry():
    from bagua_hvd.tensorflow.data.compute_service import Address, Attach, Client, Dispatcher, Finished, Registry

    with Registry(b"secret") as registry:
        at = [["127.0.0.1", registry.port]]
        with pytest.raises(TimeoutError, match="secret differs|closed the connection"):
            Client(at, b"another secret", 0.2)
        # An address that does not answer does not delay the others until the timeout.
        with socket.create_server(("127.0.0.1", 0)) as silent:
            begin = time.monotonic()
            Client([["127.0.0.1", silent.getsockname()[1]], *at], b"secret", 12).close()
            assert time.monotonic() - begin < 10
        with Client(at, b"secret", 2) as worker, Client(at, b"secret", 5) as first, Client(at, b"secret", 5) as other:
            with pytest.raises(TimeoutError, match="dispatcher 1 of the compute service did not start"):
                worker.address_of(1)
            first.send(Dispatcher(1, "a:1"))
            assert other.address_of(1) == "a:1"
            first.send(Attach())
            other.send(Attach())
            first.send(Finished())
            first.close()
            # Another client still reads, so the service stays.
            assert worker.address_of(1) == "a:1"
            other.close()
            worker.wait_for_shutdown()
        # An invalid message closes its connection, and the registry continues.
        connection = channel.Connection("127.0.0.1", registry.port, b"secret", 5)
        connection.send(Hello(1))
        connection.send(Dispatcher("first", "a:1"))
        assert connection.receive(Address) is None
        connection.close()
        with Client(at, b"secret", 5) as late:
            assert late.address_of(1) == "a:1"
            late.wait_for_shutdown()


def check_addresses():
    from bagua_hvd.tensorflow.data.compute_worker import _addresses

    found = [["docker0", "172.17.0.1"], ["eth0", "10.0.0.1"], ["fd00::1%eth0", "fd00::1"], ["lo", "127.0.0.1"]]
    for interfaces, first in (("eth0,lo", "10.0.0.1"), ("lo", "172.17.0.1")):
        with mock.patch("bagua_hvd.job.probe.addresses", lambda: found), mock.patch.dict(
                os.environ, HOROVOD_GLOO_IFACE=interfaces):
            assert _addresses(1)[0] == [first, 1] and _addresses(1)[-1] == ["127.0.0.1", 1]


def config_and_registry(path):
    check_addresses()
    check_config(Path(path))
    check_registry()


def test_config_and_registry(run_ranks, tmp_path):
    run_ranks(1, config_and_registry, arguments={"path": str(tmp_path / "service.json")})
