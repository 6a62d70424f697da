"""The rules of the collectives, for every framework: arguments, names, averages; what a framework supplies."""
