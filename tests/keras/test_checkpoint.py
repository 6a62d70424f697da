"""The algorithm's state in Keras' files: a loaded training continues as if it had not been interrupted."""
import keras
import numpy as np
import pytest

import bagua_hvd.tensorflow.keras as hvd
from bagua_hvd import algorithms
from bagua_hvd.codecs import block
from bagua_hvd.training.state import State, from_bytes, to_bytes
from keras_training import assert_same_everywhere, data_of, flat, make_model

BATCH = 4           # of 20 rows: 5 steps
ALGORITHMS = {
    # Error feedback on each rank; Adam's frozen variance, in the optimizer's own variables, and the step number.
    "onebit_adam": ({"warmup_steps": 3}, lambda: keras.optimizers.Adam(0.01)),
    # Replicas of the neighbours, and weights that differ between ranks.
    "low_precision_decentralized": ({}, lambda: keras.optimizers.SGD(0.05)),
    # An outer momentum, equal on all ranks, and a fragment in flight during saving. The codec is deterministic, because
    # seeds depend on the names of variables, which Keras numbers.
    "diloco": ({"communication_interval": 3, "fragments": 2, "overlap_steps": 2, "codec": block(4)},
               lambda: keras.optimizers.SGD(0.05)),
}


def algorithm(name):
    return algorithms.get(name, **ALGORITHMS[name][0])


def new_model(name):
    model = make_model()
    model.compile(hvd.DistributedOptimizer(ALGORITHMS[name][1](), algorithm=algorithm(name)), "mse", jit_compile=False)
    return model


def five_steps(model):
    model.fit(*data_of(hvd.rank()), batch_size=BATCH, epochs=1, verbose=0, shuffle=False)


def save(folder):
    hvd.init()
    rank = hvd.rank()
    for name in ALGORITHMS:
        model = new_model(name)
        five_steps(model)
        model.save(f"{folder}/{name}.{rank}.keras")
        model.save_weights(f"{folder}/{name}.{rank}.weights.h5")
        five_steps(model)
        np.save(f"{folder}/{name}.{rank}.npy", flat(model))


def go_on(folder):
    hvd.init()
    rank = hvd.rank()
    for name in ALGORITHMS:
        expected = np.load(f"{folder}/{name}.{rank}.npy")
        path = f"{folder}/{name}.{rank}"
        loaded = hvd.load_model(f"{path}.keras", algorithm=algorithm(name))
        five_steps(loaded)
        assert (flat(loaded) == expected).all(), name
        assert int(loaded.optimizer.iterations) == 10
        weights = new_model(name)
        weights.optimizer.build(weights.trainable_variables)
        weights.load_weights(f"{path}.weights.h5")
        five_steps(weights)
        assert (flat(weights) == expected).all(), name
        # A model that has already trained can load it, too.
        weights.load_weights(f"{path}.weights.h5")
        five_steps(weights)
        assert (flat(weights) == expected).all(), name
        if name == "onebit_adam":
            # Keras skips Adam's state until the optimizer is built; so the algorithm begins with new state as well.
            unbuilt = new_model(name)
            unbuilt.load_weights(f"{path}.weights.h5")
            five_steps(unbuilt)
            assert int(unbuilt.optimizer.iterations) == 5
            assert np.isfinite(flat(unbuilt)).all()
        # load_algorithm_state_dict() works on a model that plain Keras has loaded and saved without the state.
        plain = keras.models.load_model(f"{path}.keras")
        assert type(plain.optimizer) is type(ALGORITHMS[name][1]())
        state = hvd.load_model(f"{path}.keras", algorithm=algorithm(name)).optimizer.algorithm_state_dict()
        plain.save(f"{path}.plain.keras")
        bare = hvd.load_model(f"{path}.plain.keras", algorithm=algorithm(name))
        assert bare.optimizer.algorithm_state_dict() == {}
        bare.optimizer.load_algorithm_state_dict(state)
        five_steps(bare)
        assert (flat(bare) == expected).all(), name


def of_another_rank(folder):
    """All ranks load the file of rank 0 of two: state that belongs to a single rank begins anew."""
    hvd.init()
    for name in ALGORITHMS:
        model = hvd.load_model(f"{folder}/{name}.0.keras", algorithm=algorithm(name))
        before = flat(model)
        five_steps(model)
        assert not np.allclose(flat(model), before)
        if not model.optimizer.algorithm.models_differ:
            assert_same_everywhere(model)
        state, = model.optimizer.algorithm_state_dict()["reductions"]
        assert (state["state"]["rank"], state["state"]["size"]) == (hvd.rank(), hvd.size())
        assert state["state"]["step"] == 10


def of_parts(folder):
    """Training of a part of the variables and then of all: each list of variables continues with its own state."""
    import tensorflow as tf

    hvd.init()
    inputs, targets = data_of(hvd.rank())

    def step(model, variables):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(inputs) - targets) ** 2)
        model.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    def loaded():
        return hvd.load_model(path, algorithm=algorithm("diloco"))

    model, path = new_model("diloco"), f"{folder}/parts.{hvd.rank()}.keras"
    model.optimizer.build(model.trainable_variables)
    for variables, count in ((model.layers[0].trainable_variables, 7), (model.trainable_variables, 5)):
        for _ in range(count):
            step(model, variables)
    model.save(path)
    again, old = loaded(), loaded()
    states = old.optimizer.algorithm_state_dict()["reductions"]
    assert [state["state"]["step"] for state in states] == [7, 5]
    step(again, again.trainable_variables)
    step(model, model.trainable_variables)
    assert (flat(again) == flat(model)).all()
    # A file of an older version has the order only.
    for state in states:
        del state["shapes"]
    old.optimizer.load_algorithm_state_dict({"reductions": states})
    step(old, old.layers[0].trainable_variables)
    step(old, old.trainable_variables)
    assert [reducer.model.step for reducer in old.optimizer.distribution.reduction.reducers()] == [8, 6]


def test_state_of_parts(run_ranks, tmp_path):
    run_ranks(2, of_parts, arguments={"folder": str(tmp_path)})


@pytest.mark.long
def test_a_saved_training_goes_on(run_ranks, tmp_path):
    arguments = {"folder": str(tmp_path)}
    run_ranks(2, save, arguments=arguments)
    run_ranks(2, go_on, arguments=arguments, timeout=100)
    run_ranks(2, of_another_rank, arguments=arguments)
    run_ranks(3, of_another_rank, arguments=arguments)


def test_bytes_of_a_state():
    state = {"states": [{"sparse": {3: 1}, "data": b"\x00\xff", "list": [1, 2.5, None, True, b""]}, {}, float("inf")]}
    assert from_bytes(to_bytes(state)) == state


def test_numbers_of_numpy_can_be_saved():
    kept, loaded = State("a model"), State("a model")
    kept.keep("step", lambda: np.int64(7), shared=True)
    loaded.load_state_dict(from_bytes(to_bytes(kept.state_dict())), own=True)
    assert loaded.keep("step", lambda: 0, shared=True) == 7
