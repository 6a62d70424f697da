"""Parameters of estimators and of their models in the style of Spark ML: each with a setter and a getter.

save() and load() of both, alone or in a Pipeline: Spark's metadata, and one pickle.
"""
from collections.abc import Callable
from functools import partialmethod
from typing import Any, TypeVar

import cloudpickle
from pyspark.ml.param import Param, Params
from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter, MLReadable, MLReader, MLWritable, MLWriter

_Class = TypeVar("_Class", bound=type)

_SHARED = {
    "model": (None, "the model"),
    "feature_cols": (None, "columns that the model gets, in this order: numbers, arrays of one length, or vectors"),
    "label_cols": (None, "columns that its outputs are compared with"),
    "input_shapes": (None, "the shape of each feature column for the model, -1 for the rows; None: as it is"),
    "run_id": (None, "name of the run in the store; None: a new one"),
}
MODEL = {
    **_SHARED,
    "output_cols": (None, "columns that transform() adds, one for each label; None: <label>__output"),
}
ESTIMATOR = {
    **_SHARED,
    "num_proc": (None, "ranks; None: the backend's"),
    "backend": (None, "a Backend; None: SparkBackend(num_proc)"),
    "start_timeout": (None, "seconds to wait until Spark has room for all ranks; None: HOROVOD_SPARK_START_TIMEOUT"),
    "store": (None, "a Store"),
    "label_shapes": (None, "as input_shapes, for the labels"),
    "validation": (None, "a fraction of the rows, or the name of a column that is true for them"),
    "batch_size": (32, "rows for each rank and step"),
    "val_batch_size": (None, "as batch_size, for validation; None: batch_size"),
    "epochs": (1, "how often all rows are seen"),
    "train_steps_per_epoch": (None, "steps of an epoch; None: all rows"),
    "shuffle": (True, "whether each epoch has another order of the rows, within row groups and among them"),
    "random_seed": (0, "seed for the order of the rows and the choice of validation rows"),
    "verbose": (1, "whether rank 0 prints a line for each epoch"),
    "callbacks": ((), "callbacks of the framework"),
    "algorithm": (None, "algorithm of bagua_hvd; None: BAGUA_ALGORITHM, or gradient_allreduce"),
    "gradient_compression": (None, "hvd.Compression"),
    "backward_passes_per_step": (1, "batches of a step"),
    "use_gpu": (True, "whether ranks use the GPU of their local rank, if each rank has one"),
}


def with_params(table: dict[str, tuple[Any, str]]) -> Callable[[_Class], _Class]:
    """Class decorator: makes `batch_size` a Param, with setBatchSize() and getBatchSize().

    Args:
        table: {name: (default, meaning)}.
    """

    def add(cls):
        """Adds the parameters to the class."""
        for name, (_, meaning) in table.items():
            camel = "".join(word.capitalize() for word in name.split("_"))
            setattr(cls, name, Param(Params._dummy(), name, meaning))
            setattr(cls, f"set{camel}", partialmethod(_assign, name))
            setattr(cls, f"get{camel}", partialmethod(Keywords.value, name))
        cls.table = table
        return cls

    return add


def _assign(self, name, value):
    return self._set(**{name: value})


class Keywords(MLWritable, MLReadable):
    """A mixin before Spark ML's classes: its constructor takes the parameters as keywords; write().save(path) and
    load(path). load() unpickles, so the file can run code."""

    table: dict[str, tuple[Any, str]]
    history: Any = None         # only for models
    # From Spark ML's Params:
    uid: str
    _paramMap: Any
    _set: Any
    _setDefault: Any
    _resetUid: Any
    getOrDefault: Any

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        unknown = sorted(set(kwargs) - set(self.table))
        if unknown:
            raise TypeError(f"{type(self).__name__} has no parameters {', '.join(unknown)}; it has "
                            f"{', '.join(sorted(self.table))}")
        for name, (default, _) in self.table.items():
            self._setDefault(**{name: default})
        self._set(**kwargs)

    def value(self, name: str) -> Any:
        """The value of a parameter."""
        return self.getOrDefault(name)

    def write(self) -> MLWriter:
        """For Spark ML."""
        return _Writer(self)

    @classmethod
    def read(cls) -> MLReader:
        """For Spark ML."""
        return _Reader(cls)

    def packed(self, params: dict[str, Any]) -> dict[str, Any]:
        """The given parameters, {name: value}, in a form that can be pickled."""
        return params

    def unpacked(self, params: dict[str, Any]) -> dict[str, Any]:
        """The inverse of packed()."""
        return params


class _Writer(MLWriter):
    def __init__(self, instance):
        super().__init__()
        self._instance = instance

    def saveImpl(self, path):
        saved = self._instance
        content = {**saved.packed({param.name: value for param, value in saved._paramMap.items()}),
                   "history": saved.history}
        try:
            pickled = cloudpickle.dumps(content)        # one, so that the optimizer keeps the model's own parameters
        except Exception:
            for name, value in content.items():
                _pickle_alone(saved, name, value)
            raise
        DefaultParamsWriter.saveMetadata(saved, path, self.sc, paramMap={})
        self.sparkSession.createDataFrame([(bytearray(pickled),)], "content binary").coalesce(1).write.parquet(
            f"{path}/content")


def _pickle_alone(saved, name, value):
    try:
        cloudpickle.dumps(value)
    except Exception as error:
        raise ValueError(f"{type(saved).__name__} cannot be saved, its {name} cannot be pickled: "
                         f"{type(error).__name__}: {error}") from error


class _Reader(MLReader):
    def __init__(self, made):
        super().__init__()
        self._made = made

    def load(self, path):
        metadata = DefaultParamsReader.loadMetadata(path, self.sc)
        name = f"{self._made.__module__}.{self._made.__name__}"
        if metadata["class"] != name:
            raise ValueError(f"{path} holds a {metadata['class']}, not a {name}")
        content = cloudpickle.loads(bytes(self.sparkSession.read.parquet(f"{path}/content").first()["content"]))
        loaded = self._made()
        loaded.history = content.pop("history")
        loaded._set(**loaded.unpacked(content))
        loaded._resetUid(metadata["uid"])
        return loaded
