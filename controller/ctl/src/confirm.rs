use std::io::{BufRead, IsTerminal, Write};

use super::error::CtlError;
use crate::terminal_text::terminal_text;

/// Returns the name of the user at the keyboard, if known, for the record.
pub(super) fn operator() -> String {
    let variables = ["SUDO_USER", "USER", "LOGNAME"].into_iter();
    variables.filter_map(|name| std::env::var(name).ok()).find(|name| !name.is_empty()).unwrap_or_default()
}

/// Asks on a terminal whether to delete `volume`; without a terminal, refuses.
pub(super) fn deletion(volume: &str) -> Result<(), CtlError> {
    let refusal = format!(
        "deleting volume {volume} deletes its data after the time of the trash: use --yes without a terminal"
    );
    typed(volume, &refusal, &format!("Delete volume {volume} and its data?"))
}

/// Asks on a terminal whether to delete the trash of `volume` for good.
pub(super) fn trash_removal(volume: &str) -> Result<(), CtlError> {
    let refusal =
        format!("the trash of volume {volume} will be deleted for good: use --yes without a terminal");
    typed(volume, &refusal, &format!("Delete the trash of volume {volume} for good?"))
}

/// Asks on a terminal whether to make one replica the only copy of `volume`.
pub(super) fn salvage(volume: &str, replica: &str) -> Result<(), CtlError> {
    let refusal = format!(
        "salvaging volume {volume} may lose acknowledged writes: use --yes-i-may-lose-data without a terminal"
    );
    typed(volume, &refusal, &format!("Make replica {replica} the only copy of volume {volume}?"))
}

/// Asks on a terminal whether to give up a node for good.
pub(super) fn node_deletion(node: &str, force: bool) -> Result<(), CtlError> {
    let refusal = format!("deleting node {node} gives up its replicas: use --yes without a terminal");
    let loss = if force { ", and lose the volumes whose last replica it has" } else { "" };
    typed(node, &refusal, &format!("Give up node {node} for good{loss}?"))
}

/// Asks on a terminal whether to give up a disk for good.
pub(super) fn disk_loss(node: &str, path: &str, force: bool) -> Result<(), CtlError> {
    let refusal =
        format!("giving up disk {path} of node {node} gives up its replicas: use --yes without a terminal");
    let loss = if force { ", and lose the volumes whose last replica it has" } else { "" };
    typed(path, &refusal, &format!("Give up disk {path} of node {node} for good{loss}?"))
}

/// Asks on a terminal whether to move an orphan to the trash.
pub(super) fn orphan_deletion(name: &str) -> Result<(), CtlError> {
    let refusal = format!("{name} may be the only copy of its data: use --yes without a terminal");
    typed(name, &refusal, &format!("Move {name} to the trash of its disk?"))
}

/// Asks for the name of the volume or node, as a confirmation.
fn typed(name: &str, refusal: &str, question: &str) -> Result<(), CtlError> {
    let (input, mut output) = (std::io::stdin(), std::io::stderr());
    if !input.is_terminal() || !output.is_terminal() {
        return Err(CtlError::NotConfirmed(refusal.to_owned()));
    }
    let failed = |error: std::io::Error| CtlError::NotConfirmed(format!("cannot ask: {error}"));
    write!(output, "{} Type its name to continue: ", terminal_text(question)).map_err(failed)?;
    output.flush().map_err(failed)?;
    let mut answer = String::new();
    input.lock().read_line(&mut answer).map_err(failed)?;
    if answer.trim() == name {
        return Ok(());
    }
    Err(CtlError::NotConfirmed(format!("cancelled: {name} is unchanged")))
}
