"""Python programs that begin at once: forks of a process that has imported PyTorch and bagua_hvd.torch already.

    with Preloaded() as command:
        [*command, program, *arguments]     # in place of [sys.executable, program, *arguments]

What command starts stands for the fork: it passes SIGTERM and SIGINT on, ends as the fork ends, and takes it along when
it is killed.
"""
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

FILES = (0, 1, 2)


class Preloaded:
    def __enter__(self):
        self._folder = tempfile.TemporaryDirectory(prefix="preloaded.")
        path = f"{self._folder.name}/socket"
        self._server = subprocess.Popen([sys.executable, __file__, "serve", path], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE)
        self._server.stdout.readline()      # it has imported
        return [sys.executable, "-S", "-E", __file__, "start", path]

    def __exit__(self, *_):
        self._server.communicate(timeout=60)
        self._folder.cleanup()


def start(path, *command):
    """In the process that stands for the fork."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    request = json.dumps([command, dict(os.environ), os.getcwd()]).encode()
    socket.send_fds(connection, [len(request).to_bytes(4, "big")], FILES)
    connection.sendall(request)
    child = int.from_bytes(connection.recv(4), "big")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: os.kill(child, number))
    status = int.from_bytes(connection.recv(4), "big", signed=True)     # tried again after a signal (PEP 475)
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def read(connection):
    """(files, command, environment, folder) of who stands for a fork."""
    size, files, _, _ = socket.recv_fds(connection, 4, len(FILES))
    request = b""
    while len(request) < int.from_bytes(size, "big"):
        request += connection.recv(1 << 20)
    return files, *json.loads(request)


def run(files, command, environment, folder):
    """In the fork."""
    os.setpgid(0, 0)
    for file, target in zip(files, FILES, strict=True):
        os.dup2(file, target)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = list(command)
    sys.path[0] = str(Path(command[0]).parent)
    runpy.run_path(command[0], run_name="__main__")


def serve(path):
    """In the process that is forked: until its stdin ends."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    import torch
    import torch._dynamo  # noqa: F401  (the first step of an optimizer imports it)

    import bagua_hvd.torch  # noqa: F401

    torch.set_num_threads(1)
    print(flush=True)
    woken, wake = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    selector = selectors.DefaultSelector()
    for file in (sys.stdin.fileno(), listener, woken):
        selector.register(file, selectors.EVENT_READ)
    children = {}       # connection -> pid
    while True:
        for key, _ in selector.select():
            if key.fileobj == sys.stdin.fileno():
                for child in children.values():
                    os.kill(child, signal.SIGKILL)
                return
            if key.fileobj is listener:
                connection, _ = listener.accept()
                wanted = read(connection)
                child = os.fork()
                if child == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    selector.close()
                    for file in (listener, woken, wake, connection, *children):
                        file.close()
                    run(*wanted)
                    sys.exit(0)
                for file in wanted[0]:
                    os.close(file)
                connection.sendall(child.to_bytes(4, "big"))
                children[connection] = child
                selector.register(connection, selectors.EVENT_READ)
            elif key.fileobj is woken:
                woken.recv(100)
                for connection, child in list(children.items()):
                    found, status = os.waitpid(child, os.WNOHANG)
                    if found:
                        code = os.waitstatus_to_exitcode(status)
                        try:
                            connection.sendall(code.to_bytes(4, "big", signed=True))
                        except OSError:
                            pass        # who stood for it was killed
                        if connection in selector.get_map():
                            selector.unregister(connection)
                        connection.close()
                        del children[connection]
            elif key.fileobj in children:       # who stands for it has ended
                os.kill(children[key.fileobj], signal.SIGKILL)
                selector.unregister(key.fileobj)


if __name__ == "__main__":
    {"serve": serve, "start": start}[sys.argv[1]](*sys.argv[2:])
