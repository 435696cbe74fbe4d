# Starts Redis with a user for each role of roles.conf.
#
#   sh start.sh --dir /data --maxmemory 1gb ...
#
# Passwords come from environment variables, so that no command line shows them:
# REDIS_<ROLE>_PASSWORD for each role, and REDISCLI_AUTH for the user `default`, which has all
# permissions, for operators and replicas only.
set -eu
umask 077
folder=$(dirname "$0")
users=$(mktemp)
{
    printf 'requirepass %s\nmasterauth %s\n' "$REDISCLI_AUTH" "$REDISCLI_AUTH"
    while read -r role rules; do
        case "$role" in
            gateway) password=$REDIS_GATEWAY_PASSWORD ;;
            worker) password=$REDIS_WORKER_PASSWORD ;;
            jobs) password=$REDIS_JOBS_PASSWORD ;;
            *) continue ;;
        esac
        printf 'user %s on >%s %s\n' "$role" "$password" "$rules"
    done < "$folder/roles.conf"
} > "$users"
exec redis-server "$folder/redis.conf" --include "$users" "$@"
