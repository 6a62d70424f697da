"""Random programs of Keras' own training loops, compared with plain Keras on the gradients of all ranks.

A program is drawn from its seed, equally on all ranks: variables, some of them local or sparse, an optimizer with its
clipping and loss scaling, a lossless algorithm, and steps. These accumulate, leave out variables, weigh ranks, change
the learning rate, overflow on one rank, and continue with a new optimizer. Gradients are given, not computed, so one
program runs eagerly, in a graph, compiled by XLA, and on the torch backend.
"""
import os
import random

import numpy as np
import pytest

ALGORITHMS = ("gradient_allreduce", "bytegrad", "topk", "doublesqueeze", "powersgd")
SHAPES = ((), (1,), (5,), (3, 4), (2, 3, 2), (7, 1))
BASES = ("sgd", "momentum", "adam", "adamw", "adagrad", "rmsprop")
CLIPS = ({}, {}, {"clipnorm": 0.7}, {"global_clipnorm": 0.5}, {"clipvalue": 0.2})


# ------------------------------------------------------------------------------------------------------ drawing ----


def draw_program(seed, n, mode):
    draw = random.Random(seed)
    on_torch = os.environ.get("KERAS_BACKEND") == "torch"       # there hvd has fewer options, and gradients are dense
    algorithm = draw.choice(["gradient_allreduce"] * 4 + list(ALGORITHMS))
    exact = algorithm == "gradient_allreduce"
    total = algorithm != "powersgd" and draw.random() < 0.3
    delay = int(algorithm in ("gradient_allreduce", "doublesqueeze") and draw.random() < 0.1)
    sparse = exact and not delay and not on_torch and mode != "xla" and draw.random() < 0.3
    passes = 1 if on_torch else draw.choice((1, 1, 1, 2, 3))
    scaled = exact and not delay and draw.random() < 0.2
    variables = [{"shape": draw.choice(SHAPES), "rows": False, "local": False} for _ in range(draw.randrange(1, 6))]
    for variable in variables[1:]:
        if sparse and draw.random() < 0.5:
            variable.update(shape=(6, 2), rows=True)
        elif not delay and draw.random() < 0.2:
            variable["local"] = True
    optimizer = {
        "algorithm": algorithm, "sum": total, "delay": delay, "passes": passes, "scaled": scaled,
        "base": draw.choice(BASES[:2] if sparse else BASES), "clip": {} if sparse else draw.choice(CLIPS),
        "mean_of_passes": draw.random() < 0.5, "scale_local": on_torch or draw.random() < 0.5,
        "predivide": 2.0 if exact and not total and draw.random() < 0.2 else 1.0,
        "groups": draw.choice((None, None, None, 1, 2)), "as_dense": sparse and (passes > 1 or draw.random() < 0.3),
        "ema": draw.random() < 0.15 and not scaled,
    }
    steps = []
    for t in range(draw.randrange(3, 7)):
        step = {"used": [i for i in range(len(variables)) if i == 0 or delay or draw.random() < 0.8],
                "weights": None, "rate": draw.choice((None, None, None, 0.5)), "overflow": None,
                "reload": t > 0 and exact and not delay and draw.random() < 0.2}
        if exact and not total and not sparse and draw.random() < 0.3:
            step["weights"] = [draw.choice((0, 1, 2, 5)) for _ in range(n - 1)] + [3]
        if scaled and draw.random() < 0.3:
            step["overflow"] = draw.randrange(n)
        steps.append(step)
    return {"seed": seed, "variables": variables, "optimizer": optimizer, "steps": steps}


def initial(program, index):
    values = np.random.default_rng((program["seed"], index)).normal(size=program["variables"][index]["shape"])
    return values.astype("float32")


def gradient(program, t, passed, index, rank):
    """A rank's gradient in one pass of a step. Rows that it does not use are zeros."""
    generator = np.random.default_rng((program["seed"], t, passed, index, rank))
    values = generator.normal(size=program["variables"][index]["shape"]).astype("float32")
    if program["variables"][index]["rows"]:
        values[generator.permutation(len(values))[:3]] = 0
    return values


# ------------------------------------------------------------------------------------------------- the training ----


class Trainer:
    """The program's variables and its optimizer."""

    def __init__(self, program):
        import keras

        self.program = program
        self.variables = [keras.Variable(initial(program, i), name=f"v{i}") for i in range(len(program["variables"]))]
        self.optimizer = self.make()
        self.optimizer.build(self.variables)

    def base(self):
        from keras import optimizers

        how = self.program["optimizer"]
        common = {**how["clip"], **({"use_ema": True, "ema_overwrite_frequency": 2} if how["ema"] else {})}
        return {"sgd": lambda: optimizers.SGD(0.1, **common),
                "momentum": lambda: optimizers.SGD(0.1, momentum=0.9, **common),
                "adam": lambda: optimizers.Adam(0.01, epsilon=1e-3, **common),
                "adamw": lambda: optimizers.AdamW(0.01, weight_decay=0.1, epsilon=1e-3, **common),
                "adagrad": lambda: optimizers.Adagrad(0.1, epsilon=1e-3, **common),
                "rmsprop": lambda: optimizers.RMSprop(0.01, epsilon=1e-3, **common)}[how["base"]]()

    def scaled(self, optimizer):
        from keras import optimizers

        if not self.program["optimizer"]["scaled"]:
            return optimizer
        return optimizers.LossScaleOptimizer(optimizer, initial_scale=8.0, dynamic_growth_steps=2)

    def scale(self):
        return np.float32(self.optimizer.dynamic_scale if self.program["optimizer"]["scaled"] else 1.0)

    def innermost(self):
        return getattr(self.optimizer, "inner_optimizer", self.optimizer)

    def change_rate(self, rate):
        if rate is not None:
            self.innermost().learning_rate = float(self.innermost().learning_rate) * rate


class Alone(Trainer):
    """Plain Keras, with the gradients that this rank should get."""

    def __init__(self, program, rank, n):
        self.rank, self.n = rank, n
        self.sent = [np.zeros_like(initial(program, i)) for i in range(len(program["variables"]))]
        super().__init__(program)

    def make(self):
        return self.scaled(self.base())

    def reduced(self, t, step, index):
        how, local = self.program["optimizer"], self.program["variables"][index]["local"]
        of_ranks = [sum(gradient(self.program, t, passed, index, rank) for passed in range(how["passes"]))
                    / (how["passes"] if how["mean_of_passes"] else 1) for rank in range(self.n)]
        if step["overflow"] is not None:
            of_ranks[step["overflow"]] = of_ranks[step["overflow"]] * np.float32(np.inf)
        weights = step["weights"] or [1] * self.n
        weighted = [self.n * weight / sum(weights) * each if weight else np.zeros_like(each)
                    for weight, each in zip(weights, of_ranks, strict=True)]
        if local:
            return weighted[self.rank] / (self.n if how["scale_local"] else 1)
        return sum(weighted) / (1 if how["sum"] else self.n)

    def step(self, t, step):
        import keras

        how = self.program["optimizer"]
        self.change_rate(step["rate"])
        gradients = {i: self.reduced(t, step, i) * self.scale() for i in step["used"]}
        if how["delay"] and self.n > 1:
            gradients, self.sent = {i: self.sent[i] for i in gradients}, gradients
        self.innermost()._iterations.assign_add(how["passes"] - 1)
        self.optimizer.apply([keras.ops.convert_to_tensor(np.asarray(each, "float32")) for each in gradients.values()],
                             [self.variables[i] for i in gradients])


class Distributed(Trainer):
    """This rank's gradients, through DistributedOptimizer."""

    def __init__(self, program, hvd, mode):
        self.hvd, self.mode = hvd, mode
        self.traced = {}
        super().__init__(program)

    def algorithm(self):
        from bagua_hvd import algorithms, codecs

        everything, average = codecs.topk(1.0), not self.program["optimizer"]["sum"]
        return {"gradient_allreduce": lambda: "gradient_allreduce",
                "bytegrad": lambda: algorithms.ByteGrad(codec=everything, average=average),
                "topk": lambda: algorithms.TopK(ratio=1.0, average=average),
                "doublesqueeze": lambda: algorithms.DoubleSqueeze(codec=everything, average=average),
                "powersgd": lambda: algorithms.PowerSGD(rank=64)}[self.program["optimizer"]["algorithm"]]()

    def make(self):
        how, hvd = self.program["optimizer"], self.hvd
        more = {} if os.environ.get("KERAS_BACKEND") == "torch" else {
            "backward_passes_per_step": how["passes"], "average_aggregated_gradients": how["mean_of_passes"],
            "scale_local_gradients": how["scale_local"]}
        optimizer = self.scaled(hvd.DistributedOptimizer(
            self.base(), op=hvd.Sum if how["sum"] else hvd.Average, algorithm=self.algorithm(), delay=how["delay"],
            gradient_predivide_factor=how["predivide"], groups=how["groups"], sparse_as_dense=how["as_dense"], **more))
        for variable, spec in zip(self.variables, self.program["variables"], strict=True):
            if spec["local"]:
                optimizer.register_local_var(variable)
        return optimizer

    def reload(self):
        kept = {}
        self.optimizer.save_own_variables(kept)
        self.optimizer = self.make()
        self.optimizer.build(self.variables)
        self.optimizer.load_own_variables({key: np.array(value) for key, value in kept.items()})
        self.traced = {}

    def given(self, t, passed, step, index):
        import keras

        values = gradient(self.program, t, passed, index, self.hvd.rank()) * self.scale()
        if step["overflow"] == self.hvd.rank():
            values = values * np.float32(np.inf)
        if not self.program["variables"][index]["rows"]:
            return keras.ops.convert_to_tensor(values)
        import tensorflow as tf

        rows = np.flatnonzero(values.any(axis=1))
        return tf.IndexedSlices(tf.constant(values[rows]), tf.constant(rows), tf.constant(values.shape))

    def apply(self, used, gradients, weight):
        if weight is not None:
            self.optimizer.set_weight(weight)
        self.optimizer.apply(gradients, [self.variables[i] for i in used])

    def traced_apply(self, used, gradients, weight):
        import tensorflow as tf

        key = tuple(used), weight is not None
        if key not in self.traced:
            def run(gradients, weight):
                self.apply(used, gradients, weight if key[1] else None)

            self.traced[key] = tf.function(run, jit_compile=self.mode == "xla", reduce_retracing=True)
        self.traced[key](gradients, tf.constant(weight or 0.0))

    def step(self, t, step):
        if step["reload"]:
            self.reload()
        self.change_rate(step["rate"])
        weight = None if step["weights"] is None else float(step["weights"][self.hvd.rank()])
        for passed in range(self.program["optimizer"]["passes"]):
            gradients = [self.given(t, passed, step, i) for i in step["used"]]
            (self.apply if self.mode == "eager" else self.traced_apply)(step["used"], gradients, weight)


def run_program(hvd, seed, mode):
    import keras

    program = draw_program(seed, hvd.size(), mode)
    try:
        alone, mine = Alone(program, hvd.rank(), hvd.size()), Distributed(program, hvd, mode)
        for t, step in enumerate(program["steps"]):
            alone.step(t, step)
            mine.step(t, step)
            for i, (got, expected) in enumerate(zip(mine.variables, alone.variables, strict=True)):
                np.testing.assert_allclose(keras.ops.convert_to_numpy(got), keras.ops.convert_to_numpy(expected),
                                           rtol=2e-4, atol=2e-5, err_msg=f"step {t}, variable {i}")
    except BaseException:
        print(f"seed {seed}, {mode}, {hvd.size()} ranks, rank {hvd.rank()}: {program}", flush=True)
        raise


def run_programs(first, last, mode):
    if os.environ.get("KERAS_BACKEND") == "torch":
        import bagua_hvd.keras as hvd
    else:
        import bagua_hvd.tensorflow.keras as hvd

    hvd.init()
    for seed in range(first, last):
        run_program(hvd, seed, mode)


TORCH = {"env": {"KERAS_BACKEND": "torch"}, "framework": "keras on torch"}


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("n", "mode", "last", "backend"), [
    (2, "eager", 15, {}), (3, "graph", 5, {}), (2, "eager", 15, TORCH),
    pytest.param(2, "xla", 5, {}, marks=pytest.mark.long), pytest.param(1, "eager", 15, {}, marks=pytest.mark.long),
])
def test_programs(run_ranks, n, mode, last, backend):
    run_ranks(n, run_programs, arguments={"first": 0, "last": last, "mode": mode}, timeout=180, **backend)


@pytest.mark.long
@pytest.mark.timeout(500)
@pytest.mark.parametrize(("n", "mode", "backend"), [(2, "eager", {}), (3, "eager", {}), (2, "graph", {}),
                                                    (3, "eager", TORCH)])
def test_many_programs(run_ranks, n, mode, backend):
    run_ranks(n, run_programs, arguments={"first": 1000, "last": 1030 if mode == "graph" else 1080, "mode": mode},
              timeout=450, **backend)
