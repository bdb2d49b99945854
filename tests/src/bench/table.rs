use super::targets::Measured;

/// A line of the table: medians over the rounds.
#[derive(Clone, Debug)]
pub struct Row {
    /// The measured target.
    pub target: String,
    /// Medians.
    pub measured: Measured,
    /// Requests per second as a share of those of the files in the same run.
    pub of_files: Option<f64>,
}

/// Returns the value in the middle.
///
/// # Panics
/// No value is given.
#[must_use]
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

impl Measured {
    /// Returns the median of each value.
    ///
    /// # Panics
    /// No measurement is given.
    #[must_use]
    pub fn median(all: &[Measured]) -> Measured {
        let of = |value: fn(&Measured) -> f64| median(&all.iter().map(value).collect::<Vec<_>>());
        let maybe = |value: fn(&Measured) -> Option<f64>| {
            let values: Vec<f64> = all.iter().filter_map(value).collect();
            (!values.is_empty()).then(|| median(&values))
        };
        Measured {
            requests_per_s: of(|one| one.requests_per_s),
            bytes_per_s: of(|one| one.bytes_per_s),
            mean_us: of(|one| one.mean_us),
            cpu_us_per_request: maybe(|one| one.cpu_us_per_request),
            resident_bytes: all.iter().filter_map(|one| one.resident_bytes).max(),
        }
    }
}

/// Prints the lines of one workload.
pub fn print(workload: &str, rows: &[Row]) {
    println!("\n{workload}");
    println!(
        "  {:<34} {:>10} {:>9} {:>9} {:>11} {:>9} {:>9}",
        "", "requests/s", "MiB/s", "mean µs", "CPU µs/req", "RSS MiB", "of files"
    );
    for Row { target, measured, of_files } in rows {
        let some = |value: Option<String>| value.unwrap_or_else(|| "-".to_owned());
        println!(
            "  {:<34} {:>10.0} {:>9.1} {:>9.1} {:>11} {:>9} {:>9}",
            target,
            measured.requests_per_s,
            measured.bytes_per_s / f64::from(1 << 20),
            measured.mean_us,
            some(measured.cpu_us_per_request.map(|value| format!("{value:.1}"))),
            some(measured.resident_bytes.map(|value| format!("{:.1}", value as f64 / f64::from(1 << 20)))),
            some(of_files.map(|value| format!("{:.0} %", value * 100.0))),
        );
    }
}
