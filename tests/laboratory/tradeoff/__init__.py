"""`python -m tests.laboratory.tradeoff`: what each algorithm buys, on one network and over all of them.

    __main__      the command line: a network, measured or told; its table and its pictures
    page          the tables and figures of the documentation, from the records
    to_quality    time per step times the steps that were needed
    winners       the least relaxed way that is nearly the quickest, predicted; the map
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
    pace,
    prediction_error,
    speed,
    speed_to_quality,
    straggler,
    throughput,
    time_to_quality,
)

# What tests/laboratory/records.py asks for.
__all__ = ["ablation", "bytes_sent", "choose", "figure", "hidden", "latency", "milliseconds", "pace",
           "prediction_error", "speed", "speed_to_quality", "straggler", "throughput",
           "time_to_quality"]
