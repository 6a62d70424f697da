"""Parts of the runner that external code imports under Horovod's names."""
