import importlib.util

# Without torch there is nothing to test here.
collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_*.py"]
