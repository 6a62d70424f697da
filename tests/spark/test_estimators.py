"""Estimators on local[2]: what they train is what the same batches train in one process, and Spark can apply it."""
import math

import numpy as np
import pytest

pytest.importorskip("pyspark", reason="Spark is not installed: pip install pyspark pyarrow pandas")

from pyspark.ml import Pipeline  # noqa: E402
from pyspark.ml.feature import VectorAssembler  # noqa: E402

from bagua_hvd.spark.common.backend import SparkBackend  # noqa: E402
from bagua_hvd.spark.common.data import Rows, column  # noqa: E402
from bagua_hvd.spark.common.store import DBFSLocalStore, Store  # noqa: E402

pytestmark = pytest.mark.timeout(300)
ROWS = 240
WEIGHTS = np.array([[2.0], [-1.0]])


@pytest.fixture(scope="module")
def frame(spark):
    """Columns a, b, y = 2 a - b + 0.5, and part, true in every sixth row."""
    random = np.random.default_rng(0)
    features = random.normal(size=(ROWS, 2))
    labels = features @ WEIGHTS + 0.5
    return spark.createDataFrame(
        [(float(a), float(b), float(y), i % 6 == 0)
         for i, ((a, b), (y,)) in enumerate(zip(features, labels, strict=True))], ["a", "b", "y", "part"])


@pytest.fixture
def store(tmp_path):
    return Store.create(str(tmp_path))


def assembled(*stages):
    return Pipeline(stages=[VectorAssembler(inputCols=["a", "b"], outputCol="features"), *stages])


def check(model, frame):
    """The sum of the squares of what transform() misses is small; the other columns stay."""
    result = model.transform(frame).collect()
    assert len(result) == ROWS and {"a", "b", "y", "part", "features", "y__output"} <= set(result[0].asDict())
    assert math.fsum((row.y - row.y__output[0]) ** 2 for row in result) / ROWS < 0.01


def linear():
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("algorithm", [None, "bytegrad", "decentralized"])
def test_torch(frame, store, algorithm):
    torch = pytest.importorskip("torch")
    from bagua_hvd.spark.torch import TorchEstimator

    model, optimizer = linear()

    def error(output, label):
        return (output - label).abs().mean()

    estimator = TorchEstimator(
        num_proc=2, store=store, model=model, optimizer=optimizer, loss=torch.nn.functional.mse_loss,
        metrics=[error], feature_cols=["features"], label_cols=["y"], label_shapes=[[-1, 1]], validation="part",
        epochs=6, verbose=0, algorithm=algorithm, run_id="run").setBatchSize(10)
    assert estimator.getBatchSize() == 10 and estimator.getEpochs() == 6
    fitted = assembled(estimator).fit(frame)
    check(fitted, frame)
    history = fitted.stages[-1].getHistory()
    assert [entry["epoch"] for entry in history] == list(range(6))
    assert history[-1]["validation"]["loss"] < history[0]["train"]["loss"] / 100
    assert history[-1]["validation"]["error"] < 0.1
    assert store.exists(store.get_checkpoint_path("run"))
    assert store.dataset(store.get_train_data_path()).count_rows() == ROWS * 5 // 6


def test_torch_trains_as_one_process_does(frame, store):
    """Two ranks with batches of 5: the averages of their gradients are those of one process with both batches."""
    torch = pytest.importorskip("torch")
    from bagua_hvd.spark.torch import TorchEstimator

    model, optimizer = linear()
    features = VectorAssembler(inputCols=["a", "b"], outputCol="features").transform(frame)
    trained = TorchEstimator(
        num_proc=2, store=store, model=model, optimizer=optimizer, loss=torch.nn.functional.mse_loss, shuffle=False,
        feature_cols=["features"], label_cols=["y"], label_shapes=[[-1, 1]], batch_size=5, epochs=1,
        train_steps_per_epoch=7, verbose=0).fit(features).getModel()
    columns = {"features": None, "y": [-1, 1]}
    halves = [Rows(store.dataset(store.get_train_data_path()), columns, rank, 2).batches(5) for rank in range(2)]
    alone, optimizer = linear()
    for _ in range(7):
        both = [next(half) for half in halves]
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(*(
            f(torch.tensor(np.concatenate([batch[name] for batch in both])))
            for name, f in (("features", alone), ("y", lambda label: label)))).backward()
        optimizer.step()
    for mine, theirs in zip(alone.parameters(), trained.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_keras(frame, store):
    pytest.importorskip("tensorflow")
    import keras

    from bagua_hvd.spark.keras import KerasEstimator

    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    estimator = KerasEstimator(
        backend=SparkBackend(2), store=store, model=model, optimizer=keras.optimizers.SGD(0.1), loss="mse",
        metrics=["mae"], feature_cols=["features"], label_cols=["y"], validation=0.2, batch_size=10, epochs=6,
        verbose=0)
    fitted = assembled(estimator).fit(frame)
    check(fitted, frame)
    history = fitted.stages[-1].getHistory()
    assert len(history["loss"]) == 6 and history["val_mae"][-1] < 0.1


def test_lightning(frame, store):
    lightning = pytest.importorskip("lightning.pytorch")
    import torch

    from bagua_hvd.spark.lightning import TorchEstimator

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(2, 1)

        def forward(self, features):
            return self.linear(features)

        def training_step(self, batch, number):
            loss = torch.nn.functional.mse_loss(self(batch["features"]), batch["y"])
            self.log("loss", loss)
            return loss

        def validation_step(self, batch, number):
            self.log("val_loss", torch.nn.functional.mse_loss(self(batch["features"]), batch["y"]), sync_dist=True)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    estimator = TorchEstimator(num_proc=2, store=store, model=Module(), feature_cols=["features"], label_cols=["y"],
                               label_shapes=[[-1, 1]], validation="part", batch_size=10, epochs=6,
                               algorithm="bytegrad")
    fitted = assembled(estimator).fit(frame)
    check(fitted, frame)
    assert fitted.stages[-1].getHistory()["val_loss"] < 0.01


def test_what_is_wrong_is_said_before_a_rank_starts(frame, store):
    from bagua_hvd.spark.torch import TorchEstimator

    model, optimizer = linear()
    given = {"store": store, "model": model, "optimizer": optimizer, "loss": lambda a, b: a, "feature_cols": ["a"],
             "label_cols": ["y"]}
    with pytest.raises(TypeError, match="no parameters batchsize"):
        TorchEstimator(**given, batchsize=3)
    for wrong, words in (({"optimizer": None}, "needs optimizer="), ({"feature_cols": ["z"]}, "no columns z"),
                         ({"validation": 2.0}, "between 0 and 1"), ({"input_shapes": [[-1], [-1]]}, "2 shapes for"),
                         ({"num_proc": 2, "backend": SparkBackend(2)}, "exclude each other")):
        with pytest.raises(ValueError, match=words):
            TorchEstimator(**{**given, **wrong}).fit(frame)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_rows_of_the_ranks_are_equally_many_and_not_twice(tmp_path, size):
    import pyarrow as pa
    import pyarrow.parquet

    numbers = np.arange(100)
    for part, (low, high) in enumerate([(0, 30), (30, 31), (31, 100)]):
        pyarrow.parquet.write_table(pa.table({"n": numbers[low:high], "v": [[i, i + 0.5] for i in range(low, high)]}),
                                    tmp_path / f"{part}.parquet", row_group_size=8)
    dataset = Store.create(str(tmp_path)).dataset(str(tmp_path))
    seen = []
    for rank in range(size):
        rows = Rows(dataset, {"n": None, "v": None}, rank, size)
        batches = list(rows.batches(6, (0, 1)))
        assert len(batches) == rows.steps(6) and rows.count == 100 // size
        assert all(len(batch["n"]) == 6 for batch in batches[:-1])
        assert all((batch["v"][:, 1] == batch["n"] + np.float32(0.5)).all() for batch in batches)
        own = np.concatenate([batch["n"] for batch in batches])
        assert len(own) == rows.count and (size == 1 or list(own) != sorted(own) or rows.count < 9)
        seen += list(own)
    assert sorted(seen) == list(range(100 // size * size))
    with pytest.raises(ValueError, match="100 rows for 101 ranks"):
        Rows(dataset, {"n": None}, 0, 101)


def test_columns_that_are_no_arrays():
    import pyarrow as pa

    assert column(pa.array([[1.0, 2.0], [3.0, 4.0]]), [-1, 2, 1]).shape == (2, 2, 1)
    assert column(pa.array([1, 2])).dtype == np.int64
    for wrong, words in ((pa.array([[1.0], [2.0, 3.0]]), "different lengths"),
                         (pa.array([1.0, None]), "missing values")):
        with pytest.raises(ValueError, match=words):
            column(wrong)


def test_stores(tmp_path):
    store = Store.create(str(tmp_path / "below"))
    path = store.get_checkpoint_path("one")
    assert not store.exists(path)
    store.write_text(path, "text")
    assert store.read(path) == b"text" and store.exists(store.get_run_path("one"))
    assert not store.is_parquet_dataset(store.get_train_data_path())
    assert Store.create(f"file://{tmp_path}/below").read(path) == b"text"
    dbfs = Store.create("dbfs:/x")
    assert isinstance(dbfs, DBFSLocalStore) and dbfs.get_runs_path() == "/dbfs/x/runs"
    assert dbfs.spark_path(dbfs.get_train_data_path()) == "dbfs:/x/intermediate_train_data"
    with pytest.raises(ValueError, match="knows no such file system"):
        Store.create("nowhere://x")
