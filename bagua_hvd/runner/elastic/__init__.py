"""Elastic jobs, on the launcher's side: hosts come and go, workers fail, the job continues. Begin with driver.py."""
