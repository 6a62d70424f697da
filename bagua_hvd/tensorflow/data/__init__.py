"""Input pipelines in separate processes: compute_service."""
