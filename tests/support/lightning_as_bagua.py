"""Has Lightning's own tests, from a checkout of its repository, run on BaguaStrategy wherever they name ddp.

    PYTHONPATH=.../tests/support pytest -p lightning_as_bagua tests/tests_pytorch/callbacks/test_weight_averaging.py
"""
import lightning.pytorch as pl

from bagua_hvd.lightning import BaguaStrategy

for name, start_method in (("ddp", "popen"), ("ddp_spawn", "spawn"), ("ddp_fork", "fork"), ("ddp_notebook", "fork")):
    pl.strategies.StrategyRegistry.register(name, BaguaStrategy, override=True, start_method=start_method)
