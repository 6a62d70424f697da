"""bagua_hvd on Spark, under Horovod's paths: run(), estimators for torch, Keras and Lightning, their store.
docs/spark.md.

    runner.py       run(): the driver's side, and a task of its barrier stage, which starts a rank
    common/         shared by the estimators: parameters, store, reading and writing Parquet, models for Spark
    torch, keras, lightning     TorchEstimator, KerasEstimator, TorchEstimator
"""
try:
    import pyspark  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("bagua_hvd.spark needs Spark: pip install 'bagua_hvd[spark]'", name="pyspark") from error

from bagua_hvd.spark.runner import run, run_elastic

__all__ = ["run", "run_elastic"]
