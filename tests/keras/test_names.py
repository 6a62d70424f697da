"""Ranks that list variables in different orders, or use different branches of a model, get an error."""
import pytest

pytestmark = pytest.mark.timeout(160)
FRAMEWORKS = {"tensorflow": "tensorflow", "torch": "keras on torch"}


def other_names():
    import keras
    import numpy as np

    import bagua_hvd.keras as hvd

    hvd.init()
    rank = hvd.rank()

    def disagree(gradients, variables, first, second):
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
        optimizer.build(variables)
        for _ in range(2):
            with pytest.raises(Exception, match=(
                    rf"Ranks disagree on gradient 0: on rank 0 it is that of '{first}(:0)?' \(float32\[4\]\), on rank "
                    rf"1 that of '{second}(:0)?' \(float32\[4\]\). List the same variables")):
                optimizer.apply(gradients, variables)

    def tensor(value):
        return keras.ops.convert_to_tensor(np.full(4, value, "float32"))

    a, b = (keras.Variable(np.zeros(4, "float32"), name=name) for name in "ab")
    disagree([tensor(1), tensor(1)], [b, a] if rank else [a, b], "a", "b")
    branches = [None, tensor(1)] if rank else [tensor(1), None]
    if keras.backend.backend() == "tensorflow":
        disagree(branches, [a, b], "a", "b")
    assert not keras.ops.convert_to_numpy(a).any() and not keras.ops.convert_to_numpy(b).any()
    if keras.backend.backend() == "torch":      # None is sent as zeros
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
        optimizer.build([a, b])
        optimizer.apply(branches, [a, b])
        assert (keras.ops.convert_to_numpy(a) == -0.5).all() and (keras.ops.convert_to_numpy(b) == -0.5).all()

    # Layers have different numbers in each process, so only their order counts.
    others = [keras.layers.Dense(1) for _ in range(3 * rank)]
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3), keras.layers.Dense(3)])
    number = int(model.layers[0].name.partition("_")[2] or 0)
    assert len(others) == 3 * rank
    assert hvd.allreduce(np.array([number], "float32"), op=hvd.Sum)[0] != hvd.size() * number
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    model.fit(np.ones((4, 3)), np.full((4, 3), rank), verbose=0)


@pytest.mark.parametrize("backend", FRAMEWORKS)
def test_other_names(run_ranks, backend):
    run_ranks(2, other_names, env={"KERAS_BACKEND": backend}, framework=FRAMEWORKS[backend], timeout=150)
