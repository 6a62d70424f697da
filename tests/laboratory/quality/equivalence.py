"""Two one-sided tests: whether a ratio is within a margin of 1, not equivalent, or inconclusive.

Losses are compared by ratios, so a seed's sample is the logarithm of its ratio; the test is Student's for their mean.
Source: Schuirmann, J. Pharmacokinet. Biopharm. 15 (1987), 657. https://doi.org/10.1007/BF01068419
"""
import math
from collections.abc import Sequence
from typing import NamedTuple


class Verdict(NamedTuple):
    """change: the relative mean. spread: standard deviation over seeds. p: of the test for being within the margin."""

    seeds: int
    change: float
    spread: float
    p: float
    word: str           # "within", "not equivalent", "inconclusive", "diverged"


def judge(ratios: Sequence[float], margin: float, level: float) -> Verdict:
    """Whether the ratios of some seeds show that 1 - margin < ratio < 1 + margin.

    Only a larger loss is worse: a loss below the margin is "within", too.
    """
    if not all(map(math.isfinite, ratios)):
        return Verdict(len(ratios), math.inf, math.inf, 1.0, "diverged")
    logs = [math.log(ratio) for ratio in ratios]
    mean = math.fsum(logs) / len(logs)        # Python's sum() differs between versions
    if len(logs) < 3:
        return Verdict(len(logs), math.expm1(mean), math.nan, math.nan, "inconclusive")
    deviation = math.sqrt(math.fsum((each - mean)**2 for each in logs) / (len(logs) - 1))
    if deviation == 0:
        word = "within" if mean < math.log1p(margin) else "not equivalent"
        return Verdict(len(logs), math.expm1(mean), 0.0, 0.0, word)
    from scipy import stats

    below = stats.ttest_1samp(logs, math.log1p(margin), alternative="less").pvalue
    above = stats.ttest_1samp(logs, math.log1p(-margin), alternative="greater").pvalue
    p = float(below if mean < 0 else max(below, above))
    beyond = stats.ttest_1samp(logs, math.log1p(margin), alternative="greater").pvalue
    word = "within" if p < level else "not equivalent" if beyond < level else "inconclusive"
    return Verdict(len(logs), math.expm1(mean), deviation, p, word)
