"""The training of an estimator's rank, without Spark."""
import os
import pickle
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("pyspark", reason="Spark is not installed: pip install pyspark pyarrow pandas")
torch = pytest.importorskip("torch")

PASSES, BATCHES, EPOCHS = 2, 5, 2


def batches(rank):
    random = np.random.default_rng(rank)
    return [{"x": random.normal(size=(4, 2)).astype("float32"), "y": random.normal(size=(4, 1)).astype("float32")}
            for _ in range(BATCHES)]


def linear():
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def incomplete_windows():
    """The last, incomplete batches of an epoch make a step of their own."""
    from bagua_hvd.spark.torch import _train

    model, optimizer = linear()
    torch.cuda.is_available = lambda: True      # on a host without a GPU for this rank
    _train(model, SimpleNamespace(
        use_gpu=True, gradient_compression=None, optimizer=optimizer, algorithm=None, backward_passes_per_step=PASSES,
        loss=torch.nn.functional.mse_loss, loss_weights=None, rows=lambda rank, size: (batches(rank), None),
        epoch=lambda rows, epoch: rows, feature_cols=["x"], label_cols=["y"], metrics=[], epochs=EPOCHS, callbacks=[],
        verbose=0))
    alone, optimizer = linear()
    for _ in range(EPOCHS):
        for number in range(BATCHES):
            for rank in range(2):
                batch = batches(rank)[number]
                loss = torch.nn.functional.mse_loss(alone(torch.tensor(batch["x"])), torch.tensor(batch["y"]))
                (loss / 2).backward()
            if number % PASSES == PASSES - 1 or number == BATCHES - 1:
                optimizer.step()
                optimizer.zero_grad()
    for mine, theirs in zip(alone.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_incomplete_windows(run_ranks):
    run_ranks(2, incomplete_windows)


def keras_models_that_differ():
    """The result is the ranks' mean, which all ranks have at the end. A rank sees the GPU of its local rank alone."""
    os.environ["CUDA_VISIBLE_DEVICES"] = "5,7"      # as for the host's ranks
    import keras

    import bagua_hvd.keras as hvd
    from bagua_hvd.spark.keras import _train, to_bytes

    class Keep(keras.callbacks.Callback):
        def on_train_end(self, logs=None):
            kept.append(self.model)

    for algorithm in ("async", hvd.algorithms.LocalSGD(BATCHES, full_steps=0)):
        kept = []
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        optimizer = keras.saving.serialize_keras_object(keras.optimizers.SGD(0.1))
        result = _train(to_bytes(model), optimizer, SimpleNamespace(
            optimizer=None, random_seed=0, custom_objects=None, gradient_compression=None,
            algorithm=algorithm, loss="mse", loss_weights=None, metrics=(), rows=lambda rank, size: (rank, None),
            epoch=lambda rank, epoch: batches(rank)[:-1], steps=lambda rank: BATCHES - 1, feature_cols=["x"],
            label_cols=["y"], epochs=1, callbacks=[Keep()], verbose=0))
        hvd.init()
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "57"[hvd.rank()]
        mine = kept[0].get_weights()
        assert (hvd.allgather(mine[0][None]) == mine[0]).all(), algorithm
        if hvd.rank() == 0:
            assert (pickle.loads(result["content"])[0] == mine[0]).all()
        hvd.shutdown()


def test_keras_models_that_differ(run_ranks):
    pytest.importorskip("keras")
    run_ranks(2, keras_models_that_differ)
