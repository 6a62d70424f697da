"""Trains a small CNN on scikit-learn's handwritten digits in a loop of its own, as a Horovod user writes it.

    baguarun -np 2 python examples/tensorflow2_digits.py --algorithm bytegrad

Change the import to `import horovod.tensorflow as hvd`, and drop `algorithm=` and the report, and it is a Horovod
script. With --xla the training step is compiled by XLA.
"""
import argparse
import hashlib
import sys
import time

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from tqdm import tqdm

import bagua_hvd.tensorflow as hvd


def make_model():
    """Two convolutions and two linear layers over 8 x 8 pixels."""
    return tf.keras.Sequential([
        tf.keras.Input((8, 8, 1)),
        tf.keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
        tf.keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
        tf.keras.layers.MaxPooling2D(),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(64, activation="relu"),
        tf.keras.layers.Dense(10),
    ])


def digits():
    """The data, shuffled alike on all ranks: 1437 images for training, 360 for testing."""
    images, labels = load_digits(return_X_y=True)
    images = images.astype("float32").reshape(-1, 8, 8, 1) / 16
    order = np.random.default_rng(0).permutation(len(labels))
    images, labels = images[order], labels[order].astype("int32")
    return (images[:1437], labels[:1437]), (images[1437:], labels[1437:])


def digest(model):
    """SHA-256 of all weights, as a tensor of 32 bytes."""
    sha = hashlib.sha256()
    for weight in model.get_weights():
        sha.update(weight.tobytes())
    return tf.constant(list(sha.digest()), tf.uint8)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--algorithm", default=None, help="default: BAGUA_ALGORITHM, else gradient_allreduce")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step")
    parser.add_argument("--lr", type=float, default=0.03, help="for one rank; multiplied by their number")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--xla", action="store_true", help="compile the training step")
    args = parser.parse_args()

    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.keras.utils.set_random_seed(args.seed + hvd.rank())   # different weights, until rank 0's are broadcast
    train_set, (test_images, test_labels) = digits()
    dataset = tf.data.Dataset.from_tensor_slices(train_set).shard(hvd.size(), hvd.rank())
    steps_per_epoch = len(train_set[0]) // (args.batch_size * hvd.size())
    dataset = dataset.shuffle(2000).batch(args.batch_size, drop_remainder=True).take(steps_per_epoch)

    model = make_model()
    optimizer = tf.keras.optimizers.SGD(args.lr * hvd.size(), momentum=0.9)
    optimizer.build(model.trainable_variables)
    loss_function = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    hvd.broadcast_variables(model.variables, root_rank=0)
    hvd.broadcast_variables(optimizer.variables, root_rank=0)

    @tf.function(jit_compile=args.xla)
    def training_step(images, labels):
        with tf.GradientTape() as tape:
            loss = loss_function(labels, model(images, training=True))
        tape = hvd.DistributedGradientTape(tape, algorithm=args.algorithm)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    hvd.statistics()        # reset: counts from here
    started = time.perf_counter()
    for _ in tqdm(range(args.epochs), desc="epochs", disable=hvd.rank() != 0):
        for images, labels in dataset:
            training_step(images, labels)
    seconds = time.perf_counter() - started
    steps = args.epochs * steps_per_epoch
    spent = hvd.statistics().recent

    digests = hvd.allgather(digest(model)[None])
    identical = bool(tf.reduce_all(digests == digests[0]))
    accuracy = np.mean(np.argmax(model(test_images), axis=1) == test_labels)
    if hvd.rank() == 0:
        print(f"ranks: {hvd.size()}")
        print(f"test accuracy: {100 * accuracy:.2f} %")
        print(f"steps/s: {steps / seconds:.1f}")
        print(f"bytes sent per step and rank: {spent.bytes_sent / steps:.0f}")
        print(f"parameters identical on all ranks: {'yes' if identical else 'NO'}")
    hvd.shutdown()
    return 0 if identical else 1


if __name__ == "__main__":
    sys.exit(main())
