"""One process's part in a job: environment, rendezvous, the runtime, process sets, elasticity."""
