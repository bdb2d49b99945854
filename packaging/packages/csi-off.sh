# Whether agent.toml turns CSI off. A socket that no agent serves would have kubelet wait for it.
csi_is_off() {
    grep -Eqs '^[[:space:]]*csi[[:space:]]*=[[:space:]]*"off"' /etc/shorthorn/agent.toml
}
