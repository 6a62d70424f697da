"""Trains with unmodified DeePMD-kit, which uses Horovod on TensorFlow, on two ranks of bagua_hvd.

    pip install deepmd-kit tensorflow-cpu nvidia-cuda-runtime-cu12 && python tests/compat/deepmd_training.py

The data is generated here. If mpi4py is installed, it needs an MPI library, too. The output goes to the terminal; the
last lines say whether all steps ran, and whether the timeline has their gradients.
"""
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(folder, *command):
    """The output of a command that two ranks run; both must succeed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(
        filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    launcher = [sys.executable, "-m", "bagua_hvd.runner.launch", "--as-horovod", "-np", "2",
                "--timeline-filename", str(folder / "timeline.json")]
    with subprocess.Popen([*launcher, *command], cwd=folder, env=environment, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT) as process:
        lines = []
        for line in process.stdout or ():
            print(line, end="", flush=True)
            lines.append(line)
    if process.returncode:
        sys.exit(f"ended with {process.returncode}")
    return "".join(lines)


STEPS = 40
DEEPMD = {
    "model": {"type_map": ["A", "B"],
              "descriptor": {"type": "se_e2_a", "sel": [8, 8], "rcut": 4.0, "rcut_smth": 0.5, "neuron": [4, 8],
                             "axis_neuron": 4, "seed": 1},
              "fitting_net": {"neuron": [16, 16], "seed": 1}},
    "learning_rate": {"type": "exp", "start_lr": 0.001, "stop_lr": 1e-6, "decay_steps": 10},
    "loss": {"type": "ener", "start_pref_e": 1, "limit_pref_e": 1, "start_pref_f": 10, "limit_pref_f": 1},
    "training": {"training_data": {"systems": ["system"], "batch_size": 2}, "numb_steps": STEPS, "seed": 1,
                 "disp_file": "lcurve.out", "disp_freq": 10, "save_freq": 40},
}


def system(folder, atoms=8, frames=16):
    """Atoms on springs."""
    import numpy as np

    generator = np.random.default_rng(0)
    places = np.stack(np.meshgrid(*[[1.0, 3.0]] * 3), -1).reshape(atoms, 3)
    moved = generator.normal(0, 0.1, (frames, atoms, 3))
    (folder / "set.000").mkdir(parents=True)
    np.savetxt(folder / "type.raw", [0, 1] * (atoms // 2), fmt="%d")
    (folder / "type_map.raw").write_text("A\nB\n")
    for name, array in {"coord": places + moved, "box": np.tile(np.eye(3) * 8, (frames, 1, 1)),
                        "energy": (moved ** 2).sum((1, 2)), "force": -2 * moved}.items():
        np.save(folder / "set.000" / f"{name}.npy", array.reshape(frames, -1))


def main():
    with tempfile.TemporaryDirectory(prefix="deepmd_training.") as name:
        folder = Path(name)
        system(folder / "system")
        (folder / "input.json").write_text(json.dumps(DEEPMD))
        run(folder, sys.executable, "-m", "deepmd", "--tf", "train", "input.json")
        curve = (folder / "lcurve.out").read_text().splitlines()
        timeline = (folder / "timeline.json").read_text()
    last = int(curve[-1].split()[0])
    sums = len(re.findall(r'"NEGOTIATE_ALLREDUCE"', timeline))
    good = last == STEPS and sums >= STEPS
    print("as it should be:" if good else "NOT as it should be:", f"last step {last}, {sums} allreduces")
    return not good


if __name__ == "__main__":
    sys.exit(main())
