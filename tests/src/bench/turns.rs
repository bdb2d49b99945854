//! Measures one load on two volumes by turns, so that a change on the machine changes both.

use anyhow::Result;

/// A turn of both volumes under one load.
#[derive(Clone, Copy, Debug)]
pub struct CostFigure {
    /// The load.
    pub workload: &'static str,
    /// Requests per second of the volume with it.
    pub with: f64,
    /// The figure of the volume without the feature.
    pub without: f64,
}

/// Measures `turns` turns of a load on the volumes with and without a feature. The volume that comes first
/// changes from turn to turn.
///
/// # Errors
/// Those of `measure`, which returns requests per second.
pub(super) fn measure_by_turns<S>(
    workload: &'static str,
    (with, without): (&S, &S),
    turns: u32,
    measure: impl Fn(&S) -> Result<f64>,
) -> Result<Vec<CostFigure>> {
    let figure = |turn: u32| {
        let (with, without) = if turn.is_multiple_of(2) {
            let first = measure(without)?;
            (measure(with)?, first)
        } else {
            (measure(with)?, measure(without)?)
        };
        Ok(CostFigure { workload, with, without })
    };
    (0..turns).map(figure).collect()
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[test]
    fn the_volume_that_comes_first_changes_from_turn_to_turn() {
        let order = RefCell::new(Vec::new());
        let measure = |subject: &&'static str| {
            order.borrow_mut().push(*subject);
            Ok(if *subject == "with" { 1.0 } else { 2.0 })
        };
        let figures = measure_by_turns("load", (&"with", &"without"), 3, measure).unwrap();
        assert_eq!(*order.borrow(), ["without", "with", "with", "without", "without", "with"]);
        assert!(figures.iter().all(|figure| figure.with < figure.without), "{figures:?}");
    }
}
