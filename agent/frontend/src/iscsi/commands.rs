//! The command lines of tgt and open-iscsi, and the meaning of their answers. Nothing here runs them.

use std::fmt;
use std::net::Ipv4Addr;
use std::path::Path;

use shorthorn_types::VolumeName;

/// The domain of the project, in the form of iSCSI names (RFC 7143, 4.2.7.4).
const NAMING_AUTHORITY: &str = "iqn.2026-11.io.shorthorn";
/// The vendor of a volume's disk: eight characters at most. Rules of udev and multipath have it.
const VENDOR: &str = "SHRTHORN";
const PRODUCT: &str = "VOLUME";
/// The port of the targets, on an address of their own.
const PORT: u16 = 13260;
/// The port on which a target listens before it exists. An initiator that finds a portal without its target
/// gives its session up for good, so the real portal comes last.
const SETUP_PORT: u16 = 13261;
/// The number of a target. tgtd needs one, and has one target only.
const TID: &str = "1";
/// The unit of the volume; unit 0 is tgtd's own.
pub(super) const LUN: u32 = 1;
/// The limits of the data of one request, on both sides. Longer ones make it slow, shorter ones too.
const SEGMENT_BYTES: &str = "262144";
const BURST_BYTES: &str = "1048576";
/// The seconds for which requests wait without a target: as long as for NBD, a week.
pub(super) const WAIT_S: u32 = 7 * 24 * 3600;
/// The seconds between two pings of the initiator, and for their answer. A tgtd that was killed keeps its
/// connection for as long as one of its threads waits for the engine.
const PING_S: u32 = 15;

/// Exit status of iscsiadm: the session exists already.
const SESSION_EXISTS: i32 = 15;
/// Exit status of iscsiadm: no record or session of that name.
const NOT_FOUND: i32 = 21;

/// The secrets and names of one volume's target, the same for as long as the volume exists.
#[derive(Clone, PartialEq, Eq)]
pub struct IscsiIdentity {
    /// The password with which the initiator proves that it may use the target (CHAP).
    pub password: String,
    /// The password with which the target proves that it is the volume's. It must be another one.
    pub target_password: String,
    /// The number of the disk: hexadecimal digits that no other volume has.
    pub disk_id: String,
}

impl fmt::Debug for IscsiIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IscsiIdentity").field("disk_id", &self.disk_id).finish_non_exhaustive()
    }
}

/// A program with its arguments.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Call {
    pub(super) program: &'static str,
    pub(super) arguments: Vec<String>,
    /// The indexes of arguments that must not be shown.
    secrets: Vec<usize>,
    /// Exit statuses that mean success, beside 0.
    accepted: &'static [i32],
}

impl Call {
    fn new<'a>(program: &'static str, arguments: impl IntoIterator<Item = &'a str>) -> Call {
        Call {
            program,
            arguments: arguments.into_iter().map(str::to_owned).collect(),
            secrets: Vec::new(),
            accepted: &[],
        }
    }

    /// Hides the argument that is `secret` in texts.
    fn hiding(mut self, secret: &str) -> Call {
        self.secrets.extend(self.arguments.iter().position(|argument| argument == secret));
        self
    }

    fn accepting(mut self, accepted: &'static [i32]) -> Call {
        self.accepted = accepted;
        self
    }

    /// Returns true if `status` means that the requested state holds.
    pub(super) fn is_success(&self, status: i32) -> bool {
        status == 0 || self.accepted.contains(&status)
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.program)?;
        for (index, argument) in self.arguments.iter().enumerate() {
            let shown = if self.secrets.contains(&index) { "***" } else { argument };
            write!(f, " {shown}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// The name of a volume's target.
pub(super) fn target_name(volume: &VolumeName) -> String {
    format!("{NAMING_AUTHORITY}:{volume}")
}

/// The name of a volume's target in CHAP: another one than that of the initiator. No volume has a dot in its
/// name.
fn target_user(volume: &VolumeName) -> String {
    format!("{volume}.target")
}

/// The address of a target: one of 127.83.0.0/16, by its index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Portal(pub(super) u16);

impl Portal {
    /// Returns the index at which the search for a free address begins: volumes rarely share it.
    pub(super) fn first(volume: &VolumeName) -> Portal {
        let hash = volume
            .as_str()
            .bytes()
            .fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
        Portal(u16::try_from((hash >> 16) ^ (hash & 0xffff)).unwrap_or(0))
    }

    /// Returns the next one.
    pub(super) fn next(self) -> Portal {
        Portal(self.0.wrapping_add(1))
    }

    pub(super) fn ip(self) -> Ipv4Addr {
        let [high, low] = self.0.to_be_bytes();
        Ipv4Addr::new(127, 83, high, low)
    }

    /// Returns address and port, as the initiator connects to it.
    pub(super) fn address(self) -> String {
        format!("{}:{PORT}", self.ip())
    }

    fn setup_address(self) -> String {
        format!("{}:{SETUP_PORT}", self.ip())
    }
}

/// The target of one volume, as tgtd and the initiator need it.
#[derive(Clone, Debug)]
pub(super) struct Target {
    pub(super) volume: VolumeName,
    pub(super) portal: Portal,
    pub(super) identity: IscsiIdentity,
}

impl Target {
    /// Returns the program of the target. Its control socket is in the environment ([`CONTROL_VARIABLE`]).
    pub(super) fn daemon(&self) -> Call {
        Call::new("tgtd", ["-f", "--iscsi", &format!("portal={}", self.portal.setup_address())])
    }

    /// Returns the calls that make the target in a new tgtd whose disk is the file `backing`. The last but
    /// one lets the initiator in.
    pub(super) fn set_up(&self, backing: &Path) -> Vec<Call> {
        let name = target_name(&self.volume);
        let user = self.volume.as_str();
        let lun = LUN.to_string();
        let backing = backing.display().to_string();
        let admin = |arguments: &[&str]| {
            Call::new("tgtadm", ["--lld", "iscsi", "--mode"].into_iter().chain(arguments.iter().copied()))
        };
        let of_target = |operation: &'static str, more: &[&str]| {
            admin(&[&["target", "--op", operation, "--tid", TID][..], more].concat())
        };
        let parameter = |name: &str, value: &str| of_target("update", &["--name", name, "--value", value]);
        let unit = |operation: &'static str, more: &[&str]| {
            admin(&[&["logicalunit", "--op", operation, "--tid", TID, "--lun", &lun][..], more].concat())
        };
        let disk_id = &self.identity.disk_id;
        let disk = format!(
            "vendor_id={VENDOR},product_id={PRODUCT},product_rev=1,scsi_id={disk_id},scsi_sn={disk_id},\
             thin_provisioning=1"
        );
        let (password, target_password) = (&self.identity.password, &self.identity.target_password);
        let target_user = target_user(&self.volume);
        let portal = |operation: &'static str, address: String| {
            admin(&["portal", "--op", operation, "--param", &format!("portal={address}")])
        };
        vec![
            of_target("new", &["--targetname", &name]),
            parameter("MaxRecvDataSegmentLength", SEGMENT_BYTES),
            parameter("MaxBurstLength", BURST_BYTES),
            parameter("FirstBurstLength", SEGMENT_BYTES),
            parameter("InitialR2T", "No"),
            // Of all backing stores only this one passes a flush on.
            unit("new", &["--backing-store", &backing, "--bstype", "rdwr"]),
            unit("update", &["--params", &disk]),
            admin(&["account", "--op", "new", "--user", user, "--password", password]).hiding(password),
            admin(&["account", "--op", "bind", "--tid", TID, "--user", user]),
            admin(&["account", "--op", "new", "--user", &target_user, "--password", target_password])
                .hiding(target_password),
            admin(&["account", "--op", "bind", "--tid", TID, "--user", &target_user, "--outgoing"]),
            of_target("bind", &["--initiator-address", "127.0.0.1"]),
            portal("new", self.portal.address()),
            portal("delete", self.portal.setup_address()),
        ]
    }

    fn of_node(&self, more: &[&str]) -> Call {
        let (name, address) = (target_name(&self.volume), self.portal.address());
        let node = ["-m", "node", "-T", &name, "-p", &address];
        Call::new("iscsiadm", node.into_iter().chain(more.iter().copied()))
    }

    /// Returns the calls that make a session with the target. Nothing is discovered, and the settings are of
    /// this target alone.
    pub(super) fn log_in(&self) -> Vec<Call> {
        let (password, target_password) =
            (self.identity.password.as_str(), self.identity.target_password.as_str());
        let target_user = target_user(&self.volume);
        let (wait_s, ping_s) = (WAIT_S.to_string(), PING_S.to_string());
        let settings = [
            ("node.startup", "manual"),
            // The host's defaults may be others. With several sessions a volume would have several disks.
            ("node.session.nr_sessions", "1"),
            ("node.session.auth.authmethod", "CHAP"),
            ("node.session.auth.username", self.volume.as_str()),
            ("node.session.auth.password", password),
            // While no tgtd listens, any user of the host can listen on its port.
            ("node.session.auth.username_in", target_user.as_str()),
            ("node.session.auth.password_in", target_password),
            ("node.session.timeo.replacement_timeout", wait_s.as_str()),
            ("node.conn[0].timeo.noop_out_interval", ping_s.as_str()),
            ("node.conn[0].timeo.noop_out_timeout", ping_s.as_str()),
            ("node.session.iscsi.InitialR2T", "No"),
            ("node.session.scan", "auto"),
        ];
        let mut update = vec!["--op", "update"];
        for (name, value) in settings {
            update.extend(["-n", name, "-v", value]);
        }
        vec![
            forget(&self.volume),
            self.of_node(&["--op", "new"]),
            self.of_node(&update).hiding(password).hiding(target_password),
            self.of_node(&["--login"]).accepting(&[SESSION_EXISTS]),
        ]
    }
}

/// Returns the call that ends the sessions of a volume's target, with whatever address.
pub(super) fn log_out(volume: &VolumeName) -> Call {
    let name = target_name(volume);
    Call::new("iscsiadm", ["-m", "node", "-T", &name, "--logout"]).accepting(&[NOT_FOUND])
}

/// Returns the call that removes the settings of a volume's target.
pub(super) fn forget(volume: &VolumeName) -> Call {
    let name = target_name(volume);
    Call::new("iscsiadm", ["-m", "node", "-T", &name, "--op", "delete"]).accepting(&[NOT_FOUND])
}

/// The environment variable with the path of a tgtd's control socket. It appends the number of the socket.
pub(super) const CONTROL_VARIABLE: &str = "TGT_IPC_SOCKET";
/// The number that it appends.
pub(super) const CONTROL_SUFFIX: &str = ".0";

#[cfg(test)]
mod tests {
    use super::*;

    fn target() -> Target {
        Target {
            volume: VolumeName::new("v-1").unwrap(),
            portal: Portal(0x0102),
            identity: IscsiIdentity {
                password: "secretsecret".into(),
                target_password: "hiddenhidden".into(),
                disk_id: "0123456789abcdef".into(),
            },
        }
    }

    fn lines(calls: &[Call]) -> Vec<String> {
        calls.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_target_listens_on_its_own_loopback_address_after_all_else() {
        let target = target();
        assert_eq!(target.daemon().to_string(), "tgtd -f --iscsi portal=127.83.1.2:13261");
        let lines = lines(&target.set_up(Path::new("/run/v/disk")));
        assert_eq!(
            lines[0],
            "tgtadm --lld iscsi --mode target --op new --tid 1 --targetname iqn.2026-11.io.shorthorn:v-1"
        );
        let at = |text: &str| lines.iter().position(|line| line.contains(text)).unwrap();
        assert!(at("--backing-store /run/v/disk --bstype rdwr") < at("thin_provisioning=1"));
        assert!(at("vendor_id=SHRTHORN,product_id=VOLUME") < at("portal=127.83.1.2:13260"));
        assert!(at("account --op bind --tid 1 --user v-1") < at("portal=127.83.1.2:13260"));
        assert!(at("account --op bind --tid 1 --user v-1.target --outgoing") < at("portal=127.83.1.2:13260"));
        assert!(at("--op bind --tid 1 --initiator-address 127.0.0.1") < at("portal=127.83.1.2:13260"));
        assert!(lines.last().unwrap().ends_with("portal --op delete --param portal=127.83.1.2:13261"));
    }

    #[test]
    fn the_passwords_are_in_the_arguments_and_in_no_text() {
        let target = target();
        let mut calls = target.set_up(Path::new("/run/v/disk"));
        calls.extend(target.log_in());
        for secret in ["secretsecret", "hiddenhidden"] {
            let with = |call: &&Call| call.arguments.iter().any(|argument| argument == secret);
            assert_eq!(calls.iter().filter(with).count(), 2);
            assert!(!format!("{calls:?} {target:?} {:?}", target.identity).contains(secret));
            assert!(lines(&calls).iter().all(|line| !line.contains(secret)));
        }
    }

    #[test]
    fn a_session_is_of_one_target_and_waits_a_week() {
        let lines = lines(&target().log_in());
        let node = "iscsiadm -m node -T iqn.2026-11.io.shorthorn:v-1 -p 127.83.1.2:13260";
        assert_eq!(lines[0], "iscsiadm -m node -T iqn.2026-11.io.shorthorn:v-1 --op delete");
        assert!(lines[1..].iter().all(|line| line.starts_with(node)), "{lines:?}");
        assert!(lines[2].contains("-n node.session.timeo.replacement_timeout -v 604800"), "{}", lines[2]);
        assert!(lines[2].contains("-n node.startup -v manual"), "{}", lines[2]);
        assert!(lines[2].contains("-n node.session.auth.username_in -v v-1.target"), "{}", lines[2]);
        assert!(lines[2].contains("-n node.session.nr_sessions -v 1"), "{}", lines[2]);
        assert!(lines[3].ends_with("--login"));
    }

    #[test]
    fn a_state_that_holds_already_is_success() {
        let volume = VolumeName::new("v-1").unwrap();
        let login = target().log_in().pop().unwrap();
        assert!(
            login.is_success(0) && login.is_success(15) && !login.is_success(24) && !login.is_success(21)
        );
        for call in [log_out(&volume), forget(&volume)] {
            assert!(call.is_success(21) && !call.is_success(15) && !call.is_success(32), "{call}");
        }
    }

    #[test]
    fn addresses_are_loopback_and_differ() {
        assert_eq!(Portal(u16::MAX).ip().to_string(), "127.83.255.255");
        assert_eq!(Portal(u16::MAX).next(), Portal(0));
        let portals: Vec<Portal> =
            (0..100).map(|n| Portal::first(&VolumeName::new(&format!("pvc-{n}")).unwrap())).collect();
        let shared = portals.iter().enumerate().filter(|(n, portal)| portals[..*n].contains(portal)).count();
        assert!(shared <= 3, "{shared} of 100 volumes share an address at first");
    }
}
