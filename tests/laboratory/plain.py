"""Plain TCP's throughput over the links of hosts: the bound for transfers much longer than a round trip."""
import ctypes
import os
import select
import socket
import statistics
import time
from multiprocessing import get_context

PORT = 5778
START_SECONDS, BLOCK = 30.0, 1 << 18
CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


def enter(namespace):
    """Moves this thread, and everything it starts, into the network namespace."""
    file = os.open(f"/run/netns/{namespace}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _libc.setns(file, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"namespace {namespace}")
    finally:
        os.close(file)


def _connect(address):
    end = time.monotonic() + START_SECONDS
    while True:
        try:
            return socket.create_connection((address, PORT), START_SECONDS)
        except ConnectionRefusedError:          # it may not listen yet
            if time.monotonic() > end:
                raise
            time.sleep(0.02)


def _host(namespace, address, other, seconds, warm, answers, together):
    """Sends to one host and receives from another; puts bytes per second, over `seconds` after the warm-up."""
    enter(namespace)
    with socket.create_server((address, PORT)) as server, _connect(other) as to, server.accept()[0] as source:
        to.setblocking(False)
        together.wait(START_SECONDS)
        began, received, before = time.monotonic(), 0, (0.0, 0)
        target, block = bytearray(1 << 20), bytes(BLOCK)
        while (now := time.monotonic()) < began + warm + seconds:
            readable, writable, _ = select.select([source], [to], [], 0.1)
            if readable:
                received += source.recv_into(target)
            if writable:
                to.send(block)
            if not before[0] and now > began + warm:
                before = now, received
        answers.put((received - before[1]) / (time.monotonic() - before[0]))
        together.wait(START_SECONDS)            # a late one still sends


def _echo(namespace, address, other, times, answers, together):
    enter(namespace)
    if other is None:
        with socket.create_server((address, PORT)) as server, server.accept()[0] as link:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while data := link.recv(1):
                link.sendall(data)
        return
    with _connect(other) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        found = []
        for _ in range(times):
            began = time.perf_counter()
            link.sendall(b".")
            link.recv(1)
            found.append(time.perf_counter() - began)
        answers.put(found)


def _run(count, target, arguments, answers_expected, seconds):
    context = get_context("fork")
    answers, together = context.SimpleQueue(), context.Barrier(count)
    processes = [context.Process(target=target, args=(*arguments(index), answers, together), daemon=True)
                 for index in range(count)]
    for process in processes:
        process.start()
    try:
        end = time.monotonic() + seconds + START_SECONDS
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
        if any(process.exitcode for process in processes):
            raise RuntimeError("hosts could not exchange data")
        return [answers.get() for _ in range(answers_expected)]
    finally:
        for process in processes:
            process.kill()


def throughput(hosts, seconds=2.0, warm=1.0):
    """Bytes of data per second that each host receives while every host sends to the next one."""
    return _run(hosts.count, _host, lambda index: (
        hosts.names[index], hosts.address_of(index), hosts.address_of((index + 1) % hosts.count), seconds, warm),
        hosts.count, seconds + warm)


def round_trip(hosts, times=50):
    """The median seconds of a byte from host 1 to host 0 and back."""
    answers, = _run(2, _echo, lambda index: (
        hosts.names[index], hosts.address_of(index), hosts.address_of(0) if index else None, times), 1, 60.0)
    return statistics.median(answers)
