"""Workers that begin at once: main(argument) of a file, in a fork of a process that has imported PyTorch (zygote.py).

    with Preloaded() as command:
        [*command, file, argument]      # in place of [sys.executable, file, argument]

What this command starts stands for the fork: it ends as the fork ends, and takes it along when it is killed. The fork
writes stdout and stderr to its stdout.
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
        self._folder.cleanup()      # nobody finds it any more

    def _serve(self):
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._run, args=(connection,), daemon=True).start()

    def _run(self, connection):
        with connection:
            pid, file, argument, environment = json.loads(connection.makefile().readline())
            child = self._zygote.start(file, "main", {"name": argument}, environment, f"/proc/{pid}/fd/1")
            while child.poll() is None:
                if select.select([connection], [], [], 0.01)[0]:       # who stood for it has ended
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
