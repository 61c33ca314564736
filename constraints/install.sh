#!/bin/sh
# install.sh ENVIRONMENT EXTRA VERSION CANDIDATE...: the project with one of its extras, editable, in a virtual environment.
#
# Makes the environment, unless it is there, with the first CANDIDATE interpreter of VERSION ("3.11+": that or newer,
# "3.12": only that) and installs the exact versions that belong to its Python. EXTRA may be "" for none, or "device"
# for what the NVIDIA driver takes; CUDA=12, 13 or none overrides what is found.
set -eu
environment=$1 extra=$2 version=$3
shift 3

fail() {
    echo "error: $*" >&2
    exit 1
}

# Every candidate is started, not just looked up: a version manager puts names on the path that do not run. Debian
# packs `ensurepip` apart, and without it no environment can be made.
find_python() {
    for python in "$@"; do
        "$python" - "$version" >/dev/null 2>&1 <<'PROBE' && return
import ensurepip, sys, venv
wanted = tuple(map(int, sys.argv[1].rstrip("+").split(".")))
have = sys.version_info[:2]
sys.exit(not (have >= wanted if sys.argv[1].endswith("+") else have == wanted))
PROBE
    done
    fail "no Python $version with its venv module among: $*. Install one (Debian, Ubuntu: also python3-venv) or give its path, as in make PYTHON=/path/to/python3.12, or PYTHON312= for the newer lane"
}

device_extra() {
    case "${CUDA:-}" in
        none) return ;;
        12 | 13) echo "cuda$CUDA" && return ;;
        ?*) fail "CUDA=$CUDA is none of 12, 13, none" ;;
    esac
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 | cut -d . -f 1)
    case "$driver" in
        "" | *[!0-9]*) ;;
        *)
            [ "$driver" -ge 525 ] || fail "NVIDIA driver $driver is too old: CUDA 12 needs 525. Update it, or use the CPU: make demo CUDA=none"
            if [ "$driver" -ge 580 ]; then echo cuda13; else echo cuda12; fi
            ;;
    esac
}

if [ "$extra" = device ]; then
    extra=$(device_extra)
    [ -n "$extra" ] || echo "== no NVIDIA driver answers: JAX for the CPU"
fi
if [ ! -x "$environment/bin/pip" ]; then
    find_python "$@"
    echo "== $environment: $("$python" --version) from $python"
    "$python" -m venv "$environment"
fi
python=$environment/bin/python
lane=$("$python" -c 'import sys; print("py311-jax0.10.2" if sys.version_info < (3, 12) else "py312-jax0.11.2")')
echo "== $environment: installing ninfer-jax${extra:+[$extra]} with the versions of constraints/$lane.txt"
install() {
    "$python" -m pip install -qq --disable-pip-version-check -c "constraints/$lane.txt" "$@"
}
# The build back end is pinned as well, so it is installed first and not fetched anew into an isolated build.
install setuptools
install --no-build-isolation -e ".${extra:+[$extra]}"
