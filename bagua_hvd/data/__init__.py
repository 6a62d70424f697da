"""Data loaders that read ahead in a thread; imports no framework."""
from bagua_hvd.data.data_loader_base import AsyncDataLoaderMixin, BaseDataLoader

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]
