"""Ranks with emulated computation: they sleep as long as a model would compute, and release its gradients on schedule.

Everything else is real: parameters and gradients of the model's shapes, torch's autograd and hooks, the optimizer of
bagua_hvd.torch with its reducer and algorithms (or torch's DistributedDataParallel over gloo), and every byte on the
network. So sixteen ranks can share two cores while the network remains the bottleneck. Gradients are noise, different
on each rank, which is the hardest input for compressors. The optimizer's arithmetic is emulated, too, except Adam's.
"""
import ctypes
import gc
import os
import resource
import sys
import time
import traceback
from multiprocessing import get_context
from typing import Any

from tests.laboratory.hosts import variables_of
from tests.laboratory.plain import enter
from tests.laboratory.profiles import Profile

LEARNING_RATE = 1e-6
KEEP_MEMORY = {-3: 1 << 30, -1: (1 << 31) - 1}      # mallopt's M_MMAP_THRESHOLD and M_TRIM_THRESHOLD
ANSWER_SECONDS = 300


def _sleep_until(moment):
    left = moment - time.perf_counter()
    if left > 0:
        time.sleep(left)


def _queued():
    """{thread: seconds for which it was ready to run, but had no core}."""
    found = {}
    for thread in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{thread}/schedstat") as file:
                found[thread] = int(file.read().split()[1]) / 1e9
        except OSError:             # it has ended
            pass
    return found


class Pace:
    """When this rank's gradients are ready. slowness: factor on all computation times of the profile."""

    def __init__(self, profile: Profile, slowness: float):
        self.profile, self.slowness = profile, slowness
        self.began = 0.0
        self.late: list[float] = []         # by how many seconds a step's last gradient was late, for lack of CPU

    def sleep(self, seconds):
        time.sleep(seconds * self.slowness)

    def ready(self, index):
        moment = self.began + self.profile.gradients[index][2] * self.slowness
        _sleep_until(moment)
        if index == len(self.profile.gradients) - 1:
            self.late.append(time.perf_counter() - moment)


def model_of(pace, noise):
    """A torch module that computes nothing: forward() sleeps, backward() releases parts of `noise` as gradients."""
    import torch

    profile = pace.profile

    class Release(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, parameter, index, gradient):
            ctx.index, ctx.gradient = index, gradient
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            pace.ready(ctx.index)
            return grad, ctx.gradient.clone(), None, None

    class Emulated(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.released, offset = [], 0
            for index, (name, shape, _) in enumerate(profile.gradients):
                parameter = torch.nn.Parameter(torch.zeros(shape))
                self.register_parameter(name.replace(".", "_"), parameter)
                gradient = noise[offset:offset + parameter.numel()].view(shape)
                self.released.append((parameter, index, gradient))
                offset += parameter.numel()
            self.start = torch.zeros((), requires_grad=True)        # no parameter: autograd starts here

        def forward(self):
            pace.sleep(profile.forward_s)
            x = self.start * 1.0
            for parameter, index, gradient in reversed(self.released):      # the backward pass is in reverse order
                x = Release.apply(x, parameter, index, gradient)
            return x

    return Emulated()


def _optimizer(torch, model, pace, kind):
    if kind == "adam":
        return torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)

    class Slept(torch.optim.SGD):       # type: ignore[name-defined]
        @torch.no_grad()
        def step(self, closure=None):
            pace.sleep(pace.profile.step_s)

    return Slept(model.parameters(), lr=LEARNING_RATE)


class _Rank:
    """In a child process: one rank, which follows the parent's commands."""

    def __init__(self, rank, size, profile, variables):
        os.environ.update(variables)
        import torch

        import bagua_hvd.torch as hvd

        torch.set_num_threads(1)
        os.environ["BAGUA_FULL_STEPS"] = "0"       # relaxed steps are timed
        hvd.init()
        self._torch, self._hvd, self._rank, self._size, self._profile = torch, hvd, rank, size, profile
        torch.manual_seed(rank)
        self._noise = torch.randn(profile.parameters) * 1e-3 if profile else None
        self._gloo = False

    def _distributed(self, way, model, pace, arguments):
        """(function that computes the loss, optimizer) of one configuration."""
        torch, hvd = self._torch, self._hvd
        if way == "none":
            return model, _optimizer(torch, model, pace, "sgd")
        if way.startswith("ddp"):
            return self._ddp(way, model), _optimizer(torch, model, pace, "sgd")
        from bagua_hvd import algorithms
        from tests.laboratory.quality.grid import with_codec

        arguments = with_codec(arguments)
        early, self._delay = arguments.pop("gradients_untouched", None), arguments.pop("delay", 0)
        kind = arguments.pop("optimizer", "sgd")
        algorithm = algorithms.get(way, **arguments)
        kind = "adam" if algorithm.uses_adam else kind
        optimizer = hvd.DistributedOptimizer(_optimizer(torch, model, pace, kind), model.named_parameters(),
                                             algorithm=algorithm, gradients_untouched=early, delay=self._delay)
        return model, optimizer

    def _ddp(self, way, model):
        import torch.distributed as dist

        from tests.laboratory import ddp

        if not self._gloo:
            store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), self._size,
                                  self._rank == 0)
            dist.init_process_group("gloo", store=store, rank=self._rank, world_size=self._size)
            self._gloo = True
        return ddp.hooked(model, way)

    def prepare(self, way, arguments, slowness, warmup):
        """Builds one configuration, and makes `warmup` steps. Returns the seconds of the last one."""
        self.drop()
        self._delay = 0
        pace = Pace(self._profile, slowness)
        model = model_of(pace, self._noise)
        compute, optimizer = self._distributed(way, model, pace, arguments)
        self._cell = pace, compute, optimizer
        self._hvd.barrier()
        times = [self._step() for _ in range(warmup)]
        return times[-1]

    def _step(self):
        pace, compute, optimizer = self._cell
        before = time.perf_counter()
        optimizer.zero_grad()
        loss = compute()
        pace.began = time.perf_counter()
        loss.backward()
        optimizer.step()
        return time.perf_counter() - before

    def plan(self):
        """For Auto: (index of the algorithm in use, bytes of a bucket or 0: as set)."""
        optimizer = self._cell[2]
        algorithm = optimizer.algorithm
        used = algorithm.plan(optimizer.reducer.model)
        return list(algorithm.algorithms).index(used["algorithm"]), used["bucket_bytes"] or 0

    def watch(self, steps):
        """Makes this many steps of Auto: returns their seconds, and plan() in each."""
        self._hvd.barrier()
        return [(self.plan(), self._step()) for _ in range(steps)]

    def measure(self, steps, seconds):
        """Makes `steps` steps, or as many as fit into `seconds`: returns their seconds, and their use of the CPU."""
        pace = self._cell[0]
        pace.late.clear()
        self._hvd.barrier()
        if self._delay:
            self._step()            # operations in flight have had the barrier's time, too
        times: list[float] = []
        queued = _queued()
        used, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        while time.perf_counter() < began + seconds if seconds else len(times) < steps:
            times.append(self._step())
        after = resource.getrusage(resource.RUSAGE_SELF)
        waited = [seconds - queued.get(thread, 0) for thread, seconds in _queued().items()]
        return {"steps": times, "made": len(times) + self._delay, "elapsed": time.perf_counter() - began,
                "late": pace.late[:], "queued": max(waited),
                "cpu": after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime}

    def allreduces(self, nbytes, begun, every, count, warmup):
        """Seconds from each start, by time.monotonic(), at which all ranks begin, to this rank's result; and its CPU
        seconds since the first start."""
        tensor = self._torch.ones(nbytes // 4)
        times: list[float] = []
        used = 0.0
        for index in range(-warmup, count):
            moment = begun + (index + warmup) * every
            time.sleep(max(0.0, moment - time.monotonic()))
            if index == 0:
                used = time.process_time()
            self._hvd.allreduce_(tensor, name=f"allreduces.{nbytes}", op=self._hvd.Average)
            times.append(time.monotonic() - moment)
        return times[warmup:], time.process_time() - used

    def drop(self):
        """Deletes the last cell."""
        cell = self.__dict__.pop("_cell", None)
        algorithm: Any = getattr(cell[2], "algorithm", None) if cell else None
        if getattr(algorithm, "asynchronous", False):
            algorithm.abort()
        self._hvd.barrier()
        del cell
        gc.collect()

    def leave(self):
        self.drop()
        if self._gloo:
            self._torch.distributed.destroy_process_group()
        self._hvd.shutdown()


def _child(link, rank, size, namespace, profile, variables):
    try:
        # Otherwise each step's gradients would need new pages, a cost that a GPU's allocator does not have.
        for option, value in KEEP_MEMORY.items():
            ctypes.CDLL(None).mallopt(option, value)
        enter(namespace)
        made = _Rank(rank, size, profile, variables)
        link.send(None)
        while True:
            name, arguments = link.recv()
            link.send(getattr(made, name)(*arguments))
            if name == "leave":
                return
    except EOFError:
        pass
    except BaseException:
        link.send(RuntimeError(f"rank {rank}: {traceback.format_exc()}"))
        sys.exit(1)


class Ranks:
    """A job of emulated ranks over Hosts, with `per_host` on each; a context manager.

    Args:
        profile: None: they do not train.
        environment: variables for all ranks, such as BAGUA_OVERLAP.
    """

    def __init__(self, hosts, profile, per_host=1, environment=None):
        self.size = hosts.count * per_host
        self._job = hosts.job(self.size)
        variables = self._job.__enter__()
        context = get_context("forkserver")     # this process may have threads, whose locks a fork would copy
        context.set_forkserver_preload(["torch", "bagua_hvd.torch"])
        self._links, self._processes = [], []
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            of_rank = {**variables_of(variables, rank, self.size), "OMP_NUM_THREADS": "1",
                       "MASTER_ADDR": hosts.address_of(0), "MASTER_PORT": "29511", **(environment or {})}
            process = context.Process(target=_child, args=(theirs, rank, self.size, hosts.names[rank // per_host],
                                                           profile, of_rank), daemon=True)
            process.start()
            theirs.close()
            self._links.append(ours)
            self._processes.append(process)
        self._answers()

    def _answers(self):
        answers, end = [], time.monotonic() + ANSWER_SECONDS
        for link in self._links:
            if not link.poll(max(0.0, end - time.monotonic())):
                raise RuntimeError(f"a rank did not answer within {ANSWER_SECONDS} seconds")
            answers.append(link.recv())
            if isinstance(answers[-1], Exception):
                raise answers[-1]
        return answers

    def call(self, name, *arguments, each=None):
        """The results of this method of _Rank on all ranks; each: arguments by rank, before the others."""
        for rank, link in enumerate(self._links):
            link.send((name, (*(each[rank] if each else ()), *arguments)))
        return self._answers()

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is None:
            self.call("leave")
        for process in self._processes:
            process.join(10 if kind is None else 0)
            process.kill()
            process.join()
        self._job.__exit__(None, None, None)
