//! The texts in a file: comments and string literals of Rust, comments of .proto files, pages of Markdown,
//! comments of scripts and settings.

/// The origin of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Lines of comments that follow each other, a page of Markdown, or a description of YAML. All lines have
    /// the same marker, with this last character.
    Comment(char),
    /// A string literal, without the line breaks that `\` hides.
    Literal,
    /// A raw string literal as it is, often a document.
    Raw,
}

/// A text with the indexes of its first and last line.
#[derive(Debug)]
pub struct Text {
    /// Decides about the splitting into sentences.
    pub kind: Kind,
    /// From 0.
    pub first: usize,
    /// From 0, the same as `first` in most literals.
    pub last: usize,
    /// Without markers of comments and quotes.
    pub text: String,
}

/// Returns the comments and string literals of Rust in their order.  Lines of comments that follow each other
/// are one text.
pub fn of_rust(source: &str) -> Vec<Text> {
    let chars: Vec<char> = source.chars().collect();
    let mut texts: Vec<Text> = Vec::new();
    let (mut at, mut line) = (0, 0);
    while at < chars.len() {
        let rest = &chars[at..];
        let (kind, length, text) = match rest {
            ['/', '/', ..] => comment(rest),
            ['"', ..] => literal(rest),
            ['r', ..] if !is_name_before(&chars, at) && raw(rest).is_some() => raw(rest).unwrap_or_default(),
            ['\'', '\\', _, ..] => {
                (None, 2 + rest[2..].iter().skip(1).take_while(|c| **c != '\'').count() + 2, String::new())
            }
            ['\'', _, '\'', ..] => (None, 3, String::new()),
            _ => (None, 1, String::new()),
        };
        let first = line;
        line += rest[..length.min(rest.len())].iter().filter(|c| **c == '\n').count();
        at += length;
        let Some(kind) = kind else { continue };
        let is_more = |before: &&mut Text| {
            matches!(kind, Kind::Comment(_)) && before.kind == kind && before.last + 1 == first
        };
        match texts.last_mut().filter(is_more) {
            Some(before) => {
                before.last = line;
                before.text.push('\n');
                before.text.push_str(&text);
            }
            None => texts.push(Text { kind, first, last: line, text }),
        }
    }
    texts
}

/// Words with a full stop that does not end a sentence.
const ABBREVIATIONS: [&str; 4] = ["e.g.", "i.e.", "etc.", "vs."];

type Token = (Option<Kind>, usize, String);

fn is_name_before(chars: &[char], at: usize) -> bool {
    at > 0 && (chars[at - 1].is_alphanumeric() || chars[at - 1] == '_')
}

fn comment(rest: &[char]) -> Token {
    let text: String = rest.iter().take_while(|c| **c != '\n').collect();
    let length = text.chars().count();
    let marker =
        if text.starts_with("///") { '3' } else { text.chars().nth(2).filter(|c| *c == '!').unwrap_or('/') };
    (Some(Kind::Comment(marker)), length, text.trim_start_matches(['/', '!']).trim().to_owned())
}

fn literal(rest: &[char]) -> Token {
    let (mut text, mut at) = (String::new(), 1);
    while at < rest.len() && rest[at] != '"' {
        if rest[at] != '\\' {
            text.push(rest[at]);
            at += 1;
            continue;
        }
        match rest.get(at + 1) {
            Some('\n') => at += 1 + rest[at + 1..].iter().take_while(|c| c.is_whitespace()).count(),
            Some('n') => {
                text.push('\n');
                at += 2;
            }
            Some(other) => {
                text.push(*other);
                at += 2;
            }
            None => at += 1,
        }
    }
    (Some(Kind::Literal), at + 1, text)
}

fn raw(rest: &[char]) -> Option<Token> {
    let hashes = rest[1..].iter().take_while(|c| **c == '#').count();
    if rest.get(1 + hashes) != Some(&'"') {
        return None;
    }
    let end: Vec<char> = std::iter::once('"').chain(std::iter::repeat_n('#', hashes)).collect();
    let body = &rest[2 + hashes..];
    let length = body.windows(end.len()).position(|window| window == end)?;
    Some((Some(Kind::Raw), 2 + hashes + length + end.len(), body[..length].iter().collect()))
}

/// Returns the comments of a .proto file.
pub fn of_proto(source: &str) -> Vec<Text> {
    of_rust(source).into_iter().filter(|text| matches!(text.kind, Kind::Comment(_))).collect()
}

/// Returns a page of Markdown as one text.
pub fn of_markdown(source: &str) -> Vec<Text> {
    let last = source.lines().count().saturating_sub(1);
    vec![Text { kind: Kind::Comment('#'), first: 0, last, text: source.to_owned() }]
}

/// Returns the comments after `#` that have lines of their own, and the descriptions of YAML in one line.
pub fn of_settings(source: &str) -> Vec<Text> {
    let mut texts: Vec<Text> = Vec::new();
    for (at, line) in source.lines().enumerate() {
        let line = line.trim();
        if let Some(comment) = line.strip_prefix('#').filter(|comment| !comment.starts_with('!')) {
            let comment = comment.trim_start_matches('#').trim();
            let is_more = |before: &&mut Text| before.kind == Kind::Comment('#') && before.last + 1 == at;
            match texts.last_mut().filter(is_more) {
                Some(before) => {
                    before.last = at;
                    before.text.push('\n');
                    before.text.push_str(comment);
                }
                None => texts.push(Text {
                    kind: Kind::Comment('#'),
                    first: at,
                    last: at,
                    text: comment.to_owned(),
                }),
            }
        }
        let value = ["description: ", "summary: "].iter().find_map(|key| line.strip_prefix(*key));
        if let Some(value) = value {
            let text = value.trim_matches('"').to_owned();
            texts.push(Text { kind: Kind::Comment(':'), first: at, last: at, text });
        }
    }
    texts
}

/// Returns the sentences of a text with the indexes of their first lines. Tables, blocks of code and headings
/// have none.
pub fn sentences(text: &Text) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let mut paragraph = String::new();
    let (mut start, mut is_code) = (text.first, false);
    for (at, line) in text.text.lines().chain([""]).enumerate() {
        let is_indented = paragraph.is_empty() && line.starts_with("    ");
        let is_line_of_help = text.kind == Kind::Literal && line.starts_with("  ");
        let line = line.trim();
        let is_fence = line.starts_with("```");
        is_code ^= is_fence;
        let is_table = line.starts_with(['|', '#', '<']) || line.contains("   ");
        let is_prose = !is_code && !is_fence && !line.is_empty() && !is_table && !is_indented;
        if !is_prose || is_line_of_help || is_item(line) {
            split(&mut paragraph, start, &mut found);
        }
        if is_prose {
            if paragraph.is_empty() {
                start = if matches!(text.kind, Kind::Comment(_)) { text.first + at } else { text.first };
            }
            paragraph.push_str(line);
            paragraph.push(' ');
        }
    }
    found
}

fn is_item(line: &str) -> bool {
    let number = line.trim_start_matches(|c: char| c.is_ascii_digit());
    line.starts_with("- ")
        || line.starts_with("* ")
        || (number.len() < line.len() && number.starts_with(". "))
}

/// Moves the sentences of the paragraph to `found`.
fn split(paragraph: &mut String, start: usize, found: &mut Vec<(usize, String)>) {
    let text = std::mem::take(paragraph);
    let mut sentence = String::new();
    for word in text.split_whitespace() {
        sentence.push_str(word);
        sentence.push(' ');
        let is_end = word.trim_end_matches(['"', ')', '*', '`', ']']).ends_with(['.', '!', '?']);
        if is_end && !ABBREVIATIONS.contains(&word.trim_start_matches('(')) {
            found.push((start, sentence.trim().to_owned()));
            sentence.clear();
        }
    }
    if !sentence.is_empty() {
        found.push((start, sentence.trim().to_owned()));
    }
}

/// Returns the number of words. Punctuation and placeholders without a name do not count.
pub fn count_words(sentence: &str) -> usize {
    sentence.split_whitespace().filter(|word| word.contains(char::is_alphanumeric)).count()
}
