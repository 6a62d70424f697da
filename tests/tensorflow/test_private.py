"""The private names of TensorFlow and Keras that this package uses exist in the installed release, or have a fallback.
.ci/versions runs this test, so a failure names the release that removed a name.
"""
import ast
import re
from pathlib import Path

import keras
import pytest
import tensorflow as tf

from bagua_hvd.tensorflow import graphs, sync_batch_norm, xla
from bagua_hvd.tensorflow.data import compute_service

tf_keras = None
try:
    import tf_keras
except ImportError:     # there is none for nightly builds
    pass
PACKAGE = Path(graphs.__file__).parents[1]
FOLDERS = ("tensorflow", "_keras", "keras", "spark/keras")


def built(optimizer, variable):
    optimizer.build([variable])
    return optimizer


def graph():
    """The graph of a function."""
    return tf.function(lambda: tf.constant(1)).get_concrete_function().graph


def excluding():
    optimizer = tf_keras.optimizers.AdamW()
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


# By owner: a function that makes it, the file that calls, overrides or reads names of it, and these.
USED = {
    "keras.optimizers.Optimizer": (
        lambda: keras.optimizers.Optimizer, "_keras/optimizer.py",
        "apply build update_step _backend_update_step save_own_variables load_own_variables"),
    "keras.optimizers.LossScaleOptimizer": (
        lambda: keras.optimizers.LossScaleOptimizer, "_keras/optimizer.py", "apply"),
    "an optimizer of Keras": (
        lambda: keras.optimizers.SGD(0.1), "_keras/optimizer.py", "_trainable_variables _iterations built"),
    "Adam of Keras": (
        lambda: built(keras.optimizers.Adam(), keras.Variable(0.0)), "_keras/adam.py",
        "_get_variable_index _get_current_learning_rate _momentums _velocities _use_weight_decay"),
    "RMSprop of Keras": (
        lambda: built(keras.optimizers.RMSprop(momentum=0.9), keras.Variable(0.0)), "_keras/legacy.py", "_momentums"),
    "a model of Keras": (lambda: keras.Sequential(), "_keras/elastic.py", "_flatten_layers _trainable_variables"),
    "keras.callbacks.ModelCheckpoint": (
        lambda: keras.callbacks.ModelCheckpoint, "_keras/callbacks.py", "_save_model"),
    "BatchNormalization of Keras": (
        lambda: built(keras.layers.BatchNormalization(), 3), "tensorflow/sync_batch_norm.py",
        "_moments _reduction_axes"),
    "Adam of tf_keras": (
        lambda: built(tf_keras.optimizers.Adam(), tf.Variable(0.0)), "_keras/adam.py",
        "_index_dict _var_key _learning_rate _momentums _velocities _use_weight_decay"),
    "RMSprop of tf_keras": (
        lambda: built(tf_keras.optimizers.RMSprop(momentum=0.9), tf.Variable(0.0)), "_keras/legacy.py", "_momentums"),
    "an optimizer of tf_keras": (
        excluding, "tensorflow/tf_keras.py",
        "aggregate_gradients _exclude_from_weight_decay _exclude_from_weight_decay_names"),
    "tf_keras.optimizers.legacy.Optimizer": (
        lambda: tf_keras.optimizers.legacy.Optimizer, "tensorflow/tf_keras.py",
        "_create_all_weights _compute_gradients _aggregate_gradients get_gradients"),
    "tf_keras.callbacks.Callback": (
        lambda: tf_keras.callbacks.Callback, "_keras/callbacks.py",
        "_implements_train_batch_hooks _implements_test_batch_hooks _implements_predict_batch_hooks"),
    "tf_keras.layers.BatchNormalization": (
        lambda: tf_keras.layers.BatchNormalization, "tensorflow/sync_batch_norm.py", "_calculate_mean_and_var"),
    "a function's graph": (
        graph, "tensorflow/graphs.py", "experimental_acd_manager outer_graph building_function"),
    "a resource variable": (lambda: tf.Variable(0.0), "tensorflow/functions.py", "_in_graph_mode"),
    "tf.data's DispatchServer": (
        lambda: tf.data.experimental.service.DispatchServer, "tensorflow/data/compute_service.py", "_stop"),
    "tf.data's WorkerServer": (
        lambda: tf.data.experimental.service.WorkerServer, "tensorflow/data/compute_service.py", "_stop"),
}


@pytest.mark.parametrize("name", graphs.NAMES)
def test_tensorflow(name):
    assert graphs.find(name) is not None, f"TensorFlow {tf.__version__} has no {name}: {graphs.NAMES[name]}"


@pytest.mark.parametrize(("owner", "name"), [(owner, name) for owner, use in USED.items() for name in use[-1].split()])
def test_used(owner, name):
    if "tf_keras" in owner and tf_keras is None:
        pytest.skip("needs tf_keras")
    make, file, _ = USED[owner]
    assert hasattr(make(), name), (
        f"{owner} has no {name}, which bagua_hvd/{file} uses, in TensorFlow {tf.__version__}, Keras {keras.__version__}"
        f" and tf_keras {getattr(tf_keras, '__version__', None)}")


def private_names(tree):
    """The names with an underscore that the code reads from objects, and those that it defines."""
    read, defined = set(), set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name, ctx=ast.Load()) | ast.Call(
                    func=ast.Name(id="getattr" | "hasattr"), args=[_, ast.Constant(value=name), *_]):
                read.add(name)
            case ast.Attribute(attr=name) | ast.Name(id=name, ctx=ast.Store()) | ast.alias(name=name):
                defined.add(name)
            case ast.ClassDef(name=name):
                defined.add(name)
            case ast.FunctionDef(name=name) if f"super().{name}(" not in ast.unparse(node):     # else it overrides one
                defined.add(name)
    return {name for name in read if re.match("_[a-z]", name)}, defined


def test_all_are_listed():
    """Finds names that no code of the package defines; a name that it also uses for something else is not seen."""
    read, defined = set(), set()
    for path in PACKAGE.rglob("*.py"):
        here, there = private_names(ast.parse(path.read_text()))
        defined |= there
        if str(path.relative_to(PACKAGE)).startswith(FOLDERS):
            read |= here
    listed = {name for *_, names in USED.values() for name in names.split()} | {"_replace"}     # of named tuples
    assert read - defined - listed == set(), "add these to USED"
    assert "_index_dict" in read


def test_without(monkeypatch):
    assert graphs.find("tensorflow.python.nowhere.nothing") is None
    for name in ("in_xla_context", "add_control_input"):
        monkeypatch.setattr(graphs, name, None)

    @tf.function
    def traced(x):
        gradients = [x + 1, x * 2]
        graphs.one_by_one(gradients)
        assert not graphs.compiled_by_xla()
        return tf.add_n(gradients)

    assert float(traced(tf.constant(3.0))) == 10
    monkeypatch.setattr(xla, "missing", b"xla_custom_call_v2")
    with pytest.raises(NotImplementedError, match="xla_custom_call_v2, which the installed TensorFlow does not have"):
        xla.fact("size", 0)
    compute_service._stop(object())
    monkeypatch.delattr(sync_batch_norm.BatchNormalization, sync_batch_norm._STATISTICS)
    with pytest.raises(NotImplementedError, match=r"_moments\(\), which the BatchNormalization of this Keras lacks"):
        sync_batch_norm.SyncBatchNormalization()
