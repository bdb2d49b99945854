//! Finds modules of one crate that import each other in a circle.
//!
//! Siblings are compared at each depth, each with its children. A child may use the items of its parents.
//! Tests inside a module do not count. A shared type of two modules belongs in a third one, which imports
//! neither.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// The imports of each module: the siblings that it names, itself or in its children.
type Imports = BTreeMap<String, BTreeSet<String>>;

/// The parts of a path such as `crate::store::ObjectStore`.
type Names = Vec<String>;

/// Returns the path of a child of `module`.
fn child(module: &[String], name: &str) -> Names {
    module.iter().cloned().chain([name.to_owned()]).collect()
}

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

/// Returns the paths of imports.
fn imports(code: &str) -> Vec<Names> {
    let mut paths = Vec::new();
    for (at, _) in code.match_indices("use ") {
        let before = code[..at].rsplit('\n').next().unwrap_or_default().trim();
        let is_import = before.is_empty() || before.starts_with("pub");
        if let Some((tree, _)) = code[at + 4..].split_once(';').filter(|_| is_import) {
            add_tree(&[], tree, &mut paths);
        }
    }
    paths
}

/// Returns the paths in the code, outside imports too, that begin with `crate` or `super`.
fn named(code: &str) -> Vec<Names> {
    let mut paths = Vec::new();
    for (at, _) in code.match_indices("crate::").chain(code.match_indices("super::")) {
        let is_path = |c: &char| c.is_alphanumeric() || *c == '_' || *c == ':';
        if code[..at].chars().next_back().is_none_or(|c| !is_path(&c)) {
            let path: String = code[at..].chars().take_while(is_path).collect();
            add_tree(&[], path.trim_end_matches(':'), &mut paths);
        }
    }
    paths
}

/// The modules of a crate, as far as imports between them need it. The path of the root is empty.
struct Crate {
    /// Each module that has a file, except for those of tests.
    modules: BTreeSet<Names>,
    /// Names that a module imports, or exports, with the path that each stands for.
    imported: BTreeMap<(Names, String), Names>,
}

impl Crate {
    fn new(modules: &BTreeMap<Names, String>) -> Crate {
        let imported = modules.iter().flat_map(|(here, code)| {
            let named = imports(code).into_iter().filter(|path| path.len() > 1);
            named.filter_map(|path| Some(((here.clone(), path.last()?.clone()), path)))
        });
        Crate { modules: modules.keys().cloned().collect(), imported: imported.collect() }
    }

    /// Returns the module that defines the item of a path. `here` is the module that has the path.
    fn module_of(&self, path: &[String], here: &[String]) -> Option<Names> {
        let (mut module, mut rest) = self.start_of(path, here)?;
        // Two modules may import the same name from each other, one as a type and one as a function.
        let mut followed = BTreeSet::new();
        while let Some((name, after)) = rest.split_first() {
            let place = (module, name.clone());
            if self.modules.contains(&child(&place.0, name)) {
                (module, rest) = (child(&place.0, name), after.to_vec());
                continue;
            }
            module = place.0.clone();
            let Some(import) = self.imported.get(&place).filter(|_| followed.insert(place)) else { break };
            // Names of other crates lead nowhere.
            let Some((start, end)) = self.start_of(import, &module) else { break };
            (module, rest) = (start, [end, after.to_vec()].concat());
        }
        Some(module)
    }

    /// Returns the module at which a path starts, and the rest of the path.
    fn start_of(&self, path: &[String], here: &[String]) -> Option<(Names, Names)> {
        let ups = path.iter().take_while(|name| *name == "super").count();
        let (start, names) = match path.first()?.as_str() {
            "crate" => (&[][..], 1),
            "self" => (here, 1),
            "super" => (&here[..here.len().checked_sub(ups)?], ups),
            name => (here, usize::from(!self.modules.contains(&child(here, name))) * path.len()),
        };
        (names < path.len()).then(|| (start.to_owned(), path[names..].to_owned()))
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
    if names == ["lib"] || names == ["main"] {
        names.clear();
    }
    names
}

/// Returns the code of each module of the crate in `source`, without those of tests.
fn modules(source: &Path) -> BTreeMap<Names, String> {
    let mut files = Vec::new();
    add_files(source, source, &mut files);
    let read = |file: &PathBuf| {
        let path = source.join(file);
        fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    };
    let mut texts: BTreeMap<Names, String> =
        files.iter().map(|file| (module_path(file), read(file))).collect();
    let tests: BTreeSet<Names> = texts
        .iter()
        .flat_map(|(here, text)| test_modules(text).into_iter().map(|name| child(here, &name)))
        .collect();
    texts.retain(|here, _| {
        !here.iter().any(|name| name.ends_with("tests"))
            && !(1..=here.len()).any(|end| tests.contains(&here[..end]))
    });
    texts.into_iter().map(|(here, text)| (here, code(&text))).collect()
}

/// Returns the imports between siblings, for the path of each parent.
fn imports_of_siblings(modules: &BTreeMap<Names, String>) -> BTreeMap<Names, Imports> {
    let the_crate = Crate::new(modules);
    let mut found: BTreeMap<Names, Imports> = BTreeMap::new();
    for (here, code) in modules {
        for there in
            imports(code).iter().chain(&named(code)).filter_map(|path| the_crate.module_of(path, here))
        {
            let depth = here.iter().zip(&there).take_while(|(a, b)| a == b).count();
            if let (Some(from), Some(to)) = (here.get(depth), there.get(depth)) {
                let siblings = found.entry(here[..depth].to_owned()).or_default();
                siblings.entry(from.clone()).or_default().insert(to.clone());
            }
        }
    }
    found
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
        let name = folder.strip_prefix(&root).unwrap_or(&folder).display();
        for (parent, imports) in imports_of_siblings(&modules(&folder.join("src"))) {
            let found = in_circles(&imports);
            wrong.extend(found.iter().map(|module| {
                let others = imports[*module].iter().filter(|other| found.contains(&other.as_str()));
                let module = child(&parent, module).join("::");
                format!("{name}: {module} imports {}", others.cloned().collect::<Vec<_>>().join(", "))
            }));
        }
    }
    assert!(wrong.is_empty(), "open these circles of modules:\n{}", wrong.join("\n"));
}

#[test]
fn imports_of_siblings_are_found_through_exports_groups_and_parents() {
    let names = |path: &str| -> Names {
        path.split("::").filter(|name| !name.is_empty()).map(str::to_owned).collect()
    };
    let texts = [
        ("", "mod a;\npub mod b;\nmod c;\npub use b::{Thing, deep::Other};\n"),
        ("a", ""),
        ("b", "mod deep;\nmod flat;\nuse deep::Other;\n"),
        ("b::deep", "pub struct Other;\n"),
        ("b::flat", "use super::Other;\nuse super::private;\n"),
        ("c", "mod d;\nuse crate::{Other, a::{X, Y}};\n"),
        (
            "c::d",
            "// use crate::b;\nlet x = super::super::a::f();\n#[cfg(test)]\nmod tests {\n    \
             use super::e;\n}\n",
        ),
    ];
    let modules = texts.iter().map(|(here, text)| (names(here), code(text))).collect();
    let found = imports_of_siblings(&modules);
    let of = |parent: &str, module: &str| -> Vec<&str> {
        found
            .get(&names(parent))
            .and_then(|imports| imports.get(module))
            .into_iter()
            .flatten()
            .map(String::as_str)
            .collect()
    };
    assert_eq!(of("", "c"), ["a", "b"], "a group, an export of the root, the parent of a parent");
    assert_eq!(of("", "b"), [""; 0]);
    assert_eq!(of("b", "flat"), ["deep"], "an import of the parent");
    assert_eq!(of("c", "d"), [""; 0], "comments and tests");
}

#[test]
fn a_circle_is_found() {
    let edge = |from: &str, to: &str| (from.to_owned(), BTreeSet::from([to.to_owned()]));
    let circle = Imports::from([edge("a", "b"), edge("b", "c"), edge("c", "b"), edge("d", "a")]);
    assert_eq!(in_circles(&circle), ["b", "c"]);
}
