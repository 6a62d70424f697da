"""Converts the bytes of a worker's pipe to prefixed lines on the console, and copies them to files.

Lines end at `\\n`, `\\r` or both, so progress bars appear as they are drawn. On a terminal, a line that ended in `\\r`
is overwritten by the next one of the same source; everywhere else each becomes a line of its own. One thread writes
everything, so lines of different ranks never mix.
"""
import codecs
import os
import re
import select
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import BinaryIO, Protocol, TextIO

_WRITE_NBYTES = 4096        # a pipe that select() calls writable takes this many without blocking (PIPE_BUF)
_LINE_MAX_NBYTES = 16 << 20     # a longer line is cut, so that a worker cannot fill the launcher's memory
_BLOCKED_SECONDS = 0.1
_END = re.compile(rb"(\r\n|\r|\n)")


class Descriptor:
    """Writes to a file descriptor that may block for a long time (`baguarun ... | less`).

    Args:
        while_blocked: called about ten times a second while the descriptor blocks; True: stop waiting. May write().
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._broken = False
        self._writing = False
        self._left = bytearray()    # not yet written
        self.while_blocked: Callable[[], bool] = lambda: False
        self.is_terminal = os.isatty(fd)

    def write(self, data: bytes) -> None:
        """Writes all data, after data left from earlier writes. Data for a closed descriptor is discarded.

        Raises:
            BrokenPipeError: nobody reads any more. Raised only once; later data is discarded.
        """
        if self._broken:
            return
        self._left += data
        if self._writing:
            return      # while_blocked() called write(): the data follows the blocked data, instead of splitting it
        self._writing = True
        try:
            self._write()
        except OSError as error:
            self._broken = True
            if isinstance(error, BrokenPipeError):
                raise
        finally:
            self._writing = False

    def _write(self):
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        while self._left:
            try:
                if poll.poll(_BLOCKED_SECONDS * 1000):
                    del self._left[:os.write(self._fd, self._left[:_WRITE_NBYTES])]
                elif self.while_blocked():
                    return
            except BlockingIOError:
                time.sleep(0.001)


class TextStream:
    """Writes to a Python text stream, such as a notebook's or a StringIO. Bytes that are not UTF-8 become U+FFFD,
    characters that the stream's encoding lacks become escapes.
    """

    is_terminal = False

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._broken = False
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self.while_blocked: Callable[[], bool] = lambda: False      # not called: it is not known whether write() blocks

    def write(self, data: bytes) -> None:
        """As Descriptor.write(); flushes. Data for a stream that is closed, or whose disk is full, is discarded."""
        if self._broken:
            return
        text = self._decode(data)
        try:
            try:
                self._stream.write(text)
            except UnicodeEncodeError as error:
                self._stream.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._broken = True
            if isinstance(error, BrokenPipeError):
                raise


Stream = Descriptor | TextStream


class Console:
    """The output of all sources: stdout and stderr, each a Descriptor or TextStream."""

    def __init__(self, stdout: Stream, stderr: Stream) -> None:
        self._sinks = {"stdout": stdout, "stderr": stderr}
        # (source, sink) of a line that ended in \r and may be overwritten
        self._unfinished: tuple[object, Stream] | None = None

    def while_blocked(self, function: Callable[[], bool]) -> None:
        """Sets the function that both sinks call while they are blocked; see Descriptor."""
        for sink in self._sinks.values():
            sink.while_blocked = function

    def write(self, source: object, stream: str, lines: Iterable[tuple[bytes, bytes]], prefix: bytes) -> None:
        """Writes complete lines.

        Args:
            source: the writer, compared for equality.
            stream: "stdout" or "stderr".
            lines: pairs of a line and its line ending, bytes.
            prefix: bytes before every line.
        """
        sink = self._sinks[stream]
        parts: list[bytes] = []
        for line, end in lines:
            if end != b"\r":
                end = b"\n"
            elif not line:
                continue        # a bar that begins with \r: nothing was drawn yet
            elif not sink.is_terminal:
                end = b"\n"
            parts += prefix, line, end
        if parts:
            if self._unfinished != (source, sink):
                self._finish()
            self._unfinished = (source, sink) if parts[-1] == b"\r" else None
            sink.write(b"".join(parts))

    def write_raw(self, stream: str, data: bytes) -> None:
        """Writes bytes as they are."""
        self._sinks[stream].write(data)

    def end_line(self, source: object, stream: str) -> None:
        """Called when the \\r that ended this source's last line was the first half of \\r\\n."""
        if self._unfinished == (source, self._sinks[stream]):
            self._finish()

    def _finish(self):
        """Ends a line that would otherwise be overwritten."""
        if self._unfinished:
            sink, self._unfinished = self._unfinished[1], None
            sink.write(b"\n")

    def say(self, text: str) -> None:
        """Prints a line of the launcher itself on stderr. Lost if nobody reads it."""
        with suppress(BrokenPipeError):
            self._finish()
            self._sinks["stderr"].write(text.encode("utf-8", "surrogateescape") + b"\n")

    def close(self) -> None:
        """Ends an unfinished line."""
        with suppress(BrokenPipeError):
            self._finish()


class Sink(Protocol):
    """A consumer of one stream of one process, such as a LineForwarder."""

    def feed(self, data: bytes) -> object: ...

    def close(self) -> object: ...


class LineForwarder:
    """One stream of one process: splits its bytes into lines for the console, and copies them unchanged to a file.

    Args:
        index: the rank for the prefix `[rank]<stream>:`; None: no prefix, and the console gets the bytes unchanged.
        stream: "stdout" or "stderr".
        timestamp: whether local time precedes the prefix.
        file: binary file, closed with the forwarder; None: console only.
    """

    def __init__(self, console: Console, index: int | None, stream: str, timestamp: bool = False,
                 file: BinaryIO | None = None) -> None:
        self._console = console
        self._source = (index, stream)
        self._stream = stream
        self._index = index
        self._prefix = f"[{index}]<{stream}>:".encode()
        self._timestamp = timestamp
        self._file = file
        self._partial = bytearray()     # a line without its end
        self._after_return = False  # the last byte was \r: a following \n belongs to it

    def feed(self, data: bytes) -> None:
        """Takes the next bytes; writes complete lines before it returns."""
        if not data:
            return
        if self._file:
            self._write_file(self._file, data)
        if self._index is None:
            self._console.write_raw(self._stream, data)
            return
        if self._after_return and data.startswith(b"\n"):
            self._console.end_line(self._source, self._stream)
            data = data[1:]
        self._after_return = data.endswith(b"\r")
        *pieces, rest = _END.split(data)       # line, end, line, end, ..., unfinished line
        lines = [(self._take_partial() + line, end) for line, end in zip(pieces[::2], pieces[1::2], strict=True)]
        self._partial += rest
        if len(self._partial) >= _LINE_MAX_NBYTES:
            lines.append((self._take_partial(), b"\n"))
        self._write(lines)

    def _write_file(self, file, data):
        try:
            file.write(data)
            file.flush()
        except OSError as error:
            # A full disk must not end the job, only the copy.
            self._console.say(f"baguarun: no longer writing {file.name}: {error.strerror}")
            self._close_file(file)

    def _close_file(self, file):
        self._file = None
        with suppress(OSError):
            file.close()

    def _take_partial(self):
        line = bytes(self._partial)
        self._partial.clear()
        return line

    def _write(self, lines):
        if lines:
            stamp = time.asctime().encode() if self._timestamp else b""
            self._console.write(self._source, self._stream, lines, stamp + self._prefix)

    def close(self) -> None:
        """Writes a last unfinished line."""
        line = self._take_partial()
        if line:
            self._write([(line, b"\n")])
        if self._file:
            self._close_file(self._file)
