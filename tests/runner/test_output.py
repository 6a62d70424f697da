import io
import os
import pty
import re
import threading
import time

import pytest

from bagua_hvd.runner.output import Console, Descriptor, LineForwarder, TextStream


class Sink:
    def __init__(self, is_terminal=False):
        self.is_terminal = is_terminal
        self.while_blocked = None
        self.data = b""

    def write(self, data):
        self.data += data


def forward(*pieces, is_terminal=False, **options):
    """The console output for one rank that writes these pieces."""
    sink = Sink(is_terminal)
    console = Console(sink, Sink())
    forwarder = LineForwarder(console, 0, "stdout", **options)
    for piece in pieces:
        forwarder.feed(piece)
    forwarder.close()
    console.close()
    return sink.data


@pytest.mark.parametrize("pieces, lines", [
    ([b"a\nb\n"], [b"a", b"b"]),
    ([b"a", b"b\nc", b"\n"], [b"ab", b"c"]),
    ([b"no end"], [b"no end"]),
    ([b"\n\n"], [b"", b""]),
    ([b""], []),
    ([b"a\r\nb\r\n"], [b"a", b"b"]),
    ([b"a\r", b"\nb\r", b"\n"], [b"a", b"b"]),
    ([b"10%\r20%\r30%\n"], [b"10%", b"20%", b"30%"]),
    ([b"\r10%", b"\r20%", b"\n"], [b"10%", b"20%"]),
    ([b"\xff\x00\xfe\n"], [b"\xff\x00\xfe"]),
])
def test_lines(pieces, lines):
    assert forward(*pieces) == b"".join(b"[0]<stdout>:" + line + b"\n" for line in lines)


def test_any_cut_gives_the_same_lines():
    data = b"one\r\ntwo\n\nthree\rfour\r\rfive"
    whole = forward(data)
    for first in range(len(data)):
        for second in range(first, len(data)):
            assert forward(data[:first], data[first:second], data[second:]) == whole


def test_a_line_is_written_when_it_ends():
    sink = Sink()
    forwarder = LineForwarder(Console(sink, Sink()), 7, "stdout")
    forwarder.feed(b"one\ntwo")
    assert sink.data == b"[7]<stdout>:one\n"


def test_timestamp():
    line = forward(b"text\n", timestamp=True).decode()
    assert re.fullmatch(r"\w{3} \w{3} [ \d]\d \d\d:\d\d:\d\d \d{4}\[0\]<stdout>:text\n", line)


def test_an_endless_line_is_cut(monkeypatch):
    monkeypatch.setattr("bagua_hvd.runner.output._LINE_MAX_NBYTES", 10)
    assert forward(b"x" * 6, b"y" * 6, b"z\n") == b"[0]<stdout>:" + b"x" * 6 + b"y" * 6 + b"\n[0]<stdout>:z\n"


def test_bars_on_a_terminal_are_drawn_over_by_their_own_rank_only():
    sink = Sink(is_terminal=True)
    console = Console(sink, sink)
    first, second = (LineForwarder(console, rank, "stdout") for rank in (0, 1))
    first.feed(b"10%\r")
    first.feed(b"20%\r")
    second.feed(b"text\n")
    first.feed(b"30%\r")
    console.say("ours")
    assert sink.data == (b"[0]<stdout>:10%\r[0]<stdout>:20%\r\n[1]<stdout>:text\n[0]<stdout>:30%\r\nours\n")


def test_a_line_end_cut_in_two_is_not_drawn_over():
    assert forward(b"a\r", b"\nb\n", is_terminal=True) == b"[0]<stdout>:a\r\n[0]<stdout>:b\n"


def test_file_gets_the_bytes_unchanged(tmp_path):
    path = tmp_path / "stdout"
    forward(b"a\r", b"\n\xffb", file=open(path, "wb"))
    assert path.read_bytes() == b"a\r\n\xffb"


def test_a_full_disk_costs_the_copy_only():
    sink = Sink()
    console = Console(Sink(), sink)
    forwarder = LineForwarder(console, 0, "stderr", file=open("/dev/full", "wb"))
    forwarder.feed(b"a\n")
    forwarder.feed(b"b\n")
    forwarder.close()
    assert sink.data == (b"baguarun: no longer writing /dev/full: No space left on device\n"
                         b"[0]<stderr>:a\n[0]<stderr>:b\n")


def test_characters_that_a_stream_cannot_encode_are_escaped():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    TextStream(stream).write("\u00e9 \u2713\n".encode())
    assert stream.buffer.getvalue() == b"\xe9 \\u2713\n"


def _closed():
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("make", [_closed, lambda: open("/dev/full", "w")])
def test_a_stream_that_cannot_be_written_costs_the_output_only(make):
    stream = TextStream(make())
    stream.write(b"x\n")
    stream.write(b"x\n")


def test_descriptor_waits_for_its_reader():
    reader, writer = os.pipe()
    data = os.urandom(1 << 20)
    received, calls = [], []

    def read():
        while not calls:        # the pipe is full
            time.sleep(0.01)
        while piece := os.read(reader, 1 << 16):
            received.append(piece)

    thread = threading.Thread(target=read)
    thread.start()
    descriptor = Descriptor(writer)
    descriptor.while_blocked = lambda: bool(calls.append(1))
    descriptor.write(data)
    os.close(writer)
    thread.join()
    os.close(reader)
    assert b"".join(received) == data


@pytest.mark.parametrize("gives_up", [False, True])
def test_a_write_while_another_is_blocked_comes_after_it(gives_up):
    """No other data comes in the middle of a frame or of a rank's line, or of the rest of a write that gave up."""
    reader, writer = os.pipe()
    descriptor, received, calls = Descriptor(writer), [], []

    def while_blocked():
        received.append(os.read(reader, 1 << 20))
        if not calls:
            descriptor.write(b"said")
        calls.append(1)
        return gives_up

    descriptor.while_blocked = while_blocked
    descriptor.write(b"x" * (1 << 18))
    descriptor.write(b"more")
    for _ in range(10):
        descriptor.write(b"")
    os.close(writer)
    received.append(os.read(reader, 1 << 20))
    os.close(reader)
    assert b"".join(received) == b"x" * (1 << 18) + b"saidmore"


def test_descriptor_gives_up_when_told():
    reader, writer = os.pipe()
    descriptor = Descriptor(writer)
    descriptor.while_blocked = lambda: True
    descriptor.write(b"x" * (1 << 20))
    os.close(reader)
    with pytest.raises(BrokenPipeError):
        descriptor.write(b"x")
    descriptor.write(b"only the first time")
    os.close(writer)
    descriptor = Descriptor(writer)
    descriptor.write(b"closed descriptors swallow")


def test_descriptor_knows_a_terminal():
    ours, theirs = pty.openpty()
    assert Descriptor(theirs).is_terminal
    os.close(ours)
    os.close(theirs)
