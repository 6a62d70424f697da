"""The two halves of a data loader: making batches (BaseDataLoader) and prefetching them (AsyncDataLoaderMixin)."""
import atexit
import queue
import threading
from typing import TYPE_CHECKING, Any

# Seconds after which a thread that waits for the other end of the queue notices that the loader was closed.
_POLL_S = 0.1
# Seconds to wait for the thread at the interpreter's end.
_EXIT_S = 5.0


class BaseDataLoader:
    """Batches, epoch by epoch. Subclasses implement _iterate() and __len__()."""

    def __len__(self):
        """The number of batches in an epoch."""
        raise NotImplementedError

    def _iterate(self):
        """Yields the batches of one epoch."""
        raise NotImplementedError

    def _process_batch(self, batch):
        """Converts a batch for the user, in the user's thread. Unless overridden, returns the batch itself."""
        return batch

    def __iter__(self):
        for batch in self._iterate():
            yield self._process_batch(batch)


# Marks the end of an epoch in the queue.
_END = object()


class _Failure:
    """Queue entry with the exception that ended the thread."""

    def __init__(self, exception):
        self.exception = exception


# The mixin precedes a loader's class, which need not be derived from BaseDataLoader.
if TYPE_CHECKING:
    _Loader = BaseDataLoader
else:
    _Loader = object


class AsyncDataLoaderMixin(_Loader):
    """Prefetches in a daemon thread, across the ends of epochs. Make it the first base:

        class AsyncLoader(AsyncDataLoaderMixin, Loader): ...

    The thread starts with the first iteration and repeats _iterate() until it is closed. An iteration yields batches up
    to the end of an epoch; if it is left early, the next one continues where it stopped. An exception in _iterate() is
    raised in the iteration, after the batches before it; the next iteration then starts anew. Only one consumer at a
    time is allowed.

    The thread keeps the loader alive: call close_async_loader() before you drop one.

    Args:
        async_loader_queue_size: maximum number of prefetched batches; 0: no thread, batches are read on demand.
        debug_data_loader: print the thread's actions.
        args, kwargs: for the next class.
    Attributes:
        async_loader_queue_size, debug_data_loader; queue: None without a thread; finished_event: set when closing;
        started: the thread exists.
    """

    def __init__(self, async_loader_queue_size: int = 64, debug_data_loader: bool = False, *args: Any,
                 **kwargs: Any) -> None:
        self.async_loader_queue_size = async_loader_queue_size
        self.debug_data_loader = debug_data_loader
        bounded = async_loader_queue_size > 0
        self.queue: queue.Queue[Any] | None = queue.Queue(async_loader_queue_size) if bounded else None
        self.finished_event = threading.Event()
        self.started = False
        self._thread: threading.Thread | None = None
        super().__init__(*args, **kwargs)

    def close_async_loader(self) -> None:
        """Stops the thread after the batch that it is reading, and empties the queue. May be called again."""
        self._close(timeout=None)

    def _close(self, timeout):      # at exit, too: a thread inside a library while the interpreter ends can crash it
        thread, entries = self._thread, self.queue
        if not self.started or thread is None or entries is None:
            return
        self._log("closing")
        self.finished_event.set()
        thread.join(timeout)
        while not entries.empty():
            entries.get_nowait()
        self.started = False
        atexit.unregister(self._close)
        self._log("closed")

    def _start(self, entries):
        self._log("starting")
        self.finished_event.clear()
        self.started = True
        thread = self._thread = threading.Thread(target=self._fill, args=(entries,), name="async data loader",
                                                 daemon=True)
        thread.start()
        atexit.register(self._close, _EXIT_S)

    def _fill(self, entries):
        """The function of the thread."""
        try:
            while not self.finished_event.is_set():
                for batch in self._iterate():
                    self._put(entries, batch)
                    if self.finished_event.is_set():
                        break
                self._log("end of an epoch")
                self._put(entries, _END)
        except BaseException as exception:
            self._put(entries, _Failure(exception))

    def _put(self, entries, entry):
        while not self.finished_event.is_set():
            try:
                return entries.put(entry, timeout=_POLL_S)
            except queue.Full:
                pass

    def __iter__(self):
        entries = self.queue
        if entries is None:
            yield from super().__iter__()
            return
        if not self.started:
            self._start(entries)
        while (entry := self._get(entries)) is not _END:
            if isinstance(entry, _Failure):
                self.close_async_loader()
                raise entry.exception
            yield self._process_batch(entry)

    def _get(self, entries):
        """The next entry; _END also if the loader is closed, perhaps by another thread."""
        while not self.finished_event.is_set():
            try:
                return entries.get(timeout=_POLL_S)
            except queue.Empty:
                pass
        return _END

    def _log(self, text):
        if self.debug_data_loader:
            print(f"{type(self).__name__}: {text}", flush=True)
