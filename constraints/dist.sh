#!/bin/sh
# dist.sh OUT CANDIDATE...: sdist and wheel in OUT, and each extra of the wheel tried in an environment that holds nothing else.
#
# The wheel is made from the sdist, so both are whole. EXTRAS, if set, names the extras to try ("base" is none of them); without it
# every extra is. CUDA's and torch's take gigabytes; each environment is removed before the next is made.
set -eu
out=$1
shift
root=$(pwd)

fail() {
    echo "error: $*" >&2
    exit 1
}

for python in "$@"; do
    "$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break
    python=
done
[ -n "${python:-}" ] || fail "no Python 3.11 or newer with its venv module among: $*"
lane=$("$python" -c 'import sys; print("py311-jax0.10.2" if sys.version_info < (3, 12) else "py312-jax0.11.2")')
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

empty() { # a new environment in $work/env
    rm -rf "$work/env"
    "$python" -m venv "$work/env"
}
pip() {
    "$work/env/bin/python" -m pip "$@" -qq --disable-pip-version-check -c "$root/constraints/$lane.txt"
}

mkdir -p "$out"
rm -f "$out"/ninfer_jax-*
empty
pip install setuptools
"$work/env/bin/python" -c 'import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])' "$out" >"$work/log" 2>&1 ||
    { cat "$work/log" >&2; fail "no sdist"; }
pip wheel --no-deps --no-build-isolation --wheel-dir "$out" "$out"/ninfer_jax-*.tar.gz
wheel=$(cd "$out" && echo "$PWD"/ninfer_jax-*.whl)

try() { # command, in an empty folder, where no checkout can be imported by chance
    mkdir -p "$work/elsewhere"
    (cd "$work/elsewhere" && JAX_PLATFORMS=cpu "$@")
}

known=$("$python" -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"])')
for extra in ${EXTRAS:-base $known}; do
    case " base $known " in *" $extra "*) ;; *) fail "EXTRAS names $extra, there are: base $known" ;; esac
    empty
    case $extra in base) what=$wheel ;; *) what="$wheel[$extra]" ;; esac
    pip install "$what"
    try "$work/env/bin/python" -c 'import ninfer_jax, pallas_kernels; assert "site-packages" in ninfer_jax.__file__, ninfer_jax.__file__'
    try "$work/env/bin/ninfer-jax" --version
    case $extra in
        base) try "$work/env/bin/ninfer-jax" generate tiny --prompt ROMEO. --max-new 8 --greedy --context 256 >"$work/said"
            [ -s "$work/said" ] || fail "generate tiny said nothing" ;;
        server) try "$work/env/bin/python" -c 'import ninfer_jax.server.process' ;;
    esac
    echo "== $extra: installed, imported, run"
done
ls -l "$out"
