"""Two optimizers, and a tape whose list of variables grows, under a state of class TEST_STATE, until a rank joins."""
import os
import time

import keras
import tensorflow as tf

import bagua_hvd.tensorflow as hvd

UNFROZEN_AT = 3     # the step from which all variables are trained
STEPS = 4           # of two ranks


def make(layers):
    return keras.Sequential([keras.Input((4,)), *(keras.layers.Dense(3) for _ in range(layers))])


def main():
    keras.utils.set_random_seed(0)
    generator, discriminator, tuned = make(1), make(2), make(2)
    hvd.init()
    optimizers = [hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)) for _ in range(2)]
    plain = keras.optimizers.SGD(0.01)
    for optimizer, model in zip((*optimizers, plain), (generator, discriminator, tuned), strict=True):
        optimizer.build(model.trainable_variables)
    if os.environ["TEST_STATE"] == "TensorFlowState":
        state = hvd.elastic.TensorFlowState([*generator.variables, *discriminator.variables, *tuned.variables], step=0)
    else:
        state = hvd.elastic.TensorFlowKerasState(discriminator, optimizers[1], step=0)
    inputs = tf.ones((2, 4))

    def gradients(model, variables, wrap=lambda tape: tape):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(inputs) ** 2)
        return zip(wrap(tape).gradient(loss, variables), variables, strict=True)

    @hvd.elastic.run
    def train(state):
        print(f"enter rank={hvd.rank()} size={hvd.size()} step={state.step}", flush=True)
        end = state.step + STEPS
        while hvd.size() == 1 or state.step < end:
            # A rank that joins makes the Reducer of all these variables first, and none of the last layer's alone.
            part = tuned if state.step >= UNFROZEN_AT else tuned.layers[-1]
            plain.apply_gradients(gradients(tuned, part.trainable_variables, hvd.DistributedGradientTape))
            for model, optimizer in zip((generator, discriminator), optimizers, strict=True):
                optimizer.apply_gradients(gradients(model, model.trainable_variables))
            state.step += 1
            if hvd.size() == 1:
                time.sleep(0.1)
                print(f"alone step={state.step}", flush=True)
            state.commit()

    train(state)
    print(f"done rank={hvd.rank()} size={hvd.size()} step={state.step}", flush=True)


if __name__ == "__main__":
    main()
