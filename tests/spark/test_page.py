"""The code of docs/spark.md, unchanged except for numbers of ranks and paths."""
import re
from pathlib import Path

import pytest

pytest.importorskip("pyspark", reason="Spark is not installed: pip install pyspark pyarrow pandas")

pytestmark = pytest.mark.timeout(600)
PAGE = Path(__file__).parents[2] / "docs" / "spark.md"


def test_code_of_the_page(spark, tmp_path):
    pytest.importorskip("torch")
    rows = [([float(i % 3), 0.0, 1.0, 0.5], i % 3) for i in range(120)]
    train, test = spark.createDataFrame(rows, ["features", "label"]).randomSplit([0.8, 0.2], 0)
    names = {"__name__": "__main__", "train_df": train, "test_df": test}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    code = "\n".join(blocks).replace("num_proc=4", "num_proc=2").replace("num_processes=4", "num_processes=2")
    exec(compile(code.replace("hdfs://namenode", str(tmp_path)), "spark.md", "exec"), names)
    assert names["results"] == [(0, 3), (1, 3)]
    loaded = type(names["model"]).load(f"{tmp_path}/model")
    assert len(loaded.transform(test).first().scores) == 3 and len(loaded.getHistory()) == 3
