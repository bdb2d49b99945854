//! Checks the fenced blocks of the documentation: each is in the table of tested blocks, and its commands
//! call programs, packages and units that exist. Each program of the project checks its own arguments, and
//! tests/tests/tools.rs those of kubectl and helm.

use std::collections::BTreeSet;
use std::path::Path;

use shorthorn_testkit::docs::{Block, Page, Tested, pages, read, root, simple_commands, tested_blocks};

/// Programs whose arguments other tests check.
const CHECKED: [&str; 6] =
    ["shorthornctl", "shorthorn-agent", "shorthorn-controller", "kubectl", "helm", "make"];
/// Programs of other projects that a block calls, each with the least number of its arguments.
const OTHERS: [(&str, usize); 13] = [
    ("base64", 2),
    ("cat", 1),
    ("cp", 2),
    ("e2fsck", 2),
    ("editor", 1),
    ("fio", 1),
    ("mkfs.ext4", 1),
    ("mount", 2),
    ("nbdinfo", 1),
    ("reboot", 0),
    ("resize2fs", 1),
    ("source", 0),
    ("umount", 1),
];
const PACKAGE_VERBS: [&str; 3] = ["install", "remove", "purge"];
const SYSTEMCTL_VERBS: [&str; 7] = ["enable", "kill", "restart", "start", "status", "stop", "daemon-reload"];
const SYSTEMCTL_FLAGS: [&str; 2] = ["--now", "-s"];
const JOURNALCTL_FLAGS: [&str; 2] = ["-u", "--since"];

fn blocks() -> Vec<(Page, Block, Tested)> {
    tested_blocks().unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn every_block_is_in_the_table() {
    assert!(blocks().len() > 50, "only {} blocks", blocks().len());
}

/// A test that runs or reads a block names its page. The reason of the others names a file only if it exists.
#[test]
fn the_tests_of_the_table_exist_and_name_their_pages() {
    for (page, block, tested) in blocks() {
        let place = page.at(block.line, block.first_line());
        match tested {
            Tested::Run(file) | Tested::Read(file) => {
                assert!(root().join(file).is_file(), "{place}: {file} does not exist");
                let name = page.path.display().to_string();
                assert!(read(file).contains(&name), "{place}: {file} does not name {name}");
            }
            Tested::Parsed(reason) => {
                let files = reason.split(|c: char| c.is_whitespace() || ",;:".contains(c));
                for file in files.filter(|word| word.ends_with(".rs")) {
                    assert!(root().join(file).is_file(), "{place}: {file} does not exist");
                }
                assert!(reason.split_whitespace().count() > 3, "{place}: {reason:?} is no reason");
            }
        }
    }
}

/// Returns the error of a command, if it has one.
fn fault(words: &[String]) -> Option<String> {
    let program = Path::new(&words[0]).file_name()?.to_str()?;
    let rest: Vec<&str> = words[1..].iter().map(String::as_str).collect();
    match program {
        _ if CHECKED.contains(&program) => None,
        "apt" | "dnf" => fault_of_packages(&rest),
        "systemctl" => {
            let verb = rest.first().copied().unwrap_or_default();
            let is_known = SYSTEMCTL_VERBS.contains(&verb);
            let units = rest.iter().filter(|word| word.starts_with("shorthorn")).count();
            let flag = rest.iter().find(|word| word.starts_with('-') && !SYSTEMCTL_FLAGS.contains(word));
            match flag {
                Some(flag) => Some(format!("{flag} is not a flag of systemctl that a page uses")),
                None if !is_known => Some(format!("{verb:?} is not a verb of systemctl")),
                None => (units == 0).then(|| "no unit".to_owned()),
            }
        }
        "journalctl" => {
            let flags = rest.iter().filter(|word| word.starts_with('-') && **word != "-1d");
            let unknown = flags.filter(|flag| !JOURNALCTL_FLAGS.contains(flag));
            unknown.map(|flag| format!("{flag} is not a flag of journalctl that a page uses")).next()
        }
        _ => match OTHERS.iter().find(|(name, _)| *name == program) {
            Some((_, least)) => (rest.len() < *least).then(|| "arguments are missing".to_owned()),
            None => Some(format!("{program} is unknown to this test")),
        },
    }
}

/// Packages are named as they are, or as files: `./NAME_*.deb`, `./NAME-*.rpm`.
fn fault_of_packages(words: &[&str]) -> Option<String> {
    let (verb, packages) = words.split_first()?;
    if !PACKAGE_VERBS.contains(verb) || packages.is_empty() {
        return Some(format!("{verb:?} with {} packages", packages.len()));
    }
    packages.iter().find_map(|word| {
        let file = word
            .strip_prefix("./")
            .and_then(|file| file.strip_suffix("_*.deb").or_else(|| file.strip_suffix("-*.rpm")));
        let name = file.unwrap_or(word);
        let is_package = root().join("packaging/packages").join(name).join("files").is_file();
        (!is_package).then(|| format!("{name} is not a package"))
    })
}

#[test]
fn the_commands_of_blocks_exist() {
    let (mut wrong, mut used) = (Vec::new(), BTreeSet::new());
    for (page, block, _) in blocks().iter().filter(|(_, _, tested)| !matches!(tested, Tested::Read(_))) {
        for words in block.commands() {
            used.insert(words[0].clone());
            if let Some(fault) = fault(&words) {
                wrong.push(page.at(block.line, &format!("{}: {fault}", words.join(" "))));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    let unused: Vec<_> = OTHERS.iter().filter(|(name, _)| !used.contains(*name)).collect();
    assert!(unused.is_empty(), "no page uses {unused:?}");
}

/// Sentences name packages too.
#[test]
fn packages_of_sentences_exist() {
    let (mut wrong, mut count) = (Vec::new(), 0);
    for page in pages().iter().filter(|page| page.path.starts_with("docs")) {
        for code in page.code() {
            let commands = simple_commands(&code.text).into_iter();
            for words in
                commands.filter(|words| matches!(words[0].as_str(), "apt" | "dnf") && words.len() > 2)
            {
                count += 1;
                let rest: Vec<&str> = words[1..].iter().map(String::as_str).collect();
                let faults = fault_of_packages(&rest).into_iter();
                wrong.extend(faults.map(|fault| page.at(code.line, &fault)));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(count > 8, "only {count} commands");
}

#[test]
fn faults_are_found() {
    let of = |line: &str| fault(&simple_commands(line)[0]);
    for line in [
        "apt install ./shorthorn-agent_*.deb",
        "dnf remove shorthornctl",
        "systemctl enable --now shorthorn-agent.service",
        "journalctl -u shorthorn-agent --since -1d",
        "cp a b",
    ] {
        assert_eq!(of(line), None, "{line}");
    }
    for line in [
        "apt install ./shorthorn_*.deb",
        "apt add shorthornctl",
        "systemctl begin shorthorn-agent.service",
        "systemctl stop --all shorthorn-agent",
        "systemctl stop",
        "journalctl --unit shorthorn-agent",
        "cp a",
        "shorthornkt status",
    ] {
        assert!(of(line).is_some(), "{line}");
    }
}
