import os
from pathlib import Path

import pytest

from elastic_job import ElasticJob


def shared_memory():
    return set(os.listdir("/dev/shm")) if Path("/dev/shm").is_dir() else set()


@pytest.fixture
def make_job(launcher):
    """make_job(hosts): an ElasticJob. The test fails when a process or a file in shared memory is left behind."""
    before = shared_memory()
    yield lambda hosts: ElasticJob(launcher, hosts)
    left = {name for name in shared_memory() - before if "bagua" in name}
    assert not left, f"left in /dev/shm: {left}"
