"""The laboratory: how this project measures itself, on hosts that it emulates on one machine. Run from the repository.

What a user measures on her own cluster ships with the package (bagua_hvd.bench); these programs stand on it.

    python -m tests.laboratory                  collectives between emulated hosts; what the machine itself gives
    python -m tests.laboratory.train            what communication adds to a training step, between emulated hosts
    python -m tests.laboratory.step_times       time and bytes of a step by algorithm and network
    python -m tests.laboratory.auto             what `auto` chooses beside every plan; see also paired, changing
    python -m tests.laboratory.tradeoff         what each algorithm buys: measured, predicted, drawn
    python -m tests.laboratory.quality          each algorithm's loss beside that of exact averages
    python -m tests.laboratory.codecs           encoding and decoding beside memcpy; device: the same on a GPU
    python -m tests.laboratory.simulator        schedules simulated beside measured ones; model: on up to 4,096 hosts
    python -m tests.laboratory.world            start-up, descriptors and memory of large worlds
    python -m tests.laboratory.frontends        what a step costs in each front end; ddp: beside gloo's
    python -m tests.laboratory.records          writes the generated parts of the documentation anew

`native/` is compiled when it is first needed (library.py).
"""
