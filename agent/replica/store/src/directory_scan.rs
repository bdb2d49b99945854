//! Collects the facts about the files in a directory.

use nix::fcntl::OFlag;
use shorthorn_chain::{
    Checks, DirectoryEntry, DirectoryFacts, INTENT_FILE, ImageFacts, ImageName, MetaFacts, Recovery,
    VOLUME_META, classify, recover,
};
use shorthorn_types::ByteRange;

use crate::directory::{Directory, stat_of};
use crate::error::StoreError;
use crate::files::data_extents;

/// Derives the layout of the directory, and the steps that repair it.
pub(crate) fn recover_directory(directory: &Directory, checks: &Checks) -> Result<Recovery, StoreError> {
    recover(collect(directory)?, checks).map_err(|error| StoreError::chain(directory.path(), error))
}

pub(crate) fn collect(directory: &Directory) -> Result<DirectoryFacts, StoreError> {
    let mut facts = DirectoryFacts::default();
    for name in directory.list()? {
        match classify(&name) {
            DirectoryEntry::VolumeMeta => facts.volume_meta = directory.read(VOLUME_META)?,
            DirectoryEntry::Intent => facts.intent = directory.read(INTENT_FILE)?,
            DirectoryEntry::Image(image) => {
                let found = image_facts(directory, &image)?;
                facts.images.insert(image, found);
            }
            DirectoryEntry::Meta(image) => {
                if let (Some(stat), Some(bytes)) = (directory.stat(&name)?, directory.read(&name)?) {
                    facts.metas.insert(image, MetaFacts { inode: stat.inode, bytes });
                }
            }
            DirectoryEntry::ForeignMeta => facts.foreign_metas.push(name),
            DirectoryEntry::Temp => facts.temps.push(name),
            DirectoryEntry::Other => {}
        }
    }
    Ok(facts)
}

fn image_facts(directory: &Directory, image: &ImageName) -> Result<ImageFacts, StoreError> {
    let name = image.as_str();
    let file = directory.open_file(name, OFlag::O_RDONLY)?;
    let stat = stat_of(&file).map_err(|error| StoreError::io("look at", directory.path_of(name), error))?;
    let mut holds_data = false;
    if image.is_head()
        && stat.allocated_bytes > 0
        && let Ok(whole) = ByteRange::new(0, stat.size_bytes)
    {
        data_extents(&file, whole, &mut |_| holds_data = true)
            .map_err(|errno| StoreError::io("find the data of", directory.path_of(name), errno))?;
    }
    Ok(ImageFacts { size_bytes: stat.size_bytes, inode: stat.inode, holds_data })
}
