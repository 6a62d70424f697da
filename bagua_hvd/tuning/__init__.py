"""Selection of the fastest plan of communication: costs, measurements, predictions, decisions and their record."""
