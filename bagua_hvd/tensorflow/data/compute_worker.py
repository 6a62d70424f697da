"""The compute tasks of a compute service: `baguarun -np 8 python -m bagua_hvd.tensorflow.data.compute_worker FILE`.

Rank 0 runs the registry and writes the file by which the other ranks and the training tasks find it; it removes the
file when the service ends. See compute_service.
"""
import argparse
import hmac
import secrets
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from bagua_hvd.core import variables
from bagua_hvd.job import probe
from bagua_hvd.job.channel import HOROVOD_SECRET_KEY
from bagua_hvd.job.environment import get_env_rank_and_size
from bagua_hvd.job.server import EVERY_INTERFACE
from bagua_hvd.tensorflow.data.compute_service import Registry, TfDataServiceConfig, compute_worker_fn

_POLL_SECONDS = 0.1


def _key():
    """A key that is equal on all ranks of this job and differs in other jobs, so that an old file is recognized."""
    secret = variables.read(HOROVOD_SECRET_KEY)
    return hmac.digest(secret, b"compute service", "sha256") if secret else secrets.token_bytes(32)


def _await(configfile, key, timeout):
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        with suppress(FileNotFoundError):
            config = TfDataServiceConfig.read(configfile)
            if config.key == key or not variables.given(HOROVOD_SECRET_KEY):
                return config
        time.sleep(_POLL_SECONDS)
    raise TimeoutError(f"rank 0 has not written {configfile} within {timeout} seconds")


def _addresses(port):
    """[host, port] pairs of the registry. Servers on its host get the first one, as which others must reach them."""
    chosen = variables.read("HOROVOD_GLOO_IFACE") or ()
    found = sorted(probe.addresses(), key=lambda pair: (
        probe.interface_of(pair[0]) not in chosen or pair[1].startswith("127.")))
    return [[address, port] for _, address in found]


def main(dispatchers: Any, dispatcher_side: Any, configfile: Any, timeout: int) -> None:
    """Runs this rank of the compute tasks until the service ends.

    Args:
        dispatchers: their number, which must divide the number of tasks. dispatcher_side: "compute" or "training".
        configfile: path of the file, on a file system that all tasks share.
        timeout: seconds in which the others must start.
    Raises:
        ValueError: wrong numbers. TimeoutError: a task did not start in time.
    """
    rank, size = get_env_rank_and_size()
    if dispatchers < 1 or size % dispatchers:
        raise ValueError(f"dispatchers={dispatchers} must divide the number of compute tasks, {size}")
    key = _key()
    if rank > 0:
        compute_worker_fn(_await(configfile, key, timeout))
        return
    with Registry(key, EVERY_INTERFACE) as registry:
        config = TfDataServiceConfig(dispatchers, size // dispatchers, dispatcher_side, _addresses(registry.port), key,
                                     timeout)
        config.write(configfile)
        try:
            compute_worker_fn(config)
        finally:
            Path(configfile).unlink(missing_ok=True)


def _parse(arguments):
    parser = argparse.ArgumentParser(prog="python -m bagua_hvd.tensorflow.data.compute_worker", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configfile", help="file to write, for the training tasks")
    parser.add_argument("--dispatchers", type=int, default=1, help="default 1")
    parser.add_argument("--dispatcher-side", choices=("compute", "training"), default="compute",
                        help="which tasks run the dispatchers; default compute")
    parser.add_argument("--timeout", type=int, default=60,
                        help="seconds in which the other tasks have to appear; default 60")
    return vars(parser.parse_args(arguments))


if __name__ == "__main__":
    main(**_parse(sys.argv[1:]))
