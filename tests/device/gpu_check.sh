#!/bin/sh
# Everything that needs a GPU, on a machine that has one; see docs/gpu.md. Usage: tests/device/gpu_check.sh [FOLDER]
# FOLDER: where the raw output goes, one file for each step; docs/results/gpu/<date> unless given.
# The steps go on after a failure; the exit code is the number of those that failed.
set -u
cd "$(dirname "$0")/../.." || exit 1
out=${1:-docs/results/gpu/$(date -u +%Y-%m-%d)}
mkdir -p "$out"
python=${PYTHON:-python3}
failed=0
export PIP_BREAK_SYSTEM_PACKAGES=1      # the machine is for this alone

step() {                                # name, command...
    name=$1
    shift
    echo "== $name: $*"
    echo "$(date -u +%Y-%m-%dT%H:%M:%SZ) $*" >"$out/$name.log"
    if "$@" >>"$out/$name.log" 2>&1; then echo "   ok"; else
        echo "   FAILED, see $out/$name.log"
        failed=$((failed + 1))
    fi
    tail -n 15 "$out/$name.log"
}

if [ -d .wheels ]; then
    step install $python -m pip install --no-index --find-links .wheels cffi setuptools cloudpickle psutil PyYAML pytest \
        pytest-timeout hypothesis
fi
step build $python setup.py -q build_clib build_ext --inplace
PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export PYTHONPATH OMP_NUM_THREADS=1
run="$python -m bagua_hvd.runner.launch"

step versions sh -c "date -u; uname -a; nvidia-smi; $python -m pip list; $run --check-build"
# Without a GPU too: stand-ins, emulation, NVRTC.
step stand-ins $python -m pytest -q tests/device tests/torch/test_cuda_view.py -k 'not test_gpu.py and not gpu-'
# The codecs' bytes on the GPU against the C codecs'.
step kernels $python -m pytest -v tests/device/test_kernels.py -k gpu
# Collectives of every dtype, encoded ones, streams, training, on 1, 2 and 4 ranks that share the GPU, against the CPU's results.
BAGUA_HVD_NCCL=0
export BAGUA_HVD_NCCL
step staged $python -m pytest -v tests/device/test_gpu.py -k 'not nccl'
unset BAGUA_HVD_NCCL
# A communicator of one rank; more need more GPUs.
step nccl1 $python -m pytest -v -s tests/device/test_gpu.py -k nccl
gpus=$(nvidia-smi -L 2>/dev/null | wc -l)
if [ "$gpus" -gt 1 ]; then
    step "nccl$gpus" env NCCL_DEBUG=INFO $run -np "$gpus" $python tests/device/gpu_training.py
    step "nccl${gpus}allreduce" $run -np "$gpus" $python -m tests.laboratory.device
fi
# Bandwidths: a copy, encode and decode of 256 MiB (to aim for: 80 % of the copy), pack of ResNet-50's gradients (70 %).
step bench $python -m tests.laboratory.device
for ranks in 1 2 4; do
    step "allreduce$ranks" env BAGUA_HVD_NCCL=0 $run -np $ranks $python -m tests.laboratory.device
done
for ranks in 2 4; do
    step "training$ranks" $run -np $ranks $python tests/device/gpu_training.py
done
if command -v compute-sanitizer >/dev/null; then
    for tool in memcheck racecheck synccheck; do
        step "sanitizer-$tool" compute-sanitizer --tool $tool --error-exitcode 1 $python -m pytest -q \
            tests/device/test_kernels.py -k gpu
    done
    step sanitizer-job compute-sanitizer --target-processes all --error-exitcode 1 $python -m pytest -q \
        tests/device/test_gpu.py -k 'collectives and 1'
else
    echo "== sanitizer: not run, there is no compute-sanitizer" | tee "$out/sanitizer.log"
fi
exit $failed
