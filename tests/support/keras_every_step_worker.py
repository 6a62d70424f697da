"""Trains with fit() and every_step=True until rank 0 finds TEST_STOP; logs its steps to a file in TEST_LOG."""
import json
import os
import time
from pathlib import Path

import keras
import numpy as np

BATCH, STEPS = 4, 20        # steps of an epoch


def make_model():
    keras.utils.set_random_seed(0)
    keras.config.set_floatx("float64")
    return keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(16), keras.layers.BatchNormalization(),
                             keras.layers.ReLU(), keras.layers.Dense(1)])


def make_optimizer():
    return keras.optimizers.SGD(0.005, momentum=0.9)


def share(step, rank):
    """A rank's inputs and targets in one step."""
    inputs = np.random.default_rng(1000 * step + rank).standard_normal((BATCH, 6))
    return inputs, np.tanh(inputs.prod(1, keepdims=True))


def main():
    import tensorflow as tf

    import bagua_hvd.tensorflow.keras as hvd
    from bagua_hvd.job.runtime import runtime
    from bagua_hvd.tensorflow import broadcast_object

    model = make_model()
    hvd.init()
    folder = Path(os.environ["TEST_LOG"])
    file = os.open(folder / f"{os.getpid()}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def log(event, **words):
        os.write(file, (json.dumps({"event": event, "at": time.time(), "pid": os.getpid(), **words}) + "\n").encode())

    model.compile(hvd.DistributedOptimizer(make_optimizer()), "mse", jit_compile=False)
    state = hvd.elastic.KerasState(model, every_step=True, batch=0, epoch=0)

    def step():
        return state.epoch * STEPS + state.batch

    class Log(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            time.sleep(0.02)        # limits the number of steps to replay
            log("try", step=step(), epoch=0, indices=[])

        def on_train_batch_end(self, batch, logs=None):
            log("done", step=step() - 1)
            if step() % 10 == 0 and broadcast_object(os.path.exists(os.environ["TEST_STOP"]), name="stop"):
                self.model.stop_training = True

    def batches():
        first = step()
        while True:
            yield share(first, hvd.rank())
            first += 1

    @hvd.elastic.run
    def train(state):
        log("enter", scope=runtime.options.scope, rank=hvd.rank(), size=hvd.size(), step=step(),
            host=os.environ["HOROVOD_HOSTNAME"])
        print(f"enter step={step()} rank={hvd.rank()} size={hvd.size()} pid={os.getpid()}", flush=True)
        data = tf.data.Dataset.from_generator(batches, output_signature=(
            tf.TensorSpec((BATCH, 6), tf.float64), tf.TensorSpec((BATCH, 1), tf.float64)))
        model.fit(data, epochs=10 ** 6, initial_epoch=state.epoch, steps_per_epoch=STEPS, verbose=0, callbacks=[
            hvd.elastic.UpdateBatchStateCallback(state), hvd.elastic.UpdateEpochStateCallback(state), Log()])

    train(state)
    np.savez(folder / f"{os.getpid()}.npz", *[weight.numpy() for weight in model.trainable_weights])
    print(f"done step={step()} rank={hvd.rank()} size={hvd.size()}", flush=True)


if __name__ == "__main__":
    main()
