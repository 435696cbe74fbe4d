# Starts Redis with a user for each role of roles.conf.
#
#   sh start.sh --dir /data --maxmemory 1gb ...
#
# Passwords come from the environment, and no command line shows them: those of the roles in REDIS_ROLE_PASSWORD, and in
# REDISCLI_AUTH that of the user `default`, who may do everything and is for operators alone.
set -eu
umask 077
folder=$(dirname "$0")
users=$(mktemp)
{
    printf 'requirepass %s\n' "$REDISCLI_AUTH"
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
