"""Keras 3 on several hosts, on TensorFlow or PyTorch: fit, evaluate, checkpoints, resuming, mixed precision.

    baguarun -np 4 -H host1:2,host2:2 python examples/keras_several_hosts.py --folder /shared/digits
    KERAS_BACKEND=torch baguarun -np 2 python examples/keras_several_hosts.py --folder /tmp/digits

Run it again with the same folder, which all hosts must share, to resume an interrupted training.
docs/keras-several-hosts.md explains it.
"""
import argparse
from pathlib import Path

import keras
import numpy as np
from sklearn.datasets import load_digits

import bagua_hvd.keras as hvd


class Backup(keras.callbacks.BackupAndRestore):
    """All ranks restore, only rank 0 saves: two ranks must not write one file."""

    def on_epoch_end(self, epoch, logs=None):
        if hvd.rank() == 0:
            super().on_epoch_end(epoch, logs)

    def on_train_end(self, logs=None):
        if hvd.rank() == 0:
            super().on_train_end(logs)


def shard(images, labels):
    """This rank's share; equally many images on every rank, so that all make the same number of steps."""
    count = len(labels) // hvd.size() * hvd.size()
    return images[hvd.rank():count:hvd.size()], labels[hvd.rank():count:hvd.size()]


def digits():
    """1437 images for training and 360 for testing, shuffled alike on all ranks."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    images, labels = images[order].reshape(-1, 8, 8, 1).astype("float32") / 16, labels[order].astype("int32")
    return (images[:1437], labels[:1437]), (images[1437:], labels[1437:])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="for backup and models; all hosts must see it")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--algorithm", default=None, help="default: BAGUA_ALGORITHM, else gradient_allreduce")
    args = parser.parse_args()

    hvd.init()
    keras.utils.set_random_seed(42)                                     # the same initial weights on every rank
    keras.mixed_precision.set_global_policy("mixed_bfloat16")           # before the layers are made
    model = keras.Sequential([
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Flatten(),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(10, dtype="float32"),                        # the loss in full precision
    ])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.002 * hvd.size()), algorithm=args.algorithm)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])

    train_set, test_set = (shard(*data) for data in digits())
    callbacks = [
        Backup(args.folder / "backup", double_checkpoint=True),
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),                          # before all callbacks that read metrics
    ]
    if hvd.rank() == 0:
        callbacks.append(keras.callbacks.ModelCheckpoint(
            str(args.folder / "best.keras"), monitor="val_accuracy", mode="max", save_best_only=True))
    model.fit(*train_set, batch_size=32, epochs=args.epochs, validation_data=test_set, callbacks=callbacks,
              verbose=2 if hvd.rank() == 0 else 0)

    loss, accuracy = (float(hvd.allreduce(value)) for value in model.evaluate(*test_set, verbose=0))
    if hvd.rank() == 0:
        print(f"{keras.backend.backend()}, {hvd.size()} ranks: test loss {loss:.3f}, accuracy {100 * accuracy:.1f} %")
        best = hvd.load_model(str(args.folder / "best.keras"), algorithm=args.algorithm)
        print(f"best.keras was written after step {int(best.optimizer.iterations)}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
