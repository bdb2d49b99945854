/// Records that work may continue after an event.
///
/// The core tries deferred requests again at the beginning of a round of work. So a wake of requests is a
/// wake of all work.
#[derive(Debug)]
pub(crate) struct WakeFlags {
    work: bool,
    requests: bool,
}

impl WakeFlags {
    /// Returns the wake of a new core: work may be pending, and no request is deferred.
    pub fn new() -> WakeFlags {
        WakeFlags { work: true, requests: false }
    }

    /// Records that other work than requests may continue.
    pub fn work(&mut self) {
        self.work = true;
    }

    pub fn work_if(&mut self, may_continue: bool) {
        self.work |= may_continue;
    }

    /// Records that all work may continue, deferred requests too.
    pub fn all(&mut self) {
        (self.work, self.requests) = (true, true);
    }

    pub fn all_if(&mut self, may_continue: bool) {
        if may_continue {
            self.all();
        }
    }

    /// Returns true if another round of work has to follow. Wakes meanwhile count for the next one.
    pub fn take_work(&mut self) -> bool {
        std::mem::take(&mut self.work)
    }

    /// Returns true if this round has to try the deferred requests again.
    pub fn take_requests(&mut self) -> bool {
        std::mem::take(&mut self.requests)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_wake_with_all_work_and_count_once() {
        let mut wake = WakeFlags::new();
        assert!(wake.take_work() && !wake.take_requests());
        wake.work_if(false);
        wake.all_if(false);
        assert!(!wake.take_work());
        wake.all();
        assert!(wake.take_work());
        wake.work();
        assert!(wake.take_requests() && !wake.take_requests());
        assert!(wake.take_work() && !wake.take_work(), "work that was woken meanwhile follows");
    }
}
