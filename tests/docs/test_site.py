"""Builds the site as `make docs` does: checks its links and anchors, and runs its pages' commands for a minute."""
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
for module in ("latex2mathml", "material", "mkdocstrings"):
    pytest.importorskip(module, reason="`pip install --group docs`")
for module in ("torch", "tensorflow", "lightning"):
    pytest.importorskip(module)


def test_the_site(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    for name in ("BAGUA_FULL_STEPS", "BAGUA_FULL_STEP_BITS"):      # set for the tests by conftest.py
        environment.pop(name, None)
    done = subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", ".ci/mkdocs.yml",
                           "--site-dir", tmp_path], cwd=ROOT, env=environment, capture_output=True, text=True,
                          timeout=880)
    assert done.returncode == 0, done.stdout + done.stderr
    home = (tmp_path / "index.html").read_text()
    assert "<svg" in home and "rank 0 of 2: loss" in home, "a picture, and what the script printed"
    assert "tradeoff.js" in (tmp_path / "choose.html").read_text()
    assert (tmp_path / "search" / "search_index.js").exists() and "iframe-worker.js" in home, "search without a server"
    fetched = re.findall(r'(?:<script|<link rel="stylesheet"|<img)[^>]+(?:src|href)="(https?://[^"]+)', home)
    assert not fetched, "nothing is fetched from elsewhere"
