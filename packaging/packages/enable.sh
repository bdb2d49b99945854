# Enables units at the first installation. Later the administrator's choice stays.
enable_units() { # PREVIOUS-VERSION UNIT…
    previous=$1
    shift
    if command -v deb-systemd-helper >/dev/null; then
        for unit in "$@"; do
            deb-systemd-helper unmask "$unit" >/dev/null || true
            if deb-systemd-helper --quiet was-enabled "$unit"; then
                deb-systemd-helper enable "$unit" >/dev/null || true
            else
                deb-systemd-helper update-state "$unit" >/dev/null || true
            fi
        done
    elif [ -z "$previous" ] && command -v systemctl >/dev/null; then
        systemctl --quiet enable "$@" || true
    fi
}
