//! Removes secrets from the contents of a bundle. If in doubt, it removes the text.

use serde_json::{Map, Value};

/// The text in place of a secret.
pub(super) const LEFT_OUT: &str = "(left out)";
/// Words in the names of fields and variables whose values are secret.
const SECRET_WORDS: [&str; 9] = [
    "secret",
    "password",
    "passwd",
    "passphrase",
    "token",
    "credential",
    "authorization",
    "apikey",
    "privatekey",
];
/// Fields that hold a whole object as text, with all that is secret in it.
const WHOLE_OBJECTS: [&str; 1] = ["kubectl.kubernetes.io/last-applied-configuration"];
/// The length from which a run of letters and digits counts as a key: 30 bytes in base64.
const KEY_CHARS: usize = 40;
/// The same for one of hexadecimal digits: 32 bytes.
const HEX_CHARS: usize = 64;
/// The prefix of a JSON web token.
const WEB_TOKEN: &str = "eyJ";

/// Returns the value without secrets.
pub(super) fn value(value: Value) -> Value {
    match value {
        Value::Object(fields) => Value::Object(object(fields)),
        Value::Array(items) => Value::Array(items.into_iter().map(self::value).collect()),
        Value::String(text) => Value::String(self::text(&text)),
        other => other,
    }
}

fn object(fields: Map<String, Value>) -> Map<String, Value> {
    // A variable of a container, or a similar pair: its name shows whether its value is secret.
    let is_named_secret = fields.get("name").and_then(Value::as_str).is_some_and(is_secret_name);
    let kept = fields.into_iter().map(|(name, found)| {
        let is_whole = WHOLE_OBJECTS.contains(&name.as_str());
        let is_secret = is_whole || (is_secret_name(&name) || is_named_secret && name == "value");
        // A reference names the place of a secret, and not its value; booleans and numbers are not secrets.
        let is_text = matches!(found, Value::String(_) | Value::Array(_));
        if is_secret && is_text {
            return (name, Value::String(LEFT_OUT.to_owned()));
        }
        (name, value(found))
    });
    kept.collect()
}

/// Returns true if a field of this name is secret.
fn is_secret_name(name: &str) -> bool {
    let name: String = name.chars().filter(char::is_ascii_alphanumeric).collect();
    let name = name.to_ascii_lowercase();
    SECRET_WORDS.iter().any(|word| name.contains(word))
}

/// Returns the text without secrets.
pub(super) fn text(text: &str) -> String {
    let mut is_in_key = false;
    let mut clean = String::with_capacity(text.len());
    for line in text.split_inclusive('\n') {
        if line.contains("-----BEGIN") && line.contains("PRIVATE KEY") {
            is_in_key = true;
            clean.push_str(LEFT_OUT);
            clean.push('\n');
        } else if !is_in_key {
            clean.push_str(&self::line(line));
        }
        if line.contains("-----END") {
            is_in_key = false;
        }
    }
    clean
}

/// Returns true if the character separates words.
fn is_separator(c: char) -> bool {
    c.is_whitespace()
        || matches!(c, '"' | '\'' | ',' | ';' | '(' | ')' | '[' | ']' | '{' | '}' | '<' | '>' | '&' | '?')
}

fn line(line: &str) -> String {
    let mut clean = String::with_capacity(line.len());
    // How many of the next words are secret.
    let mut secret_words = 0;
    let mut rest = line;
    while !rest.is_empty() {
        let start = rest.find(|c| !is_separator(c)).unwrap_or(rest.len());
        let (gap, after) = rest.split_at(start);
        clean.push_str(gap);
        let end = after.find(is_separator).unwrap_or(after.len());
        let (word, after) = after.split_at(end);
        rest = after;
        if word.is_empty() {
            continue;
        }
        if secret_words > 0 && !matches!(word, "=" | ":") {
            // The scheme of an Authorization, which the secret follows.
            let is_scheme = ["bearer", "basic"].contains(&word.to_ascii_lowercase().as_str());
            secret_words = u32::from(is_scheme);
            clean.push_str(if is_scheme { word } else { LEFT_OUT });
            continue;
        }
        if ["bearer", "basic"].contains(&word.to_ascii_lowercase().as_str()) {
            secret_words = 1;
        }
        match word.split_once(['=', ':']) {
            Some((name, found)) if is_secret_name(name) && !name.contains("//") => {
                clean.push_str(&word[..=name.len()]);
                if found.is_empty() {
                    secret_words = 1;
                } else {
                    clean.push_str(LEFT_OUT);
                }
            }
            _ => {
                // As in JSON, or `password = x`: the name alone, then its separator from the value.
                let next = rest.trim_start_matches(['"', '\'', ' ']);
                let is_name = word.len() < KEY_CHARS && is_secret_name(word);
                if is_name && next.starts_with(['=', ':']) {
                    secret_words = 1;
                }
                clean.push_str(&self::word(word));
            }
        }
    }
    clean
}

/// Returns a word without a password in a URL, and without anything like a key.
fn word(word: &str) -> String {
    let mut word = word.to_owned();
    if let Some((scheme, rest)) = word.split_once("://")
        && let Some((user, host)) = rest.split('/').next().and_then(|authority| authority.rsplit_once('@'))
        && user.contains(':')
    {
        let path = &rest[user.len() + 1 + host.len()..];
        word = format!("{scheme}://{LEFT_OUT}@{host}{path}");
    }
    if let Some(at) = word.find(WEB_TOKEN).filter(|at| word.len() - at >= KEY_CHARS) {
        word.replace_range(at.., LEFT_OUT);
    }
    let is_key_char = |c: char| c.is_ascii_alphanumeric() || matches!(c, '+' | '/' | '=');
    let mut clean = String::with_capacity(word.len());
    let mut rest = word.as_str();
    while !rest.is_empty() {
        let end = rest.find(|c| !is_key_char(c)).unwrap_or(rest.len());
        let (run, after) = rest.split_at(end);
        clean.push_str(if is_key(run) { LEFT_OUT } else { run });
        let next = after.chars().next().map_or(0, char::len_utf8);
        clean.push_str(&after[..next]);
        rest = &after[next..];
    }
    clean
}

fn is_key(run: &str) -> bool {
    let has = |is: fn(&char) -> bool| run.chars().any(|c| is(&c));
    let is_hex = run.len() >= HEX_CHARS && run.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_hex
        || run.len() >= KEY_CHARS
            && has(char::is_ascii_digit)
            && has(char::is_ascii_uppercase)
            && has(char::is_ascii_lowercase)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const KEY: &str = "q83vEjRWeJCrze8SNFZ4kKvN7xI0VniQq83vEjRWeJA=";

    #[test]
    fn secrets_in_texts_are_left_out() {
        let hex = "0123456789abcdef".repeat(4);
        for (text, secret) in [
            ("password=hunter2 and more", "hunter2"),
            ("password: hunter2", "hunter2"),
            ("the password = hunter2;", "hunter2"),
            ("{\"apiToken\":\"hunter2\",\"a\":1}", "hunter2"),
            ("Authorization: Bearer hunter2", "hunter2"),
            ("authorization: Basic aHVudGVyMg", "aHVudGVyMg"),
            ("header Bearer hunter2 sent", "hunter2"),
            ("DB_PASSWORD=hunter2", "hunter2"),
            ("https://admin:hunter2@example.com/path", "hunter2"),
            ("https://example.com/?token=hunter2&a=b", "hunter2"),
            (&format!("a key: {KEY}"), KEY),
            (&format!("secret {hex}"), &hex),
            ("eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJhIn0.c2ln-_natureofit", "natureofit"),
            ("-----BEGIN RSA PRIVATE KEY-----\nhunter2\n-----END RSA PRIVATE KEY-----\n", "hunter2"),
        ] {
            let clean = self::text(text);
            assert!(!clean.contains(secret) && clean.contains(LEFT_OUT), "{text} became {clean}");
        }
    }

    #[test]
    fn texts_without_secrets_stay() {
        for text in [
            "volume pvc-0b1c2d3e-4f50-6172-8394-a5b6c7d8e9f0 is degraded: 2 of 3 replicas have all data\n",
            "2026-01-02T03:04:05Z INFO ready store=/var/lib/shorthorn/store.redb \
             listen=unix:///run/shorthorn/controller.sock",
            "disk /var/lib/longhorn of node n1: 123e4567-e89b-12d3-a456-426614174000",
            "replica v-8rqh2w91 on 10.0.0.1:10000 left the view (connection reset)",
            "sha256:0123456789abcdef is a digest",
        ] {
            assert_eq!(self::text(text), text);
        }
        let after = self::text("-----BEGIN PRIVATE KEY-----\nx\n-----END PRIVATE KEY-----\nafter\n");
        assert!(after.ends_with("after\n") && !after.contains('x'), "{after}");
    }

    #[test]
    fn secrets_in_objects_are_left_out_and_references_stay() {
        let pod = json!({
            "metadata": { "annotations": { WHOLE_OBJECTS[0]: "{\"a\":\"hunter2\"}" }, "name": "p" },
            "spec": {
                "containers": [{ "env": [
                    { "name": "DB_PASSWORD", "value": "hunter2" },
                    { "name": "LEVEL", "value": "debug" },
                    { "name": "API_TOKEN", "valueFrom": { "secretKeyRef": { "name": "s", "key": "k" } } },
                ], "args": ["--token=hunter2", "--level=info"] }],
                "csi": {
                    "volumeAttributes": { "adminPassword": "hunter2" }, "nodeStageSecretRef": { "name": "s" }
                },
                "automountServiceAccountToken": false,
            },
        });
        let clean = value(pod);
        assert!(!clean.to_string().contains("hunter2"), "{clean:#}");
        let container = &clean["spec"]["containers"][0];
        assert_eq!(
            (&container["env"][1]["value"], &container["args"][1]),
            (&"debug".into(), &"--level=info".into())
        );
        assert_eq!(container["env"][2]["valueFrom"]["secretKeyRef"]["name"], "s");
        assert_eq!(clean["spec"]["csi"]["nodeStageSecretRef"]["name"], "s");
        assert_eq!(clean["spec"]["automountServiceAccountToken"], false);
    }
}
