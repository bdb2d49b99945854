//! Finds modules of one crate that import each other in a circle.
//!
//! Modules are those that the root of a crate declares, with their children. Tests inside a module do not
//! count. A shared type of two modules belongs in a third one, which imports neither.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// The imports of each module: the other modules of its crate that it names.
type Imports = BTreeMap<String, BTreeSet<String>>;

/// The parts of a path such as `crate::store::Store`.
type Names = Vec<String>;

/// Returns the text without comments and without test modules at its end.
fn code(text: &str) -> String {
    let end = text.find("#[cfg(test)]\nmod tests {").unwrap_or(text.len());
    text[..end].lines().map(|line| line.split("//").next().unwrap_or_default()).collect::<Vec<_>>().join("\n")
}

/// Returns the modules of a file that only tests compile, as `mod NAME;`.
fn test_modules(text: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut is_test = false;
    for line in text.lines().map(str::trim) {
        if line.starts_with("#[") {
            is_test |= line.starts_with("#[cfg(test)]") || line.starts_with("#[cfg(all(test");
            continue;
        }
        if let Some(name) = declared(line).filter(|_| is_test) {
            found.insert(name.to_owned());
        }
        is_test = false;
    }
    found
}

/// Returns the name of the module that the line declares in a file of its own.
fn declared(line: &str) -> Option<&str> {
    let (before, name) = line.trim().strip_suffix(';')?.split_once("mod ")?;
    let is_visibility = before.is_empty() || (before.starts_with("pub") && before.ends_with(' '));
    (is_visibility && name.chars().all(|c| c.is_alphanumeric() || c == '_')).then_some(name)
}

/// Adds the paths of a tree such as `crate::{a::B, c}` to `paths`. Each begins with `before`.
fn add_tree(before: &[String], tree: &str, paths: &mut Vec<Names>) {
    let tree = tree.trim();
    let (start, group) = match tree.split_once('{') {
        Some((start, group)) => (start, Some(group.trim_end().strip_suffix('}').unwrap_or(group))),
        None => (tree.split(" as ").next().unwrap_or_default(), None),
    };
    let parts = start.split("::").map(str::trim).filter(|part| !part.is_empty()).map(str::to_owned);
    let path: Names = before.iter().cloned().chain(parts).collect();
    let Some(group) = group else { return paths.push(path) };
    let (mut depth, mut from) = (0_usize, 0);
    for (at, c) in group.char_indices() {
        match c {
            '{' => depth += 1,
            '}' => depth = depth.saturating_sub(1),
            ',' if depth == 0 => {
                add_tree(&path, &group[from..at], paths);
                from = at + 1;
            }
            _ => {}
        }
    }
    if !group[from..].trim().is_empty() {
        add_tree(&path, &group[from..], paths);
    }
}

/// Returns all paths of imports, and those in the code that begin with `crate` or `super`.
fn paths(code: &str) -> Vec<Names> {
    let mut paths = Vec::new();
    for (at, _) in code.match_indices("use ") {
        let before = code[..at].rsplit('\n').next().unwrap_or_default().trim();
        let is_import = before.is_empty() || before.starts_with("pub");
        if let Some((tree, _)) = code[at + 4..].split_once(';').filter(|_| is_import) {
            add_tree(&[], tree, &mut paths);
        }
    }
    for (at, _) in code.match_indices("crate::").chain(code.match_indices("super::")) {
        let is_path = |c: &char| c.is_alphanumeric() || *c == '_' || *c == ':';
        if code[..at].chars().next_back().is_none_or(|c| !is_path(&c)) {
            let path: String = code[at..].chars().take_while(is_path).collect();
            add_tree(&[], path.trim_end_matches(':'), &mut paths);
        }
    }
    paths
}

/// A crate, as far as imports between its modules need it.
struct Crate {
    /// The modules that its root declares, except for those of tests.
    modules: BTreeSet<String>,
    /// Names that the root exports, with the module of each.
    exported: BTreeMap<String, String>,
}

impl Crate {
    fn new(root: &str) -> Crate {
        let tests = test_modules(root);
        let all = root.lines().filter_map(declared).map(str::to_owned);
        let modules: BTreeSet<String> = all.filter(|name| !tests.contains(name)).collect();
        let mut exported = BTreeMap::new();
        for path in paths(&code(root)) {
            let mut names = path.iter().skip_while(|name| *name == "crate" || *name == "self");
            if let (Some(module), Some(last)) = (names.next(), path.last())
                && modules.contains(module)
            {
                exported.insert(last.clone(), module.clone());
            }
        }
        Crate { modules, exported }
    }

    /// Returns the module that a path leads to. `here` is the path of the module that has it.
    fn module_of(&self, path: &[String], here: &[String]) -> Option<&str> {
        let ups = path.iter().take_while(|name| *name == "super").count();
        let rest = match path.first()?.as_str() {
            "crate" => &path[1..],
            "super" if ups == here.len() => &path[ups..],
            _ => return None,
        };
        let name = rest.first()?;
        self.modules.get(name).or_else(|| self.exported.get(name)).map(String::as_str)
    }
}

/// Returns the modules that reach themselves through imports.
fn in_circles(imports: &Imports) -> Vec<&str> {
    let reaches_itself = |module: &&String| {
        let (mut seen, mut next) = (BTreeSet::new(), vec![*module]);
        while let Some(from) = next.pop() {
            next.extend(imports.get(from).into_iter().flatten().filter(|to| seen.insert(*to)));
        }
        seen.contains(*module)
    };
    imports.keys().filter(reaches_itself).map(String::as_str).collect()
}

/// Adds the Rust files under `folder`, as paths from `source`.
fn add_files(source: &Path, folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display())) {
        let path = entry.unwrap_or_else(|error| panic!("{}: {error}", folder.display())).path();
        if path.is_dir() {
            add_files(source, &path, files);
        } else if path.extension().is_some_and(|end| end == "rs") {
            files.push(path.strip_prefix(source).unwrap_or(&path).to_owned());
        }
    }
}

/// Returns the path of the module in a file, from the root of the crate.
fn module_path(file: &Path) -> Names {
    let mut names: Names =
        file.with_extension("").iter().map(|name| name.to_string_lossy().into_owned()).collect();
    names.pop_if(|name| name == "mod");
    names
}

/// Returns the imports between the modules of the crate whose sources are in `source`.
fn imports(source: &Path) -> Option<Imports> {
    let read = |file: &Path| fs::read_to_string(source.join(file)).ok();
    let root = read(Path::new("lib.rs")).or_else(|| read(Path::new("main.rs")))?;
    let the_crate = Crate::new(&root);
    let mut files = Vec::new();
    add_files(source, source, &mut files);
    let texts: Vec<(Names, String)> =
        files.iter().filter_map(|file| Some((module_path(file), read(file)?))).collect();
    let tests: BTreeSet<Names> = texts
        .iter()
        .flat_map(|(here, text)| {
            test_modules(text).into_iter().map(|name| here.iter().cloned().chain([name]).collect())
        })
        .collect();
    let is_test = |here: &Names| {
        here.iter().any(|name| name.ends_with("tests"))
            || (1..=here.len()).any(|end| tests.contains(&here[..end]))
    };
    let mut imports = Imports::new();
    for (here, text) in
        texts.iter().filter(|(here, _)| the_crate.modules.contains(&here[0]) && !is_test(here))
    {
        let others = imports.entry(here[0].clone()).or_default();
        for path in paths(&code(text)) {
            others.extend(
                the_crate.module_of(&path, here).filter(|other| **other != here[0]).map(str::to_owned),
            );
        }
    }
    Some(imports)
}

/// Adds the folders of crates under `folder`.
fn add_crates(folder: &Path, crates: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display())) {
        let path = entry.unwrap_or_else(|error| panic!("{}: {error}", folder.display())).path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir() && !path.is_symlink() && !name.starts_with('.') && name != "target" && name != "src"
        {
            add_crates(&path, crates);
        }
    }
    if folder.join("Cargo.toml").exists() && folder.join("src").is_dir() {
        crates.push(folder.to_owned());
    }
}

#[test]
fn modules_do_not_import_each_other_in_circles() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut crates = Vec::new();
    add_crates(&root, &mut crates);
    assert!(crates.len() > 30, "only {} crates under {}", crates.len(), root.display());
    let mut wrong = Vec::new();
    for folder in crates {
        let Some(imports) = imports(&folder.join("src")) else { continue };
        let name = folder.strip_prefix(&root).unwrap_or(&folder).display();
        let found = in_circles(&imports);
        wrong.extend(found.iter().map(|module| {
            let others = imports[*module].iter().filter(|other| found.contains(&other.as_str()));
            format!("{name}: {module} imports {}", others.cloned().collect::<Vec<_>>().join(", "))
        }));
    }
    assert!(wrong.is_empty(), "open these circles of modules:\n{}", wrong.join("\n"));
}

#[test]
fn a_circle_is_found_through_exports_groups_and_parents() {
    let the_crate =
        Crate::new("mod a;\npub mod b;\n#[cfg(test)]\nmod example;\npub use b::{Thing, deep::Other};\n");
    assert_eq!(the_crate.modules.iter().collect::<Vec<_>>(), ["a", "b"]);
    let of = |text: &str, here: &[&str]| -> Vec<String> {
        let here: Names = here.iter().map(|name| (*name).to_owned()).collect();
        let found = paths(&code(text));
        found.iter().filter_map(|path| the_crate.module_of(path, &here)).map(str::to_owned).collect()
    };
    assert_eq!(of("use crate::{Other, a::{X, Y}};", &["c"]), ["b", "a", "a"]);
    assert_eq!(of("let x = super::super::a::f();", &["c", "d"]), ["a"]);
    assert_eq!(of("use super::a::f;", &["c", "d"]), [""; 0], "a child of c");
    assert_eq!(of("// use crate::a;\n#[cfg(test)]\nmod tests {\n    use crate::b;\n}\n", &["c"]), [""; 0]);
    let edge = |from: &str, to: &str| (from.to_owned(), BTreeSet::from([to.to_owned()]));
    let circle = Imports::from([edge("a", "b"), edge("b", "c"), edge("c", "b"), edge("d", "a")]);
    assert_eq!(in_circles(&circle), ["b", "c"]);
}
