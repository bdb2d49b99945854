//! The packages for Debian and for distributions with rpm: files, modes, configuration, scripts, bill of
//! materials. vm_packages.rs installs them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use shorthorn_tests::{build_packages, in_target, project};

const VERSION: &str = "0.0.1";
const PACKAGES: [&str; 3] = ["shorthorn-agent", "shorthorn-controller", "shorthornctl"];
/// The configuration of each package, which upgrades keep.
const CONFIGURATION: [&[&str]; 3] =
    [&["/etc/multipath/conf.d/shorthorn.conf", "/etc/needrestart/conf.d/shorthorn.conf"], &[], &[]];
/// The settings of each package. In the deb they are no conffiles: packages_deb.rs installs them.
const SETTINGS: [&[&str]; 3] = [&["/etc/shorthorn/agent.toml"], &["/etc/shorthorn/controller.env"], &[]];

/// Returns all packages in both formats, built once for all tests of this file.
fn packages() -> Result<&'static Path> {
    static FOLDER: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let built = FOLDER.get_or_init(|| {
        let build = |folder: &Path| build_packages(folder, &["--version", VERSION]);
        in_target(concat!(env!("CARGO_TARGET_TMPDIR"), "/packages"), build)
    });
    built.as_deref().map_err(|error| anyhow::anyhow!("{error}"))
}

/// Returns the file of a package; `extension` is deb or rpm.
fn file(package: &str, extension: &str) -> Result<PathBuf> {
    let entries = fs::read_dir(packages()?)?.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    let wanted = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let rest = name.strip_prefix(package).and_then(|rest| rest.strip_prefix(['-', '_']));
        rest.is_some_and(|rest| rest.starts_with(VERSION)) && name.ends_with(extension)
    };
    entries.into_iter().find(wanted).with_context(|| format!("no {extension} of {package}"))
}

fn run(program: &str, arguments: &[&str]) -> Result<String> {
    let output =
        Command::new(program).args(arguments).output().with_context(|| format!("running {program}"))?;
    text(program, output)
}

fn text(program: &str, output: Output) -> Result<String> {
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{program}: {}\n{errors}", output.status);
    Ok(String::from_utf8(output.stdout)?)
}

/// Returns the regular files of a Debian package with their modes, as `ls -l` shows them. All belong to root.
fn deb_files(package: &str) -> Result<BTreeMap<String, String>> {
    let list = run("dpkg-deb", &["--contents", path(&file(package, "deb")?)?])?;
    let mut files = BTreeMap::new();
    for line in list.lines() {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [mode, owner, .., name] = fields[..] else { anyhow::bail!("{line}") };
        ensure!(owner == "root/root", "{line}");
        if mode.starts_with('d') {
            ensure!(mode == "drwxr-xr-x", "{line}");
        } else {
            files.insert(name.trim_start_matches('.').to_owned(), mode.to_owned());
        }
    }
    Ok(files)
}

fn path(path: &Path) -> Result<&str> {
    path.to_str().context("a path that is not UTF-8")
}

/// Returns the files below `folder`, relative to it.
fn walk(folder: &Path) -> Result<BTreeSet<String>> {
    let mut found = BTreeSet::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(next) = folders.pop() {
        for entry in fs::read_dir(&next)? {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                folders.push(entry.path());
            } else {
                found.insert(path(entry.path().strip_prefix(folder)?)?.to_owned());
            }
        }
    }
    Ok(found)
}

#[test]
fn every_file_for_systemd_is_in_a_package() -> Result<()> {
    let packaged: BTreeMap<String, String> =
        deb_files("shorthorn-agent")?.into_iter().chain(deb_files("shorthorn-controller")?).collect();
    let source = walk(&project().join("systemd"))?;
    ensure!(source.len() > 10, "{source:?}");
    for file in source {
        let folder = if file.starts_with("system") { "/usr/lib/systemd" } else { "/usr/lib" };
        let mode = if file.contains("generator") { "-rwxr-xr-x" } else { "-rw-r--r--" };
        let found = packaged.get(&format!("{folder}/{file}")).map(String::as_str);
        ensure!(found == Some(mode), "{file}: {found:?}");
    }
    Ok(())
}

#[test]
fn a_package_has_its_program_manual_and_documents() -> Result<()> {
    for (package, section) in PACKAGES.into_iter().zip([8, 8, 1]) {
        let files = deb_files(package)?;
        let has = |name: &str, mode: &str| {
            ensure!(files.get(name).is_some_and(|found| found == mode), "{name} in {files:?}");
            Ok(())
        };
        has(&format!("/usr/bin/{package}"), "-rwxr-xr-x")?;
        has(&format!("/usr/share/man/man{section}/{package}.{section}.gz"), "-rw-r--r--")?;
        for document in ["copyright", "changelog.gz", "changelog.Debian.gz", &format!("{package}.cdx.json")] {
            has(&format!("/usr/share/doc/{package}/{document}"), "-rw-r--r--")?;
        }
        let programs = files.values().filter(|mode| *mode == "-rwxr-xr-x").count();
        let expected = if package == "shorthorn-agent" { 4 } else { 1 };
        ensure!(programs == expected, "{package} has {programs} executable files");
    }
    let shell_files = deb_files("shorthornctl")?;
    for file in ["bash-completion/completions/shorthornctl", "zsh/vendor-completions/_shorthornctl"] {
        ensure!(shell_files.contains_key(&format!("/usr/share/{file}")), "{file}");
    }
    Ok(())
}

#[test]
fn both_formats_know_the_configuration() -> Result<()> {
    for ((package, expected), settings) in PACKAGES.into_iter().zip(CONFIGURATION).zip(SETTINGS) {
        let deb = file(package, "deb")?;
        let unpacked = tempfile::tempdir()?;
        run("dpkg-deb", &["--control", path(&deb)?, path(unpacked.path())?])?;
        let listed = fs::read_to_string(unpacked.path().join("conffiles")).unwrap_or_default();
        ensure!(listed.lines().collect::<Vec<_>>() == expected, "{package}: {listed}");
        let listed = run("rpm", &["-q", "--configfiles", "-p", path(&file(package, "rpm")?)?])?;
        let listed: Vec<&str> = listed.lines().filter(|line| line.starts_with('/')).collect();
        ensure!(listed == [expected, settings].concat(), "{package}: {listed:?}");
    }
    // RPM replaces other configuration at an upgrade.
    let flags = ["-qp", "--qf", "[%{FILENAMES} %{FILEFLAGS:fflags}\n]"];
    let agent = file("shorthorn-agent", "rpm")?;
    let flags = run("rpm", &[&flags[..], &[path(&agent)?]].concat())?;
    ensure!(flags.contains("/etc/shorthorn/agent.toml cn\n"), "{flags}");
    Ok(())
}

#[test]
fn scripts_are_for_every_posix_shell() -> Result<()> {
    for package in ["shorthorn-agent", "shorthorn-controller"] {
        let unpacked = tempfile::tempdir()?;
        run("dpkg-deb", &["--control", path(&file(package, "deb")?)?, path(unpacked.path())?])?;
        for script in ["postinst", "prerm", "postrm"] {
            let script = unpacked.path().join(script);
            ensure!(fs::metadata(&script)?.permissions().mode() & 0o777 == 0o755, "{}", script.display());
            check_script(&fs::read_to_string(&script)?).with_context(|| script.display().to_string())?;
        }
        for script in ["POSTIN", "PREUN", "POSTUN"] {
            let text =
                run("rpm", &["-qp", "--qf", &format!("%{{{script}}}"), path(&file(package, "rpm")?)?])?;
            check_script(&text).with_context(|| format!("%{script} of {package}"))?;
        }
    }
    for script in ["packaging/libexec/end-pods", "packaging/libexec/kubelet-drop-ins"] {
        check_script(&fs::read_to_string(project().join(script))?)?;
    }
    check_script(&fs::read_to_string(project().join(GENERATOR))?)
}

fn check_script(script: &str) -> Result<()> {
    ensure!(script.len() > 20 && !script.contains("@include"), "{script}");
    let mut shell = Command::new("dash").arg("-n").stdin(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    shell.stdin.take().context("a pipe")?.write_all(script.as_bytes())?;
    text("dash -n", shell.wait_with_output()?).map(drop)
}

/// An upgrade touches neither engines nor replicas, and a removal asks first.
#[test]
fn scripts_name_no_engine_but_to_protect_it() -> Result<()> {
    let agent = file("shorthorn-agent", "deb")?;
    let unpacked = tempfile::tempdir()?;
    run("dpkg-deb", &["--control", path(&agent)?, path(unpacked.path())?])?;
    let read = |name: &str| fs::read_to_string(unpacked.path().join(name));
    let (after, before) = (read("postinst")?, read("prerm")?);
    // The files that an agent of a DaemonSet has left are deleted: engines continue without them.
    let copies = ["$units/shorthorn-engine@.service", "$units/shorthorn.slice"];
    let after = copies.iter().fold(after, |script, copy| script.replace(copy, ""));
    ensure!(!after.contains("shorthorn-engine") && !after.contains("shorthorn.slice"), "{after}");
    ensure!(!before.contains("shorthorn-engine"), "{before}");
    let refusal = before.find("    refuse_while_in_use\n").context("a removal does not ask")?;
    let stop = before.find("    invoke stop").context("a removal stops nothing")?;
    ensure!(refusal < stop, "the agent stops before the removal is refused");
    Ok(())
}

/// The scripts of the agent on an empty /etc and /var/lib, in a mount namespace of their own.
#[test]
fn a_removal_is_refused_while_the_host_is_needed() -> Result<()> {
    let unpacked = tempfile::tempdir()?;
    run("dpkg-deb", &["--control", path(&file("shorthorn-agent", "deb")?)?, path(unpacked.path())?])?;
    let prelude = format!(
        "set -e; for folder in /etc /var/lib /dev/shm; do mount -t tmpfs none $folder; done; \
         cd {}; state=/var/lib/shorthorn; mkdir -p /etc/shorthorn $state/instances/engine \
         $state/instances/replica",
        path(unpacked.path())?
    );
    let inside = |script: &str| -> Result<Output> {
        let script = format!("{prelude}; {script}");
        Ok(Command::new("unshare").args(["--mount", "sh", "-c", &script]).output()?)
    };
    text("prerm", inside("./prerm remove")?)?;
    let volume = "touch $state/instances/engine/v1.json";
    let settings = "echo 'device_dir = \"/dev/shm\"' >/etc/shorthorn/agent.toml";
    for (needed, message) in [
        (volume, "volumes are attached to this host: v1 "),
        ("touch $state/instances/replica/v2-0000000a.json", "run on this host: v2-0000000a "),
        (&format!("{settings}; echo v3 >/dev/shm/.ublkb0"), "volumes are attached to this host: v3 "),
    ] {
        let refused = inside(&format!("{needed}; ./prerm remove"))?;
        let errors = String::from_utf8_lossy(&refused.stderr);
        ensure!(refused.status.code() == Some(1) && errors.contains(message), "{refused:?}");
    }
    text("prerm", inside(&format!("{volume}; ./prerm upgrade 1"))?)?;
    text("prerm", inside(&format!("{volume}; SHORTHORN_FORCE_REMOVE=1 ./prerm remove"))?)?;
    let purge = "mkdir -p $state/tls $state/disk/replicas/v1; touch $state/disks.json $state/cluster.json \
                 $state/tls/agent.pem $state/tls/.agent.pem.new $state/tls/join.key; \
                 ./postrm purge; find $state -mindepth 1 | sort | tr '\\n' ' '; ls -d /etc/shorthorn";
    let left = String::from_utf8(inside(purge)?.stdout)?;
    let disk = "/var/lib/shorthorn/disk";
    ensure!(left == format!("{disk} {disk}/replicas {disk}/replicas/v1 "), "left after a purge: {left}");
    Ok(())
}

#[test]
fn the_bill_of_materials_has_every_crate() -> Result<()> {
    for package in ["shorthorn-agent", "shorthornctl"] {
        let unpacked = tempfile::tempdir()?;
        run("dpkg-deb", &["--extract", path(&file(package, "deb")?)?, path(unpacked.path())?])?;
        let bill = unpacked.path().join(format!("usr/share/doc/{package}/{package}.cdx.json"));
        let bill: Value = serde_json::from_slice(&fs::read(bill)?)?;
        ensure!(
            bill["bomFormat"] == "CycloneDX" && bill["metadata"]["component"]["name"] == package,
            "{bill:#}"
        );
        let components = bill["components"].as_array().context("no components")?;
        let listed: BTreeSet<String> = components
            .iter()
            .map(|one| {
                format!("{} v{}", one["name"].as_str().unwrap_or(""), one["version"].as_str().unwrap_or(""))
            })
            .collect();
        let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
        let manifest = project().join("Cargo.toml");
        let options =
            ["tree", "--locked", "--package", package, "--edges", "normal,build", "--prefix", "none"];
        let tree = run(&cargo, &[&options[..], &["--manifest-path", path(&manifest)?]].concat())?;
        let name_and_version = |line: &str| line.split(' ').take(2).collect::<Vec<_>>().join(" ");
        let needed: BTreeSet<String> =
            tree.lines().skip(1).filter(|line| !line.is_empty()).map(name_and_version).collect();
        let missing: Vec<_> = needed.difference(&listed).collect();
        ensure!(needed.len() > 100 && missing.is_empty(), "{package} does not list {missing:?}");
        let tests: Vec<_> =
            listed.iter().filter(|one| one.contains("proptest") || one.contains("testkit")).collect();
        ensure!(tests.is_empty(), "{package} lists crates of tests: {tests:?}");
        let sums = components
            .iter()
            .filter(|one| one["hashes"][0]["content"].as_str().is_some_and(|sum| sum.len() == 64));
        ensure!(sums.count() > 100, "crates of the registry have checksums");
    }
    Ok(())
}

#[test]
fn the_rpm_installs_the_files_of_the_deb() -> Result<()> {
    let root = tempfile::tempdir()?;
    let rpms = PACKAGES.iter().map(|name| file(name, "rpm")).collect::<Result<Vec<_>>>()?;
    let mut arguments = vec![
        "--root",
        path(root.path())?,
        "--dbpath",
        "/rpmdb",
        "--noscripts",
        "--nodeps",
        "--nosignature",
        "--install",
    ];
    for rpm in &rpms {
        arguments.push(path(rpm)?);
    }
    run("rpm", &arguments)?;
    let mut installed = BTreeMap::new();
    for file in walk(root.path())?.into_iter().filter(|file| !file.starts_with("rpmdb")) {
        let mode = fs::metadata(root.path().join(&file))?.permissions().mode() & 0o7777;
        installed.insert(format!("/{file}"), mode == 0o755);
    }
    let mut expected = BTreeMap::new();
    for package in PACKAGES {
        for (file, mode) in deb_files(package)? {
            // The two families keep these in other places, or not at all.
            let is_debian = ["/copyright", "/changelog.Debian.gz"].iter().any(|end| file.ends_with(end));
            if !is_debian && !file.contains("/lintian/") {
                let file = file.replace("/vendor-completions/", "/site-functions/");
                let file = file.replace("/usr/share/shorthorn/", "/etc/shorthorn/");
                expected.insert(file, mode == "-rwxr-xr-x");
            }
        }
        expected.insert(format!("/usr/share/licenses/{package}/LICENSE"), false);
    }
    ensure!(installed == expected, "{:#?}\n{:#?}", installed, expected);
    let agent = run(
        "rpm",
        &["--root", path(root.path())?, "--dbpath", "/rpmdb", "--verify", "--nodeps", "shorthorn-agent"],
    )?;
    ensure!(agent.is_empty(), "{agent}");
    Ok(())
}

#[test]
fn lint_finds_nothing() -> Result<()> {
    let debs = PACKAGES.iter().map(|name| file(name, "deb")).collect::<Result<Vec<_>>>()?;
    let debs = debs.iter().map(|file| path(file)).collect::<Result<Vec<_>>>()?;
    // That is only here, to be quick.
    let uncompressed = "uses-no-compression-for-control-tarball,uses-no-compression-for-data-tarball";
    let options = ["--allow-root", "--suppress-tags", uncompressed];
    let found = run("lintian", &[&options[..], &debs[..]].concat())?;
    ensure!(found.is_empty(), "{found}");
    let rpms = PACKAGES.iter().map(|name| file(name, "rpm")).collect::<Result<Vec<_>>>()?;
    let rpms = rpms.iter().map(|file| path(file)).collect::<Result<Vec<_>>>()?;
    let config = project().join("packaging/rpmlint.toml");
    let found = run("rpmlint", &[&["--config", path(&config)?], &rpms[..]].concat())?;
    ensure!(found.contains("0 errors, 0 warnings"), "{found}");
    Ok(())
}

#[test]
fn two_builds_are_equal() -> Result<()> {
    let again = tempfile::tempdir()?;
    build_packages(again.path(), &["--version", VERSION, "--package", "shorthornctl"])?;
    let built: Vec<_> = fs::read_dir(again.path())?.collect::<Result<_, _>>()?;
    ensure!(built.len() == 2, "{built:?}");
    for package in built {
        let first = packages()?.join(package.file_name());
        ensure!(
            fs::read(&first)? == fs::read(package.path())?,
            "{package:?} differs from {}",
            first.display()
        );
    }
    Ok(())
}

const GENERATOR: &str = "systemd/system-generators/shorthorn-generator";

/// Runs the generator on a root directory with these files; the drop-in that it has made.
fn generated(config: &str, disks: &str) -> Result<Option<String>> {
    let root = tempfile::tempdir()?;
    for folder in ["etc/shorthorn", "var/lib/shorthorn", "units"] {
        fs::create_dir_all(root.path().join(folder))?;
    }
    fs::write(root.path().join("etc/shorthorn/agent.toml"), config)?;
    fs::write(root.path().join("var/lib/shorthorn/disks.json"), disks)?;
    let units = root.path().join("units");
    let output = Command::new(project().join(GENERATOR))
        .args([&units, &units, &units])
        .env("SHORTHORN_ROOT", root.path())
        .output()?;
    text("shorthorn-generator", output)?;
    Ok(fs::read_to_string(units.join("shorthorn-replica@.service.d/disks.conf")).ok())
}

#[test]
fn replicas_are_ordered_after_the_mounts_of_their_disks() -> Result<()> {
    let config =
        "#disks = [\"/not\"]\ndisks = [\n  \"/data/a\", # the fast one\n  \"/srv\",\n]\nzone = \"/zone\"\n";
    let made =
        generated(config, r#"{"disks":["/mnt/x-1/long horn"],"prepared":[]}"#)?.context("no drop-in")?;
    let after = made.lines().find_map(|line| line.strip_prefix("After=")).context("no order")?;
    let units: BTreeSet<&str> = after.split_whitespace().collect();
    let expected = [
        "data.mount",
        "data-a.mount",
        "srv.mount",
        "mnt.mount",
        "mnt-x\\x2d1.mount",
        "mnt-x\\x2d1-long\\x20horn.mount",
    ];
    ensure!(units == BTreeSet::from(expected), "{made}");
    ensure!(
        !made.contains("Requires"),
        "the failure of one disk must not stop the replicas of others: {made}"
    );
    ensure!(generated("#disks = []\n", "{}")?.is_none(), "a drop-in without disks");
    Ok(())
}

/// Runs kubelet-drop-ins on a root directory; the files below etc/systemd/system.
fn drop_ins(root: &Path, arguments: &[&str]) -> Result<BTreeSet<String>> {
    let output = Command::new(project().join("packaging/libexec/kubelet-drop-ins"))
        .args(arguments)
        .env("SHORTHORN_ROOT", root)
        .output()?;
    text("kubelet-drop-ins", output)?;
    walk(&root.join("etc/systemd/system"))
}

#[test]
fn drop_ins_fit_the_units_to_a_kubelet_elsewhere() -> Result<()> {
    let root = tempfile::tempdir()?;
    let units = root.path().join("etc/systemd/system");
    fs::create_dir_all(&units)?;
    ensure!(drop_ins(root.path(), &["--for", "k3s"])?.is_empty(), "the units as installed are for k3s");
    fs::create_dir_all(root.path().join("var/lib/k0s/kubelet"))?;
    let files = drop_ins(root.path(), &[])?;
    let expected = [
        "shorthorn-agent-csi.socket.d/shorthorn-kubelet.conf",
        "shorthorn-agent-registration.socket.d/shorthorn-kubelet.conf",
        "var-lib-k0s-kubelet-pods-.mount.d/shorthorn-kubelet.conf",
    ];
    ensure!(files == expected.map(str::to_owned).into(), "{files:?}");
    let socket = fs::read_to_string(units.join(expected[0]))?;
    ensure!(
        socket.contains("ListenStream=\nListenStream=/var/lib/k0s/kubelet/plugins/csi.shorthorn.io/csi.sock"),
        "{socket}"
    );
    // As the drop-in for the usual directory.
    let settings =
        |text: &str| text.lines().filter(|line| !line.starts_with('#')).collect::<Vec<_>>().join("\n");
    let usual = "systemd/system/var-lib-kubelet-pods-.mount.d/shorthorn.conf";
    let (usual, made) =
        (fs::read_to_string(project().join(usual))?, fs::read_to_string(units.join(expected[2]))?);
    ensure!(settings(&usual) == settings(&made), "{made}");
    // kubelet has moved: the drop-ins for the old place are deleted.
    let files = drop_ins(root.path(), &["--for", "microk8s"])?;
    ensure!(
        files.contains("var-snap-microk8s-common-var-lib-kubelet-pods-.mount.d/shorthorn-kubelet.conf"),
        "{files:?}"
    );
    ensure!(files.len() == 3, "{files:?}");
    ensure!(drop_ins(root.path(), &["--remove"])?.is_empty(), "drop-ins are left");
    Ok(())
}

#[test]
fn containers_outside_of_units_are_ended() -> Result<()> {
    let root = tempfile::tempdir()?;
    let pod = root.path().join("kubepods/besteffort/pod1");
    fs::create_dir_all(&pod)?;
    // One that ends when it is asked to, and one that has to be killed.
    let scripts = ["echo ready; exec sleep 1000", "trap '' TERM; echo ready; while :; do sleep 1; done"];
    let mut containers = Vec::new();
    for script in scripts {
        let mut container = Command::new("sh").args(["-c", script]).stdout(Stdio::piped()).spawn()?;
        let mut ready = [0; 6];
        std::io::Read::read_exact(container.stdout.as_mut().context("a pipe")?, &mut ready)?;
        containers.push(container);
    }
    let pids: Vec<String> = containers.iter().map(|one| one.id().to_string()).collect();
    fs::write(pod.join("cgroup.procs"), pids.join("\n"))?;
    let output = Command::new(project().join("packaging/libexec/end-pods"))
        .arg("1")
        .env("SHORTHORN_CGROUP_ROOT", root.path())
        .output();
    let mut signals = Vec::new();
    for container in &mut containers {
        let ended = container.try_wait()?;
        let _ = container.kill();
        container.wait()?;
        signals.push(ended.and_then(|status| std::os::unix::process::ExitStatusExt::signal(&status)));
    }
    text("end-pods", output?)?;
    ensure!(signals == [Some(15), Some(9)], "{signals:?}");
    Ok(())
}
