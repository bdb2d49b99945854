//! Compares the keys of the configuration file with the flags, whose help explains them.

use clap::CommandFactory;
use shorthorn_testkit::docs::{check_generated, table};

use super::*;

/// Returns the keys that `text` may have beside an unknown one, from the error about that.
fn accepted(text: &str) -> Vec<String> {
    let error = toml::from_str::<File>(text).unwrap_err().message().to_owned();
    let (_, names) = error.split_once("expected one of ").unwrap();
    names.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

#[test]
fn the_documentation_has_each_key_with_its_flag() {
    let top = accepted("unknown = 1\n").into_iter().filter(|key| key != "kubernetes");
    let top = top.map(|key| (key.clone(), key));
    let of_kubernetes = accepted("[kubernetes]\nunknown = 1\n");
    let of_kubernetes = of_kubernetes.into_iter().map(|key| (format!("kubernetes.{key}"), key));
    let keys: Vec<(String, String)> = top.chain(of_kubernetes).collect();
    assert!(keys.len() > 20, "only {keys:?}");

    let command = Cli::command();
    let serve = command.find_subcommand("serve").unwrap();
    let rows = keys.iter().map(|(path, key)| {
        // An entry of the table [nodes] is one --node.
        let flag = if key == "nodes" { "node".to_owned() } else { key.replace('_', "-") };
        let argument = serve.get_arguments().find(|argument| argument.get_long() == Some(flag.as_str()));
        assert!(
            argument.is_some_and(|argument| argument.get_help().is_some()),
            "{path} has no flag --{flag}"
        );
        let listed = serve.get_arguments().find(|argument| argument.get_long() == Some("config")).unwrap();
        let listed = listed.get_help().map(ToString::to_string).unwrap_or_default();
        assert!(listed.contains(key.as_str()), "the help of --config does not list {path}");
        vec![format!("`{path}`"), format!("`--{flag}`")]
    });
    let made = table(&["Key", "Flag with the same meaning"], &rows.collect::<Vec<_>>());
    check_generated("docs/reference/shorthorn-controller.md", "keys", &made);
}
