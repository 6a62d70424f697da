"""`run_ranks` runs a function of the test's module on n ranks, each a real process, and shows their output."""
import os
import secrets
import subprocess
import sys
import time
from base64 import b64encode
from pathlib import Path
from typing import NamedTuple

import pytest

from zygote import Zygote

ROOT = Path(__file__).resolve().parents[2]
# Default of HOROVOD_START_TIMEOUT in tests: when ranks import a framework at once on a busy machine, the last one may
# need more than the usual half minute.
START_SECONDS = "90"

_zygotes = {
    "torch": Zygote("bagua_hvd.torch"),
    "tensorflow": Zygote("bagua_hvd.tensorflow"),
    "keras on torch": Zygote("keras", KERAS_BACKEND="torch"),
}


class RankResult(NamedTuple):
    returncode: int | None      # None: it was killed
    output: str                 # stdout and stderr


def job_environment(rank, size, port, secret, extra=None):
    """The environment that a launcher sets for one rank of a job on this host."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HOROVOD_", "BAGUA_"))}
    environment |= {"BAGUA_FULL_STEPS": "0", "BAGUA_FULL_STEP_BITS": "32"}       # algorithms as published
    environment.update({
        "HOROVOD_RANK": str(rank), "HOROVOD_SIZE": str(size),
        "HOROVOD_LOCAL_RANK": str(rank), "HOROVOD_LOCAL_SIZE": str(size),
        "HOROVOD_CROSS_RANK": "0", "HOROVOD_CROSS_SIZE": "1",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "_HOROVOD_SECRET_KEY": b64encode(secret).decode(),
        "HOROVOD_GLOO_IFACE": "lo",
        "HOROVOD_START_TIMEOUT": START_SECONDS,
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    })
    environment.update(extra or {})
    return environment


def run_ranks(tmp_path, n, function, arguments=None, env=None, timeout=100, check=True, rendezvous=None,
              framework="torch"):
    """Starts n ranks of one job on this host and returns their RankResults.

    `function` is one of the test's module, or a script's path; `arguments` are literals; `env` is for every rank, or a
    list with a dict for each. Unless check is False, every rank must end with 0 within `timeout` seconds.
    `rendezvous`: whether to start a rendezvous server; None: if there are several ranks. `framework`: preloaded in the
    processes: "torch", "tensorflow", or "keras on torch" (Keras with that backend).
    """
    from bagua_hvd.job.rendezvous import Rendezvous

    secret = secrets.token_bytes(32)
    rendezvous = Rendezvous(secret) if (n > 1 if rendezvous is None else rendezvous) else None
    port = rendezvous.port if rendezvous else 1
    outputs = [tmp_path / f"rank{rank}.{time.monotonic_ns()}" for rank in range(n)]
    processes = []
    try:
        for rank in range(n):
            extra = env[rank] if isinstance(env, list) else env
            environment = job_environment(rank, n, port, secret, extra)
            processes.append(_start(function, arguments, environment, outputs[rank], framework))
        _wait(processes, timeout, check)
    finally:
        returncodes = [process.poll() for process in processes]
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        if rendezvous:
            rendezvous.close()
    results = [
        RankResult(returncode, output.read_text(errors="replace"))
        for returncode, output in zip(returncodes, outputs, strict=True)
    ]
    if check and any(result.returncode != 0 for result in results):
        pytest.fail("\n".join(
            f"--- rank {rank} of {n}: "
            + ("killed, as it did not end in time" if result.returncode is None else f"exit code {result.returncode}")
            + f"\n{result.output}"
            for rank, result in enumerate(results)
        ), pytrace=False)
    return results


def printed():
    """The calling rank's output so far."""
    return Path("/proc/self/fd/1").read_text(errors="replace")


def _start(function, arguments, environment, output_path, framework):
    if callable(function):
        return _zygotes[framework].start(function.__code__.co_filename, function.__name__, arguments or {},
                                          environment, output_path)
    with open(output_path, "wb") as output:
        return subprocess.Popen([sys.executable, str(function), *map(str, arguments or ())], env=environment,
                                stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)


def _wait(processes, timeout, check):
    """Waits until all have ended, or `timeout`; after one fails, the others have five more seconds."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if None not in codes:
            return
        if check and any(codes):
            deadline = min(deadline, time.monotonic() + 5)
            check = False
        time.sleep(0.02)
