"""n workers that train one model, in NumPy: tests of algorithms compare real ranks with them.

A model is one flat float32 vector x. Worker i's gradient in step t is

    g_i(x, t) = (x - c_i) / 4 + d_it

with c_i, d_it and the first x multiples of 2^-8: simple enough that both sides get the same bits, different on every
worker, and a function of x. The optimizer is SGD with lr = 1/4 and momentum 1/2, so that every product is exact.
"""
import functools
import math
import random
from zlib import crc32

import numpy as np
import torch

import bagua_hvd.torch as hvd
import two_levels
from floats import assert_same_bits
from low_precision import Codec as Oracle
from low_precision import allgather, scatter_gather, seed_of, segments
from two_levels import means

F = np.float32
SHAPES = [(5, 7), (7,), (), (3, 4, 2), (0, 3), (40, 6), (1,), (13, 2)]
COUNT = sum(map(math.prod, SHAPES))
BUCKETS = {"BAGUA_DEFAULT_BUCKET_SIZE": "800", "HOROVOD_ELASTIC": "1"}      # several; a single rank communicates, too


def dyadic(*seed, count=COUNT):
    """Multiples of 2^-8 between -1 and 1."""
    return (np.random.default_rng(seed).integers(-256, 257, count) / 256).astype(F)


def start(i, apart):
    """Worker i's first weights; apart: they differ between workers."""
    return dyadic(1, i if apart else 0)


def gradient(i, t, x):
    return (x - dyadic(2, i)) * F(0.25) + dyadic(3, i, t)


class SGD:
    """One worker's torch.optim.SGD(lr=0.25, momentum=0.5)."""

    def __init__(self):
        self.momentum = F(0)

    def __call__(self, x, g):
        self.momentum = self.momentum * F(0.5) + g
        return x - self.momentum * F(0.25)


PERMUTED = {3: (2, 0, 1), 5: (1, 0)}      # memory order of the dimensions of these SHAPES, outermost first


def _empty(place, shape):
    order = PERMUTED.get(place, range(len(shape)))
    return torch.empty([shape[dim] for dim in order]).permute(np.argsort(order).tolist())


def make_model(x):
    """A torch module with parameters of all SHAPES, initialized to x. Some are not contiguous."""
    parameters = [torch.nn.Parameter(_empty(place, shape)) for place, shape in enumerate(SHAPES)]
    assert [place for place, p in enumerate(parameters) if not p.is_contiguous()] == list(PERMUTED)
    model = torch.nn.ParameterList(parameters)
    for parameter, part in zip(parameters, parts(x), strict=True):
        parameter.data.copy_(part)
    return model


def parts(x):
    """x as tensors of SHAPES."""
    return [part.view(shape) for part, shape in
            zip(torch.from_numpy(x.copy()).split([math.prod(s) for s in SHAPES]), SHAPES, strict=True)]


def flat(model):
    return torch.cat([parameter.detach().reshape(-1).float() for parameter in model.parameters()]).numpy()


def backward(model, g, scaler=None):
    loss = sum((p * part).sum() for p, part in zip(model.parameters(), parts(g), strict=True))
    (loss if scaler is None else scaler.scale(loss)).backward()


def train(rank, model, optimizer, steps):
    """Makes these steps with the rank's own gradients."""
    for t in steps:
        optimizer.zero_grad()
        backward(model, gradient(rank, t, flat(model)))
        optimizer.step()


class Scaled:
    """Steps under a changing loss scale: it grows after two steps, and is halved before each third one, when a gradient
    overflows on one rank. The skipped step must have no effect: the equations do not include it. skips: False: without
    such steps.
    """

    def __init__(self, model, optimizer, skips=True):
        self._model, self._optimizer, self._skips = model, optimizer, skips
        self._scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_factor=8.0, growth_interval=2)
        self.scales = set()

    def step(self, t, g):
        if self._skips and t % 3 == 1:
            lost = gradient(hvd.rank(), 1000 + t, g)
            if hvd.rank() == hvd.size() - 1:
                lost[7] = np.inf
            before = flat(self._model)
            self._once(lost)
            assert_same_bits(flat(self._model), before, "skipped")
        self._once(g)

    def _once(self, g):
        self.scales.add(self._scaler.get_scale())
        self._optimizer.zero_grad()
        backward(self._model, g, self._scaler)
        self._scaler.step(self._optimizer)
        self._scaler.update()


def take_step(model, optimizer, t, g, under_scale=None):
    """Step t with this rank's gradient g. under_scale: a Scaled; None: no loss scale."""
    if under_scale:
        under_scale.step(t, g)
        return
    optimizer.zero_grad()
    backward(model, g)
    optimizer.step()


def of_adam(optimizer, name):
    """A copy of one state of torch's optimizer, flattened like x."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return torch.cat([optimizer.state[p][name].reshape(-1) for p in parameters]).numpy().copy()


def buckets_of(optimizer):
    """For each bucket of gradients, the positions of its elements in x."""
    ends = np.cumsum([0, *map(math.prod, SHAPES)])
    return [np.concatenate([np.arange(ends[i], ends[i + 1]) for i in bucket.members])
            for bucket in optimizer.reducer.buckets]


def assert_trains_as(algorithm, simulate, steps=10, apart=False, exact=True, scaled=False, delay=0):
    """Trains, and compares all ranks' weights after every step with a simulation on rank 0.

    Args:
        simulate: function of (n, positions of each bucket's elements, first weights of all); a generator of the weights
            of all after each step.
        apart: workers begin with different weights. exact: bit for bit; otherwise up to 1e-6 of the largest.
        scaled: with steps of Scaled. delay: of the optimizer, and then a further argument of simulate().
    """
    rank, n = hvd.rank(), hvd.size()
    model = make_model(start(rank, apart))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)
    optimizer = hvd.DistributedOptimizer(optimizer, algorithm=algorithm, delay=delay)
    places = buckets_of(optimizer)
    assert len(places) > 2
    seeds.names = [[member.name for member in bucket.members.values()]
                   for bucket in (*optimizer.reducer.buckets, *optimizer.reducer.model.weights)]
    assert len({seeds.of(0, b) for b in range(len(places))}) == len(places)
    trace, under_scale = [], Scaled(model, optimizer)
    for t in range(steps):
        if scaled:
            under_scale.step(t, gradient(rank, t, flat(model)))
        else:
            optimizer.zero_grad()
            backward(model, gradient(rank, t, flat(model)))
            optimizer.step()
        trace.append(flat(model))
    assert not scaled or len(under_scale.scales) > 2
    everyone = hvd.allgather(torch.tensor(np.array(trace))[None]).numpy()
    if rank == 0:
        simulated = simulate(n, places, [start(i, apart) for i in range(n)], *[delay] * bool(delay))
        for t in range(steps):
            for i, wanted in enumerate(next(simulated)):
                what = f"{type(optimizer.algorithm).__name__}, step {t}, rank {i} of {n}"
                assert abs(wanted).max() < 100, what
                if exact:
                    assert_same_bits(everyone[i, t], wanted.astype(F), what)
                else:
                    np.testing.assert_allclose(everyone[i, t], wanted, rtol=1e-6, atol=1e-6 * abs(wanted).max(),
                                               err_msg=what)
    return model, optimizer


def tensors_in(at):
    """Slices of a bucket with elements at the positions `at` in x: its nonempty tensors."""
    of = np.repeat(np.arange(len(SHAPES)), [math.prod(shape) for shape in SHAPES])[at]
    ends = [0, *(np.flatnonzero(np.diff(of)) + 1), len(at)]
    return [slice(begin, end) for begin, end in zip(ends, ends[1:], strict=False)]


def by_gradients(combine, tensors=False):
    """A simulation in which all workers use the gradient combine(t, bucket's number, gradients of all).

    tensors: combine has a fourth argument, the bucket's tensors_in().
    """
    def simulate(n, places, xs, delay=0):
        optimizer, x = SGD(), xs[0]
        averages = [np.zeros(COUNT, F)] * delay         # in flight
        for t in range(10**6):
            gs = [gradient(i, t, x) for i in range(n)]
            g = np.empty(COUNT, F)
            for b, at in enumerate(places):
                g[at] = combine(t, b, [g_i[at] for g_i in gs], *([tensors_in(at)] if tensors else []))
            averages.append(g)
            x = optimizer(x, averages.pop(0))
            yield [x] * n
    return simulate


class seeds:
    """The seed of bucket b (of gradients, then of weights) in step t; all are different."""

    names = []              # names of each bucket's tensors

    @classmethod
    def of(cls, t, b):
        return crc32(",".join(cls.names[b]).encode()) << 32 | t


class Errors:
    """All workers' residuals for each bucket, initially zero. With two levels a server has one for each element."""

    def __init__(self, two_levels=False):
        self._of, self._two_levels = {}, two_levels

    def of(self, b, n, count):
        server = count if self._two_levels else -(-count // n)
        return self._of.setdefault(b, ([np.zeros(count, F) for _ in range(n)], [np.zeros(server, F) for _ in range(n)]))


def c_lp_s(codec, values, seed=0, errors=None, by_allgather=False, average=True, hosts=None):
    """Everybody's result of C_LP_S. errors: a pair of lists, workers' and servers', updated. hosts: for two levels."""
    n, (worker, server) = len(values), errors or (None, None)
    oracle, factor = Oracle(*codec), 1 / n if average else 1
    if hosts:
        return two_levels.c_lp_s(oracle, "float32", values, hosts, [seed] * n, average, by_allgather=by_allgather,
                                 errors=errors)
    if by_allgather:
        return allgather(oracle, "float32", values, [seed] * n, factor, worker)
    return scatter_gather(oracle, "float32", values, [seed] * n, factor, worker, server)


def decoded(codec, value, seed, i):
    """D(Q(value)) of worker i's own values."""
    out = np.empty_like(value)
    for part in segments(0, len(value)):
        out[part] = Oracle(*codec).round_trip("float32", value[part], seed_of(Oracle(*codec), seed, i, 0, part.start))
    return out


def peer(n, i, t, mode="shift_one"):
    """The peer of worker i in round t; i itself: it pauses."""
    h = n // 2
    if mode == "exponential":
        met = i ^ 2 ** (t % len(bin(n - 1)[2:]))
        return met if met < n else i
    if mode == "random":
        t = random.Random(t).randrange(n - 1 + n % 2)
        if n % 2 == 0:
            met = {a: (t - a) % (n - 1) for a in range(n - 1)}
            left = next(a for a, b in met.items() if a == b)
            return {**met, left: n - 1, n - 1: left}[i]
    if n % 2:
        return (t - i) % n
    return h + (t + i) % h if i < h else (i - h - t) % h


def pairs(n, t, xs, sizes=None, mode="shift_one"):
    """Everybody's mean with the peer of round t. sizes: the number of ranks that each represents."""
    sizes, results = sizes or [1] * n, []
    for i, x in enumerate(xs):
        p = peer(n, i, t, mode)
        if sizes[i] == sizes[p]:
            results.append(x if p == i else (x + xs[p]) / 2)
        else:
            results.append((F(sizes[i]) * x + F(sizes[p]) * xs[p]) * F(1 / (sizes[i] + sizes[p])))
    return results


class ReplicaSet:
    """W, L and R of all workers, all equal to the weights they replicate. hosts: workers are hosts' means."""

    def __init__(self, xs, hosts=None):
        self.hosts = hosts or [[i] for i in range(len(xs))]
        self.of = means("float32", xs, self.hosts)

    def around(self, i):
        host, n = next(h for h, members in enumerate(self.hosts) if i in members), len(self.of)
        return self.of[host], self.of[(host - 1) % n], self.of[(host + 1) % n]

    def mixed(self, i, own, left, right):
        """A weighted sum of worker i's replicas, in float32 from left to right. A neighbor host with fewer ranks has a
        smaller weight: R is replaced by W + min(1, s_p / s_i) (R - W).
        """
        host, n = next(h for h, members in enumerate(self.hosts) if i in members), len(self.of)
        sizes = [len(members) for members in self.hosts]
        shares = [min(1, sizes[p % n] / sizes[host]) for p in (host - 1, host + 1)]
        own += (1 - shares[0]) * left + (1 - shares[1]) * right
        weights = own, left * shares[0], right * shares[1]
        terms = [F(weight) * replica for weight, replica in zip(weights, self.around(i), strict=True) if weight]
        return functools.reduce(np.add, terms)

    def means(self, xs):
        """For each worker the mean over its host."""
        each = means("float32", xs, self.hosts)
        return [each[next(h for h, members in enumerate(self.hosts) if i in members)] for i in range(len(xs))]

    def add(self, codec, values, seed):
        """values: equal on all ranks of a host."""
        sent = [values[members[0]] for members in self.hosts]
        self.of = [w + decoded(codec, value, seed, i) for i, (w, value) in enumerate(zip(self.of, sent, strict=True))]
