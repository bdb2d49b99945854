//! The settings of a host through installation, upgrade and purge of the packages for Debian, by dpkg
//! without a terminal. This machine has them in mounts of their own, in which systemctl does nothing.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use anyhow::{Context, Result, ensure};
use shorthorn_tests::{build_packages, in_target};

/// The packages with settings, and the names of these.
const SETTINGS: [(&str, &str); 2] =
    [("shorthorn-agent", "agent.toml"), ("shorthorn-controller", "controller.env")];

/// Makes the mounts, and functions for the scripts. `$built` is the package of this tree, `$package` its
/// name, and `$file` the name of its settings.
///
/// `later` makes a release whose settings have another text, and `earlier` one that has them as a conffile.
const PRELUDE: &str = r##"set -eux
mount -t tmpfs none "$work" && cd "$work"
mkdir usr usr.work etc etc.work
mount -t overlay -o lowerdir=/usr,upperdir=usr,workdir=usr.work none /usr
mount -t overlay -o lowerdir=/etc,upperdir=etc,workdir=etc.work none /etc
for folder in /var/lib /run; do mount -t tmpfs none $folder; done
rm -rf /etc/shorthorn
mkdir -p /var/lib/dpkg/info /var/lib/dpkg/updates /run/systemd/system
touch /var/lib/dpkg/status
for program in systemctl systemd-tmpfiles udevadm deb-systemd-helper deb-systemd-invoke; do
    rm -f /usr/bin/$program
    printf '#!/bin/sh\n' >/usr/bin/$program
    chmod 755 /usr/bin/$program
done
settings=/etc/shorthorn/$file
dpkg_install() { dpkg --force-depends --log=/dev/null --install "$1" </dev/null; }
purge() { dpkg --log=/dev/null --purge $package </dev/null; }
is_conffile() { dpkg-query --show --showformat '${Conffiles}' $package | grep -q "$settings"; }
later() {
    dpkg-deb --raw-extract "$built" tree
    sed -i 's/^Version: .*/Version: 9/' tree/DEBIAN/control
    find tree -name $file -exec sh -c 'echo "# A later text." >>"$1"' - {} \;
    dpkg-deb -Znone --build tree later.deb >/dev/null
}
earlier() {
    mkdir -p old/DEBIAN old/etc/shorthorn
    printf '%s\n' "Package: $package" 'Version: 0' 'Architecture: all' \
        'Maintainer: None <none@none.invalid>' 'Description: earlier release' >old/DEBIAN/control
    echo "$settings" >old/DEBIAN/conffiles
    echo '# An earlier text.' >old$settings
    dpkg-deb -Znone --build old earlier.deb >/dev/null
}
"##;

/// Returns the packages, built once for all tests of this file.
fn packages() -> Result<&'static Path> {
    static FOLDER: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let built = FOLDER.get_or_init(|| {
        let mut options = vec!["--version", "1", "--format", "deb"];
        SETTINGS.iter().for_each(|(package, _)| options.extend(["--package", package]));
        in_target(concat!(env!("CARGO_TARGET_TMPDIR"), "/packages-deb"), |to| build_packages(to, &options))
    });
    built.as_deref().map_err(|error| anyhow::anyhow!("{error}"))
}

/// Runs a script for each package with settings.
fn run(script: &str) -> Result<()> {
    ensure!(nix::unistd::geteuid().is_root(), "mounts need root");
    for (package, file) in SETTINGS {
        let start = format!("{package}_");
        let built = fs::read_dir(packages()?)?.filter_map(Result::ok).map(|entry| entry.path());
        let is_wanted = |path: &PathBuf| {
            path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with(&start))
        };
        let built = built.into_iter().find(is_wanted).with_context(|| format!("no deb of {package}"))?;
        let work = tempfile::tempdir()?;
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", &format!("{PRELUDE}{script}")]).stdin(Stdio::null());
        command.env("work", work.path()).env("built", built).env("package", package).env("file", file);
        command.env("DEBIAN_FRONTEND", "noninteractive");
        let output = command.output().context("running unshare")?;
        let printed = [output.stdout, output.stderr].concat();
        ensure!(output.status.success(), "{package}: {script}\n{}", String::from_utf8_lossy(&printed));
    }
    Ok(())
}

#[test]
fn changed_settings_stay_at_an_upgrade_that_brings_others() -> Result<()> {
    run("dpkg_install $built; test -f $settings
         echo '# setup' >$settings
         later; dpkg_install later.deb
         test \"$(cat $settings)\" = '# setup'
         purge; test ! -e /etc/shorthorn")
}

#[test]
fn a_host_whose_settings_were_a_conffile_keeps_them_too() -> Result<()> {
    run("earlier; dpkg_install earlier.deb
         echo '# setup' >$settings
         dpkg_install $built
         test \"$(cat $settings)\" = '# setup'
         later; dpkg_install later.deb
         test \"$(cat $settings)\" = '# setup'
         echo '# again' >$settings
         dpkg --force-depends --log=/dev/null --remove $package
         test \"$(cat $settings)\" = '# again'
         purge; test ! -e /etc/shorthorn")
}

#[test]
fn a_new_host_gets_the_settings_of_the_package_once() -> Result<()> {
    run("dpkg_install $built
         cmp $settings /usr/share/shorthorn/$file
         test $(stat --format %a $settings) = 644
         if is_conffile; then exit 1; fi
         rm $settings
         later; dpkg_install later.deb; test ! -e $settings
         purge
         mkdir -p /etc/shorthorn; echo '# by hand' >$settings
         dpkg_install $built; test \"$(cat $settings)\" = '# by hand'")
}

#[test]
fn the_units_of_a_daemonset_do_not_replace_those_of_the_package() -> Result<()> {
    run("test $package = shorthorn-agent || exit 0
         units=/run/systemd/system
         mkdir -p /run/shorthorn /run/udev/rules.d
         mkdir -p $units/kubepods.slice.d $units/shorthorn-engine@v1.service.d
         own=\"$units/shorthorn-engine@.service $units/kubepods.slice.d/shorthorn.conf \
             /run/udev/rules.d/59-shorthorn.rules\"
         others=\"$units/shorthorn-engine@v1.service.d/limit.conf $units/other.service\"
         touch $own $others
         dpkg_install $built; ls $own $others >/dev/null
         touch /run/shorthorn/agent.toml
         dpkg_install $built; ls $others >/dev/null
         for file in $own $units/kubepods.slice.d; do test ! -e $file; done")
}
