//! The table of the fenced blocks of the documentation: the test that runs each one, or the reason why no
//! test can.

/// A test that runs or reads a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tested {
    /// The test of this file runs the commands, in their order.
    Run(&'static str),
    /// No test runs the commands, for this reason. Their syntax and names are checked.
    Parsed(&'static str),
    /// The block is not a command, and the test of this file reads it.
    Read(&'static str),
}

use Tested::{Parsed, Read, Run};

const BUILDS: &str = "builds everything, for a quarter of an hour";
const ANOTHER_HOST: &str =
    "needs another host: tests/tests/vm_packages.rs runs the commands of the first one";
const RPM: &str = "needs a host with rpm: tests/tests/packages_rpm.rs installs the packages in a folder";
const HELM: &str = "the chart needs a later API server than the tests have; tests/tests/tools.rs renders it";
const KUSTOMIZE: &str = "has objects that the API server of the tests does not know; tests/tests/chart.rs";
const CLUSTER: &str = "tests/tests/kubernetes/pages.rs";
const KEY: &str = "tests/tests/kubernetes/backup.rs";
const CHART: &str = "tests/tests/tools.rs";
const FLAGS: &str = "controller/tests/docs.rs";
const LOCAL: &str = "tests/tests/pages/local.rs";
const HOSTS: &str = "tests/tests/pages/install_hosts.rs";
const MACHINE: &str = "tests/tests/vm_packages.rs";

/// The blocks of a page in their order, each by its first line without the comment.
pub type Entries = &'static [(&'static str, Tested)];

/// Every block of README.md and of the pages in docs.
pub const BLOCKS: &[(&str, Entries)] = &[
    (
        "README.md",
        &[
            ("make demo", Parsed(BUILDS)),
            ("make build", Run(LOCAL)),
            ("nbdinfo 'nbd+unix:///v1?socket=/var/tmp/v1/run/engine.nbd'", Run(LOCAL)),
        ],
    ),
    (
        "docs/backup.md",
        &[
            (
                "kubectl get secret shorthorn-volume-key -n shorthorn-system -o jsonpath='{.data.key}' \
                 >shorthorn-volume-key.base64",
                Run(KEY),
            ),
            ("base64 -d shorthorn-volume-key.base64 |", Run(KEY)),
            (
                "kubectl patch secret shorthorn-volume-key -n shorthorn-system --type=merge -p \
                 '{\"metadata\":{\"finalizers\":null}}'",
                Run(KEY),
            ),
            ("systemctl stop shorthorn-controller", Run("tests/tests/pages/backup.rs")),
        ],
    ),
    (
        "docs/daily.md",
        &[
            ("shorthornctl status", Run("tests/tests/pages/daily.rs")),
            ("shorthornctl volume trash", Run("tests/tests/pages/daily.rs")),
            ("journalctl -u shorthorn-agent -u 'shorthorn-*@*' --since -1d >NODE.log", Run(MACHINE)),
        ],
    ),
    (
        "docs/first-volume.md",
        &[
            ("shorthornctl node list", Run(MACHINE)),
            ("make build", Run(LOCAL)),
            ("nbdinfo 'nbd+unix:///v1?socket=/var/tmp/v1/run/engine.nbd'", Run(LOCAL)),
            ("shorthorn-agent replica inspect DIR [--output json]", Run(LOCAL)),
        ],
    ),
    (
        "docs/install-hosts.md",
        &[
            ("make packages", Parsed(BUILDS)),
            (
                "apt install ./shorthorn-agent_*.deb ./shorthorn-controller_*.deb ./shorthornctl_*.deb",
                Run(MACHINE),
            ),
            (
                "dnf install ./shorthorn-agent-*.rpm ./shorthorn-controller-*.rpm ./shorthornctl-*.rpm",
                Parsed(RPM),
            ),
            ("shorthorn-agent setup --node-name node1 --disk /var/lib/longhorn", Run(MACHINE)),
            ("shorthornctl node add node1 --address unix:///run/shorthorn/agent.sock", Run(MACHINE)),
            ("shorthornctl node list", Run(MACHINE)),
            ("SHORTHORN_CONTROLLER_ARGS=--tls-listen 192.0.2.10:9521", Read(FLAGS)),
            ("systemctl restart shorthorn-controller", Run(HOSTS)),
            ("apt install ./shorthorn-agent_*.deb", Parsed(ANOTHER_HOST)),
            ("shorthornctl node add node2 --address 192.0.2.12:9501", Run(HOSTS)),
        ],
    ),
    (
        "docs/install.md",
        &[
            ("make packages", Parsed(BUILDS)),
            ("apt install ./shorthorn-agent_*.deb", Run(MACHINE)),
            ("dnf install ./shorthorn-agent-*.rpm", Parsed(RPM)),
            ("make image", Parsed(BUILDS)),
            (
                "helm upgrade --install shorthorn packaging/chart --namespace shorthorn-system \
                 --create-namespace",
                Parsed(HELM),
            ),
            ("kubectl apply -k packaging/deploy", Parsed(KUSTOMIZE)),
            ("kubectl get pods -n shorthorn-system", Run(CLUSTER)),
            (
                "helm upgrade shorthorn packaging/chart --namespace shorthorn-system \
                 --reset-then-reuse-values",
                Parsed(HELM),
            ),
            ("kubectl apply -k packaging/deploy/agent", Parsed(KUSTOMIZE)),
            ("apiVersion: v1", Read(CLUSTER)),
            ("kubectl apply -f pod.yaml", Run(CLUSTER)),
            ("storageClasses:", Read(CHART)),
            (
                "helm upgrade shorthorn packaging/chart --namespace shorthorn-system \
                 --reset-then-reuse-values",
                Parsed(HELM),
            ),
            ("metrics_listen = \"192.0.2.11:9511\"", Read("agent/src/serve/config/reference_tests.rs")),
        ],
    ),
    (
        "docs/lost-node.md",
        &[
            ("shorthornctl status", Run("tests/tests/pages/lost_node.rs")),
            ("shorthornctl volume detach NAME", Run("tests/tests/pages/lost_node.rs")),
            ("kubectl delete node NODE", Run(CLUSTER)),
            ("shorthornctl node cordon NODE", Run("tests/tests/pages/lost_node.rs")),
        ],
    ),
    (
        "docs/maintenance.md",
        &[
            ("kubectl drain NODE --ignore-daemonsets --delete-emptydir-data", Run(CLUSTER)),
            ("shorthornctl node cordon NODE", Run("tests/tests/pages/maintenance.rs")),
            ("kubectl describe pod shorthorn-guard-NODE -n shorthorn-system", Run(CLUSTER)),
            ("shorthornctl node drain NODE", Run("tests/tests/pages/maintenance.rs")),
        ],
    ),
    (
        "docs/nodes.md",
        &[(
            "shorthorn-agent disk discover --file disks.toml",
            Parsed("formats devices: tests/tests/vm_disks.rs does so in a virtual machine"),
        )],
    ),
    (
        "docs/reference/shorthorn-controller.md",
        &[(
            "SHORTHORN_CONTROLLER_ARGS=--node node1=unix:///run/shorthorn/agent.sock \
             --replica-replace-after-s 300",
            Read(FLAGS),
        )],
    ),
    (
        "docs/replace-disk.md",
        &[
            ("shorthornctl disk drain NODE PATH", Run("tests/tests/pages/replace_disk.rs")),
            ("shorthornctl disk remove NODE PATH --lost", Run("tests/tests/pages/replace_disk.rs")),
            ("shorthornctl disk add NODE PATH", Run("tests/tests/pages/replace_disk.rs")),
        ],
    ),
    (
        "docs/security.md",
        &[(
            "shorthornctl --server https://controller.example:9521 --tls-identity ann.pem status",
            Parsed("needs a name in DNS: controller/tests/cluster/tls.rs connects to an address"),
        )],
    ),
    (
        "docs/troubleshooting.md",
        &[
            ("shorthornctl status", Run("tests/tests/pages/troubleshooting.rs")),
            ("journalctl -u shorthorn-engine@NAME", Run(MACHINE)),
            ("shorthornctl volume salvage NAME", Run("tests/tests/pages/troubleshooting.rs")),
            (
                "shorthornctl volume detach NAME --force",
                Parsed("needs a minute without service; the agent and the reconcilers have the tests"),
            ),
            ("kubectl describe pod POD", Run(CLUSTER)),
            (
                "systemctl status shorthorn-agent shorthorn-agent-csi.socket \
                 shorthorn-agent-registration.socket",
                Run(MACHINE),
            ),
        ],
    ),
    (
        "docs/upgrade.md",
        &[
            (
                "helm upgrade shorthorn packaging/chart --namespace shorthorn-system \
                 --reset-then-reuse-values",
                Parsed(HELM),
            ),
            ("apt install ./shorthorn-agent_*.deb", Run("tests/tests/pages/upgrade.rs")),
            ("shorthornctl doctor", Run("tests/tests/pages/upgrade.rs")),
            (
                "apt install ./shorthorn-controller_*.deb ./shorthornctl_*.deb",
                Run("tests/tests/pages/upgrade.rs"),
            ),
        ],
    ),
];
