"""Shared by the estimators: backend.py, store.py, params.py, data.py (Parquet in and out), estimator.py."""
