#!/bin/sh
# Everything that needs a GPU, on a machine that has one; see docs/gpu.md. Usage: tests/device/gpu_check.sh FOLDER
# The steps go on after a failure; the exit code is the number of those that failed.
set -u
cd "$(dirname "$0")/../.." || exit 1
out=${1:?usage: tests/device/gpu_check.sh FOLDER}
mkdir -p "$out"
python=${PYTHON:-python3}
failed=0
export PIP_BREAK_SYSTEM_PACKAGES=1      # the machine is for this alone

step() {                                # name, command...
    name=$1
    shift
    echo "== $name: $*"
    if "$@" >"$out/$name.log" 2>&1; then echo "   ok"; else
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
step versions sh -c "date -u; nvidia-smi; $python -m pip list; $python -m bagua_hvd.runner.launch --check-build"
step tests $python -m pytest -q tests/device tests/torch/test_cuda_view.py
step bench $python -m bagua_hvd.bench --device cuda
for ranks in 1 2 4; do
    step "allreduce$ranks" $python -m bagua_hvd.runner.launch -np $ranks $python -m bagua_hvd.bench --device cuda
done
if command -v compute-sanitizer >/dev/null; then
    step sanitizer compute-sanitizer --error-exitcode 1 $python -m pytest -q tests/device/test_kernels.py -k gpu
fi
exit $failed
