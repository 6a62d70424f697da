"""Trains a Keras 3 model on scikit-learn's handwritten digits on a Ray cluster, by Ray Train V2.

    python examples/ray_keras_digits.py --num-workers 2

Keras has no data parallelism of its own over several hosts: BaguaConfig connects the ranks, and the optimizer is
bagua_hvd's. For torch: examples/ray_torch_digits.py.
"""
import argparse
import os
import tempfile

import ray
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from bagua_hvd.ray.train import BaguaConfig


def train(config):
    """The training loop of a rank."""
    import keras
    from sklearn.datasets import load_digits

    import bagua_hvd.keras as hvd

    hvd.init()
    keras.utils.set_random_seed(config["seed"])
    images, labels = load_digits(return_X_y=True)
    images = images / 16
    mine = slice(hvd.rank(), 1437, hvd.size())
    model = keras.Sequential([keras.layers.Input((64,)), keras.layers.Dense(64, activation="relu"),
                              keras.layers.Dense(10)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.002 * hvd.size()), algorithm=config["algorithm"])
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    model.fit(images[mine], labels[mine], batch_size=32, epochs=config["epochs"], verbose=0,
              callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    accuracy = model.evaluate(images[1437:], labels[1437:], verbose=0)[1]
    with tempfile.TemporaryDirectory() as folder:
        model.save_weights(f"{folder}/model.weights.h5")
        checkpoint = Checkpoint.from_directory(folder) if hvd.rank() == 0 else None
        ray.train.report({"ranks": hvd.size(), "accuracy": accuracy}, checkpoint=checkpoint)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--algorithm", default=None, help="default: BAGUA_ALGORITHM, else gradient_allreduce")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--storage", default=None, help="a folder that all nodes share; default: Ray's")
    args = parser.parse_args()

    # Keras chooses its backend at import, on the workers.
    ray.init(runtime_env={"env_vars": {"KERAS_BACKEND": os.environ.get("KERAS_BACKEND", "tensorflow")}})
    result = DataParallelTrainer(
        train, train_loop_config={"algorithm": args.algorithm, "epochs": args.epochs, "seed": 42},
        backend_config=BaguaConfig(), scaling_config=ScalingConfig(num_workers=args.num_workers),
        run_config=RunConfig(storage_path=args.storage)).fit()
    print(f"{result.metrics['ranks']} ranks, test accuracy: {100 * result.metrics['accuracy']:.2f} %")


if __name__ == "__main__":
    main()
