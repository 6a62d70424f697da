"""The collectives, common to all frameworks: arguments, names and averages; and the adapter of a framework."""
