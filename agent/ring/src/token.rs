/// The identity of an operation, carried through the kernel to its completion in the 64 bits of user data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Token {
    /// The part of the program that handles the completion.
    pub source: u8,
    /// The kind of operation in that part.
    pub kind: u8,
    /// The number of the connection, queue tag or file.
    pub index: u16,
    /// The incarnation of that, or the request.
    pub tag: u32,
}

impl Token {
    /// Returns the 64 bits.
    #[must_use]
    pub const fn pack(self) -> u64 {
        (self.source as u64) << 56 | (self.kind as u64) << 48 | (self.index as u64) << 32 | self.tag as u64
    }

    /// Reads the 64 bits back.
    #[must_use]
    #[allow(clippy::cast_possible_truncation)] // each cast cuts a field out
    pub const fn unpack(bits: u64) -> Token {
        Token {
            source: (bits >> 56) as u8,
            kind: (bits >> 48) as u8,
            index: (bits >> 32) as u16,
            tag: bits as u32,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_and_back() {
        let token = Token { source: 0xfe, kind: 3, index: 0xabcd, tag: 0x8765_4321 };
        assert_eq!(Token::unpack(token.pack()), token);
    }
}
