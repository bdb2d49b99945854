//! Checks that everything the documentation names exists: pages, links, files, targets of make, units. The
//! tests of each program check its commands.

use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};

use shorthorn_testkit::docs::{Page, anchor, pages, read, root, simple_commands};

/// The folders of the tree. A word that begins with one of them is a path.
const FOLDERS: [&str; 7] = ["agent/", "controller/", "docs/", "packaging/", "proto/", "systemd/", "tests/"];
/// The folders below which packages own every file.
const INSTALLED: [&str; 2] = ["/etc/shorthorn/", "/usr/libexec/shorthorn/"];
/// The packages.
const PACKAGES: [&str; 3] = ["shorthorn-agent", "shorthorn-controller", "shorthornctl"];

/// A link of a page.
struct Link {
    line: usize,
    target: String,
}

fn links(page: &Page) -> Vec<Link> {
    let mut found = Vec::new();
    for (line, text) in page.prose() {
        for part in text.split("](").skip(1) {
            if let Some((target, _)) = part.split_once(')') {
                found.push(Link { line, target: target.to_owned() });
            }
        }
    }
    found
}

fn anchors(page: &Page) -> BTreeSet<String> {
    let prose = page.prose();
    let headings = prose.iter().filter(|(_, line)| line.starts_with('#'));
    headings.map(|(_, line)| anchor(line.trim_start_matches('#'))).collect()
}

/// Removes `..` from a path.
fn plain(path: &Path) -> PathBuf {
    path.components().fold(PathBuf::new(), |mut path, part| {
        match part {
            Component::ParentDir => drop(path.pop()),
            Component::CurDir => {}
            _ => path.push(part),
        }
        path
    })
}

fn none(wrong: &[String]) {
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn links_lead_to_pages_and_headings() {
    let (pages, mut wrong, mut count) = (pages(), Vec::new(), 0);
    for page in &pages {
        for Link { line, target } in links(page) {
            if target.contains("://") {
                continue;
            }
            count += 1;
            let (file, heading) = target.split_once('#').unwrap_or((&target, ""));
            let folder = page.path.parent().unwrap_or_else(|| Path::new(""));
            let path = if file.is_empty() { page.path.clone() } else { plain(&folder.join(file)) };
            let is_known = match pages.iter().find(|page| page.path == path) {
                Some(page) => heading.is_empty() || anchors(page).contains(heading),
                None => heading.is_empty() && root().join(&path).exists(),
            };
            if !is_known {
                wrong.push(page.at(line, &target));
            }
        }
    }
    none(&wrong);
    assert!(count > 30, "only {count} links");
}

/// Pages of the book cannot link to files outside of it.
#[test]
fn the_summary_lists_every_page_of_the_book() {
    let pages = pages();
    let summary = pages.iter().find(|page| page.path == Path::new("docs/SUMMARY.md")).unwrap();
    let listed: Vec<PathBuf> =
        links(summary).iter().map(|link| Path::new("docs").join(&link.target)).collect();
    let in_book = pages.iter().filter(|page| page.path.starts_with("docs") && page.path != summary.path);
    let existing: BTreeSet<PathBuf> = in_book.clone().map(|page| page.path.clone()).collect();
    assert_eq!(listed.iter().cloned().collect::<BTreeSet<_>>(), existing);
    assert_eq!(listed.len(), existing.len(), "a page is listed twice");
    let outside = in_book.flat_map(|page| links(page).into_iter().map(move |link| (page, link)));
    let outside = outside.filter(|(page, link)| {
        let folder = page.path.parent().unwrap_or_else(|| Path::new(""));
        !link.target.contains("://") && !plain(&folder.join(&link.target)).starts_with("docs")
    });
    none(&outside.map(|(page, link)| page.at(link.line, &link.target)).collect::<Vec<_>>());
}

#[test]
fn targets_of_make_exist() {
    let makefile = read("Makefile");
    let targets: BTreeSet<&str> = makefile
        .lines()
        .filter_map(|line| Some(line.split_once(':')?.0))
        .flat_map(str::split_whitespace)
        .collect();
    let (mut wrong, mut count) = (Vec::new(), 0);
    for page in pages() {
        for code in page.code() {
            for words in simple_commands(&code.text).iter().filter(|words| words[0] == "make") {
                for target in words[1..].iter().filter(|word| !word.contains('=')) {
                    count += 1;
                    if !targets.contains(target.as_str()) {
                        wrong.push(page.at(code.line, &words.join(" ")));
                    }
                }
            }
        }
    }
    none(&wrong);
    assert!(count > 15, "only {count} targets");
}

/// Returns the words of a text that may be paths.
fn words(text: &str) -> impl Iterator<Item = &str> {
    let is_outside = |c: char| !c.is_alphanumeric() && !"/._-@".contains(c);
    text.split(is_outside).map(|word| word.trim_end_matches(['.', '/']))
}

#[test]
fn files_of_the_tree_exist() {
    let (mut wrong, mut count) = (Vec::new(), 0);
    for page in pages() {
        for (at, line) in page.text.lines().enumerate() {
            // A word before a wildcard is a part of a path only.
            let line = line.replace("](", "] (");
            for word in
                line.split_whitespace().filter(|word| !word.contains(['*', '…', '<', '{'])).flat_map(words)
            {
                if FOLDERS.iter().any(|folder| word.starts_with(folder)) {
                    count += 1;
                    if !root().join(word).exists() {
                        wrong.push(page.at(at + 1, word));
                    }
                }
            }
        }
    }
    none(&wrong);
    assert!(count > 100, "only {count} paths");
}

#[test]
fn installed_files_are_in_a_package() {
    let lists = PACKAGES.iter().flat_map(|package| {
        ["files", "files.deb", "files.rpm"].map(|list| format!("packaging/packages/{package}/{list}"))
    });
    let tables: String = lists.filter(|list| root().join(list).exists()).map(read).collect();
    let rows = tables.lines().filter_map(|line| {
        let [_, target, source] = line.split_whitespace().collect::<Vec<_>>()[..] else { return None };
        let name = Path::new(source).file_name()?.to_str()?;
        Some(if target.ends_with('/') { format!("{target}{name}") } else { target.to_owned() })
    });
    let known: BTreeSet<String> = rows.collect();
    let (mut wrong, mut count) = (Vec::new(), 0);
    for page in pages() {
        for (at, line) in page.text.lines().enumerate() {
            for word in words(line) {
                if INSTALLED.iter().any(|folder| word.starts_with(folder)) {
                    count += 1;
                    if !known.contains(word) {
                        wrong.push(page.at(at + 1, word));
                    }
                }
            }
        }
    }
    none(&wrong);
    assert!(count > 3, "only {count} files");
}

/// Returns true if systemd has the unit after an installation. A name without a suffix is a service.
fn is_unit(name: &str) -> bool {
    let template = match name.split_once('@') {
        Some((name, rest)) => format!("{name}@{}", rest.rfind('.').map_or("", |at| &rest[at..])),
        None => name.to_owned(),
    };
    let file = root().join("systemd/system").join(&template);
    file.exists() || root().join("systemd/system").join(format!("{template}.service")).exists()
}

#[test]
fn units_exist() {
    let (mut wrong, mut count) = (Vec::new(), 0);
    for page in pages() {
        for code in page.code() {
            for words in simple_commands(&code.text) {
                let options = match words[0].as_str() {
                    "systemctl" | "journalctl" => &words[1..],
                    name if name.starts_with("shorthorn-") && name.contains(['.', '@']) => &words[..],
                    _ => continue,
                };
                for unit in options.iter().filter(|word| word.starts_with("shorthorn")) {
                    count += 1;
                    let is_pattern = unit.contains('*');
                    if !is_pattern && !is_unit(unit) {
                        wrong.push(page.at(code.line, unit));
                    }
                }
            }
        }
    }
    none(&wrong);
    assert!(count > 10, "only {count} units");
}
