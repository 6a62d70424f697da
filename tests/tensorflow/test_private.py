"""The private names of TensorFlow and Keras that this package uses exist in the installed release, or have a fallback.
.ci/versions runs this test, so a failure names the release that removed a name.
"""
import keras
import pytest
import tensorflow as tf

from bagua_hvd.tensorflow import graphs, private, xla

# Names in Keras' classes that _keras/ calls, overrides, or reads from instances.
CALLED = {
    keras.optimizers.Optimizer: ["apply", "build", "update_step", "_backend_update_step", "_get_variable_index",
                                 "_get_current_learning_rate", "save_own_variables", "load_own_variables"],
    keras.optimizers.LossScaleOptimizer: ["apply"],
}
READ = ["_trainable_variables", "_iterations", "built"]


@pytest.mark.parametrize("name", private.NAMES)
def test_tensorflow(name):
    assert private.find(name) is not None, f"TensorFlow {tf.__version__} has no {name}: {private.NAMES[name]}"


@pytest.mark.parametrize(("cls", "name"), [(cls, name) for cls, names in CALLED.items() for name in names])
def test_keras(cls, name):
    assert callable(getattr(cls, name, None)), f"{cls.__name__} of Keras {keras.__version__} has no {name}()"


@pytest.mark.parametrize("name", READ)
def test_read(name):
    assert hasattr(keras.optimizers.SGD(0.1), name), f"optimizers of Keras {keras.__version__} have no {name}"


def test_without(monkeypatch):
    assert private.find("tensorflow.python.nowhere.nothing") is None
    for name in ("in_xla_context", "add_control_input"):
        monkeypatch.setattr(private, name, None)

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
