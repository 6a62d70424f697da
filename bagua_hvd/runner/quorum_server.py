"""A server for outer steps with a quorum that outlives all ranks: see algorithms/quorum.py.

    _HOROVOD_SECRET_KEY=... BAGUA_HVD_PORTS=29400 python -m bagua_hvd.runner.quorum_server
"""
import sys
import threading

from bagua_hvd.algorithms.quorum import QuorumServer
from bagua_hvd.core import variables
from bagua_hvd.job.server import EVERY_INTERFACE


def main() -> None:
    """Serves on all interfaces, on the first free port of BAGUA_HVD_PORTS, until the process is killed."""
    secret = variables.read("_HOROVOD_SECRET_KEY")
    if not secret:
        sys.exit("_HOROVOD_SECRET_KEY is not set: export _HOROVOD_SECRET_KEY=$(openssl rand -base64 32), here and for "
                 "all ranks")
    with QuorumServer(secret, EVERY_INTERFACE) as server:
        print(f"quorum server: port {server.port}", flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
