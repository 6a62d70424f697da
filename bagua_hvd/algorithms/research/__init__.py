"""Algorithms that lose to another one in this project's own records. Importing this registers their names.

| name | use instead | why |
|---|---|---|
| lamb | torch.optim with gradient_allreduce | an optimizer, not a way to communicate |
| local_adam | local_sgd | a higher loss on every task |
| push_sum | gradient_allreduce | 0.8 to 0.9 times the speed of exact averages |
| terngrad | doublesqueeze with codec=block(4) | a higher loss on every task, for as many bytes |
| zero_one_adam | onebit_adam | a higher loss on every task, for three quarters of the bytes |

docs/results/quality.md has the losses, docs/results/tradeoff.md the times.
"""
from bagua_hvd.algorithms.base import register
from bagua_hvd.algorithms.research.lamb import Lamb
from bagua_hvd.algorithms.research.local_adam import LocalAdam
from bagua_hvd.algorithms.research.push_sum import PushSum
from bagua_hvd.algorithms.research.terngrad import TernGrad
from bagua_hvd.algorithms.research.zero_one_adam import ZeroOneAdam

register("lamb", Lamb)
register("local_adam", LocalAdam)
register("push_sum", PushSum)
register("terngrad", TernGrad)
register("zero_one_adam", ZeroOneAdam)

__all__ = ["Lamb", "LocalAdam", "PushSum", "TernGrad", "ZeroOneAdam"]
