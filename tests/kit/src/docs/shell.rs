//! The simple commands of a shell line, and of a synopsis such as `disk remove [--lost] NODE PATH`.

/// The most commands that one synopsis stands for.
const VARIANTS_MAX: usize = 64;
/// Words before a command that belong to another one.
const PREFIXES: [&str; 3] = ["sudo", "exec", "env"];

/// A character of a line, and whether it was quoted.
type Marked = (char, bool);

/// Returns the simple commands of a line as words. A word `a|b` stands for a command with each of both, and
/// brackets around optional words are removed.
#[must_use]
pub fn simple_commands(line: &str) -> Vec<Vec<String>> {
    let commands = split(line).into_iter().flat_map(|words| variants(&words)).map(|words| trimmed(&words));
    commands.filter(|words| !words.is_empty()).collect()
}

/// Splits a line into commands and words.
fn split(line: &str) -> Vec<Vec<Vec<Marked>>> {
    let (mut commands, mut command, mut word) = (Vec::new(), Vec::new(), Vec::<Marked>::new());
    let (mut quote, mut has_word, mut drops_word) = (None, false, false);
    let mut characters = line.chars().peekable();
    let mut before = ' ';
    while let Some(c) = characters.next() {
        let is_separate = before.is_whitespace() && characters.peek().is_none_or(|next| next.is_whitespace());
        match (quote, c) {
            (Some(open), _) if c == open => quote = None,
            (Some(_), _) => word.push((c, true)),
            (None, '\'' | '"') => (quote, has_word) = (Some(c), true),
            (None, '#') if before.is_whitespace() => break,
            (None, ' ' | '\t') => end_word(&mut command, &mut word, &mut has_word, &mut drops_word),
            (None, ';' | '(' | ')' | '&') | (None, '|') if c != '|' || is_separate => {
                end_word(&mut command, &mut word, &mut has_word, &mut drops_word);
                commands.push(std::mem::take(&mut command));
                // The command in `<(…)` is not a file.
                drops_word = false;
            }
            (None, '>' | '<') => {
                // `2>` has a number before it, which is not a word.
                if word.iter().all(|(c, _)| c.is_ascii_digit()) {
                    word.clear();
                }
                end_word(&mut command, &mut word, &mut has_word, &mut drops_word);
                drops_word = true;
            }
            (None, '$') if characters.peek() == Some(&'(') => {}
            (None, _) => word.push((c, false)),
        }
        before = c;
    }
    end_word(&mut command, &mut word, &mut has_word, &mut drops_word);
    commands.push(command);
    commands.retain(|command| !command.is_empty());
    commands
}

fn end_word(
    command: &mut Vec<Vec<Marked>>,
    word: &mut Vec<Marked>,
    has_word: &mut bool,
    drops_word: &mut bool,
) {
    let is_word = std::mem::take(has_word) || !word.is_empty();
    let word = std::mem::take(word);
    if is_word && !std::mem::take(drops_word) {
        command.push(word);
    }
}

/// Returns the commands that a synopsis stands for.
fn variants(words: &[Vec<Marked>]) -> Vec<Vec<String>> {
    let mut all = vec![Vec::new()];
    for word in words {
        let word: Vec<Marked> =
            word.iter().copied().filter(|marked| !matches!(marked, ('[' | ']', false))).collect();
        let choices: Vec<String> = word
            .split(|marked| *marked == ('|', false))
            .map(|part| part.iter().map(|(c, _)| *c).collect::<String>())
            .map(|text| text.trim_end_matches("...").to_owned())
            .collect();
        let longer = all.iter().flat_map(|command: &Vec<String>| {
            choices.iter().map(|choice| command.iter().chain([choice]).cloned().collect())
        });
        all = longer.take(VARIANTS_MAX).collect();
    }
    all
}

/// Removes everything before the command itself: assignments, `sudo`, and `kubectl exec … --`.
fn trimmed(words: &[String]) -> Vec<String> {
    let is_exec = words.first().is_some_and(|word| word == "kubectl") && words.contains(&"exec".to_owned());
    let after = words.iter().position(|word| is_exec && word == "--").map_or(0, |at| at + 1);
    let is_prefix = |word: &&String| {
        let is_assignment = word.split_once('=').is_some_and(|(name, _)| {
            !name.is_empty() && name.chars().all(|c| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_')
        });
        is_assignment || PREFIXES.contains(&word.as_str())
    };
    words[after..].iter().skip_while(is_prefix).cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn commands(line: &str) -> Vec<String> {
        simple_commands(line).iter().map(|words| words.join(" ")).collect()
    }

    #[test]
    fn lines_are_split_as_a_shell_does() {
        assert_eq!(commands("umount /mnt; a b   # c"), ["umount /mnt", "a b"]);
        assert_eq!(commands("A=1 sudo a && b | c"), ["a", "b", "c"]);
        assert_eq!(commands("source <(a b)"), ["source", "a b"]);
        assert_eq!(commands("a 'b c' \"d;e\" >f 2>g"), ["a b c d;e"]);
        assert_eq!(commands("kubectl exec -n s deploy/c -- a b"), ["a b"]);
        assert_eq!(commands("a --x='' #no"), ["a --x="]);
    }

    #[test]
    fn a_synopsis_stands_for_each_of_its_commands() {
        assert_eq!(commands("node cordon|drain NODE"), ["node cordon NODE", "node drain NODE"]);
        assert_eq!(commands("a [--b C] [V...]"), ["a --b C V"]);
        assert_eq!(commands("a 'b|[c]'"), ["a b|[c]"]);
    }
}
