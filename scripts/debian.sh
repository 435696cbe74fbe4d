#!/usr/bin/env bash
# Install Debian packages as root, without asking anything and without starting their services.
set -euo pipefail

policy=/usr/sbin/policy-rc.d
if [[ ! -e $policy ]]; then
    # Debian asks this file whether a package may start its service: 101 means no.
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
    trap 'rm -f "$policy"' EXIT
fi
export DEBIAN_FRONTEND=noninteractive
install=(apt-get install --yes --quiet=2 --no-install-recommends "$@")
"${install[@]}" >/dev/null 2>&1 || {
    apt-get update --quiet=2
    "${install[@]}" >/dev/null
}
