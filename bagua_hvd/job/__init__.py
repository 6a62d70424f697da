"""One process's part in a job: environment, how ranks find each other, the runtime, process sets, elasticity."""
