# The volumes and replicas that still need this package, for the scripts that run before its removal.

# The value of KEY in agent.toml, or DEFAULT.
setting() { # KEY DEFAULT
    value=$(sed -n 's/^[[:space:]]*'"$1"'[[:space:]]*=[[:space:]]*"\([^"]*\)".*/\1/p' \
        /etc/shorthorn/agent.toml 2>/dev/null | head -n 1)
    printf '%s\n' "${value:-$2}"
}

# The names of the spec files of a kind: each says that an instance should run.
instances() { # KIND
    for file in "$(setting state_dir /var/lib/shorthorn)/instances/$1"/*.json; do
        [ ! -e "$file" ] || basename "$file" .json
    done
}

# The names of the volumes that are attached to this host, also those of `shorthorn-agent run`.
attached_volumes() {
    {
        instances engine
        for mark in "$(setting device_dir /dev/longhorn)"/.ublkb*; do
            [ ! -f "$mark" ] || cat "$mark"
        done
        cat /sys/block/nbd*/backend 2>/dev/null | sed -n 's/^shorthorn://p'
        cat /sys/class/iscsi_session/*/targetname 2>/dev/null | sed -n 's/^iqn.2026-11.io.shorthorn://p'
    } | sort -u
}

refuse_while_in_use() {
    volumes=$(attached_volumes | tr '\n' ' ')
    replicas=$(instances replica | tr '\n' ' ')
    [ -n "$volumes$replicas" ] || return 0
    {
        [ -z "$volumes" ] || echo "shorthorn-agent: volumes are attached to this host: $volumes"
        [ -z "$replicas" ] || echo "shorthorn-agent: replicas of attached volumes run on this host: $replicas"
        if [ "${SHORTHORN_FORCE_REMOVE:-}" = 1 ]; then
            echo "SHORTHORN_FORCE_REMOVE=1: removing the package. Engines and replicas run until they end, and"
            echo "do not start again."
            return 0
        fi
        echo "Detach the volumes first (shorthornctl volume detach NAME). If they are attached elsewhere, move"
        echo "their replicas (shorthornctl node drain NODE). SHORTHORN_FORCE_REMOVE=1 removes the package anyway:"
        echo "the devices of this host then fail when their engines end."
    } >&2
    [ "${SHORTHORN_FORCE_REMOVE:-}" = 1 ]
}
