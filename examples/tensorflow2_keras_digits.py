"""Trains a small CNN on scikit-learn's handwritten digits with Keras' fit(), as a Horovod user writes it.

    baguarun -np 2 python examples/tensorflow2_keras_digits.py --algorithm bytegrad

Change the import to `import horovod.tensorflow.keras as hvd`, and drop `algorithm=` and the report, and it is a Horovod
script. With KERAS_BACKEND=torch, and bagua_hvd.keras instead, it runs on PyTorch.
"""
import argparse
import hashlib
import sys
import time

import keras
import numpy as np
from sklearn.datasets import load_digits

import bagua_hvd.tensorflow.keras as hvd


class Weighted(keras.Sequential):
    """Weighs each rank's gradients by its images in the step."""

    def train_step(self, data):
        self.optimizer.set_weight(keras.ops.shape(data[0])[0])
        return super().train_step(data)


def make_model(kind=keras.Sequential):
    """Two convolutions and two linear layers over 8 x 8 pixels."""
    return kind([
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
        keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Flatten(),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(10),
    ])


def digits():
    """The data, shuffled alike on all ranks: 1437 images for training, 360 for testing."""
    images, labels = load_digits(return_X_y=True)
    images = images.astype("float32").reshape(-1, 8, 8, 1) / 16
    order = np.random.default_rng(0).permutation(len(labels))
    images, labels = images[order], labels[order].astype("int32")
    return (images[:1437], labels[:1437]), (images[1437:], labels[1437:])


def digest(model):
    """SHA-256 of all weights, as an array of 32 bytes."""
    sha = hashlib.sha256()
    for weight in model.get_weights():
        sha.update(weight.tobytes())
    return np.frombuffer(sha.digest(), np.uint8)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--algorithm", default=None, help="default: BAGUA_ALGORITHM, else gradient_allreduce")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step")
    parser.add_argument("--lr", type=float, default=0.03, help="for one rank; multiplied by their number")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--weighted", action="store_true",
                        help="use all images: an epoch's last batches are smaller, and not equal on all ranks")
    args = parser.parse_args()

    hvd.init()
    keras.utils.set_random_seed(args.seed + hvd.rank())     # different weights, until rank 0's are broadcast
    (images, labels), test_set = digits()
    images, labels = images[hvd.rank()::hvd.size()], labels[hvd.rank()::hvd.size()]
    steps_per_epoch = 1437 // (args.batch_size * hvd.size())
    if args.weighted:
        steps_per_epoch = -(-len(images) // args.batch_size)
    images, labels = (array[:steps_per_epoch * args.batch_size] for array in (images, labels))

    model = make_model(Weighted if args.weighted else keras.Sequential)
    optimizer = keras.optimizers.SGD(args.lr * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, algorithm=args.algorithm)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(args.lr * hvd.size(), warmup_epochs=3),
    ]

    hvd.statistics()        # reset: counts from here
    started = time.perf_counter()
    model.fit(images, labels, args.batch_size, epochs=args.epochs, callbacks=callbacks,
              verbose=2 if hvd.rank() == 0 else 0)
    seconds = time.perf_counter() - started
    steps = args.epochs * steps_per_epoch
    spent = hvd.statistics().recent

    digests = hvd.allgather(digest(model)[None])
    identical = bool((digests == digests[0]).all())
    _, accuracy = model.evaluate(*test_set, verbose=0)
    if hvd.rank() == 0:
        print(f"ranks: {hvd.size()}, algorithm: {type(optimizer.algorithm).__name__}")
        print(f"test accuracy: {100 * accuracy:.2f} %")
        print(f"steps/s: {steps / seconds:.1f}")
        print(f"bytes sent per step and rank: {spent.bytes_sent / steps:.0f}")
        print(f"parameters identical on all ranks: {'yes' if identical else 'NO'}")
    hvd.shutdown()
    return 0 if identical else 1


if __name__ == "__main__":
    sys.exit(main())
