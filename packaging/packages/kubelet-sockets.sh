# Kubelet forgets a driver when its registration socket is gone.
remove_kubelet_sockets() {
    for root in /var/lib/kubelet /var/snap/microk8s/common/var/lib/kubelet /var/lib/k0s/kubelet \
        "$(setting kubelet_root /var/lib/kubelet)"; do
        rm -f "$root/plugins_registry/shorthorn@csi.shorthorn.io-reg.sock"
        plugin=$root/plugins/csi.shorthorn.io
        rm -f "$plugin/csi.sock"
        [ ! -d "$plugin" ] || rmdir --ignore-fail-on-non-empty "$plugin" || true
    done
}
