# Makes a cluster of Redis servers, with a replica for each master.
#
#   sh create.sh HOST[:PORT] ...
#
# If the cluster exists, each server receives the addresses of the others: containers can get new
# ones. The environment variable REDISCLI_AUTH is the password of the user `default` on all servers.
set -eu
host() { getent ahostsv4 "${1%%:*}" | { read -r address _; echo "$address"; }; }
port() { case "$1" in *:*) echo "${1##*:}" ;; *) echo 6379 ;; esac; }
ask() { at=$1; shift; redis-cli -h "$(host "$at")" -p "$(port "$at")" "$@"; }
for server in "$@"; do
    addresses="${addresses:-} $(host "$server"):$(port "$server")"
done
if ask "$1" cluster info | grep -q '^cluster_slots_assigned:0'; then
    # shellcheck disable=SC2086
    redis-cli --cluster create $addresses --cluster-replicas 1 --cluster-yes
else
    for each in "$@"; do
        for server in "$@"; do
            ask "$each" cluster meet "$(host "$server")" "$(port "$server")" > /dev/null
        done
    done
fi
for server in "$@"; do
    until ask "$server" cluster info | grep -q '^cluster_state:ok'; do sleep 0.1; done
done
