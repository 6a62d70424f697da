"""Imported before anything else of this package: see require()."""
from bagua_hvd.core.requirement import require

require("Keras", (3, 0))
