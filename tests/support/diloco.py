"""DiLoCo as first published: of the whole model at once, in full precision, and blocking."""
import functools

from bagua_hvd.algorithms import DiLoCo

WHOLE = {"fragments": 1, "overlap_steps": 0, "codec": None}
whole_diloco = functools.partial(DiLoCo, **WHOLE)
