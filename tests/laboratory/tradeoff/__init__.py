"""`python -m tests.laboratory.tradeoff`: the gain of each algorithm, on one network and over all of them.

    __main__      the command line: a network, measured or given; its table and its pictures
    page          the tables and figures of the documentation, from the records
    to_quality    time per step times the number of needed steps
    winners       the least relaxed configuration that is nearly the fastest, predicted; the map
    pictures      of steps and of time to quality; those of the documentation
"""
from tests.laboratory.tradeoff.page import (
    ablation,
    bytes_sent,
    choose,
    figure,
    hidden,
    latency,
    milliseconds,
    prediction_error,
    speed,
    speed_to_quality,
    straggler,
    throughput,
    time_to_quality,
)

# Called by tests/laboratory/records.py.
__all__ = ["ablation", "bytes_sent", "choose", "figure", "hidden", "latency", "milliseconds",
           "prediction_error", "speed", "speed_to_quality", "straggler", "throughput",
           "time_to_quality"]
