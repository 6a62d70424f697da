"""Gradients on their way: ready, in a bucket, given to an algorithm, waited for."""
