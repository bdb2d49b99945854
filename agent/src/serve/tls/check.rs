//! `serve --check`: whether the addresses of the configuration can be served by TLS.

use shorthorn_pki::Role;

use crate::enrol::{file_in, kubeconfig};
use crate::serve::config::Config;
use crate::serve::tls::enrolment::kubeconfig_of;
use crate::serve::tls::{load, now};

/// A remark for the operator; none: TLS is not used, or has no problem.
///
/// # Errors
/// A problem that keeps this node from being served by TLS, with its remedy.
pub fn check(config: &Config) -> Result<Option<String>, String> {
    if !config.listens_with_tls() {
        return Ok(None);
    }
    let node = Role::Node(config.node_name.clone());
    let file = file_in(&config.tls_dir);
    let bundle = load(&file, &node).map_err(|error| error.to_string())?;
    let Some((identity, trust)) = bundle.and_then(|bundle| Some((bundle.identity?, bundle.trust))) else {
        return not_enrolled(config).map(Some);
    };
    let at = file.display();
    if identity.certificate().is_expired(now()) {
        return Err(format!("the certificate in {at} is expired: {}", remedy(config)));
    }
    if identity.certificate().is_overdue(now()) {
        let why = "two thirds of its life are over: the controller renews it as soon as it reaches this node";
        return Ok(Some(format!("the certificate in {at} should have been renewed, because {why}")));
    }
    if let Some(leaf) = identity.chain().first() {
        trust.verify_server(leaf, now()).map_err(|error| format!("the certificate in {at}: {error}"))?;
    }
    Ok(None)
}

fn not_enrolled(config: &Config) -> Result<String, String> {
    if let Some(file) = kubeconfig_of(&config.kubelet_kubeconfig) {
        kubeconfig::load(&file).map_err(|error| format!("kubelet_kubeconfig: {error}"))?;
    }
    Ok(format!("this node has no certificate yet: {}", remedy(config)))
}

fn remedy(config: &Config) -> String {
    match kubeconfig_of(&config.kubelet_kubeconfig) {
        Some(file) => format!("the agent enrols it with {}", file.display()),
        None => "run shorthorn-agent join".to_owned(),
    }
}
