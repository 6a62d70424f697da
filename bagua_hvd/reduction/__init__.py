"""Reduction of gradients: collected in buckets, passed to an algorithm, waited for."""
