"""bagua_hvd on Spark, at Horovod's paths: run(), estimators for torch, Keras and Lightning, their store. docs/spark.md.

    runner.py       run(): the driver's side
    task.py         what a task of its barrier stage does: it starts the rank
    common/         what the estimators share: parameters, store, Parquet in and out, the model that Spark gets back
    torch, keras, lightning     TorchEstimator, KerasEstimator, TorchEstimator
"""
try:
    import pyspark  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("bagua_hvd.spark needs Spark: pip install 'bagua_hvd[spark]'", name="pyspark") from error

from bagua_hvd.spark.runner import run, run_elastic

__all__ = ["run", "run_elastic"]
