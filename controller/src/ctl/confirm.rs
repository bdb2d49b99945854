use std::io::{BufRead, IsTerminal, Write};

use super::error::CtlError;

/// Asks on a terminal whether `volume` shall go; elsewhere nobody could answer.
pub(super) fn deletion(volume: &str) -> Result<(), CtlError> {
    let (input, mut output) = (std::io::stdin(), std::io::stderr());
    if !input.is_terminal() || !output.is_terminal() {
        let message =
            format!("deleting volume {volume} destroys its data: say --yes where nobody can be asked");
        return Err(CtlError::NotConfirmed(message));
    }
    let failed = |error: std::io::Error| CtlError::NotConfirmed(format!("cannot ask: {error}"));
    write!(output, "Delete volume {volume} and all its data? Type its name to go on: ").map_err(failed)?;
    output.flush().map_err(failed)?;
    let mut answer = String::new();
    input.lock().read_line(&mut answer).map_err(failed)?;
    if answer.trim() == volume {
        return Ok(());
    }
    Err(CtlError::NotConfirmed(format!("volume {volume} was not deleted")))
}
