"""Framework-independent estimator and model: data to the store, training on the ranks, a model for Spark."""
import uuid
from types import SimpleNamespace
from typing import Any

import numpy as np
from pyspark.ml import Estimator, Model

from bagua_hvd.spark.common import data
from bagua_hvd.spark.common.backend import SparkBackend
from bagua_hvd.spark.common.params import Keywords


class HorovodModel(Keywords, Model):
    """The result of fit(): transform() adds a column `<label>__output` for each label.

    Subclasses implement predictor().

    Args:
        history: of the training; see the estimators.
    """

    def __init__(self, history: Any = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.history = history

    def getHistory(self) -> Any:
        """The history of the training."""
        return self.history

    def predictor(self) -> Any:
        """A function without arguments, sent to the executors. There it returns a function that maps a list of arrays
        (the feature columns) to a list of arrays (the outputs)."""
        raise NotImplementedError

    def _transform(self, dataset):
        from pyspark.ml.functions import vector_to_array
        from pyspark.sql.functions import col, pandas_udf
        from pyspark.sql.types import ArrayType, FloatType, StructField, StructType

        labels = self.value("label_cols")
        names = self.value("output_cols") or [f"{label}__output" for label in labels]
        if len(names) != len(labels):
            raise ValueError(f"output_cols={names!r}: give one name for each of the labels {', '.join(labels)}")
        features, shapes, make = self.value("feature_cols"), self.value("input_shapes"), self.predictor()
        kinds = {field.name: field.dataType.typeName() for field in dataset.schema.fields}

        def predict(parts):
            import pandas as pd
            import pyarrow as pa

            function = make()
            for part in parts:
                columns = part if isinstance(part, tuple) else (part,)
                outputs = function([data.column(name, pa.Array.from_pandas(series), shape) for name, series, shape in
                                    zip(features, columns, shapes or [None] * len(columns), strict=True)])
                yield pd.DataFrame({name: list(np.asarray(output, np.float32).reshape(len(columns[0]), -1))
                                    for name, output in zip(names, outputs, strict=True)})

        schema = StructType([StructField(name, ArrayType(FloatType())) for name in names])
        udf = pandas_udf(_typed(predict, len(features)), schema)
        inputs = [vector_to_array(col(name), "float32") if kinds[name].startswith("vector") else col(name)
                  for name in features]
        return (dataset.withColumn("__outputs", udf(*inputs))
                .select(*dataset.columns, *(col(f"__outputs.{name}") for name in names)))


def _typed(predict, count):
    """`predict` with the type hints that tell Spark how to call it."""
    from collections.abc import Iterator
    from types import GenericAlias

    import pandas as pd

    given = pd.Series if count == 1 else GenericAlias(tuple, (pd.Series,) * count)
    predict.__annotations__ = {"parts": GenericAlias(Iterator, (given,)), "return": Iterator[pd.DataFrame]}
    return predict


class HorovodEstimator(Keywords, Estimator):
    """fit() writes the rows to a folder of its own in the store, trains on the ranks, and removes the folder.

    Subclasses implement job() and made().
    """

    def job(self) -> tuple[Any, dict[str, str]]:
        """(argument of train(), environment variables of the ranks). ValueError: parameters are missing or wrong."""
        raise NotImplementedError

    def made(self, result: Any, run_id: str) -> HorovodModel:
        """The model, made from rank 0's result; its `content` goes to the store."""
        raise NotImplementedError

    def check(self, sample: dict[str, np.ndarray]) -> None:
        """ValueError if the model does not accept this row. Does nothing unless overridden."""

    def fit_on_parquet(self) -> HorovodModel:
        """Like fit(), with data that is in the store's folder already."""
        store = self.value("store")
        validated = self.value("validation") is not None
        return self._train(self._backend(), store.get_train_data_path(),
                           store.get_val_data_path() if validated else None)

    def _backend(self):
        for name in ("model", "store", "feature_cols", "label_cols", *self.required):
            if self.value(name) is None:
                raise ValueError(f"{type(self).__name__} needs {name}=")
        given = {name: self.value(name) for name in ("num_proc", "start_timeout") if self.value(name) is not None}
        backend = self.value("backend")
        if given and backend is not None:
            raise ValueError(f"{' and '.join(given)} and backend exclude each other: give the backend its number of "
                             "processes and its start_timeout")
        return backend or SparkBackend(**given)

    required: tuple[str, ...] = ()

    def _fit(self, dataset):
        backend, store, validation = self._backend(), self.value("store"), self.value("validation")
        flag = validation if isinstance(validation, str) else None
        if flag is None and validation is not None and not 0 < validation < 1:
            raise ValueError(f"validation={validation!r}: give a fraction between 0 and 1, or the name of a column")
        source = data.Source(dataset, self._columns(), flag)
        self.check(source.sample)
        fit = uuid.uuid4().hex      # several fits may use the store concurrently
        train, val = store.get_train_data_path(fit), store.get_val_data_path(fit) if validation is not None else None
        try:
            source.write(store.spark_path(train), val and store.spark_path(val), validation, self.value("random_seed"),
                         backend.num_processes())
            return self._train(backend, train, val)
        finally:
            for path in (train, val):
                if path is not None:
                    store.remove(path)

    def _columns(self):
        """{name: shape} of all columns that the ranks read."""
        columns: dict[str, Any] = {}
        for names, shapes in (("feature_cols", "input_shapes"), ("label_cols", "label_shapes")):
            names, shapes = self.value(names), self.value(shapes)
            if shapes is not None and len(shapes) != len(names):
                raise ValueError(f"{len(shapes)} shapes for the columns {', '.join(names)}: give one for each")
            columns.update(zip(names, shapes or [None] * len(names), strict=True))
        return columns

    def _train(self, backend, train_path, val_path):
        run_id, store = self.value("run_id") or f"run_{uuid.uuid4().hex[:12]}", self.value("store")
        train, env = self.job()
        task = Task(store=store, columns=self._columns(), train_path=train_path, val_path=val_path, **{
            name: self.value(name) for name in self.table if name not in ("store", "backend", "model", "run_id")})
        task.rows(0, backend.num_processes())       # reports too few rows before a rank starts
        # One pickle, so that the optimizer keeps the model's own parameters.
        result = backend.run(train, (task,), env=env)[0]
        model = self.made(result, run_id)
        store.write(store.get_checkpoint_path(run_id), result["content"])
        return model


class Task(SimpleNamespace):
    """Data and parameters for a rank's training; each parameter is an attribute.

    Args:
        store, columns: see Rows. train_path, val_path: folders of the store; val_path None: no validation.
    """

    def rows(self, rank: int, size: int) -> tuple[data.Rows, data.Rows | None]:
        """(rows for training, rows for validation or None)."""
        def rows(path, purpose):
            return data.Rows(self.store.dataset(path), self.columns, rank, size, purpose)

        return rows(self.train_path, "train"), None if self.val_path is None else rows(self.val_path, "validate")

    def epoch(self, rows: data.Rows, epoch: int) -> Any:
        """The batches of an epoch, at most train_steps_per_epoch."""
        from itertools import islice

        seed = (self.random_seed, epoch) if self.shuffle else None
        return islice(rows.batches(self.batch_size, seed), self.steps(rows))

    def steps(self, rows: data.Rows) -> int:
        """Number of batches of epoch()."""
        return min(rows.steps(self.batch_size), self.train_steps_per_epoch or rows.count)

    def validation_batches(self, rows: data.Rows) -> Any:
        """Batches of all validation rows."""
        return rows.batches(self.val_batch_size or self.batch_size)
