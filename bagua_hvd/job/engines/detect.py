"""Detects the engine that started this process, and the process's rank."""
import os
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Placement:
    """This process in a job that another engine started.

    Attributes:
        engine: "torchrun", "openmpi", "hydra" (MPICH and its relatives), "slurm", "pmi", or "env": only the variables
            of torch's env:// are set, as by Kubernetes' PyTorchJob.
        local_size: ranks on this host; None: the engine does not say.
        job: text that identifies the job among all of this user's jobs, on all its hosts; None: the engine has none.
    """

    engine: str
    rank: int
    size: int
    local_size: int | None
    job: str | None


# In order: an engine that another one may have started comes before it. (engine, a variable that only it sets, rank,
# size, local size, variables that name the job)
_ENGINES = (
    ("torchrun", "TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", ()),
    ("openmpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE",
     ("PMIX_NAMESPACE",)),
    ("hydra", "MPI_LOCALRANKID", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS", ()),
    # Set by srun, and not by sbatch for the batch script itself.
    ("slurm", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", None,
     # Clusters that share a home may use the same numbers; the port belongs to this srun.
     ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_LAUNCHER_PORT")),
    ("pmi", "PMI_RANK", "PMI_RANK", "PMI_SIZE", None, ("PMI_JOBID",)),
    ("env", "MASTER_PORT", "RANK", "WORLD_SIZE", None, ()),
)


def detect(environ: Any = None) -> Any:
    """The Placement that the environment describes; None: no engine.

    Raises:
        ValueError: an engine's variables are incomplete or not numbers.
    """
    environ = os.environ if environ is None else environ
    for engine, mark, rank, size, local_size, job in _ENGINES:
        # A notebook may have exported MASTER_PORT alone, for ranks that it starts later.
        if mark in environ and (engine != "env" or rank in environ or size in environ):
            ranks = number(environ, size, engine)
            local = ranks if environ.get("SLURM_STEP_NUM_NODES") == "1" else None
            if local_size is not None:
                local = number(environ, local_size, engine)
            names = [environ[name] for name in job if name in environ]
            return Placement(engine, number(environ, rank, engine), ranks, local,
                             "-".join([engine, *names]) if names else None)
    return None


def number(environ: Any, name: str, engine: str) -> int:
    """The variable's value. ValueError: it is not set, or no number."""
    try:
        return int(environ[name])
    except (KeyError, ValueError):
        raise wrong(environ, name, engine) from None


def wrong(environ: Any, name: str, engine: str) -> ValueError:
    """The error for a variable that is missing or malformed."""
    value = repr(environ[name]) if name in environ else "not set"
    return ValueError(f"this process was started by {engine}, but environment variable {name} is {value}: start the "
                      "job with baguarun instead")
