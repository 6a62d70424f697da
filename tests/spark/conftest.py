import os
import shutil
import sys

import pytest


@pytest.fixture(scope="session")
def spark():
    """A Spark session of two tasks in this process's JVM."""
    if not (shutil.which("java") or os.environ.get("JAVA_HOME")):
        pytest.skip("there is no Java: apt-get install default-jre-headless")
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    session = (SparkSession.builder.master("local[2]").appName("tests").config("spark.ui.enabled", "false")
               .config("spark.driver.host", "127.0.0.1").config("spark.driver.bindAddress", "127.0.0.1")
               .config("spark.sql.shuffle.partitions", "2").config("spark.driver.memory", "1g")
               .config("spark.scheduler.barrier.maxConcurrentTasksCheck.interval", "1s").getOrCreate())
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()
