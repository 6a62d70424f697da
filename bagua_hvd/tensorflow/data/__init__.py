"""Input pipelines that run in processes of their own: compute_service."""
