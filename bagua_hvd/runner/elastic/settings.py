"""Validated settings of an elastic job."""
from dataclasses import dataclass

from bagua_hvd.core import variables


@dataclass
class ElasticSettings:
    """Number of ranks, waiting times and limits.

    Args:
        num_proc: slots that must be available before the job begins. None: min_num_proc.
        min_num_proc: the job never trains with fewer ranks. None: num_proc.
        max_num_proc: the job never trains with more ranks. None: as many as there are slots.
        elastic_timeout: seconds to wait for min_num_proc slots, or for workers that do not call init().
        start_timeout: seconds that the first rendezvous waits for workers that are still starting; also seconds that
            others wait for a worker that does not respond.
        reset_limit: maximum number of rendezvous after the first one. None: no limit.
        hosts_are_fixed: no host can be added after the start.
    Raises:
        ValueError: the numbers contradict each other.
    """

    num_proc: int | None = None
    min_num_proc: int | None = None
    max_num_proc: int | None = None
    elastic_timeout: float = variables.TABLE["HOROVOD_ELASTIC_TIMEOUT"].default
    start_timeout: float = 30
    reset_limit: int | None = None
    hosts_are_fixed: bool = False

    def __post_init__(self):
        first = self.min_num_proc if self.num_proc is None else self.num_proc
        least = first if self.min_num_proc is None else self.min_num_proc
        if first is None or least is None:
            raise ValueError("an elastic job needs --min-np or -np: say how many processes it needs at least")
        if least < 1:
            raise ValueError(f"--min-np {least}: give 1 or more")
        if first < least:
            raise ValueError(f"-np {first} is below --min-np {least}: raise it, or leave it out")
        if self.max_num_proc is not None and self.max_num_proc < first:
            raise ValueError(f"--max-np {self.max_num_proc} is below the {first} processes to begin with: "
                             "raise it, or leave it out")
        self.num_proc, self.min_num_proc = first, least
