import importlib.util

# Without Lightning nothing can be tested here.
collect_ignore_glob = [] if importlib.util.find_spec("lightning") else ["test_*.py"]
