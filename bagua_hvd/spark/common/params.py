"""Parameters of estimators and of their models in the style of Spark ML: each with a setter and a getter."""
from collections.abc import Callable
from functools import partialmethod
from typing import Any, TypeVar

from pyspark.ml.param import Param, Params

from bagua_hvd.spark.common.saving import Saved

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


class Keywords(Saved):
    """A mixin before Spark ML's classes whose constructor takes the parameters as keywords."""

    table: dict[str, tuple[Any, str]]
    _setDefault: Any    # from Spark ML's Params
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
