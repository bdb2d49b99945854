//! The numbers of one scrape.

use std::fmt;

use prometheus_client::encoding::text;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

/// The labels of one series. The author of a metric ensures that only few different ones exist.
type SeriesLabels = Vec<(&'static str, String)>;

fn owned(labels: &[(&'static str, &str)]) -> SeriesLabels {
    labels.iter().map(|(name, value)| (*name, (*value).to_owned())).collect()
}

/// The content of one answer. Names have the prefix `shorthorn_` and base units; counters get `_total`.
#[derive(Debug, Default)]
pub struct MetricsPage {
    registry: Registry,
}

impl MetricsPage {
    /// Adds gauges, which are read for this page.
    pub fn gauges(&mut self, name: &str, help: &str) -> Gauges {
        let gauges = Gauges(Family::default());
        self.registry.register(name, help, gauges.0.clone());
        gauges
    }

    /// Adds counters that are kept elsewhere, read for this page.
    pub fn counters(&mut self, name: &str, help: &str) -> Counters {
        let counters = Counters::default();
        self.show_counters(name, help, &counters);
        counters
    }

    /// Adds sums of time that are kept elsewhere, read for this page.
    pub fn seconds(&mut self, name: &str, help: &str) -> Seconds {
        let seconds = Seconds(Family::default());
        self.registry.register(name, help, seconds.0.clone());
        seconds
    }

    /// Adds counters that the program keeps all the time.
    pub fn show_counters(&mut self, name: &str, help: &str, counters: &Counters) {
        self.registry.register(name, help, counters.0.clone());
    }

    /// Adds histograms that the program keeps all the time.
    pub fn show_histograms(&mut self, name: &str, help: &str, histograms: &Histograms) {
        self.registry.register(name, help, histograms.0.clone());
    }

    /// Returns the page as OpenMetrics text.
    ///
    /// # Errors
    /// None that can happen: it is written to memory.
    pub fn text(&self) -> Result<String, fmt::Error> {
        let mut text = String::new();
        text::encode(&mut text, &self.registry)?;
        Ok(text)
    }
}

/// Numbers that go up and down, by labels.
#[derive(Clone, Debug)]
pub struct Gauges(Family<SeriesLabels, Gauge>);

impl Gauges {
    /// Sets the value of a series; a value beyond the maximum is shown as the maximum.
    pub fn set(&self, labels: &[(&'static str, &str)], value: u64) {
        self.0.get_or_create_owned(&owned(labels)).set(i64::try_from(value).unwrap_or(i64::MAX));
    }
}

/// Numbers that only go up, by labels; cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Counters(Family<SeriesLabels, Counter>);

impl Counters {
    /// Counts one more.
    pub fn count(&self, labels: &[(&'static str, &str)]) {
        self.add(labels, 1);
    }

    /// Counts that many more.
    pub fn add(&self, labels: &[(&'static str, &str)], more: u64) {
        self.0.get_or_create_owned(&owned(labels)).inc_by(more);
    }

    /// Returns the count.
    #[must_use]
    pub fn get(&self, labels: &[(&'static str, &str)]) -> u64 {
        self.0.get_or_create_owned(&owned(labels)).get()
    }
}

/// Sums of time that only grow, by labels.
#[derive(Clone, Debug)]
pub struct Seconds(Family<SeriesLabels, Counter<f64, std::sync::atomic::AtomicU64>>);

impl Seconds {
    /// Shows that much more.
    pub fn add(&self, labels: &[(&'static str, &str)], seconds: f64) {
        self.0.get_or_create_owned(&owned(labels)).inc_by(seconds);
    }
}

/// Histograms of durations, by labels; cheap to clone.
#[derive(Clone, Debug)]
pub struct Histograms(Family<SeriesLabels, Histogram, fn() -> Histogram>);

/// The buckets from a millisecond to two minutes, which cover the waits of the control plane.
const BUCKETS_S: [f64; 12] = [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0];

impl Default for Histograms {
    fn default() -> Histograms {
        Histograms(Family::new_with_constructor(|| Histogram::new(BUCKETS_S)))
    }
}

impl Histograms {
    /// Records a duration.
    pub fn observe(&self, labels: &[(&'static str, &str)], took: std::time::Duration) {
        self.0.get_or_create_owned(&owned(labels)).observe(took.as_secs_f64());
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use shorthorn_testkit::metrics::{samples, value};

    use super::*;

    #[test]
    fn a_page_is_openmetrics() {
        let (calls, took) = (Counters::default(), Histograms::default());
        calls.count(&[("method", "Create"), ("code", "Ok")]);
        calls.count(&[("method", "Create"), ("code", "Ok")]);
        took.observe(&[], Duration::from_millis(20));
        let mut page = MetricsPage::default();
        page.show_counters("shorthorn_calls", "Calls", &calls);
        page.show_histograms("shorthorn_call_duration_seconds", "How long they took", &took);
        let disks = page.gauges("shorthorn_disk_size_bytes", "Size of a disk");
        disks.set(&[("disk", "/mnt/\"quoted\"\n")], u64::MAX);
        page.seconds("shorthorn_busy_seconds", "Busy").add(&[], 0.5);
        let samples = samples(&page.text().unwrap());
        let value = |series: &str| value(&samples, series);
        assert_eq!(value("shorthorn_calls_total{method=\"Create\",code=\"Ok\"}"), Some(2.0));
        assert_eq!(value("shorthorn_call_duration_seconds_bucket{le=\"0.01\"}"), Some(0.0));
        assert_eq!(value("shorthorn_call_duration_seconds_bucket{le=\"0.03\"}"), Some(1.0));
        assert_eq!(value("shorthorn_call_duration_seconds_bucket{le=\"+Inf\"}"), Some(1.0));
        assert_eq!(value("shorthorn_call_duration_seconds_count"), Some(1.0));
        let escaped = "shorthorn_disk_size_bytes{disk=\"/mnt/\\\"quoted\\\"\\n\"}";
        #[allow(clippy::cast_precision_loss)] // as a client that reads it
        let most = i64::MAX as f64;
        assert_eq!(value(escaped), Some(most), "{samples:?}");
        assert_eq!(value("shorthorn_busy_seconds_total"), Some(0.5));
    }
}
