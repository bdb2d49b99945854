//! Watches a list: changes are shown below it.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::{Entry, Lister};
use crate::error::{CtlError, is_unreachable};
use crate::format::Format;
use crate::output;

/// The interval of rebuilding the list.
const POLL: Duration = Duration::from_secs(2);
/// The time limit of an unreachable controller: another one takes over sooner.
const PATIENCE: Duration = Duration::from_secs(60);

/// Shows the list, then each object that looks different, until it is interrupted.
pub(crate) async fn watch(lister: Lister, server: &str, format: Format) -> Result<(), CtlError> {
    let mut seen: Option<BTreeMap<String, Entry>> = None;
    let mut answered = Instant::now();
    loop {
        match lister.list().await? {
            Ok(mut list) => {
                answered = Instant::now();
                let now: BTreeMap<String, Entry> =
                    list.entries.iter().map(|entry| (entry.name.clone(), entry.clone())).collect();
                let is_first = seen.is_none();
                let before = seen.replace(now.clone()).unwrap_or_default();
                let gone: Vec<&String> = before.keys().filter(|name| !now.contains_key(*name)).collect();
                list.entries
                    .retain(|entry| before.get(&entry.name).is_none_or(|old| differs(old, entry, format)));
                if is_first && list.entries.is_empty() {
                    output::complain(list.if_empty)?;
                } else if !list.entries.is_empty() {
                    let is_table = matches!(format, Format::Table | Format::Wide);
                    output::print(&if is_table { list.table(format, is_first) } else { list.text(format)? })?;
                }
                for name in gone {
                    output::complain(&format!("{name} is gone"))?;
                }
            }
            Err(error) if is_unreachable(&error) && answered.elapsed() < PATIENCE => {}
            Err(error) => return Err(CtlError::of(&error, server)),
        }
        sleep(POLL).await;
    }
}

/// Returns true if a reader of that format sees a difference.
fn differs(old: &Entry, new: &Entry, format: Format) -> bool {
    match format {
        Format::Table | Format::Wide => old.rows != new.rows,
        Format::Json | Format::Yaml => old.fields != new.fields,
        Format::Name => false,
    }
}
