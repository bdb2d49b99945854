//! Checks the commands of kubectl and helm in the documentation: each verb, flag, kind, object and value
//! exists.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use shorthorn_testkit::docs::{self, blocks_read_by, shown_commands};

const INSTALL: &str = "docs/install.md";
/// Kinds of Kubernetes that a page names.
const KINDS: [&str; 16] = [
    "clusterrole",
    "clusterrolebinding",
    "crd",
    "deploy",
    "deployment",
    "namespace",
    "node",
    "pod",
    "pods",
    "pv",
    "pvc",
    "secret",
    "shn",
    "shr",
    "shv",
    "she",
];
/// Verbs whose first argument is a kind.
const VERBS_OF_KINDS: [&str; 7] = ["delete", "describe", "get", "label", "logs", "patch", "wait"];
/// Objects that only an earlier release made.
const FORMER: [&str; 1] = ["shorthorn-sidecars"];
/// Plug-ins of kubectl, which are programs of their own.
const PLUGINS: [&str; 1] = ["shorthorn"];

fn run(program: &str, arguments: &[&str]) -> Result<String> {
    let tools = Command::new(docs::root().join("packaging/chart/tools")).output()?;
    ensure!(tools.status.success(), "{}", String::from_utf8_lossy(&tools.stderr));
    let tools = PathBuf::from(String::from_utf8(tools.stdout)?.trim());
    let output = Command::new(tools.join(program)).args(arguments).current_dir(docs::root()).output()?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{program} {}: {stderr}", arguments.join(" "));
    Ok(String::from_utf8(output.stdout)?)
}

/// The flags of a verb. A flag with a value is true.
type Flags = BTreeMap<String, bool>;

/// Reads the flags in the help of kubectl, as `-n, --namespace='':`.
fn kubectl_flags(help: &str) -> Flags {
    let mut flags = Flags::new();
    for line in help.lines().map(str::trim).filter(|line| line.starts_with('-') && line.ends_with(':')) {
        let Some((names, default)) = line.trim_end_matches(':').split_once('=') else { continue };
        let takes_value = !matches!(default, "true" | "false");
        flags.extend(names.split(", ").map(|name| (name.to_owned(), takes_value)));
    }
    flags
}

/// Reads the flags in the help of helm, as `-n, --namespace string   namespace scope`.
fn helm_flags(help: &str) -> Flags {
    let mut flags = Flags::new();
    for line in help.lines().map(str::trim).filter(|line| line.starts_with('-')) {
        let head = line.split("  ").next().unwrap_or_default();
        let (names, kind): (Vec<&str>, Vec<&str>) =
            head.split([' ', ',']).filter(|word| !word.is_empty()).partition(|word| word.starts_with('-'));
        flags.extend(names.into_iter().map(|name| (name.to_owned(), !kind.is_empty())));
    }
    flags
}

/// A flag with its value, which may be empty.
type Given<'a> = (&'a str, &'a str);

/// Splits the words after a program into flags with their values, and the others.
fn split<'a>(words: &'a [String], flags: &Flags) -> Result<(Vec<Given<'a>>, Vec<&'a str>)> {
    let (mut given, mut others) = (Vec::new(), Vec::new());
    let mut words = words.iter().map(String::as_str);
    while let Some(word) = words.next() {
        if !word.starts_with('-') {
            others.push(word);
            continue;
        }
        let (name, value) = word.split_once('=').map_or((word, None), |(name, value)| (name, Some(value)));
        let takes_value = *flags.get(name).with_context(|| format!("{name} is not a flag"))?;
        let value = match value {
            None if takes_value => words.next().with_context(|| format!("{name} has no value"))?,
            value => value.unwrap_or_default(),
        };
        given.push((name, value));
    }
    Ok((given, others))
}

struct Kubectl {
    global: Flags,
    verbs: BTreeMap<String, Flags>,
    /// The kinds of packaging/deploy/crds.yaml, and [`KINDS`].
    kinds: Vec<String>,
    /// The words of the files of all installed objects, their names among them.
    objects: BTreeSet<String>,
}

impl Kubectl {
    fn new() -> Result<Kubectl> {
        let crds = docs::read("packaging/deploy/crds.yaml");
        let plurals: Vec<&str> = crds.lines().filter_map(|line| line.strip_prefix("    plural: ")).collect();
        ensure!(plurals.len() == 4, "{plurals:?}");
        let short: Vec<&str> = crds.lines().filter_map(|line| line.strip_prefix("    - sh")).collect();
        for kind in KINDS.iter().filter_map(|kind| kind.strip_prefix("sh")) {
            ensure!(short.contains(&kind), "no definition has the short name sh{kind}");
        }
        let full = plurals.iter().map(|plural| format!("{plural}.shorthorn.io"));
        let kinds = KINDS.iter().map(|kind| (*kind).to_owned()).chain(full).collect();
        let mut objects = BTreeSet::new();
        for entry in fs::read_dir(docs::root().join("packaging/deploy"))? {
            let path = entry?.path();
            if path.is_file() {
                let is_outside = |c: char| !c.is_alphanumeric() && c != '-';
                let text = fs::read_to_string(path)?;
                objects.extend(text.split(is_outside).map(str::to_owned));
            }
        }
        let global = kubectl_flags(&run("kubectl", &["options"])?);
        Ok(Kubectl { global, verbs: BTreeMap::new(), kinds, objects })
    }

    /// Returns the flags of a verb, with those of every verb.
    fn flags(&mut self, verb: &str) -> Result<Flags> {
        if let Some(flags) = self.verbs.get(verb) {
            return Ok(flags.clone());
        }
        let words = match verb {
            "create" => vec!["create", "secret", "generic", "--help"],
            "rollout" => vec!["rollout", "restart", "--help"],
            _ => vec![verb, "--help"],
        };
        let mut flags = kubectl_flags(&run("kubectl", &words)?);
        flags.extend(self.global.clone());
        self.verbs.insert(verb.to_owned(), flags.clone());
        Ok(flags)
    }

    fn check(&mut self, words: &[String], is_complete: bool) -> Result<()> {
        // Flags of every verb may stand before it.
        let verb = split_verb(words, &self.global)?;
        if PLUGINS.contains(&verb) {
            return Ok(());
        }
        let flags = self.flags(verb)?;
        let (given, others) = split(words, &flags)?;
        let arguments = &others[1..];
        let names_files = given.iter().any(|(flag, _)| matches!(*flag, "-f" | "-k"));
        if VERBS_OF_KINDS.contains(&verb) && !names_files {
            let Some(kinds) = arguments.first() else {
                ensure!(!is_complete, "the kind is missing");
                return Ok(());
            };
            let kinds = kinds.split('/').next().unwrap_or_default();
            for kind in kinds.split(',') {
                ensure!(self.kinds.iter().any(|known| known == kind), "{kind} is not a kind");
            }
        }
        let values = given.iter().map(|(_, value)| *value).chain(arguments.iter().copied());
        for value in values {
            let name = value.rsplit('/').next().unwrap_or_default();
            let is_ours = name.starts_with("shorthorn-") && !name.starts_with("shorthorn-guard-");
            let is_known = FORMER.contains(&name) || self.objects.contains(name);
            ensure!(!is_ours || is_known || value.ends_with(".base64"), "no object is called {name}");
        }
        Ok(())
    }
}

/// Returns the verb: the first word that is not a flag of every verb.
fn split_verb<'a>(words: &'a [String], global: &Flags) -> Result<&'a str> {
    let mut at = 0;
    while let Some(word) = words.get(at) {
        match global.get(word.as_str()) {
            Some(takes_value) => at += 1 + usize::from(*takes_value),
            None => return Ok(word),
        }
    }
    bail!("no verb")
}

#[test]
fn kubectl_knows_the_commands_of_the_documentation() -> Result<()> {
    let (mut kubectl, mut wrong, mut count) = (Kubectl::new()?, Vec::new(), 0);
    for (page, code, words) in shown_commands("kubectl") {
        count += 1;
        if let Err(error) = kubectl.check(&words[1..], code.is_block) {
            wrong.push(page.at(code.line, &format!("{}: {error:#}", words.join(" "))));
        }
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    ensure!(count > 30, "only {count} commands");
    Ok(())
}

#[test]
fn faults_in_commands_of_kubectl_are_found() -> Result<()> {
    let mut kubectl = Kubectl::new()?;
    for (line, message) in [
        ("kubectl get shx -n shorthorn-system", "shx is not a kind"),
        ("kubectl get shv -n shorthorn-sistem", "no object is called shorthorn-sistem"),
        ("kubectl drain NODE --ignore-daemonset", "--ignore-daemonset is not a flag"),
        ("kubectl dran NODE", "dran"),
        ("kubectl delete", "the kind is missing"),
        ("kubectl rollout restart deployment/shorthorn-control", "no object is called shorthorn-control"),
    ] {
        let words = docs::simple_commands(line).remove(0);
        let found = kubectl.check(&words[1..], true).err().with_context(|| line.to_owned())?;
        ensure!(format!("{found:#}").contains(message), "{line}: {found:#}, not {message}");
    }
    Ok(())
}

/// Helm renders the chart with the values of the page. Its schema refuses unknown ones.
fn render(words: &[String]) -> Result<()> {
    let help = run("helm", &[&words[0], "--help"])?;
    ensure!(help.contains(&format!("helm {} ", words[0])), "{} is not a verb of helm", words[0]);
    let (given, others) = split(words, &helm_flags(&help))?;
    let [_, release, chart] = others[..] else { return Ok(()) };
    let values: Vec<String> = given
        .iter()
        .filter(|(flag, _)| *flag == "--set")
        .map(|(_, value)| value.replace("REGISTRY", "registry.example"))
        .collect();
    let mut arguments = vec!["template", release, chart, "--namespace", "shorthorn-system"];
    arguments.extend(values.iter().flat_map(|value| ["--set", value]));
    let made = run("helm", &arguments)?;
    ensure!(made.contains("kind: Deployment"), "{made}");
    Ok(())
}

#[test]
fn helm_renders_the_chart_with_the_documented_values() -> Result<()> {
    let (mut wrong, mut count) = (Vec::new(), 0);
    for (page, code, words) in shown_commands("helm") {
        count += 1;
        if let Err(error) = render(&words[1..]) {
            wrong.push(page.at(code.line, &format!("{}: {error:#}", words.join(" "))));
        }
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    ensure!(count > 6, "only {count} commands");
    for line in [
        "helm upgrade shorthorn packaging/chart --set controler.replicas=2",
        "helm upgrade shorthorn packaging/charts",
        "helm upgrade shorthorn packaging/chart --reset-and-reuse-values",
    ] {
        ensure!(render(&docs::simple_commands(line).remove(0)[1..]).is_err(), "{line} is accepted");
    }
    Ok(())
}

/// The values file of the page that makes a class the default of the cluster.
#[test]
fn the_documented_values_file_makes_a_default_class() -> Result<()> {
    let folder = tempfile::tempdir()?;
    for block in blocks_read_by(INSTALL, "tests/tests/tools.rs")? {
        let file = folder.path().join("values.yaml");
        fs::write(&file, &block.text)?;
        let made = run(
            "helm",
            &["template", "shorthorn", "packaging/chart", "--values", &file.display().to_string()],
        )?;
        let classes: Vec<&str> =
            made.split("\n---\n").filter(|text| text.contains("kind: StorageClass")).collect();
        ensure!(classes.len() == 1, "{classes:#?}");
        let is_default = "storageclass.kubernetes.io/is-default-class: \"true\"";
        ensure!(classes[0].contains(is_default) && classes[0].contains("dataLocality"), "{}", classes[0]);
    }
    Ok(())
}
