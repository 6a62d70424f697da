"""Horovod's interface on a new engine, with BAGUA's relaxed communication behind one keyword.

Import a front end, as with Horovod: `import bagua_hvd.torch as hvd`. Importing this package imports no framework.
"""

__version__ = "0.1.0"
