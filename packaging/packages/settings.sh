# Puts settings of a new host into place. They belong to the host, not to the package: `shorthorn-agent setup` or the
# administrator changes them. As a conffile they would have dpkg ask a question at an upgrade, and an upgrade without a
# terminal fails there. A file that the administrator has deleted does not return. On a host that had an earlier
# release, dpkg keeps the file as an obsolete conffile.
create_settings() { # PREVIOUS-VERSION NAME
    settings=/etc/shorthorn/$2
    [ -z "$1" ] && [ ! -e "$settings" ] && [ ! -L "$settings" ] || return 0
    install -D -m 0644 "/usr/share/shorthorn/$2" "$settings.new"
    mv "$settings.new" "$settings"
}
