"""A process that has imported a framework and forks ranks, which saves each rank seconds of imports.

Run as a script, with the module to import, it is the zygote: it reads one JSON line for each process to start, and
writes one when it started and one when it ended. `Zygote` is the other end; its processes look like subprocess.Popen.
"""
import ast
import atexit
import contextlib
import gc
import importlib
import importlib.util
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import traceback


class ZygoteProcess:
    def __init__(self, zygote, pid):
        self._zygote = zygote
        self.pid = pid
        self.returncode = None

    def poll(self):
        self._zygote.read(timeout=0)
        return self.returncode

    def wait(self):
        while self.returncode is None:
            self._zygote.read(timeout=0.02)
        return self.returncode

    def kill(self):
        self.signal(signal.SIGKILL)

    def signal(self, number):
        """Sends a signal, unless the process has ended or ends during the call."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class Zygote:
    """Starts the zygote with the first process. Safe for several threads.

    Args:
        module: imported besides pytest; must leave the process with one thread. variables: of its environment.
    """

    def __init__(self, module, **variables):
        self._module = module
        self._variables = variables
        self._popen = None
        self._processes = {}
        self._buffer = b""
        self._lock = threading.RLock()

    def start(self, path, function, arguments, environment, output):
        """Calls a function of the file in a new process with stdout and stderr redirected to `output`, a path."""
        with self._lock:
            return self._start(path, function, arguments, environment, output)

    def _start(self, path, function, arguments, environment, output):
        if self._popen is None:
            self._popen = subprocess.Popen(
                [sys.executable, __file__, self._module], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": environment["PYTHONPATH"],
                     "TF_CPP_MIN_LOG_LEVEL": "3", **self._variables},
            )
            self._selector = selectors.DefaultSelector()
            self._selector.register(self._popen.stdout, selectors.EVENT_READ)
            atexit.register(self._end)
        order = {"path": str(path), "function": function, "arguments": repr(arguments), "environment": environment,
                 "output": str(output)}
        self._popen.stdin.write(json.dumps(order).encode() + b"\n")
        self._popen.stdin.flush()
        started = None
        while started is None:
            started = self._read(timeout=None)
        return started

    def _end(self):
        self._popen.stdin.close()
        self._popen.wait()

    def read(self, timeout):
        """Reads the zygote's reports; returns the process that it started, if any."""
        with self._lock:
            return self._read(timeout)

    def _read(self, timeout):
        started = None
        while b"\n" not in self._buffer:
            if not self._selector.select(timeout):
                return None
            data = os.read(self._popen.stdout.fileno(), 65536)
            assert data, "the zygote died"
            self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            report = json.loads(line)
            pid = report["pid"]
            if "returncode" in report:
                self._processes.pop(pid).returncode = report["returncode"]
            else:
                started = self._processes[pid] = ZygoteProcess(self, pid)
        return started


def _run(order):
    """In the child: runs as the rank, and exits like an interpreter."""
    os.environ.clear()
    os.environ.update(order["environment"])
    output = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    code = 0
    try:
        spec = importlib.util.spec_from_file_location("worker_module", order["path"])
        module = importlib.util.module_from_spec(spec)
        sys.modules["worker_module"] = module
        spec.loader.exec_module(module)
        getattr(module, order["function"])(**ast.literal_eval(order["arguments"]))
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _main():
    # These imports take most time. torch imports more when the first optimizer is made; test files import pytest.
    importlib.import_module("pytest")
    importlib.import_module(sys.argv[1])
    if sys.argv[1].endswith("torch"):
        importlib.import_module("torch._dynamo")
    gc.collect()
    gc.freeze()                 # otherwise the first collection in each child copies all pages with objects
    wakeup_read, wakeup_write = os.pipe()
    os.set_blocking(wakeup_write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakeup_write)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    selector.register(wakeup_read, selectors.EVENT_READ)
    buffer = b""

    def report(**values):
        os.write(1, json.dumps(values).encode() + b"\n")

    while True:
        for key, _ in selector.select():
            data = os.read(key.fd, 65536)
            if key.fd == 0:
                if not data:
                    return
                buffer += data
        *orders, buffer = buffer.split(b"\n")
        for line in orders:
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                _run(json.loads(line))
            report(pid=pid)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            report(pid=pid, returncode=os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    _main()
