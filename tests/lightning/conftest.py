import importlib.util

# Without Lightning there is nothing to test here.
collect_ignore_glob = [] if importlib.util.find_spec("lightning") else ["test_*.py"]
