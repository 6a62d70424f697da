"""The laboratory: this project's own measurements, on hosts emulated on one machine. Run it from the repository.

Measurements for a user's own cluster are part of the package (bagua_hvd.bench); these programs use them.

    python -m tests.laboratory                  collectives between emulated hosts; the machine's own limits python -m
    tests.laboratory.train            time that communication adds to a training step, between emulated hosts python -m
    tests.laboratory.step_times       time and bytes of a step by algorithm and network python -m tests.laboratory.auto
    the choice of `auto` compared with every plan; also paired, changing python -m tests.laboratory.tradeoff         the
    gain of each algorithm: measured, predicted, drawn python -m tests.laboratory.quality          each algorithm's loss
    compared with that of exact averages python -m tests.laboratory.codecs           encoding and decoding compared with
    memcpy; device: on a GPU python -m tests.laboratory.simulator        simulated schedules compared with measured
    ones; model: on up to 4,096 hosts python -m tests.laboratory.world            start-up, descriptors and memory of
    large worlds python -m tests.laboratory.frontends        the cost of a step in each front end; ddp: compared with
    gloo's python -m tests.laboratory.records          regenerates parts of the documentation

`native/` is compiled at its first use (library.py).
"""
