#!/usr/bin/env bash
# Install Debian packages as root, without prompts and without starting their services.
set -euo pipefail

policy=/usr/sbin/policy-rc.d
if [[ ! -e $policy ]]; then
    # Debian runs this file to check whether a package may start its service: 101 means no.
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
    trap 'rm -f "$policy"' EXIT
fi
export DEBIAN_FRONTEND=noninteractive
install=(apt-get install --yes --quiet=2 --no-install-recommends "$@")

# The package lists may be missing or outdated. Failed downloads are tried up to three times.
"${install[@]}" >/dev/null 2>&1 && exit
for pause in 5 20; do
    apt-get update --quiet=2 && "${install[@]}" >/dev/null && exit
    printf 'setup:   apt-get failed, trying again in %s seconds ...\n' "$pause"
    sleep "$pause"
done
apt-get update --quiet=2
"${install[@]}" >/dev/null
