"""The machine's own limits, without collectives: memcpy, and TCP between two processes.

As a program, `python -m tests.laboratory.ceiling listen|connect ADDRESS`: one end of a link between two hosts; the
listening end writes the samples of TCP_CASES to stdout as JSON.
"""
import ctypes
import json
import multiprocessing
import select
import socket
import statistics
import subprocess
import sys
import time

from bagua_hvd.bench.rank import KIB, MIB, human_nbytes
from bagua_hvd.bench.report import microseconds

COLUMNS = ("what", "size", "median us", "min", "max", "GB/s")
FORK = multiprocessing.get_context("fork")
ANSWER_SECONDS = 60
LINK_PORT = 5777
LOOPBACK, LINK = (f"{what}, both ways at once" for what in ("loopback TCP", "TCP between two hosts"))
TCP_CASES = ((4, 2000), (KIB, 2000), (MIB, 200), (16 * MIB, 20), (64 * MIB, 8))      # bytes, repeats


def _copy(nbytes, start, answers):
    source, target = bytearray(nbytes), bytearray(nbytes)
    source[:], target[:] = b"1" * nbytes, b"0" * nbytes         # touches every page
    to, of = (ctypes.addressof(ctypes.c_char.from_buffer(array)) for array in (target, source))
    repeats = max(1, 16 * MIB // nbytes)
    start.wait(ANSWER_SECONDS)
    samples, end = [], time.perf_counter() + 0.5
    while time.perf_counter() < end:
        started = time.perf_counter()
        for _ in range(repeats):
            ctypes.memmove(to, of, nbytes)
        samples.append((time.perf_counter() - started) / repeats)
    answers.put(samples)


def _in_processes(count, target, *arguments):
    """The response of each of `count` processes."""
    answers = FORK.Queue()
    processes = [FORK.Process(target=target, args=(*arguments, answers), daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        return [answers.get(timeout=ANSWER_SECONDS) for _ in processes]
    finally:
        for process in processes:
            process.join(1)
            process.kill()


def exchange(connection, source, target):
    """Sends and receives simultaneously on a non-blocking socket."""
    while len(source) or len(target):
        readable, writable, _ = select.select([connection] if len(target) else [], [connection] if len(source) else [],
                                              [])
        if readable:
            got = connection.recv_into(target)
            if not got:
                raise ConnectionError("the other process of the TCP measurement ended")
            target = target[got:]
        if writable:
            source = source[connection.send(source[:4 * MIB]):]


def _exchanges(connection, nbytes, repeats):
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setblocking(False)
    source, target = memoryview(bytearray(nbytes)), memoryview(bytearray(nbytes))
    samples = []
    for _ in range(repeats):
        started = time.perf_counter()
        exchange(connection, source, target)
        samples.append(time.perf_counter() - started)
    return samples[2:]


def _tcp(nbytes, repeats):
    """Seconds in which two processes send each other `nbytes` simultaneously."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    other = FORK.Process(target=_exchanges, args=(theirs, nbytes, repeats), daemon=True)
    other.start()
    theirs.close()
    try:
        with ours:
            return _exchanges(ours, nbytes, repeats)
    finally:
        other.join(1)
        other.kill()


def _between(hosts):
    """The samples of TCP_CASES for the link of the first two hosts."""
    ends = [subprocess.Popen(["ip", "netns", "exec", hosts.names[index], sys.executable, "-m", __spec__.name, role,
                              hosts.address_of(0)], stdout=subprocess.PIPE)
            for index, role in enumerate(("listen", "connect"))]
    try:
        output, _ = ends[0].communicate(timeout=10 * ANSWER_SECONDS)
    finally:
        for end in ends:
            end.kill()
            end.wait()
    if ends[0].returncode:
        raise RuntimeError("the hosts could not exchange data")
    return json.loads(output)


def measure(hosts=None):
    """(name, bytes, [seconds]) for each line of the table: the link between `hosts`, or this machine."""
    if hosts:
        return [(LINK, nbytes, samples)
                for (nbytes, _), samples in zip(TCP_CASES, _between(hosts), strict=True)]
    lines = []
    for nbytes in (256 * KIB, 16 * MIB, 64 * MIB):
        for count in (1, 2):
            answers = _in_processes(count, _copy, nbytes, FORK.Barrier(count))
            what = "memcpy, 1 process" if count == 1 else f"memcpy, each of {count} processes"
            lines.append((what, nbytes, [sample for samples in answers for sample in samples]))
    for nbytes, repeats in TCP_CASES:
        lines.append((LOOPBACK, nbytes, _tcp(nbytes, repeats + 2)))
    return lines


def rows(lines):
    """The table and the JSON for measure()'s result."""
    found = []
    for what, nbytes, samples in lines:
        median = statistics.median(samples)
        found.append({"what": what, "nbytes": nbytes, "median_us": median * 1e6, "min_us": min(samples) * 1e6,
                      "max_us": max(samples) * 1e6, "gbs": nbytes / median / 1e9})
    return found


def cells(row):
    return (row["what"], human_nbytes(row["nbytes"]), *map(microseconds, (row["median_us"], row["min_us"],
            row["max_us"])), f"{row['gbs']:.3f}")


def _connect(address):
    deadline = time.monotonic() + ANSWER_SECONDS
    while True:
        try:
            return socket.create_connection((address, LINK_PORT))
        except ConnectionRefusedError:          # it may not listen yet
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def end_of_link(role, address):
    """The socket between two hosts. `address` is that of the one with the role "listen"; the other one connects."""
    if role == "listen":
        with socket.create_server((address, LINK_PORT)) as server:
            return server.accept()[0]
    return _connect(address)


def main(role, address):
    with end_of_link(role, address) as connection:
        samples = [_exchanges(connection, nbytes, repeats + 2) for nbytes, repeats in TCP_CASES]
    if role == "listen":
        json.dump(samples, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
