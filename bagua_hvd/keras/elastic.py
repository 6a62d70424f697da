"""Elastic training: `@hvd.elastic.run` around a function of a KerasState. See bagua_hvd/_keras/elastic.py."""
from bagua_hvd._keras.elastic import *  # noqa: F403  (names that scripts use)
