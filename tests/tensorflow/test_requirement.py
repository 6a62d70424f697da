"""What `import bagua_hvd.tensorflow` says without a TensorFlow that it can use. Modules of our own stand for that."""
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("text, fragment", [
    ("raise ModuleNotFoundError(\"No module named 'tensorflow'\", name='tensorflow')", "none is installed"),
    ("__version__ = '2.9.1'", "2.9.1 is installed"),
])
def test_one_sentence(tmp_path, text, fragment):
    (tmp_path / "tensorflow.py").write_text(text)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    result = subprocess.run([sys.executable, "-c", "import bagua_hvd.tensorflow"], env=environment, text=True,
                            capture_output=True)
    last_line = result.stderr.strip().splitlines()[-1]
    assert last_line.startswith("ImportError: bagua_hvd.tensorflow needs TensorFlow 2.16 or later")
    assert fragment in last_line and "pip install" in last_line
    assert "During handling" not in result.stderr
