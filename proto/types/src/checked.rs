/// Implements the conversions of a type that is a checked `String` and has a function `new`, which checks.
#[macro_export]
macro_rules! checked_text {
    ($name:ident, $error:ty) => {
        impl $name {
            /// Returns the text that `new` has checked.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl ::std::str::FromStr for $name {
            type Err = $error;
            fn from_str(text: &str) -> Result<$name, $error> {
                $name::new(text)
            }
        }

        impl TryFrom<String> for $name {
            type Error = $error;
            fn try_from(text: String) -> Result<$name, $error> {
                $name::new(&text)
            }
        }

        impl From<$name> for String {
            fn from(checked: $name) -> String {
                checked.0
            }
        }

        impl ::std::fmt::Display for $name {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl ::std::fmt::Debug for $name {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                write!(f, "{:?}", self.0)
            }
        }
    };
}

#[cfg(test)]
mod tests {
    struct Digits(String);

    impl Digits {
        fn new(text: &str) -> Result<Digits, String> {
            let is_number = text.bytes().all(|byte| byte.is_ascii_digit());
            if is_number { Ok(Digits(text.to_owned())) } else { Err(format!("not digits: {text}")) }
        }
    }

    checked_text!(Digits, String);

    #[test]
    fn a_text_is_checked_by_each_conversion_and_shown_unchanged() {
        let digits: Digits = "42".parse().unwrap();
        assert_eq!((digits.as_str(), digits.to_string().as_str()), ("42", "42"));
        assert_eq!(format!("{digits:?}"), "\"42\"");
        assert_eq!(String::from(digits), "42");
        assert_eq!("4x".parse::<Digits>().unwrap_err(), "not digits: 4x");
        assert_eq!(Digits::try_from("x".to_owned()).unwrap_err(), "not digits: x");
    }
}
