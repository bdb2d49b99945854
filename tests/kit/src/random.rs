//! A sequence of numbers that a seed determines, for ever.

/// A generator (xorshift64*). A test prints its seed, so that a failing run can be repeated.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Starts the sequence of that seed; 0 counts as 1.
    #[must_use]
    pub fn new(seed: u64) -> Random {
        Random(seed.max(1))
    }

    /// Returns the next number below `bound`, which is at most 2^32.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32) % bound
    }

    /// Returns true in one of `count` cases.
    pub fn one_in(&mut self, count: u64) -> bool {
        self.below(count) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_determines_the_sequence() {
        let sequence = |seed| {
            let mut random = Random::new(seed);
            [(); 8].map(|()| random.below(1000))
        };
        assert_eq!(sequence(7), sequence(7));
        assert_ne!(sequence(7), sequence(8));
        assert_eq!(sequence(0), sequence(1));
        let mut random = Random::new(3);
        let hits = (0..4000).filter(|_| random.one_in(4)).count();
        assert!((900..1100).contains(&hits), "{hits}");
    }
}
