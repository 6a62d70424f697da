"""Runs mixed operations on four ranks, and compares every result with NumPy's: `make soak`.

    python tests/soak/soak.py OPERATIONS [SEED]

Random kinds, dtypes, sizes, orders, process sets and joins, alternately over shared memory and TCP (with a new
rendezvous each time). Memory and descriptors must not grow after the first quarter. Prints a summary; exits with 0 if
all results were correct.
"""
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]
from plan import RANKS  # noqa: E402

from bagua_hvd.job.rendezvous import Rendezvous  # noqa: E402
from ranks import job_environment  # noqa: E402


def main(operations, seed):
    secret = os.urandom(32)
    rendezvous = Rendezvous(secret)
    command = [sys.executable, str(Path(__file__).with_name("rank.py")), str(operations), str(seed)]
    began = time.monotonic()
    processes = []
    try:
        for rank in range(RANKS):
            environment = job_environment(rank, RANKS, rendezvous.port, secret) | {"PYTHONMALLOC": "malloc"}
            processes.append(subprocess.Popen(command, env=environment))
        codes = [process.wait() for process in processes]       # when one fails, the others get an error
    finally:
        for process in processes:
            process.kill()
            process.wait()
        rendezvous.close()
    print(f"{operations} operations over {RANKS} ranks, seed {seed}: exit codes {codes}, "
          f"{time.monotonic() - began:.0f} s", flush=True)
    return 0 if codes == [0] * RANKS else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1))
