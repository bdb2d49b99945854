//! The files that the checks read.

use std::fs;
use std::io::Read;
use std::path::Path;
use std::sync::OnceLock;

use super::Source;

/// The extensions of settings with comments after `#`.
const SETTINGS: [&str; 8] = ["conf", "rules", "service", "slice", "socket", "target", "toml", "yaml"];
/// Folders of programs that make images: a change of a comment there would make all images again.
const RECIPES: [&str; 2] = ["tests/apiserver", "tests/vm"];

/// Adds all wanted files under `folder`, except for build outputs and hidden folders.
fn add_sources(root: &Path, folder: &Path, is_wanted: fn(&Path) -> bool, sources: &mut Vec<Source>) {
    for entry in fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display())) {
        let path = entry.unwrap_or_else(|error| panic!("{}: {error}", folder.display())).path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_symlink() || name.starts_with('.') || name == "target" {
            continue;
        }
        if path.is_dir() {
            add_sources(root, &path, is_wanted, sources);
        } else if is_wanted(&path) {
            let text =
                fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            sources.push(Source::new(path.strip_prefix(root).unwrap_or(&path), &text));
        }
    }
}

/// Returns all Rust files of the workspace, in the order of their paths.
pub fn sources() -> &'static [Source] {
    static FILES: OnceLock<Vec<Source>> = OnceLock::new();
    let sources = FILES.get_or_init(|| files(|path| extension(path) == "rs"));
    assert!(sources.len() > 100, "only {} files", sources.len());
    sources
}

/// Returns the gRPC interfaces.
pub fn interfaces() -> &'static [Source] {
    static FILES: OnceLock<Vec<Source>> = OnceLock::new();
    FILES.get_or_init(|| files(|path| extension(path) == "proto"))
}

/// Returns the documentation.
pub fn pages() -> &'static [Source] {
    static FILES: OnceLock<Vec<Source>> = OnceLock::new();
    FILES.get_or_init(|| files(|path| extension(path) == "md"))
}

/// Returns the files whose comments begin with `#`: settings, units of systemd, and scripts.
pub fn settings() -> &'static [Source] {
    static FILES: OnceLock<Vec<Source>> = OnceLock::new();
    FILES.get_or_init(|| {
        let mut found = files(|path| SETTINGS.contains(&extension(path)) || is_script(path));
        found.retain(|source| !RECIPES.iter().any(|folder| source.path.starts_with(folder)));
        found
    })
}

fn extension(path: &Path) -> &str {
    path.extension().and_then(|extension| extension.to_str()).unwrap_or_default()
}

/// Returns true if the file names the program that runs it. Attributes of Rust look the same.
fn is_script(path: &Path) -> bool {
    let mut start = [0; 2];
    let read = fs::File::open(path).and_then(|mut file| file.read_exact(&mut start));
    extension(path) != "rs" && read.is_ok() && start == *b"#!"
}

fn files(is_wanted: fn(&Path) -> bool) -> Vec<Source> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut sources = Vec::new();
    add_sources(&root, &root, is_wanted, &mut sources);
    sources.sort_by(|a, b| a.path.cmp(&b.path));
    sources
}
