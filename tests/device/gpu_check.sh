#!/bin/sh
# Runs everything that needs a GPU, on a machine that has one; see docs/results/gpu.md.
#
#     tests/device/gpu_check.sh [--long | --rehearse] [FOLDER]
#
#     no option    at most 8 minutes: the kernels' bytes, bandwidths, NCCL with one rank, collectives, encoded ones, training
#     --long       the rest: more ranks, all algorithms, compute-sanitizer; several GPUs if there are
#     --rehearse   both on a machine without a GPU, with fakes of driver, NCCL and CuPy, to test this script
#
# Each step has a time limit, and a failure does not stop the others. At the end: a summary of at most 40 lines, then the last
# lines of the failed steps. The raw output goes to FOLDER (docs/results/gpu/<date>), one file per step, and device.jsonl, whose
# lines belong in docs/results/records. The exit code is the number of failed steps.
set -u
cd "$(dirname "$0")/../.." || exit 1
mode=quick
case ${1:-} in --long | --rehearse) mode=${1#--} && shift ;; esac
out=${1:-docs/results/gpu/$(date -u +%Y-%m-%d)}
python=${PYTHON:-python3}
mkdir -p "$out"
summary=$out/summary.txt
: >"$summary"
begun=$(date +%s)
limit=480 slack=1
[ $mode = quick ] || limit=3600
[ $mode != rehearse ] || slack=10       # the CPU runs the kernels
failed=0
export PIP_BREAK_SYSTEM_PACKAGES=1 OMP_NUM_THREADS=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
run="$python -m bagua_hvd.runner.launch"

line() { printf '%s\n' "$*" >>"$summary"; }

# name, time limit in seconds, command. The summary shows the last line of its output, and lines with a bandwidth.
step() {
    name=$1 seconds=$(($2 * slack))
    shift 2
    left=$((limit - $(date +%s) + begun))
    [ $left -ge "$seconds" ] || seconds=$left
    if [ "$seconds" -lt 5 ]; then
        failed=$((failed + 1))
        line "NOT RUN  $name: no time is left"
        return
    fi
    start=$(date +%s)
    echo "$(date -u +%Y-%m-%dT%H:%M:%SZ) $*" >"$out/$name.log"
    timeout -k 10 "$seconds" "$@" >>"$out/$name.log" 2>&1
    code=$?
    word=ok
    if [ $code -ne 0 ]; then
        failed=$((failed + 1)) word=FAILED
        failures="${failures:-} $name"
        [ $code -lt 124 ] || word="FAILED (after $seconds s)"
    fi
    line "$(printf '%-8s %-14s %3d s  %s' "$word" "$name" $(($(date +%s) - start)) "$(tail -n 1 "$out/$name.log" | cut -c1-90)")"
    [ $code -ne 0 ] || grep -E 'GB/s|allreduce of .* us' "$out/$name.log" | cut -c1-100 >>"$summary"
}

# A step that needs PyTorch with CUDA.
on_gpu() {
    if [ $mode = rehearse ]; then line "-        $1: needs PyTorch with CUDA, not rehearsed"; else step "$@"; fi
}

quick() {
    # The codecs' bytes on the GPU against the C codecs; then each kernel's bandwidth beside a copy's: aim for 80 %.
    step kernels 150 $python -m pytest -q -p no:cacheprovider tests/device/test_kernels.py -k "$kernels"
    step bandwidths 60 $python -m tests.laboratory.device --record --folder "$out" $bandwidths
    # Every dtype, encoded operations, order of streams, groups of c10d, an optimizer on two streams, a shutdown while the
    # GPU is behind: on ranks that share the GPU, against the CPU's results.
    on_gpu nccl1 60 $python -m pytest -q -p no:cacheprovider tests/device/test_gpu.py -k nccl
    on_gpu staged2 120 env BAGUA_HVD_NCCL=0 $python -m pytest -q -p no:cacheprovider tests/device/test_gpu.py \
        -k 'not nccl and not algorithms and 2'
    on_gpu allreduce2 40 env BAGUA_HVD_NCCL=0 $run -np 2 $python -m tests.laboratory.device --record --folder "$out"
    on_gpu frameworks 90 $python -m pytest -q -p no:cacheprovider tests/device/test_gpu_training.py
    step training2 60 $run -np 2 $python tests/device/gpu_training.py --device $device --steps $steps \
        --algorithms gradient_allreduce bytegrad qadam decentralized low_precision_decentralized
}

long() {
    on_gpu staged 600 env BAGUA_HVD_NCCL=0 $python -m pytest -q -p no:cacheprovider tests/device/test_gpu.py -k 'not nccl'
    step fakes 900 $python -m pytest -q -p no:cacheprovider tests/device tests/torch/test_cuda_view.py \
        -k "not test_gpu.py and not gpu- and $fakes"
    for ranks in 1 4; do
        on_gpu "allreduce$ranks" 60 env BAGUA_HVD_NCCL=0 $run -np $ranks $python -m tests.laboratory.device --record --folder "$out"
    done
    on_gpu training4 600 $run -np 4 $python tests/device/gpu_training.py
    gpus=$(nvidia-smi -L 2>/dev/null | wc -l)
    if [ "$gpus" -gt 1 ]; then
        on_gpu "nccl$gpus" 300 env NCCL_DEBUG=INFO $run -np "$gpus" $python tests/device/gpu_training.py
        on_gpu "allreduces$gpus" 60 $run -np "$gpus" $python -m tests.laboratory.device --record --folder "$out"
    fi
    if command -v compute-sanitizer >/dev/null; then
        for tool in memcheck racecheck synccheck; do
            on_gpu sanitizer-$tool 300 compute-sanitizer --tool $tool --error-exitcode 1 $python -m pytest -q \
                -p no:cacheprovider tests/device/test_kernels.py -k gpu
        done
    else
        line "-        sanitizer: there is no compute-sanitizer"
    fi
}

device=cuda steps=100 bandwidths="" kernels=gpu fakes=test
if [ -d .wheels ]; then
    step install 60 $python -m pip install --no-index --find-links .wheels cffi setuptools cloudpickle psutil PyYAML pytest \
        pytest-timeout hypothesis
fi
step build 120 $python setup.py -q build_clib build_ext --inplace
if [ $mode = rehearse ]; then
    device=cpu steps=30 kernels="gpu and scale" bandwidths="--nbytes 1048576 --runs 1" fakes="(copy_spans or hazards and window)"
    BAGUA_HVD_LIBCUDA=$($python -c "import sys; sys.path.insert(0, 'tests/support'); import device_arrays; print(device_arrays.fake_cuda_path())")
    PYTHONPATH=$PWD/tests/device/rehearsal:$PYTHONPATH
    export BAGUA_HVD_LIBCUDA BAGUA_HVD_LIBNCCL="$BAGUA_HVD_LIBCUDA"
fi
step versions 60 sh -c "date -u; uname -a; nvidia-smi; $python -m pip list; $run --check-build"
[ $mode = long ] || quick
[ $mode = quick ] || long

echo "gpu_check.sh, $mode, $(date -u +%Y-%m-%dT%H:%M:%SZ), $(($(date +%s) - begun)) s: $failed failed"
head -n 39 "$summary"
for name in ${failures:-}; do
    echo "== $name: the last lines of $out/$name.log"
    tail -n 25 "$out/$name.log"
done
exit $failed
