//! The fenced blocks of the documentation, and the commands of a page that a test runs.

use std::collections::VecDeque;

use anyhow::{Context, Result, ensure};

use super::tested::{BLOCKS, Tested};
use super::{Code, Page, pages, simple_commands};

/// A fenced block of a page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// Line number of its first line, from 1.
    pub line: usize,
    /// The lines of code. A line that ends with a backslash is one with the next.
    pub code: Vec<Code>,
    /// The text between its fences.
    pub text: String,
}

impl Block {
    /// Returns the first line without its comment.
    #[must_use]
    pub fn first_line(&self) -> &str {
        let line = self.text.lines().next().unwrap_or_default();
        line.split(" #").next().unwrap_or_default().trim().trim_end_matches('\\').trim_end()
    }

    /// Returns the commands of the block, as words.
    #[must_use]
    pub fn commands(&self) -> Vec<Vec<String>> {
        self.code.iter().flat_map(|code| simple_commands(&code.text)).collect()
    }
}

impl Page {
    /// Returns the fenced blocks of the page, in order.
    #[must_use]
    pub fn blocks(&self) -> Vec<Block> {
        let code = self.code();
        let (mut found, mut open) = (Vec::new(), None::<usize>);
        let lines: Vec<&str> = self.text.lines().collect();
        for (at, _) in lines.iter().enumerate().filter(|(_, line)| line.trim_start().starts_with("```")) {
            let Some(start) = open.take() else {
                open = Some(at);
                continue;
            };
            let is_inside = |code: &&Code| code.is_block && (start + 2..=at).contains(&code.line);
            found.push(Block {
                line: start + 2,
                code: code.iter().filter(is_inside).cloned().collect(),
                text: lines[start + 1..at].join("\n"),
            });
        }
        found
    }
}

/// Returns each block of the documentation with its page and its entry in [`BLOCKS`].
///
/// # Errors
/// A page has a block without an entry, or an entry has no block.
pub fn tested_blocks() -> Result<Vec<(Page, Block, Tested)>> {
    let mut found = Vec::new();
    let all = pages();
    for (path, _) in BLOCKS {
        ensure!(all.iter().any(|page| page.path.ends_with(path)), "{path} is not a page");
    }
    for page in all {
        if page.path.components().count() == 1 && !page.path.ends_with("README.md") {
            // Pages for those who work on the code.
            continue;
        }
        let entries = BLOCKS.iter().find(|(path, _)| page.path.as_os_str() == *path);
        let mut entries = entries.map_or(&[][..], |(_, entries)| entries).iter();
        for block in page.blocks() {
            let line = block.first_line().to_owned();
            let place = page.at(block.line, &line);
            let (start, tested) =
                entries.next().with_context(|| format!("{place}: the table of tested blocks lacks it"))?;
            ensure!(line == *start, "{place}: the table of tested blocks has {start:?} next");
            found.push((page.clone(), block, *tested));
        }
        if let Some((start, _)) = entries.next() {
            anyhow::bail!("{} has no block {start:?}", page.path.display());
        }
    }
    Ok(found)
}

/// Returns the blocks of a page that have such an entry in [`BLOCKS`].
fn blocks_with(page: &str, is_such: impl Fn(Tested) -> bool) -> Result<Vec<Block>> {
    let blocks = tested_blocks()?.into_iter();
    let such = blocks.filter(|(of, _, tested)| of.path.as_os_str() == page && is_such(*tested));
    Ok(such.map(|(_, block, _)| block).collect())
}

/// Returns the blocks of a page that are not commands and that `test` reads according to [`BLOCKS`].
///
/// # Errors
/// The page has no such block.
pub fn blocks_read_by(page: &str, test: &str) -> Result<Vec<Block>> {
    let found = blocks_with(page, |entry| matches!(entry, Tested::Read(by) if by == test))?;
    ensure!(!found.is_empty(), "{page} has no block that {test} reads");
    Ok(found)
}

/// Returns the blocks of a page whose commands `test` runs according to [`BLOCKS`].
fn blocks_run_by(page: &str, test: &str) -> Result<Vec<Block>> {
    let found = blocks_with(page, |entry| matches!(entry, Tested::Run(by) if by == test))?;
    ensure!(!found.is_empty(), "{page} has no block that {test} runs");
    Ok(found)
}

/// Returns the lines that `test` runs according to [`BLOCKS`], as a shell takes them.
///
/// # Errors
/// The page has no such block.
pub fn lines_run_by(page: &str, test: &str) -> Result<Vec<String>> {
    let lines = blocks_run_by(page, test)?.into_iter().flat_map(|block| block.code);
    Ok(lines.map(|code| code.text).collect())
}

/// The commands of a page that one test runs, in their order.
#[derive(Debug)]
pub struct Script {
    page: String,
    left: VecDeque<Vec<String>>,
    values: Vec<(String, String)>,
}

impl Script {
    /// Reads the commands of the blocks that `test` runs according to [`BLOCKS`].
    ///
    /// # Errors
    /// The page has no such block.
    pub fn read(page: &str, test: &str) -> Result<Script> {
        Ok(Script::new(page, blocks_run_by(page, test)?.iter().flat_map(Block::commands)))
    }

    /// Makes a script of these commands of a page.
    pub fn new(page: &str, commands: impl IntoIterator<Item = Vec<String>>) -> Script {
        Script { page: page.to_owned(), left: commands.into_iter().collect(), values: Vec::new() }
    }

    /// Replaces `word` of the page by `value` from now on. Parts of words count if letters do not follow.
    pub fn set(&mut self, word: &str, value: &str) {
        self.values.retain(|(known, _)| known != word);
        self.values.push((word.to_owned(), value.to_owned()));
        // The longest first: PATH is a part of others.
        self.values.sort_by_key(|(word, _)| std::cmp::Reverse(word.len()));
    }

    /// Takes the next command, which has to begin with `start`, and replaces the words that were set.
    ///
    /// # Errors
    /// The page has another command there, or no more commands.
    pub fn next(&mut self, start: &str) -> Result<Vec<String>> {
        let page = &self.page;
        let words = self.left.pop_front().with_context(|| format!("{page} lacks {start:?}"))?;
        let command = words.join(" ");
        ensure!(command.starts_with(start), "{page} has {command:?}, and {start:?} is tried next");
        let words: Vec<String> = words.iter().map(|word| self.with_values(word)).collect();
        println!("{page}: {}", words.join(" "));
        Ok(words)
    }

    /// Takes the next command, which the test does not run for this reason.
    ///
    /// # Errors
    /// As [`Script::next`].
    pub fn leave_out(&mut self, start: &str, reason: &str) -> Result<()> {
        self.next(start)?;
        println!("left out: {reason}");
        Ok(())
    }

    fn with_values(&self, word: &str) -> String {
        let mut made = word.to_owned();
        for (name, value) in &self.values {
            let mut parts = made.split(name.as_str());
            let mut replaced = parts.next().unwrap_or_default().to_owned();
            for part in parts {
                let is_name = |c: char| c.is_alphanumeric();
                let is_whole = !replaced.ends_with(is_name) && !part.starts_with(is_name);
                replaced.push_str(if is_whole { value } else { name });
                replaced.push_str(part);
            }
            made = replaced;
        }
        made
    }

    /// Ends the script, whose commands have to be used up.
    ///
    /// # Errors
    /// Commands are left.
    pub fn finish(self) -> Result<()> {
        ensure!(
            self.left.is_empty(),
            "commands of {} that the test does not run: {:?}",
            self.page,
            self.left
        );
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_found_with_their_commands() {
        let text = "a\n\n```\nx y \\\n  z   # why\nw\n```\n`b`\n1. c\n\n   ```\n   d\n   ```\n";
        let page = Page { path: "p.md".into(), text: text.to_owned() };
        let blocks = page.blocks();
        assert_eq!(blocks.len(), 2);
        assert_eq!((blocks[0].line, blocks[0].first_line()), (4, "x y"));
        assert_eq!(blocks[0].commands(), [vec!["x", "y", "z"], vec!["w"]]);
        assert_eq!((blocks[1].line, blocks[1].first_line()), (12, "d"));
    }

    #[test]
    fn a_script_is_used_up_in_order() {
        let commands = || ["a NODE x-NODE /PATH", "b"].map(|line| simple_commands(line).remove(0));
        let mut script = Script::new("p.md", commands());
        script.set("NODE", "n1");
        script.set("PATH", "/tmp");
        assert_eq!(script.next("a").unwrap(), ["a", "n1", "x-n1", "//tmp"]);
        assert!(script.next("c").unwrap_err().to_string().contains("has \"b\", and \"c\" is tried next"));
        assert!(script.next("b").unwrap_err().to_string().contains("lacks"));
        script.finish().unwrap();
        assert!(Script::new("p.md", commands()).finish().is_err());
    }

    #[test]
    fn only_whole_words_are_replaced() {
        let mut script =
            Script::new("p.md", [vec!["v1-8rqh2w91".to_owned(), "v12".to_owned(), "v1".to_owned()]]);
        script.set("v1", "v");
        script.set("v1-8rqh2w91", "v-1");
        assert_eq!(script.next("v1").unwrap(), ["v-1", "v12", "v"]);
    }
}
