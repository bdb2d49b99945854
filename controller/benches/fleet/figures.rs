//! The figures of a run, each with its limit.

/// The limit of a figure.
#[derive(Clone, Copy, Debug)]
pub enum Limit {
    AtLeast(f64),
    Below(f64),
}

impl Limit {
    fn is_met(self, value: f64) -> bool {
        match self {
            Limit::AtLeast(limit) => value >= limit,
            Limit::Below(limit) => value < limit,
        }
    }

    fn words(self) -> String {
        match self {
            Limit::AtLeast(limit) => format!("at least {limit:.0}"),
            Limit::Below(limit) => format!("below {limit:.0}"),
        }
    }
}

/// The figures, in the order in which they were measured.
#[derive(Debug, Default)]
pub struct Figures(Vec<(String, f64, Limit)>);

impl Figures {
    /// Prints a figure now, and keeps it for the end.
    pub fn add(&mut self, what: &str, value: f64, limit: Limit) {
        line(what, format!("{value:.2}"));
        self.0.push((what.to_owned(), value, limit));
    }

    /// Prints all figures with their limits. Returns true if all are met.
    pub fn show(&self) -> bool {
        println!("\nfigures, and their limits for 100,000 volumes on 5,000 nodes");
        for (what, value, limit) in &self.0 {
            let verdict = if limit.is_met(*value) { "met" } else { "missed" };
            println!("  {what:<66} {value:>10.2}  {:<14} {verdict}", limit.words());
        }
        self.0.iter().all(|(_, value, limit)| limit.is_met(*value))
    }
}

/// Prints a number.
pub fn line(what: &str, value: String) {
    println!("  {what:<66} {value:>10}");
}
