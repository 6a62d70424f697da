"""Data loaders that prefetch in a thread, and data sets that cache samples; imports no framework."""
from bagua_hvd.data.cached_dataset import CachedDataset
from bagua_hvd.data.data_loader_base import AsyncDataLoaderMixin, BaseDataLoader

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader", "CachedDataset"]
