# Starts, stops or restarts units, if systemd runs and the policy of the host allows it.
invoke() { # ACTION UNIT…
    [ -d /run/systemd/system ] || return 0
    if command -v deb-systemd-invoke >/dev/null; then
        deb-systemd-invoke "$@" || true
    else
        systemctl "$@" || true
    fi
}

reload() {
    [ -d /run/systemd/system ] || return 0
    systemctl --system daemon-reload || true
    ! command -v udevadm >/dev/null || udevadm control --reload || true
}
