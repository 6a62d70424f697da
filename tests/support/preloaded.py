"""Workers that start fast: main(argument) of a file, in a fork of a process that has imported PyTorch (zygote.py).

    with Preloaded() as command:
        [*command, file, argument]      # instead of [sys.executable, file, argument]

The command's process represents the fork: it ends with it, and a kill of the process kills the fork. The fork writes
stdout and stderr to the process's stdout.
"""
import json
import os
import select
import signal
import socket
import sys
import tempfile
import threading


class Preloaded:
    def __enter__(self):
        from zygote import Zygote

        self._folder = tempfile.TemporaryDirectory(prefix="preloaded.")
        self._zygote = Zygote("bagua_hvd.torch")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"{self._folder.name}/socket")
        self._listener.listen(64)
        threading.Thread(target=self._serve, daemon=True).start()
        return [sys.executable, "-S", "-E", __file__, f"{self._folder.name}/socket"]

    def __exit__(self, *_):
        self._folder.cleanup()      # from now on no process can connect

    def _serve(self):
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._run, args=(connection,), daemon=True).start()

    def _run(self, connection):
        with connection:
            pid, file, argument, environment = json.loads(connection.makefile().readline())
            child = self._zygote.start(file, "main", {"name": argument}, environment, f"/proc/{pid}/fd/1")
            while child.poll() is None:
                if select.select([connection], [], [], 0.01)[0]:       # the representing process has ended
                    child.kill()
                    return
            connection.sendall(f"{child.returncode}\n".encode())


def stand_in(path, file, argument):
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    connection.sendall(json.dumps([os.getpid(), file, argument, dict(os.environ)]).encode() + b"\n")
    code = int(connection.makefile().readline())
    if code < 0:
        if code != -signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    stand_in(*sys.argv[1:])
