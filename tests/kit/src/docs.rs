//! The documentation, for tests that compare it with the code: its pages, the commands that they show, and
//! the tables that are generated.
//!
//! A page has generated text between the lines `<!-- generated: NAME -->` and `<!-- end -->`. The test that
//! generates it fails if the stored text differs. With `SHORTHORN_WRITE_DOCS=1` it writes the page instead.

mod blocks;
mod commands;
mod shell;
mod tested;

use std::fs;
use std::path::{Path, PathBuf};

pub use blocks::{Block, Script, blocks_read_by, lines_run_by, tested_blocks};
pub use commands::{check_commands, reference, shown_commands};
pub use shell::simple_commands;
pub use tested::Tested;

/// A page of the documentation.
#[derive(Clone, Debug)]
pub struct Page {
    /// Path from the root of the tree.
    pub path: PathBuf,
    /// The Markdown text.
    pub text: String,
}

/// A piece of code on a page: a line of a fenced block, or an inline span.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Code {
    /// Line number of its start, from 1.
    pub line: usize,
    /// The code, in one line.
    pub text: String,
    /// True for a line of a block, which is meant to be run as it is.
    pub is_block: bool,
}

/// Returns the root of the tree.
#[must_use]
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Reads a file of the tree.
///
/// # Panics
/// The file cannot be read.
#[must_use]
pub fn read(path: impl AsRef<Path>) -> String {
    let path = root().join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Reads README.md, ARCHITECTURE.md, CONTRIBUTING.md and everything below `docs`, in this order.
#[must_use]
pub fn pages() -> Vec<Page> {
    let mut paths: Vec<PathBuf> =
        ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"].iter().map(PathBuf::from).collect();
    add_pages(Path::new("docs"), &mut paths);
    paths.into_iter().map(|path| Page { text: read(&path), path }).collect()
}

fn add_pages(folder: &Path, paths: &mut Vec<PathBuf>) {
    let entries =
        fs::read_dir(root().join(folder)).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut names: Vec<_> = entries.filter_map(Result::ok).map(|entry| entry.file_name()).collect();
    names.sort();
    for name in names {
        let path = folder.join(name);
        if root().join(&path).is_dir() {
            add_pages(&path, paths);
        } else if path.extension().is_some_and(|extension| extension == "md") {
            paths.push(path);
        }
    }
}

impl Page {
    /// Returns the code of the page, in order.
    #[must_use]
    pub fn code(&self) -> Vec<Code> {
        let mut found = Vec::new();
        let (mut is_block, mut continued) = (false, None::<Code>);
        let mut paragraph = Vec::new();
        for (at, line) in self.text.lines().enumerate() {
            let is_fence = line.trim_start().starts_with("```");
            if is_fence {
                is_block = !is_block;
                found.extend(continued.take());
            } else if is_block {
                let (text, goes_on) = match line.strip_suffix('\\') {
                    Some(text) => (text, true),
                    None => (line, false),
                };
                let mut code =
                    continued.take().unwrap_or(Code { line: at + 1, text: String::new(), is_block });
                code.text.push_str(text);
                if goes_on {
                    continued = Some(code)
                } else {
                    found.push(code)
                }
                continue;
            }
            if is_fence || line.trim().is_empty() {
                found.extend(spans(&std::mem::take(&mut paragraph)));
            } else {
                paragraph.push((at + 1, line));
            }
        }
        found.extend(spans(&paragraph));
        found.sort_by_key(|code| code.line);
        found
    }

    /// Returns the text outside fenced blocks, with the number of each line.
    #[must_use]
    pub fn prose(&self) -> Vec<(usize, &str)> {
        let mut is_block = false;
        let lines = self.text.lines().enumerate().filter(|(_, line)| {
            let is_fence = line.trim_start().starts_with("```");
            is_block ^= is_fence;
            !is_block && !is_fence
        });
        lines.map(|(at, line)| (at + 1, line)).collect()
    }

    /// Describes a place of the page.
    #[must_use]
    pub fn at(&self, line: usize, text: &str) -> String {
        format!("{}:{line}: {text}", self.path.display())
    }
}

/// Returns the inline code of a paragraph. A span may continue in the next line.
fn spans(paragraph: &[(usize, &str)]) -> Vec<Code> {
    let (mut found, mut open) = (Vec::new(), None::<Code>);
    for (number, line) in paragraph {
        for (at, part) in line.split('`').enumerate() {
            if at > 0 {
                match open.take() {
                    Some(code) => found.push(code),
                    None => open = Some(Code { line: *number, text: String::new(), is_block: false }),
                }
            }
            if let Some(code) = &mut open {
                code.text.push_str(if at == 0 { part.trim_start() } else { part });
            }
        }
        if let Some(code) = &mut open {
            code.text.push(' ');
        }
    }
    found
}

/// Compares the generated text `name` of a page with `text`, or writes it with `SHORTHORN_WRITE_DOCS=1`.
///
/// # Panics
/// The page does not have the text, or has no place for it.
pub fn check_generated(path: &str, name: &str, text: &str) {
    let page = read(path);
    let made = with_generated(&page, name, text)
        .unwrap_or_else(|| panic!("{path} has no lines \"{}\" and \"{END}\"", start(name)));
    if std::env::var_os("SHORTHORN_WRITE_DOCS").is_some() {
        fs::write(root().join(path), &made).unwrap_or_else(|error| panic!("{path}: {error}"));
        return;
    }
    assert!(made == page, "{path} is old: run its test with SHORTHORN_WRITE_DOCS=1. It has to have:\n{text}");
}

const END: &str = "<!-- end -->";

fn start(name: &str) -> String {
    format!("<!-- generated: {name} -->")
}

fn with_generated(page: &str, name: &str, text: &str) -> Option<String> {
    let start = start(name);
    let (before, rest) = page.split_once(&start)?;
    let (_, after) = rest.split_once(END)?;
    Some(format!("{before}{start}\n\n{}\n\n{END}{after}", text.trim()))
}

/// Returns a Markdown table.
#[must_use]
pub fn table(head: &[&str], rows: &[Vec<String>]) -> String {
    let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
    let cell = |text: &String| text.trim().replace("\n\n", "<br>").replace('\n', " ").replace('|', "\\|");
    let head: Vec<String> = head.iter().map(|text| (*text).to_owned()).collect();
    let mut text = line(&head);
    text.push('|');
    text.push_str(&"---|".repeat(head.len()));
    text.push('\n');
    for row in rows {
        assert_eq!(row.len(), head.len(), "{row:?}");
        text.push_str(&line(&row.iter().map(cell).collect::<Vec<_>>()));
    }
    text
}

/// Returns the anchor of a heading, as mdBook and GitHub make it.
#[must_use]
pub fn anchor(heading: &str) -> String {
    let kept = heading.trim().to_lowercase();
    let kept = kept.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_is_found_in_blocks_and_in_spans() {
        let text = "Use `a b\n  c` or `d`.\n\n```\ne \\\n  f\ng\n```\n- `h`\n";
        let page = Page { path: "p.md".into(), text: text.to_owned() };
        let code = |line, text: &str, is_block| Code { line, text: text.to_owned(), is_block };
        let expected = [
            code(1, "a b c", false),
            code(2, "d", false),
            code(5, "e   f", true),
            code(7, "g", true),
            code(9, "h", false),
        ];
        assert_eq!(page.code(), expected);
        assert_eq!(page.prose().len(), 4);
    }

    #[test]
    fn generated_text_is_replaced_in_its_place() {
        let page = "a\n<!-- generated: x -->\nold\n<!-- end -->\nb\n";
        let made = with_generated(page, "x", "new\n").unwrap();
        assert_eq!(made, "a\n<!-- generated: x -->\n\nnew\n\n<!-- end -->\nb\n");
        assert_eq!(with_generated(&made, "x", "new"), Some(made.clone()));
        assert_eq!(with_generated(page, "y", "new"), None);
    }

    #[test]
    fn cells_cannot_end_a_table() {
        let made = table(&["A", "B"], &[vec!["a|b".into(), "c\nd\n\ne".into()]]);
        assert_eq!(made, "| A | B |\n|---|---|\n| a\\|b | c d<br>e |\n");
    }

    #[test]
    fn anchors_have_no_punctuation() {
        assert_eq!(anchor("1. The agent, on every node"), "1-the-agent-on-every-node");
        assert_eq!(anchor("`volume why`"), "volume-why");
    }
}
