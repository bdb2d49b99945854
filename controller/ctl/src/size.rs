use std::str::FromStr;

/// A number of bytes as people write it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size(pub u64);

const UNITS: [(&str, u32); 5] = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10), ("B", 0)];

impl FromStr for Size {
    type Err = String;
    fn from_str(text: &str) -> Result<Size, String> {
        let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let (number, unit) = text.split_at(digits);
        let wrong =
            || format!("{text:?} is no size: use a whole number with KiB, MiB, GiB or TiB, like 10GiB");
        let number: u64 = number.parse().map_err(|_| wrong())?;
        let shift = match unit.trim_start() {
            "" => 0,
            unit => {
                let short = |name: &str| name.trim_end_matches('B') == unit && !unit.is_empty();
                let known = UNITS.iter().find(|(name, _)| *name == unit || short(name));
                known.ok_or_else(wrong)?.1
            }
        };
        number.checked_mul(1 << shift).map(Size).ok_or_else(|| format!("{text:?} is too large"))
    }
}

/// Formats bytes for people, in IEC units with at most one decimal.
pub(super) fn human(bytes: u64) -> String {
    let (name, shift) = UNITS.iter().find(|(_, shift)| bytes >> shift > 0).unwrap_or(&("B", 0));
    let tenths = (u128::from(bytes) * 10) >> shift;
    match tenths % 10 {
        0 => format!("{} {name}", tenths / 10),
        tenth => format!("{}.{tenth} {name}", tenths / 10),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_people_write() {
        for (text, bytes) in [
            ("4096", 4096),
            ("1KiB", 1024),
            ("10GiB", 10 << 30),
            ("10 GiB", 10 << 30),
            ("5Gi", 5 << 30),
            ("2TiB", 2 << 40),
            ("7B", 7),
        ] {
            assert_eq!(text.parse(), Ok(Size(bytes)), "{text}");
        }
        for bad in ["", "GiB", "10GB", "10gib", "-1", "1.5GiB", "99999999999TiB", "10Gi B"] {
            assert!(bad.parse::<Size>().is_err(), "{bad}");
        }
    }

    #[test]
    fn shows_iec_units() {
        for (bytes, text) in [(0, "0 B"), (1023, "1023 B"), (10 << 30, "10 GiB"), (1536, "1.5 KiB")] {
            assert_eq!(human(bytes), text);
        }
        assert_eq!(human(u64::MAX), "16777215.9 TiB");
    }
}
