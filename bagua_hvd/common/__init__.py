"""What every front end shares: the rules of the collectives, process sets, the runtime. Imports no framework."""
