"""Trains a Keras 3 model on the rows of a Spark DataFrame, and applies it to another one.

    python examples/spark_keras_digits.py --num-proc 2                  # or spark-submit, on a cluster

The rows go through Parquet in a store that driver and executors share. For torch and Lightning the estimators are
bagua_hvd.spark.torch.TorchEstimator and bagua_hvd.spark.lightning.TorchEstimator.
"""
import argparse
import tempfile

import keras
from pyspark.sql import SparkSession
from pyspark.sql.functions import col, expr
from sklearn.datasets import load_digits

from bagua_hvd.spark.common.store import Store
from bagua_hvd.spark.keras import KerasEstimator


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-proc", type=int, default=2)
    parser.add_argument("--algorithm", default=None, help="default: BAGUA_ALGORITHM, else gradient_allreduce")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--store", default=None, help="a folder or URI that all hosts share; default: a temporary one")
    args = parser.parse_args()

    spark = SparkSession.builder.appName("digits").getOrCreate()
    images, labels = load_digits(return_X_y=True)
    rows = [([float(value) / 16 for value in image], int(label)) for image, label in zip(images, labels, strict=True)]
    train, test = spark.createDataFrame(rows, ["image", "label"]).randomSplit([0.8, 0.2], seed=0)

    model = keras.Sequential([keras.layers.Input((64,)), keras.layers.Dense(64, activation="relu"),
                              keras.layers.Dense(10)])
    with tempfile.TemporaryDirectory() as folder:
        fitted = KerasEstimator(
            num_proc=args.num_proc, store=Store.create(args.store or folder), model=model,
            optimizer=keras.optimizers.Adam(0.002 * args.num_proc),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), feature_cols=["image"],
            label_cols=["label"], validation=0.1, epochs=args.epochs, algorithm=args.algorithm).fit(train)
    guess = expr("array_position(label__output, array_max(label__output)) - 1")
    right = fitted.transform(test).where(guess == col("label")).count()
    print(f"{args.num_proc} ranks, test accuracy: {100 * right / test.count():.2f} %")
    spark.stop()


if __name__ == "__main__":
    main()
