# Removes the files that an agent of a DaemonSet has left in /run until the next boot. They would replace those of this
# package: engines and replicas would start with the DaemonSet's copy of the program. Running ones are not affected.
remove_runtime_copies() {
    # Only that agent writes this file.
    [ -e /run/shorthorn/agent.toml ] || return 0
    units=/run/systemd/system
    rm -f $units/shorthorn-engine@.service $units/shorthorn-replica@.service $units/shorthorn-replicas.target \
        $units/shorthorn-order.target $units/shorthorn.slice $units/kubepods.slice.d/shorthorn.conf \
        $units/var-lib-kubelet-pods-.mount.d/shorthorn.conf \
        /run/systemd/system-generators/shorthorn-generator \
        /run/modprobe.d/shorthorn.conf /run/udev/rules.d/59-shorthorn.rules
    for directory in $units/kubepods.slice.d $units/var-lib-kubelet-pods-.mount.d; do
        [ ! -d $directory ] || rmdir --ignore-fail-on-non-empty $directory
    done
}
