use shorthorn_types::Regions;

/// The size of the volume, with its division into regions, and the size that it is about to have.
///
/// A volume never shrinks. While its regions are about to become larger, nothing may begin that names one.
#[derive(Debug)]
pub(crate) struct VolumeSize {
    regions: Regions,
    /// The wanted size, until it is reported.
    wanted_bytes: Option<u64>,
}

impl VolumeSize {
    pub fn new(size_bytes: u64) -> VolumeSize {
        VolumeSize { regions: Regions::of(size_bytes), wanted_bytes: None }
    }

    /// Returns the present division of the volume.
    pub fn regions(&self) -> Regions {
        self.regions
    }

    /// Asks for `size_bytes` as soon as possible. Of several sizes the largest counts.
    pub fn want(&mut self, size_bytes: u64) {
        self.wanted_bytes = Some(size_bytes).max(self.wanted_bytes);
    }

    /// Returns true if a wanted size is still to be reported.
    pub fn is_wanted(&self) -> bool {
        self.wanted_bytes.is_some()
    }

    /// Returns true if the regions are about to become larger.
    pub fn is_changing_regions(&self) -> bool {
        let changes = |size| Regions::of(size).region_bytes() != self.regions.region_bytes();
        self.wanted_bytes.is_some_and(changes)
    }

    /// Takes on the wanted size. Returns the division before, if the volume has grown.
    pub fn grow(&mut self) -> Option<Regions> {
        let wanted_bytes = self.wanted_bytes.take()?;
        (wanted_bytes > self.regions.size_bytes())
            .then(|| std::mem::replace(&mut self.regions, Regions::of(wanted_bytes)))
    }
}

#[cfg(test)]
mod tests {
    use shorthorn_types::{REGION_BYTES_MIN, REGIONS_MAX};

    use super::*;

    #[test]
    fn the_largest_wanted_size_counts_and_a_smaller_one_changes_nothing() {
        let mut size = VolumeSize::new(8 << 16);
        [9 << 16, 12 << 16, 10 << 16].into_iter().for_each(|bytes| size.want(bytes));
        assert!(size.is_wanted() && !size.is_changing_regions());
        assert_eq!(size.grow(), Some(Regions::of(8 << 16)));
        assert_eq!((size.regions(), size.is_wanted()), (Regions::of(12 << 16), false));
        size.want(1 << 16);
        assert_eq!(size.grow(), None);
        assert_eq!((size.regions(), size.is_wanted()), (Regions::of(12 << 16), false));
    }

    #[test]
    fn regions_change_with_the_first_size_that_has_too_many() {
        let full_bytes = REGION_BYTES_MIN * REGIONS_MAX;
        let mut size = VolumeSize::new(full_bytes / 2);
        size.want(full_bytes);
        assert!(!size.is_changing_regions());
        size.want(full_bytes + 1);
        assert!(size.is_changing_regions());
        size.grow();
        assert!(!size.is_changing_regions());
        assert_eq!(size.regions().region_bytes(), 2 * REGION_BYTES_MIN);
    }
}
