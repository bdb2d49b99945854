use std::path::PathBuf;

use anyhow::{Context, Result, bail};

/// Returns the path of one of the project's programs. `SHORTHORN_BIN_DIR` names the folder of the programs;
/// the default is the target folder of the running program or test.
///
/// # Errors
/// The program does not exist.
pub fn binary(name: &str) -> Result<PathBuf> {
    let folder = match std::env::var_os("SHORTHORN_BIN_DIR") {
        Some(folder) => PathBuf::from(folder),
        None => own_folder()?,
    };
    let path = folder.join(name);
    if !path.is_file() {
        bail!("{} is not there: run `cargo build --workspace --bins`", path.display());
    }
    Ok(path)
}

/// Returns the folder of the programs that were built together with this one. Tests are in `deps` below it.
fn own_folder() -> Result<PathBuf> {
    let program = std::env::current_exe().context("finding this program")?;
    let folder = program.parent().context("this program has no folder")?;
    let is_test = folder.file_name().is_some_and(|name| name == "deps");
    Ok(if is_test { folder.parent().unwrap_or(folder) } else { folder }.to_owned())
}
