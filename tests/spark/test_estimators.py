"""Estimators on local[2] train the same model as one process with the same batches, and Spark can apply it."""
import math
import os
import threading
from decimal import Decimal

import numpy as np
import pytest

pytest.importorskip("pyspark", reason="Spark is not installed: pip install pyspark pyarrow pandas")

from pyspark.ml import Pipeline, PipelineModel  # noqa: E402
from pyspark.ml.evaluation import Evaluator  # noqa: E402
from pyspark.ml.feature import VectorAssembler  # noqa: E402
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder  # noqa: E402

from bagua_hvd.runner.common.util.timeout import TimeoutException  # noqa: E402
from bagua_hvd.spark.common.backend import Backend, SparkBackend  # noqa: E402
from bagua_hvd.spark.common.data import Rows, Source, column  # noqa: E402
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


def error(result, output="y__output"):
    """The mean squared error of transform()."""
    rows = result.collect()
    return math.fsum((row.y - row[output][0]) ** 2 for row in rows) / len(rows)


def check(model, frame, output="y__output"):
    """transform() has a small error; it keeps the other columns."""
    result = model.transform(frame)
    assert set(result.columns) == {"a", "b", "y", "part", "features", output} and result.count() == ROWS
    assert error(result, output) < 0.01


def saved(stage, folder):
    """The stage after save() and load(), alone and within a Pipeline."""
    stage.write().overwrite().save(f"{folder}/saved")
    return type(stage).load(f"{folder}/saved")


def linear():
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("algorithm", [None, "bytegrad", "decentralized"])
def test_torch(frame, store, algorithm, tmp_path):
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
    assert os.listdir(tmp_path) == ["runs"]         # the rows have been removed
    if algorithm is None:
        loaded = saved(fitted, tmp_path)
        assert isinstance(loaded, PipelineModel) and loaded.stages[-1].getHistory() == history
        loaded.stages[-1].setOutputCols(["guess"])
        check(loaded, frame, "guess")


def test_torch_trains_as_one_process_does(frame, store):
    """Two ranks with batches of 5 average their gradients, which equals one process with both batches."""
    torch = pytest.importorskip("torch")
    from bagua_hvd.spark.torch import TorchEstimator

    model, optimizer = linear()
    columns = {"features": None, "y": [-1, 1]}
    Source(VectorAssembler(inputCols=["a", "b"], outputCol="features").transform(frame), columns, None).write(
        store.spark_path(store.get_train_data_path()), None, None, 0, 2)
    trained = TorchEstimator(
        num_proc=2, store=store, model=model, optimizer=optimizer, loss=torch.nn.functional.mse_loss, shuffle=False,
        feature_cols=["features"], label_cols=["y"], label_shapes=[[-1, 1]], batch_size=5, epochs=1,
        train_steps_per_epoch=7, verbose=0).fit_on_parquet().getModel()
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


def test_keras(frame, store, tmp_path):
    pytest.importorskip("tensorflow")
    import keras

    from bagua_hvd.spark.keras import KerasEstimator

    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    estimator = KerasEstimator(
        backend=SparkBackend(2), store=store, model=model, optimizer=keras.optimizers.SGD(0.1), loss="mse",
        metrics=["mae"], feature_cols=["features"], label_cols=["y"], validation=0.2, batch_size=10, epochs=6,
        verbose=0)
    estimator = saved(estimator, tmp_path)
    assert float(estimator.getOptimizer().learning_rate) == pytest.approx(0.1) and estimator.getBatchSize() == 10
    fitted = assembled(estimator).fit(frame)
    check(saved(fitted, tmp_path), frame)
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


def test_lightning_trains_with_another_order_in_each_epoch(tmp_path, monkeypatch):
    """This includes epochs that Lightning's own limit ends. The host has fewer GPUs than ranks."""
    lightning = pytest.importorskip("lightning.pytorch")
    from types import SimpleNamespace

    import torch

    from bagua_hvd.spark.lightning import _train

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(1, 1)

        def training_step(self, batch, number):
            return self.linear(batch["x"]).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def epoch(rows, number):
        asked.append(number)
        return iter([{"x": np.ones((2, 1), np.float32)}] * 3)

    asked = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    _train(Module(), SimpleNamespace(
        rows=lambda rank, size: (None, None), epoch=epoch, steps=lambda rows: 2, epochs=3, use_gpu=True,
        algorithm=None, gradient_compression=None, backward_passes_per_step=1, logger=False, callbacks=[],
        trainer_args={"default_root_dir": str(tmp_path)}))
    assert asked == [0, 1, 2]


class InThisProcess(Backend):
    """Solves for the weights of linear() instead of starting ranks, once `together` estimators have written their rows.
    """

    def __init__(self, together=1, processes=1):
        self.together, self.processes = threading.Barrier(together), processes
        self.ran = False

    def __getstate__(self):
        return {}

    def num_processes(self):
        return self.processes

    def run(self, fn, args=(), kwargs=None, env=None):
        import io

        import torch

        self.ran = True
        self.together.wait(120)
        rows, _ = args[0].rows(0, 1)
        whole, = rows.batches(rows.count)
        features = np.column_stack([whole["features"], np.ones(rows.count)])
        weights = torch.tensor(np.linalg.lstsq(features, whole["y"], rcond=None)[0], dtype=torch.float32)
        content = io.BytesIO()
        torch.save({"weight": weights[None, :2], "bias": weights[2:]}, content)
        return [{"history": rows.count, "content": content.getvalue()}]


def of_torch(store, **given):
    from bagua_hvd.spark.torch import TorchEstimator

    model, optimizer = linear()
    return TorchEstimator(**{
        "store": store, "model": model, "optimizer": optimizer, "loss": lambda a, b: ((a - b) ** 2).mean(),
        "feature_cols": ["features"], "label_cols": ["y"], "verbose": 0, **given})


def test_two_fits_of_one_store_at_the_same_time(spark, store, tmp_path):
    pytest.importorskip("torch")
    backend = InThisProcess(together=2)
    found = {}

    def fit(bias):
        random = np.random.default_rng(0).normal(size=(20, 2))
        rows = spark.createDataFrame([(row.tolist(), float(row.sum()) + bias) for row in random], ["features", "y"])
        found[bias] = of_torch(store, backend=backend).fit(rows).getModel().bias.item()

    threads = [threading.Thread(target=fit, args=[bias]) for bias in (-3.0, 5.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {bias: pytest.approx(bias, abs=1e-4) for bias in (-3.0, 5.0)}
    assert os.listdir(tmp_path) == ["runs"]


def test_cross_validator(frame, store, tmp_path):
    pytest.importorskip("torch")

    class MeanSquare(Evaluator):
        def _evaluate(self, dataset):
            return error(dataset)

        def isLargerBetter(self):
            return False

    estimator = of_torch(store, backend=InThisProcess())
    features = VectorAssembler(inputCols=["a", "b"], outputCol="features").transform(frame)
    found = CrossValidator(
        estimator=estimator, estimatorParamMaps=ParamGridBuilder().addGrid(estimator.epochs, [1, 2]).build(),
        evaluator=MeanSquare(), numFolds=2, parallelism=2, seed=0).fit(features)
    assert found.avgMetrics == [pytest.approx(0, abs=1e-6)] * 2 and found.bestModel.getHistory() == ROWS
    assert os.listdir(tmp_path) == ["runs"]


def test_what_cannot_be_saved_is_named(spark, store, tmp_path):
    pytest.importorskip("torch")
    with pytest.raises(ValueError, match="TorchEstimator cannot be saved, its callbacks cannot be pickled"):
        of_torch(store, callbacks=[threading.Lock()]).save(f"{tmp_path}/saved")
    assert not store.exists(f"{tmp_path}/saved")


def test_no_room(spark, frame, store, tmp_path):
    pytest.importorskip("torch")
    with pytest.raises(TimeoutException, match="3 tasks at once for 2 s"):
        of_torch(store, num_proc=3, start_timeout=2, feature_cols=["a"]).fit(frame)
    assert os.listdir(tmp_path) == []


def test_what_is_wrong_is_said_before_a_rank_starts(frame, store):
    pytest.importorskip("torch")
    with pytest.raises(TypeError, match="no parameters batchsize"):
        of_torch(store, batchsize=3)
    for wrong, words in (({"optimizer": None}, "needs optimizer="), ({"feature_cols": ["z"]}, "no columns z"),
                         ({"validation": 2.0}, "between 0 and 1"), ({"input_shapes": [[-1], [-1]]}, "2 shapes for"),
                         ({"input_shapes": [[-1, 2]]}, "column 'a': the shape .-1, 2. does not fit"),
                         ({"num_proc": 2, "backend": SparkBackend(2)}, "num_proc and backend exclude each other"),
                         ({"start_timeout": 2, "backend": SparkBackend(2)}, "start_timeout and backend exclude")):
        with pytest.raises(ValueError, match=words):
            of_torch(store, **{"feature_cols": ["a"], **wrong}).fit(frame)


MISSING, RAGGED = "the column has missing values", "the rows have different lengths"


@pytest.mark.parametrize("schema, good, bad, given, words", [
    ("features array<double>, y double", ([1.0, 2.0], 1.0), ([1.0, 2.0], None), {}, f"column 'y': {MISSING}"),
    ("features array<double>, y double", ([1.0, 2.0], 1.0), (None, 1.0), {}, f"column 'features': {MISSING}"),
    ("features array<double>, y double", ([1.0, 2.0], 1.0), ([1.0, None], 1.0), {}, f"column 'features': {MISSING}"),
    ("features array<double>, y double", ([1.0, 2.0], 1.0), ([1.0], 1.0), {}, f"column 'features': {RAGGED}"),
    ("features array<double>, y double, v boolean", ([1.0, 2.0], 1.0, True), ([1.0, 2.0], 1.0, None),
     {"validation": "v"}, f"validation='v': {MISSING}"),
    ("features array<double>, y double, v string", ([1.0, 2.0], 1.0, "yes"), ([1.0, 2.0], 1.0, "no"),
     {"validation": "v"}, "validation='v': the column is of type string"),
    ("features array<double>, y double, v int", ([1.0, 2.0], 1.0, 0), ([1.0, 2.0], 1.0, 1),
     {"validation": "v"}, "1 rows for 2 ranks to validate with"),
    ("features array<double>, y decimal(4, 2)", ([1.0, 2.0], Decimal(1)), ([1.0, 2.0], Decimal(2)), {},
     "column 'y' is of type decimal.4,2.: cast it to a number"),
    ("features array<string>, y double", (["a"], 1.0), (["b"], 1.0), {}, "column 'features' is of type array<string>"),
    ("features array<int>, y double", ([1, 2], 1.0), ([3, 4], 2.0), {},
     "the model takes no integers .*, as they are in the columns features: cast them to double"),
    ("features array<double>, y double", None, None, {}, "the DataFrame has no rows"),
])
def test_rows_that_are_wrong(spark, store, tmp_path, schema, good, bad, given, words):
    pytest.importorskip("torch")
    backend = InThisProcess(processes=2)
    rows = [] if good is None else [good] * 5 + [bad]
    with pytest.raises(ValueError, match=words):
        of_torch(store, backend=backend, **given).fit(spark.createDataFrame(rows, schema))
    assert not backend.ran and os.listdir(tmp_path) == []


def test_embeddings_take_integers():
    torch = pytest.importorskip("torch")
    from bagua_hvd.spark.torch import refuse_integers

    refuse_integers(torch.nn.Embedding(3, 2), {"a": np.array([1])})
    refuse_integers(torch.nn.Linear(1, 2), {"a": np.array([[1.0]], np.float32)})


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

    assert column("c", pa.array([[1.0, 2.0], [3.0, 4.0]]), [-1, 2, 1]).shape == (2, 2, 1)
    assert column("c", pa.array([1, 2])).dtype == np.int64
    for wrong, words in ((pa.array([[1.0], [2.0, 3.0]]), "different lengths"),
                         (pa.array([1.0, None]), "missing values"), (pa.array([[1.0, None]]), "missing values"),
                         (pa.array([Decimal(1)]), "type decimal"), (pa.array(["a"]), "type string")):
        with pytest.raises(ValueError, match=f"column 'c'.*{words}"):
            column("c", wrong)
    with pytest.raises(ValueError, match="the shape .-1, 2. does not fit rows of 4 numbers"):
        column("c", pa.array([[1.0, 2.0, 3.0, 4.0]]), [-1, 2])


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
