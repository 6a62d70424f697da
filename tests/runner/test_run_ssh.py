"""bagua_hvd.run on other hosts, over a real sshd."""
import os

import pytest

import bagua_hvd

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def run(ssh_hosts, monkeypatch, tmp_path):
    for name, value in ssh_hosts.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return bagua_hvd.run


def place():
    return int(os.environ["HOROVOD_RANK"]), os.environ["HOROVOD_HOSTNAME"]


def test_results_are_in_the_order_of_the_ranks(run):
    expected = [(0, "far1"), (1, "localhost"), (2, "far2"), (3, "far2")]
    assert run(place, num_proc=4, hosts="far1:1,localhost:1,far2:2") == expected


def test_arguments_and_large_results(run):
    blob = os.urandom(3 << 20)
    assert run(lambda a, b: (b, a), args=(blob,), kwargs={"b": 2}, hosts="far1:1") == [(2, blob)]


def test_an_exception_has_the_workers_traceback(run):
    def fails():
        if os.environ["HOROVOD_RANK"] == "1":
            raise KeyError("mine")
        import time

        time.sleep(60)

    with pytest.raises(RuntimeError, match=r"Process name: 1, Exit code: 1(.|\n)*in fails(.|\n)*KeyError: 'mine'"):
        run(fails, num_proc=2, hosts="far1:1,far2:1")


def test_a_rank_that_ends_without_a_result(run):
    with pytest.raises(RuntimeError, match="Process name: 0, Exit code: 0: the process ended before"):
        run(lambda: os._exit(0), hosts="far1:1")


def test_an_identity_file_that_is_not_there(run):
    with pytest.raises(ValueError, match="ssh identity file /no/such/key: no such file"):
        run(place, hosts="far1:1", ssh_identity_file="/no/such/key")
