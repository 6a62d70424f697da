"""KerasEstimator: trains a Keras 3 model on the rows of a DataFrame, by `fit` with bagua_hvd's optimizer.

    model = KerasEstimator(num_proc=4, store=Store.create("/shared"), model=net, optimizer=keras.optimizers.Adam(),
                           loss="mse", feature_cols=["features"], label_cols=["y"], epochs=3).fit(df)
    model.transform(df)                 # adds y__output
"""
import os
import pickle
import tempfile
from typing import Any

from bagua_hvd.core import variables
from bagua_hvd.spark.common.estimator import HorovodEstimator, HorovodModel
from bagua_hvd.spark.common.params import ESTIMATOR, MODEL, with_params

_OBJECTS = {"custom_objects": (None, "{name: class} of what is not Keras' own")}
_PARAMS = {
    **{name: row for name, row in ESTIMATOR.items() if name not in ("backward_passes_per_step", "use_gpu")}, **_OBJECTS,
    "optimizer": (None, "a keras.optimizers.Optimizer"),
    "loss": (None, "as model.compile() takes it"),
    "loss_weights": (None, "as model.compile() takes them"),
    "metrics": ((), "as model.compile() takes them"),
}


def to_bytes(model: Any) -> bytes:
    """A Keras model, not compiled, in Keras' own format."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.keras")
        model.save(path)
        with open(path, "rb") as file:
            return file.read()


def from_bytes(content: bytes, custom_objects: dict[str, Any] | None) -> Any:
    """Loads a model from the result of to_bytes()."""
    import keras

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.keras")
        with open(path, "wb") as file:
            file.write(content)
        return keras.saving.load_model(path, custom_objects, compile=False)


class _Packed:
    """Converts Keras objects for save() and load()."""

    def packed(self, params: dict[str, Any]) -> dict[str, Any]:
        import keras

        return _converted(params, to_bytes, keras.saving.serialize_keras_object)

    def unpacked(self, params: dict[str, Any]) -> dict[str, Any]:
        import keras

        return _converted(params, from_bytes, keras.saving.deserialize_keras_object, params.get("custom_objects"))


def _converted(params, model, optimizer, *more):
    ways = {"model": model, "optimizer": optimizer}
    return {name: ways[name](value, *more) if name in ways and value is not None else value
            for name, value in params.items()}


@with_params({**MODEL, **_OBJECTS})
class KerasModel(_Packed, HorovodModel):
    """A trained keras.Model: getModel() returns it, getHistory() the `history` of `fit`."""

    def predictor(self) -> Any:
        content, objects = to_bytes(self.value("model")), self.value("custom_objects")
        backend = _backend()

        def make():
            os.environ["KERAS_BACKEND"] = backend       # Keras reads it at import
            module = from_bytes(content, objects)

            def predict(features):
                outputs = module.predict_on_batch(features[0] if len(features) == 1 else tuple(features))
                return outputs if isinstance(outputs, (list, tuple)) else [outputs]

            return predict

        return make


@with_params(_PARAMS)
class KerasEstimator(_Packed, HorovodEstimator):
    """Parameters as keywords; see bagua_hvd.spark.common.params and this module's for their meanings.

    Ranks use the driver's Keras backend. Several feature columns become a tuple of inputs. If the algorithm leaves the
    models of the ranks different, the result is their mean.
    """

    required = ("optimizer", "loss")

    def job(self) -> tuple[Any, dict[str, str]]:
        import keras

        model = to_bytes(self.value("model"))
        optimizer = keras.saving.serialize_keras_object(self.value("optimizer"))

        def train(task):
            return _train(model, optimizer, task)

        return train, {"KERAS_BACKEND": _backend()}

    def made(self, result: Any, run_id: str) -> KerasModel:
        objects = self.value("custom_objects")
        model = from_bytes(to_bytes(self.value("model")), objects)
        model.set_weights(pickle.loads(result["content"]))
        result["content"] = to_bytes(model)
        return KerasModel(result["history"], model=model, run_id=run_id, **{
            name: self.value(name) for name in ("feature_cols", "label_cols", "input_shapes", "custom_objects")})


def _backend():
    import keras

    return keras.config.backend()


def _train(content, optimizer, task):
    """Runs on a rank: returns the history and, on rank 0, the weights."""
    del task.optimizer                  # serialized separately; a model pickled with it would be another object
    # Keras uses the first GPU that it sees.
    own = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[variables.read("HOROVOD_LOCAL_RANK"):][:1]
    if any(own):
        os.environ["CUDA_VISIBLE_DEVICES"] = own[0]
    import keras

    import bagua_hvd.keras as hvd

    hvd.init()
    keras.utils.set_random_seed(task.random_seed)
    model = from_bytes(content, task.custom_objects)
    compression = {"compression": task.gradient_compression} if task.gradient_compression else {}
    optimizer = hvd.DistributedOptimizer(
        keras.saving.deserialize_keras_object(optimizer, task.custom_objects), algorithm=task.algorithm,
        **compression)
    model.compile(optimizer, task.loss, loss_weights=task.loss_weights, metrics=list(task.metrics))
    rows, validation = task.rows(hvd.rank(), hvd.size())

    def pairs(batches):
        for batch in batches:
            features, labels = ([batch[name] for name in names] for names in (task.feature_cols, task.label_cols))
            yield tuple(part[0] if len(part) == 1 else tuple(part) for part in (features, labels))

    def epochs():
        epoch = 0
        while True:
            yield from pairs(task.epoch(rows, epoch))
            epoch += 1

    def validations():
        while True:
            yield from pairs(task.validation_batches(validation))

    checked = {}
    if validation:
        checked = {"validation_data": validations(),
                   "validation_steps": validation.steps(task.val_batch_size or task.batch_size)}
    history = model.fit(
        epochs(), steps_per_epoch=task.steps(rows), epochs=task.epochs, verbose=2 * (task.verbose and hvd.rank() == 0),
        callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback(),
                   *task.callbacks], **checked).history
    if optimizer.algorithm.asynchronous:
        optimizer.algorithm.abort()
    if optimizer.algorithm.models_differ:
        hvd.consensus(model)
    weights = pickle.dumps(model.get_weights()) if hvd.rank() == 0 else b""
    hvd.shutdown()
    return {"history": history, "content": weights}
