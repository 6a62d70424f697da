"""Input pipelines in separate processes, by tf.data service: compute tasks beside the training tasks.

    compute tasks      baguarun -np 8 python -m bagua_hvd.tensorflow.data.compute_worker service.json
    training tasks     config = TfDataServiceConfig.read("service.json", wait_for_file_creation=True)
                       dataset = dataset.send_to_data_service(config, hvd.rank())
                       ...
                       if hvd.rank() == 0: config.shutdown()

tf.data's dispatchers and workers do the work; this module connects and ends them. Every compute task runs a worker.
Dispatchers run in the compute tasks, or in the training tasks (dispatcher_side), each with `workers_per_dispatcher` of
the workers. Training rank r uses dispatcher r modulo their number.

A process needs the service's key to get the dispatchers' addresses. The dispatchers themselves use tf.data's protocol,
which has neither keys nor encryption: use it in trusted networks only.
"""
import base64
import itertools
import json
import os
import secrets
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tensorflow as tf

from bagua_hvd.job.channel import Hello
from bagua_hvd.job.environment import get_env_rank_and_size
from bagua_hvd.job.probe import connect
from bagua_hvd.job.server import Service, join_address

_SIDES = ("compute", "training")
_POLL_SECONDS = 0.1
_CONNECT_SECONDS = 3

# Numbers the datasets that ranks share, so that all ranks use the same names.
_shared = itertools.count()

# ------------------------- the registry: processes learn the dispatchers' addresses, and when the service ends ----


@dataclass(frozen=True)
class Dispatcher:
    """Registers the sender as dispatcher `index`. address: `host:port`."""

    index: int
    address: str


@dataclass(frozen=True)
class Wanted:
    """Asks for the address of a dispatcher."""

    index: int


@dataclass(frozen=True)
class Address:
    """The response to Wanted; None: not registered yet."""

    address: str | None


@dataclass(frozen=True)
class Attach:
    """The sender uses the service until it disconnects."""


@dataclass(frozen=True)
class Watch:
    """Requests a Shutdown message when the service ends."""


@dataclass(frozen=True)
class Finished:
    """The service ends when no client is attached any more."""


@dataclass(frozen=True)
class Shutdown:
    """The service ends."""


class Registry(Service):
    """See Service.

    Args:
        secret: bytes that every client must prove that it knows. host: numeric address to bind.
    """

    def __init__(self, secret: Any, host: Any = "127.0.0.1") -> None:
        self._addresses: dict[int, Any] = {}        # index -> address
        self._attached: set[int] = set()      # numbers of clients
        self._watching: set[Any] = set()
        self._finished = False
        self._over = False
        super().__init__(secret, self._take, (Dispatcher, Wanted, Attach, Watch, Finished, Shutdown), host)

    def _take(self, event, number, message):
        if event == "dispatcher":
            self._addresses[message.index] = message.address
        elif event == "wanted":
            self.send(number, Address(self._addresses.get(message.index)))
        elif event == "attach":
            self._attached.add(number)
        elif event == "watch":
            self._watching.add(number)
        elif event == "finished":
            self._finished = True
        elif event == "disconnected":
            self._attached.discard(number)
            self._watching.discard(number)
        if event == "shutdown" or (self._finished and not self._attached):
            self._over = True
        if self._over:
            while self._watching:
                self.send(self._watching.pop(), Shutdown())


class Client:
    """A connection to a Registry; a context manager.

    Args:
        addresses: [host, port] pairs, tried for up to `timeout` seconds.
    Raises:
        TimeoutError: the registry did not answer.
    Attributes:
        local_host: the address by which the registry sees this process. send, close: the Connection's.
    """

    def __init__(self, addresses: Sequence[tuple[str, int]], secret: bytes, timeout: float) -> None:
        self._timeout = timeout
        self._connection = _connect(addresses, secret, timeout)
        self.send, self.close = self._connection.send, self._connection.close
        self.local_host = self._connection.socket.getsockname()[0]

    def address_of(self, dispatcher: int) -> str:
        """`host:port` of a dispatcher. TimeoutError: it did not register in time. OSError: the registry has ended."""
        deadline = time.monotonic() + self._timeout
        while True:
            self.send(Wanted(dispatcher))
            response = self._connection.receive(Address)
            if response is None:
                raise ConnectionError("the compute service has ended")
            if response.address is not None:
                return response.address
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"dispatcher {dispatcher} of the compute service did not start within {self._timeout} seconds"
                )
            time.sleep(_POLL_SECONDS)

    def shutdown(self) -> None:
        """Ends the service: its compute tasks return. Call it on one training rank, when all have read their data.

        OSError: the service has ended already.
        """
        self.send(Shutdown())

    def wait_for_shutdown(self) -> None:
        """Blocks until the service ends, or its registry has gone."""
        try:
            self.send(Watch())
        except OSError:
            return
        self._connection.receive(Shutdown)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()


def _connect(addresses, secret, timeout):
    deadline = time.monotonic() + timeout
    while True:
        try:
            connection = connect(addresses, secret, _CONNECT_SECONDS)
            connection.send(Hello(secrets.randbits(62)))
            return connection
        except OSError as error:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the compute service does not answer at {addresses} ({error})") from None
        time.sleep(_POLL_SECONDS)


# --------------------------------------------------------------------------------------------------- the service ----


@dataclass(frozen=True)
class TfDataServiceConfig:
    """A compute service, as known to all its processes. write() stores the key, so only the owner may read the file.

    Args:
        dispatchers: number of dispatchers, at least 1. workers_per_dispatcher: at least 1.
        dispatcher_side: the tasks that run them: "compute" or "training".
        addresses: [host, port] pairs of the registry, the best first. key: bytes that its clients must prove to know.
        timeout: seconds in which the other tasks must start.
    Raises:
        ValueError: an argument is wrong.
    """

    dispatchers: int
    workers_per_dispatcher: int
    dispatcher_side: str
    addresses: list
    key: bytes
    timeout: int = 60

    def __post_init__(self):
        if self.dispatchers < 1 or self.workers_per_dispatcher < 1:
            raise ValueError(f"expected at least one dispatcher and one worker for each, not {self.dispatchers} and "
                             f"{self.workers_per_dispatcher}")
        if self.dispatcher_side not in _SIDES:
            raise ValueError(f"dispatcher_side={self.dispatcher_side!r}: expected 'compute' or 'training'")

    def to_dict(self) -> dict[str, Any]:
        """The configuration as a dict for JSON."""
        return {**asdict(self), "key": base64.b64encode(self.key).decode()}

    @staticmethod
    def from_dict(config: dict[str, Any]) -> "TfDataServiceConfig":
        """The TfDataServiceConfig from a to_dict()."""
        return TfDataServiceConfig(**{**config, "key": base64.b64decode(config["key"])})

    def write(self, filename: str | os.PathLike[str]) -> None:
        """Writes a file for read(), readable only by its owner. It appears atomically."""
        path = Path(filename)
        part = path.with_name(f".{path.name}.{os.getpid()}")
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(self.to_dict(), file)
        part.replace(path)

    @staticmethod
    def read(filename: str | os.PathLike[str], wait_for_file_creation: bool = False) -> "TfDataServiceConfig":
        """Reads a file that write() has written.

        Args:
            wait_for_file_creation: wait, without a limit, until the file exists.
        Raises:
            FileNotFoundError: the file does not exist.
        """
        path = Path(filename)
        while wait_for_file_creation and not path.exists():
            time.sleep(_POLL_SECONDS)
        return TfDataServiceConfig.from_dict(json.loads(path.read_text()))

    def compute_client(self, verbose: int = 1) -> Client:
        """A Client of the compute service; its shutdown() ends the service.

        Args:
            verbose: unused, for compatibility with Horovod.
        Raises:
            TimeoutError: its registry does not answer.
        """
        return Client(self.addresses, self.key, self.timeout)

    def shutdown(self) -> None:
        """Ends the compute tasks. Call it on one training rank, when all have read their data."""
        with self.compute_client() as client:
            client.shutdown()


def _stop(server):
    # TensorFlow has no public method for it; without this one the server ends by garbage collection.
    getattr(server, "_stop", lambda: None)()


@contextmanager
def _dispatcher(client, index):
    """Within it, this process runs a dispatch server of tf.data, and the registry has its address."""
    server = tf.data.experimental.service.DispatchServer()
    try:
        port = server.target.rpartition(":")[2]
        client.send(Dispatcher(index, join_address(client.local_host, port)))
        yield
    finally:
        _stop(server)


@contextmanager
def tf_data_service(compute_config: TfDataServiceConfig, rank: int) -> Generator[str, None, None]:
    """A context manager that yields the address of this training rank's dispatcher: `grpc://host:port`.

    With dispatchers on the training side, the first ranks run them while they are in the context. The compute tasks end
    when rank 0 and all other ranks that entered it have left.

    Args:
        rank: of this training task.
    Raises:
        TimeoutError: the service, or the dispatcher, did not start in time.
    """
    with compute_config.compute_client() as client:
        client.send(Attach())
        here = compute_config.dispatcher_side == "training" and rank < compute_config.dispatchers
        with _dispatcher(client, rank) if here else nullcontext():
            try:
                yield f"grpc://{client.address_of(rank % compute_config.dispatchers)}"
            finally:
                if rank == 0:
                    client.send(Finished())


def send_to_data_service(dataset: tf.data.Dataset, compute_config: TfDataServiceConfig, rank: int,
                         size: int | None = None, processing_mode: str = "distributed_epoch",
                         reuse_dataset: bool = False, round_robin: bool = False) -> tf.data.Dataset:
    """Has the compute tasks compute the dataset; also a method of tf.data.Dataset.

    compute_config.shutdown() ends the compute tasks.

    Args:
        dataset: the pipeline so far, which the workers compute.
        rank, size: of the training tasks; size is needed for round_robin.
        processing_mode: of tf.data.experimental.service.distribute(): "distributed_epoch" (each dispatcher yields each
            element once) or "parallel_epochs" (each worker yields all).
        reuse_dataset: the ranks of one dispatcher share one pass over the dataset, first come, first served; else each
            rank has its own. Ranks that share several datasets must make these calls in the same order.
        round_robin: the ranks take elements in turn, in lockstep. Needs reuse_dataset and an infinite dataset.
    Raises:
        RuntimeError: dispatchers run in the training tasks; use tf_data_service().
        ValueError: round_robin without size or reuse_dataset. TimeoutError: the service did not start in time.
    """
    if compute_config.dispatcher_side == "training":
        raise RuntimeError(
            "send_to_data_service() is for dispatchers on the compute side: with dispatcher_side='training' use `with "
            "tf_data_service(compute_config, rank) as service` and tf.data.experimental.service.distribute()"
        )
    index, consumers = rank % compute_config.dispatchers, {}
    if round_robin:
        if size is None or not reuse_dataset:
            raise ValueError("round_robin=True needs size, and reuse_dataset=True")
        consumers = {"consumer_index": rank // compute_config.dispatchers,
                     "num_consumers": len(range(index, size, compute_config.dispatchers))}
    with compute_config.compute_client() as client:
        address = client.address_of(index)
    name = f"shared.{next(_shared)}" if reuse_dataset else None
    return dataset.apply(tf.data.experimental.service.distribute(
        processing_mode, f"grpc://{address}", job_name=name, **consumers,
    ))


tf.data.Dataset.send_to_data_service = send_to_data_service


def compute_worker_fn(compute_config: TfDataServiceConfig) -> None:
    """Runs this compute task's worker, and its dispatcher if it has one, until the service ends.

    The launcher's variables identify the task: task t works for dispatcher t // workers_per_dispatcher, which runs in
    the first of its tasks unless it is on the training side.

    Args:
        compute_config: the service's, from TfDataServiceConfig.read().
    Raises:
        TimeoutError: the registry, or the dispatcher, did not start in time.
    """
    index, first = divmod(get_env_rank_and_size()[0], compute_config.workers_per_dispatcher)
    with compute_config.compute_client() as client:
        here = compute_config.dispatcher_side == "compute" and first == 0
        with _dispatcher(client, index) if here else nullcontext():
            worker = tf.data.experimental.service.WorkerServer(tf.data.experimental.service.WorkerConfig(
                client.address_of(index), worker_address=join_address(client.local_host, "%port%"),
                data_transfer_address=join_address(client.local_host, "%dts_port%"),
            ))
            try:
                client.wait_for_shutdown()
            finally:
                _stop(worker)
