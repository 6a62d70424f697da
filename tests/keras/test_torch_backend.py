"""KERAS_BACKEND=torch: the same front end, through the torch Reducer."""
import functools
import itertools
import os

import numpy as np
import pytest

# Keras is imported after its backend has been chosen: in the ranks, or just before.
BACKEND = {"env": {"KERAS_BACKEND": "torch"}, "framework": "keras on torch", "timeout": 240}
pytestmark = pytest.mark.timeout(260)


def make_model(seed=0):
    import keras

    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(3)])


def data_of(rank, rows=20):
    random = np.random.default_rng(rank)
    return random.normal(size=(rows, 6)).astype("float32"), random.normal(size=(rows, 3)).astype("float32")


def assert_same_everywhere(hvd, model, different_from=None):
    flat = np.concatenate([weight.flatten() for weight in model.get_weights()])
    everyone = hvd.allgather(flat[None])
    assert np.isfinite(flat).all()
    assert (everyone == everyone[0]).all()
    if different_from is not None:
        assert not np.allclose(flat, different_from)


def fit():
    import keras

    import bagua_hvd.keras as hvd

    hvd.init()
    optimizers = (keras.optimizers.SGD(0.1, momentum=0.9), keras.optimizers.Adam(0.01, clipnorm=0.5))
    for algorithm, optimizer in itertools.product(("gradient_allreduce", "bytegrad"), optimizers):
        optimizer = type(optimizer).from_config(optimizer.get_config())
        model = make_model()
        opt = hvd.DistributedOptimizer(optimizer, algorithm=algorithm)
        assert isinstance(opt, type(optimizer)) and type(opt).__name__ == type(optimizer).__name__
        model.compile(opt, "mse")
        before = np.concatenate([weight.flatten() for weight in model.get_weights()])
        model.fit(*data_of(hvd.rank()), batch_size=5, epochs=2, verbose=0, shuffle=False)
        assert_same_everywhere(hvd, model, different_from=before)

        # Equals one process with the batches of all ranks; clipping sees the mean.
        alone = make_model()
        alone.compile(type(optimizer).from_config(optimizer.get_config()), "mse")
        parts = [data_of(rank) for rank in range(hvd.size())]
        x, y = (np.concatenate([
            part[which][i:i + 5] for i in range(0, 20, 5) for part in parts
        ]) for which in (0, 1))
        alone.fit(x, y, batch_size=5 * hvd.size(), epochs=2, verbose=0, shuffle=False)
        tolerance = {"rtol": 1e-4, "atol": 1e-5} if algorithm == "gradient_allreduce" else {"rtol": 0, "atol": 0.05}
        for mine, theirs in zip(model.get_weights(), alone.get_weights(), strict=True):
            np.testing.assert_allclose(mine, theirs, **tolerance)


@pytest.mark.long
@pytest.mark.parametrize("n", [2, 3])
def test_fit(run_ranks, n):
    run_ranks(n, fit, **BACKEND)


def compiled(algorithm):
    """torch.compile around the whole step, including the reduction, gives the same weights."""
    import keras
    import torch

    import bagua_hvd.keras as hvd

    hvd.init()
    torch.compile = functools.partial(torch.compile, backend="eager")       # only the tracing matters
    x, y = data_of(hvd.rank())
    weights = []
    for jit in (False, True):
        model = make_model()
        opt = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), algorithm=getattr(hvd.algorithms, algorithm)())
        model.compile(opt, "mse", jit_compile=jit)
        model.fit(x, y, batch_size=10, epochs=2, verbose=0, shuffle=False)
        assert_same_everywhere(hvd, model)
        weights.append(model.get_weights())
    for eager, found in zip(*weights, strict=True):
        np.testing.assert_allclose(found, eager, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("algorithm", ["GradientAllReduce", pytest.param("QAdam", marks=pytest.mark.long)])
def test_compiled(run_ranks, algorithm):
    run_ranks(2, compiled, arguments={"algorithm": algorithm}, **BACKEND)


def group_of_torch():
    """With a torch process group Keras 3.16 uses DistributedDataParallel, but not beside a DistributedOptimizer."""
    import keras
    import torch.distributed

    import bagua_hvd.keras as hvd

    hvd.init()
    torch.distributed.init_process_group("gloo", init_method=os.environ["GROUP"], rank=hvd.rank(),
                                         world_size=hvd.size())
    x, y = data_of(hvd.rank())
    model = make_model()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), op=hvd.Sum), "mse")
    own = []

    class Gradients(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            own.append(getattr(self.model, "ddp_model", None))

    model.fit(x, y, batch_size=5, epochs=1, verbose=0, shuffle=False, callbacks=[Gradients()])
    assert own == [None] * 4
    # For other optimizers Keras decides.
    model = make_model()
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(x, y, batch_size=5, epochs=1, verbose=0)
    assert (getattr(model, "ddp_model", None) is not None) == hasattr(keras.Model, "_initialize_ddp")
    torch.distributed.destroy_process_group()


def test_group_of_torch(run_ranks, tmp_path):
    run_ranks(2, group_of_torch, **{**BACKEND, "env": {**BACKEND["env"], "GROUP": f"file://{tmp_path}/group"}})


def details(folder):
    import keras

    import bagua_hvd.keras as hvd

    hvd.init()
    rank = hvd.rank()
    x, y = data_of(rank)

    # Accumulation: two passes make one step with their sum; the first advances only the iterations.
    model = make_model()
    opt = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=2)
    model.compile(opt, "mse")
    before = model.get_weights()
    model.train_on_batch(x[:5], y[:5])
    assert all((a == b).all() for a, b in zip(before, model.get_weights(), strict=True))
    assert int(opt.iterations) == 1
    model.train_on_batch(x[5:10], y[5:10])
    assert int(opt.iterations) == 2
    assert any((a != b).any() for a, b in zip(before, model.get_weights(), strict=True))
    assert_same_everywhere(hvd, model)

    # An algorithm that updates the weights itself would leave out local variables.
    opt = hvd.DistributedOptimizer(keras.optimizers.Adam(0.1), algorithm="qadam")
    opt.register_local_var(model.trainable_variables[0])
    model.compile(opt, "mse")
    with pytest.raises(ValueError, match="updates all weights itself"):
        model.train_on_batch(x, y)

    # Loss scaling, outside and inside: an infinity on one rank skips the step on all ranks.
    for outside in (True, False):
        model = make_model()
        if outside:
            inner = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
            opt = keras.optimizers.LossScaleOptimizer(inner, initial_scale=256.0)
        else:
            inner = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=256.0)
            opt = hvd.DistributedOptimizer(inner)
        model.compile(opt, "mse")
        model.train_on_batch(x, y)
        assert_same_everywhere(hvd, model)
        before = model.get_weights()
        model.train_on_batch(x * (np.inf if rank == 0 else 1), y)
        assert all((a == b).all() for a, b in zip(before, model.get_weights(), strict=True))
        assert float(opt.dynamic_scale) == 128.0
        model.train_on_batch(x, y)
        assert_same_everywhere(hvd, model)

    # Saved as the original, so plain Keras can load it; load_model() wraps it and restores all state.
    for algorithm in (lambda: None, lambda: hvd.algorithms.OneBitAdam(warmup_steps=2)):
        model = make_model()
        model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), algorithm=algorithm()), "mse")
        model.fit(x, y, epochs=4, verbose=0, shuffle=False)
        path = os.path.join(folder, f"{rank}.keras")
        model.save(path)
        plain = keras.models.load_model(path)
        assert not hasattr(plain.optimizer, "distribution")
        assert int(plain.optimizer.iterations) == 4
        wrapped = hvd.load_model(path, algorithm=algorithm())
        assert hasattr(wrapped.optimizer, "distribution") and isinstance(wrapped.optimizer, keras.optimizers.Adam)
        for one in (model, wrapped):
            one.fit(x, y, verbose=0, shuffle=False)
        assert all((a == b).all() for a, b in zip(model.get_weights(), wrapped.get_weights(), strict=True))
        assert_same_everywhere(hvd, wrapped)

    # An update without apply() is an error.
    opt = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    opt.build(model.trainable_variables)
    with pytest.raises(RuntimeError, match="have not been reduced"):
        opt.update_step(model.trainable_variables[0] * 1, model.trainable_variables[0], 0.1)
    assert hvd.allreduce(float(rank)) == (hvd.size() - 1) / 2
    assert hvd.broadcast(rank, 1) == 1


def test_details(run_ranks, tmp_path):
    run_ranks(2, details, arguments={"folder": str(tmp_path)}, **BACKEND)


def given_gradients():
    """apply() changes neither the given gradients nor those of the parameters, unless they are the same."""
    import keras
    import torch

    import bagua_hvd.keras as hvd

    hvd.init()
    rank, mean = hvd.rank(), (hvd.size() - 1) / 2
    used, unused = keras.Variable(0.0), keras.Variable(0.0)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.build([used, unused])
    gradient, earlier = torch.tensor(float(rank)), torch.tensor(5.0)
    for grad in (None, earlier):
        used.assign(0.0)
        used.value.grad = grad
        optimizer.apply([gradient, None], [used, unused])
        assert float(used) == -mean
        assert float(gradient) == rank and float(earlier) == 5
        assert used.value.grad is grad and unused.value.grad is None
    used.value.grad = gradient
    optimizer.apply([gradient, None], [used, unused])
    assert used.value.grad is gradient and float(gradient) == mean


def test_given_gradients(run_ranks):
    run_ranks(2, given_gradients, **BACKEND)


def bfloat16():
    import keras
    import torch

    import bagua_hvd.keras as hvd

    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    mine = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], dtype=torch.bfloat16) + rank
    total = sum(np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]) + other for other in range(size))
    for tensor, expected in ((mine, total), (mine.T, total.T), (mine[0, 1], total[0, 1]),
                             (mine.clone().requires_grad_(), total)):
        result = hvd.allreduce(tensor, average=False)
        assert result.dtype.name == "bfloat16" and result.shape == tuple(tensor.shape)
        np.testing.assert_array_equal(result.astype("float32"), expected)
    np.testing.assert_array_equal(hvd.broadcast(mine, 1).astype("float32"), (mine - rank + 1).float())
    assert hvd.allgather(mine).shape == (2 * size, 3)

    variable = keras.Variable(mine, dtype="bfloat16")
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, dtype="bfloat16")])
    np.testing.assert_array_equal(hvd.allreduce(variable, average=False).astype("float32"), total)
    keras.utils.set_random_seed(rank)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    x, y = data_of(rank)
    first = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(x[:, :3], y[:, :2], batch_size=5, verbose=0, callbacks=[first])
    weights = hvd.allgather(model.get_weights()[0][None])
    assert (weights == weights[0]).all()


def test_bfloat16(run_ranks):
    run_ranks(2, bfloat16, **BACKEND)


def one_step_late():
    """delay=1 applies the mean gradient of the step before, also after an optimizer has raised an error."""
    import keras

    import bagua_hvd.keras as hvd

    hvd.init()
    rank, n = hvd.rank(), hvd.size()
    t = 0

    class SGD(keras.optimizers.SGD):
        def update_step(self, *arguments):
            if t == 2:
                raise ArithmeticError
            super().update_step(*arguments)

    def gradient(rank, t, x):
        return x - np.random.default_rng([rank, t]).standard_normal(6).astype("float32")

    variable = keras.Variable(np.ones(6, "float32"))
    optimizer = hvd.DistributedOptimizer(SGD(0.25, momentum=0.5), delay=1)
    x, momentum, late = np.ones(6), np.zeros(6), np.zeros(6)
    for t in range(5):
        mine = gradient(rank, t, keras.ops.convert_to_numpy(variable))
        sent = np.mean([gradient(r, t, x) for r in range(n)], 0)
        if t == 2:
            with pytest.raises(ArithmeticError):
                optimizer.apply([keras.ops.convert_to_tensor(mine)], [variable])
            late = sent
            continue
        optimizer.apply([keras.ops.convert_to_tensor(mine)], [variable])
        momentum = 0.5 * momentum + late
        x, late = x - 0.25 * momentum, sent
        np.testing.assert_allclose(keras.ops.convert_to_numpy(variable), x, rtol=1e-5, atol=1e-5)


def test_one_step_late(run_ranks):
    run_ranks(2, one_step_late, **BACKEND)


def weighted():
    """Unequal batches train as one process on all the data; a NaN from a rank without samples is ignored."""
    import keras
    import torch

    import bagua_hvd.keras as hvd

    class Weighted(keras.Sequential):
        def train_step(self, data):
            self.optimizer.set_weight(len(data[0]))
            return super().train_step(data)

    hvd.init()
    sizes, steps = (4, 1, 7), 3
    parts = [data_of(rank, size * steps) for rank, size in enumerate(sizes)]
    model, alone = Weighted(make_model().layers), make_model()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
    alone.compile(keras.optimizers.Adam(0.01), "mse")
    model.fit(*parts[hvd.rank()], batch_size=sizes[hvd.rank()], verbose=0, shuffle=False)
    for step in range(steps):
        alone.train_on_batch(*(np.concatenate([
            part[which][step * size:(step + 1) * size] for part, size in zip(parts, sizes, strict=True)
        ]) for which in (0, 1)))
    flat, expected = (np.concatenate([weight.flatten() for weight in each.get_weights()]) for each in (model, alone))
    np.testing.assert_allclose(flat, expected, rtol=1e-5, atol=1e-6)
    variable = keras.Variable(1.0)
    opt = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    for weight, sentence in ((-hvd.rank(), "2 ranks gave"), (0, "all ranks are 0")):
        opt.set_weight(weight)
        with pytest.raises(ValueError, match=sentence):
            opt.apply_gradients([(torch.tensor(1.0), variable)])
    opt.set_weight(hvd.rank())
    opt.apply_gradients([(torch.tensor(float(hvd.rank()) or float("nan")), variable)])
    np.testing.assert_allclose(float(variable), 1 - (1 + 4) / 3, rtol=1e-5)


def test_weighted(run_ranks):
    run_ranks(3, weighted, **BACKEND)


def wrong_weight_of_one_rank():
    import keras
    import torch

    import bagua_hvd.keras as hvd

    hvd.init()
    variable = keras.Variable(1.0)
    opt = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    for weight, sentence in ((-1, "finite and not negative"), (0, "all ranks are 0")):
        opt.set_weight(weight)
        with pytest.raises(ValueError, match=sentence):
            opt.apply_gradients([(torch.tensor(1.0), variable)])
    opt.set_weight(3)
    opt.apply_gradients([(torch.tensor(1.0), variable)])
    assert float(variable) == 0


def test_wrong_weight_of_one_rank(run_ranks):
    run_ranks(1, wrong_weight_of_one_rank, **BACKEND)


def without_gradients():
    """None is sent as zeros, as in torch, so all ranks make the same step whichever variables they have used."""
    import keras
    import torch

    import bagua_hvd.keras as hvd

    hvd.init()
    rank, n = hvd.rank(), hvd.size()

    def train(algorithm, steps, used, passes=1):
        a, b = keras.Variable(np.zeros(3, "float32")), keras.Variable(np.zeros(3, "float32"))
        optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(1.0), algorithm=algorithm,
                                                    backward_passes_per_step=passes)
        found = []
        for step in range(steps):
            gradient = torch.full((3,), rank + 1.0)
            optimizer.apply([gradient, gradient.clone() if used(step) else None], [a, b])
            found.append([float(keras.ops.convert_to_numpy(variable)[0]) for variable in (a, b)])
        assert len(optimizer.distribution.reduction.reducers()) == 1
        return optimizer, (a, b), np.array(found)

    mean = (n + 1) / 2
    for passes in (1, 2):
        _, _, found = train(None, 4, lambda step: rank == 0, passes)
        for step, (a, b) in enumerate(found, 1):
            made = step // passes * passes
            np.testing.assert_allclose((a, b), (-made * mean, -made / n), rtol=1e-6)
    # The algorithm averages in every second step, in which b has a gradient; local steps without one leave b.
    _, _, found = train(hvd.algorithms.LocalSGD(2, full_steps=0), 4, lambda step: step % 2)
    steps = np.array([[rank + 1, 0], [2 * mean, mean], [2 * mean + rank + 1, mean], [4 * mean, 2 * mean]])
    np.testing.assert_allclose(found, -steps, rtol=1e-6)
    # A weighted average in which a rank's gradient is None.
    optimizer, (a, b), _ = train(None, 1, lambda step: True)
    for variable in (a, b):
        variable.assign(np.zeros(3))
    optimizer.set_weight(rank + 1)
    optimizer.apply([torch.ones(3), torch.ones(3) if rank == 0 else None], [a, b])
    np.testing.assert_allclose(keras.ops.convert_to_numpy(b), -1 / (n * mean), rtol=1e-6)
    assert len(optimizer.distribution.reduction.reducers()) == 1


def test_without_gradients(run_ranks):
    run_ranks(2, without_gradients, **BACKEND)


def begins_apart():
    """The callback broadcasts after the first step, and outer weights take its values."""
    import keras

    import bagua_hvd.keras as hvd

    hvd.init()
    for arguments in ({"full_steps": 0}, {"quorum": hvd.size()}):
        algorithm = hvd.algorithms.DiLoCo(2, **arguments)
        model = make_model(seed=hvd.rank())
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.0), algorithm=algorithm), "mse")
        model.fit(*data_of(hvd.rank()), batch_size=4, verbose=0,
                  callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(1)])
        for weight, expected in zip(model.get_weights(), make_model(seed=1).get_weights(), strict=True):
            np.testing.assert_array_equal(weight, expected)
        if "quorum" in arguments:
            algorithm.abort()
        assert hvd.allreduce(1.0) == 1.0        # rank 0 runs the quorum server


def test_begins_apart(run_ranks):
    run_ranks(2, begins_apart, **BACKEND)
