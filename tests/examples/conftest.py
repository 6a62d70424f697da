"""The fixture run_ranks, as in tests/torch."""
import importlib.util
from pathlib import Path

_spec = importlib.util.spec_from_file_location("ranks", Path(__file__).parents[1] / "torch" / "conftest.py")
_ranks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_ranks)
run_ranks = _ranks.run_ranks
