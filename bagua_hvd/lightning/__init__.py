"""Lightning on bagua_hvd: strategies for the Trainer and for Fabric, and an environment for baguarun.

    import bagua_hvd.lightning                              # registers "bagua", "bagua_bytegrad", ...
    trainer = lightning.Trainer(strategy="bagua_bytegrad", accelerator="cpu", devices=2)

Supports `lightning`, and `pytorch_lightning` with `lightning_fabric` if only those are installed, or were imported
first. See docs/lightning.md.
"""
from bagua_hvd.lightning.environment import BaguarunEnvironment
from bagua_hvd.lightning.fabric import BaguaFabricStrategy
from bagua_hvd.lightning.registration import register
from bagua_hvd.lightning.strategy import BaguaStrategy

__all__ = ["BaguaFabricStrategy", "BaguaStrategy", "BaguarunEnvironment"]

register()
