"""Measures a step's communication in each front end, with the same gradients: `python -m tests.laboratory.frontends`.

The gradients are those of ResNet-50 (161 tensors, 97.5 MiB). The model is a chain of layers, each a product with a
constant matrix, times the mean square of one weight, so that a backward pass yields gradients one by one, like a real
network. (If they were independent, TensorFlow would compute them in a different order in every step, and all buckets
would fill at its end.) The matrix is small by default, so the backward pass hides little communication, and the
difference between steps with and without communication is about its whole cost, with copies, bridges and Python.
"exposed" is the part of it in the timeline during which buckets are negotiated and reduced, and the front end only
waits for them (exposed.py). "processor" is the difference in CPU time, user and system, of all threads of a rank, which
is less sensitive to a busy machine. All configurations train in the same job, in turn, for several rounds; seconds are
the slowest rank's, exposed ones rank 0's; all are medians.

Configurations: torch, and TensorFlow with a Keras optimizer: eager, in a tf.function (graph), and compiled by XLA.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bagua_hvd.bench.rank import resnet50_counts
from bagua_hvd.bench.report import table
from tests.laboratory.exposed import Watch, bars, overlap, timeline

WAYS = ("torch", "eager", "graph", "xla")


class _Torch:
    """The chain in torch. width: of the constant matrix."""

    def __init__(self, counts, distributed, width):
        import torch

        import bagua_hvd.torch as hvd

        self._weights = [torch.nn.Parameter(torch.ones(count)) for count in counts]
        self._layer = torch.full((width, width), 1 / width)
        self._optimizer = torch.optim.SGD(self._weights, lr=1e-6)
        if distributed:
            named = [(f"weight.{i}", weight) for i, weight in enumerate(self._weights)]
            self._optimizer = hvd.DistributedOptimizer(self._optimizer, named)

    def step(self):
        self._optimizer.zero_grad()
        values = self._layer
        for weight in self._weights:
            values = values @ self._layer * weight.square().mean()
        values.sum().backward()
        self._optimizer.step()

    def reducers(self):
        return [self._optimizer.reducer]


class _TensorFlow:
    """The same in TensorFlow. way: of WAYS."""

    def __init__(self, counts, distributed, width, way):
        import keras
        import tensorflow as tf

        import bagua_hvd.tensorflow as hvd

        weights = [tf.Variable(tf.ones([count])) for count in counts]
        layer = tf.Variable(tf.fill((width, width), 1 / width), trainable=False)
        optimizer = keras.optimizers.SGD(1e-6)
        self._optimizer = hvd.DistributedOptimizer(optimizer) if distributed else optimizer
        self._optimizer.build(weights)

        def step():
            with tf.GradientTape() as tape:
                values = layer
                for weight in weights:
                    values = values @ layer * tf.reduce_mean(tf.square(weight))
                loss = tf.reduce_sum(values)
            self._optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))

        self.step = step if way == "eager" else tf.function(step, jit_compile=way == "xla")

    def reducers(self):
        return self._optimizer.distribution.reduction.reducers()


class _Training:
    """A model for several rounds of training; it is already built, traced and compiled. way: of WAYS."""

    def __init__(self, way, distributed, options):
        counts = [max(1, count // options.divide) for count in reversed(resnet50_counts())]
        self._model = (_Torch(counts, distributed, options.width) if way == "torch" else
                       _TensorFlow(counts, distributed, options.width, way))
        self._steps = options.steps
        self._timeline = Path(options.rows).with_name("timeline.json")
        for _ in range(3):
            self._model.step()
        self._watch = Watch(self._model.reducers() if distributed else [])

    def round(self):
        """(seconds, exposed seconds on rank 0, seconds of CPU time) of a step on this rank."""
        import bagua_hvd.torch as hvd

        self._watch.windows.clear()
        with timeline(self._timeline) as events:
            hvd.barrier()
            started, processor = time.perf_counter(), time.process_time()
            for _ in range(self._steps):
                self._model.step()
            seconds, processor = time.perf_counter() - started, time.process_time() - processor
        exposed = overlap(bars(events), self._watch.windows) / 1e6 if events else 0.0
        return seconds / self._steps, exposed / self._steps, processor / self._steps


def _rank(options):
    import tensorflow as tf
    import torch

    import bagua_hvd.torch as hvd

    tf.config.threading.set_intra_op_parallelism_threads(1)
    torch.set_num_threads(1)
    hvd.init()
    trainings = {f"{way} {kind}": _Training(way, kind == "distributed", options)
                 for way in options.ways for kind in ("alone", "distributed")}
    rows: dict[str, list] = {name: [] for name in trainings}
    for _ in range(options.rounds):
        for name, training in trainings.items():
            mine = torch.tensor(training.round())
            rows[name].append(hvd.allreduce(mine, op=hvd.Max, name="row").tolist())
    if hvd.rank() == 0:
        Path(options.rows).write_text(json.dumps(rows))
    hvd.shutdown()


def _report(rows, ways):
    def median(way, kind, column):
        return 1e3 * statistics.median(row[column] for row in rows[f"{way} {kind}"])

    cells = []
    for way in ways:
        alone, distributed = (median(way, kind, 0) for kind in ("alone", "distributed"))
        exposed, reference = median(way, "distributed", 1), median(ways[0], "distributed", 1)
        processor = median(way, "distributed", 2) - median(way, "alone", 2)
        cells.append((way, f"{1e3 / distributed:.2f}", f"{alone:.1f}", f"{distributed:.1f}",
                      f"{distributed - alone:.1f}", f"{exposed:.1f}", f"{processor:.1f}",
                      f"{exposed / reference:.0%}" if reference else "-"))
    print(table(("front end", "steps/s", "alone ms", "distributed ms", "cost ms", "exposed ms", "processor ms",
                 f"exposed to {ways[0]}"),
                cells, left=1))


def main(arguments=None):
    """Runs the program."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="python -m tests.laboratory.frontends", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-np", type=int, default=2, help="ranks; default 2")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS, help="default: " + " ".join(WAYS))
    parser.add_argument("--steps", type=int, default=10, help="timed, per round; default 10")
    parser.add_argument("--rounds", type=int, default=3, help="default 3")
    parser.add_argument("--divide", type=int, default=1, help="the gradients' sizes by this; default 1")
    parser.add_argument("--width", type=int, default=64,
                        help="of the constant matrix: a larger one hides more; default 64")
    parser.add_argument("--rows", help=argparse.SUPPRESS)       # set if this process is a rank
    options = parser.parse_args(arguments)
    if options.rows:
        _rank(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder, "rows.json")
        rank = [sys.executable, "-m", "tests.laboratory.frontends", *arguments, "--rows", str(rows)]
        subprocess.run(
            [sys.executable, "-m", "bagua_hvd.runner.launch", "-np", str(options.np), *rank],
            env={**os.environ, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2", "HOROVOD_TIMELINE": "DYNAMIC"},
            check=True,
        )
        _report(json.loads(rows.read_text()), options.ways)


if __name__ == "__main__":
    main()
