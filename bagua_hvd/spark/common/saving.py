"""save() and load() of estimators and models, alone or in a Pipeline: Spark's metadata, and one pickle."""
from typing import Any

import cloudpickle
from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter, MLReadable, MLReader, MLWritable, MLWriter


class Saved(MLWritable, MLReadable):
    """A mixin before Spark ML's classes: write().save(path), load(path). load() unpickles, so the file can run code."""

    uid: str
    history: Any = None         # only for models
    _paramMap: Any              # from Spark ML's Params
    _set: Any
    _resetUid: Any

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
