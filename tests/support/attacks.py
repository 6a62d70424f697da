"""Attacks of a hostile network on a port: the attacker knows the protocol, but, unless noted, no secret."""
import hashlib
import hmac
import os
import random
import resource
import socket
import struct
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

JOB = b"BVHe\x04\0\0\0"      # the first bytes of a hello: job/channel.py
HELLO_SIZE, PROOF_SIZE, ADMISSION_SIZE = 40, 32, 1
_SECONDS = 60       # far longer than a service takes to hang up on a busy machine


def listening(pid):
    """A process's listening addresses: (host, port), or the abstract name of a UNIX socket as bytes."""
    found = [("127.0.0.1", each.laddr.port) for each in psutil.Process(pid).net_connections("tcp")
             if each.status == psutil.CONN_LISTEN]
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(os.readlink(descriptor))
        except OSError:
            pass        # closed in the meantime
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        _, _, _, flags, _, _, inode, *name = line.split()
        if int(flags, 16) & 0x10000 and f"socket:[{inode}]" in inodes and name and name[0].startswith("@"):
            found.append(b"\0" + name[0][1:].encode())
    return found


def connect(address):
    """A connected socket with a timeout."""
    family = socket.AF_UNIX if isinstance(address, bytes) else socket.AF_INET
    connection = socket.socket(family, socket.SOCK_STREAM)
    connection.settimeout(_SECONDS)
    connection.connect(address)
    return connection


def heard(connection):
    """All data until the other side hangs up; TimeoutError: it does not."""
    data = b""
    try:
        while more := connection.recv(65536):
            data += more
    except ConnectionError:
        pass
    return data


def say(address, *pieces):
    """Sends these pieces; returns the response until the other side hangs up."""
    with connect(address) as connection:
        try:
            for piece in pieces:
                connection.sendall(piece)
            connection.shutdown(socket.SHUT_WR)
        except OSError:
            pass        # it has already hung up
        return heard(connection)


def exactly(connection, size):
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        assert more, f"hung up after {data!r}"
        data += more
    return data


def hello_of(nonce=bytes(32)):
    """A peer's first message to a rendezvous or driver."""
    return JOB + nonce


def introduction_of(rank, proof):
    """A rank's first message to another rank: native/transport/auth.h."""
    return struct.pack("<iII", rank, 0, 1) + proof


def proven(address, secret):
    """(a connection that has proven the secret, the received data): a peer of a rendezvous or driver turned bad."""
    connection = connect(address)
    hello = hello_of(os.urandom(32))
    connection.sendall(hello)
    theirs = exactly(connection, len(hello))
    bound = b"c" + JOB + struct.pack("<I", address[1])
    proof = hmac.digest(secret, bound + hello[-32:] + theirs[-32:], hashlib.sha256)
    connection.sendall(proof)
    exactly(connection, PROOF_SIZE + ADMISSION_SIZE)
    return connection, hello + proof


def strangers(address, seed):
    """Noise, parts of a handshake, wrong and reflected proofs. They receive nothing but a hello and a proof."""
    choice = random.Random(seed)
    hello = hello_of(choice.randbytes(32))
    said = [
        [choice.randbytes(choice.choice([1, 39, 41, 1000, 200_000])) for _ in range(3)],
        [hello[:choice.randrange(1, len(hello))]],
        [hello],
        [hello, choice.randbytes(PROOF_SIZE)],
        [hello, bytes(PROOF_SIZE), choice.randbytes(1000)],
        [introduction_of(1, choice.randbytes(PROOF_SIZE))],
        [introduction_of(choice.choice([0, -1, 1 << 20]), bytes(PROOF_SIZE))],
        [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"],
        [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + choice.randbytes(500)],
        [struct.pack("<I", 0xFFFFFFFF) * 64],
    ]
    for pieces in said:
        assert len(say(address, *pieces)) <= HELLO_SIZE + PROOF_SIZE
    reflect(address)


def reflect(address):
    """Sends the other side's messages back to it."""
    with connect(address) as connection:
        hello = hello_of()
        connection.sendall(hello)
        theirs = b""
        try:
            while len(theirs) < len(hello) + PROOF_SIZE and (more := connection.recv(4096)):
                theirs += more
            connection.sendall(theirs[len(hello):] or bytes(PROOF_SIZE))
        except ConnectionError:
            pass        # another protocol's hello
        assert len(theirs) <= HELLO_SIZE + PROOF_SIZE
        assert heard(connection) == b""


def replay(address, recorded):
    """Replays the messages of a rank that had proven the secret."""
    assert len(say(address, recorded, b"\0" * 1000)) <= HELLO_SIZE + PROOF_SIZE


def scan(address, count):
    """Connects and resets, like a port scan."""
    for _ in range(count):
        with connect(address) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@contextmanager
def descriptors(count):
    """Lets this process open this many files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, count), hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def idle(address, count, said=b""):
    """Opens this many connections, which send only `said` and stay open."""
    with ExitStack() as stack:
        stack.enter_context(descriptors(2 * count + 500))
        for _ in range(count):
            connection = stack.enter_context(connect(address))
            try:
                connection.sendall(said)
            except OSError:
                pass
        yield
