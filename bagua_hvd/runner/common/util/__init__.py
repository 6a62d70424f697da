"""Helpers under Horovod's names (`horovod.runner.common.util`)."""
