use proptest::prelude::*;

use super::*;

const OFFER: Offer<'static> = Offer {
    name: "vol-1",
    size_bytes: 0x4000_0000,
    max_request_bytes: 32 << 20,
    max_simple_request_bytes: 8 << 20,
};

fn option(option: u32, data: &[u8]) -> Vec<u8> {
    let mut out = OPTION_MAGIC.to_be_bytes().to_vec();
    out.extend(option.to_be_bytes());
    out.extend(u32::try_from(data.len()).unwrap().to_be_bytes());
    out.extend(data);
    out
}

fn go(name: &str, wanted: &[u16]) -> Vec<u8> {
    let mut out = u32::try_from(name.len()).unwrap().to_be_bytes().to_vec();
    out.extend(name.as_bytes());
    out.extend(u16::try_from(wanted.len()).unwrap().to_be_bytes());
    out.extend(wanted.iter().flat_map(|kind| kind.to_be_bytes()));
    out
}

fn replied(option: u32, kind: u32, data: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    reply(&mut out, option, kind, data);
    out
}

/// Feeds `input` until the machine waits or ends.
fn run(handshake: &mut Handshake, mut input: &[u8]) -> (Vec<u8>, Next) {
    let mut output = Vec::new();
    loop {
        let (used, next) = handshake.advance(&OFFER, input, &mut output);
        input = &input[used..];
        if next != Next::Go {
            return (output, next);
        }
    }
}

/// Returns a client with both flags that sends `options`.
fn client(options: &[u8]) -> (Vec<u8>, Next) {
    let mut handshake = Handshake::new();
    assert_eq!(run(&mut handshake, &[0, 0, 0, 3]), (vec![], Next::Wait));
    run(&mut handshake, options)
}

#[test]
fn golden_bytes_of_greeting_and_go() {
    assert_eq!(greeting(), b"NBDMAGICIHAVEOPT\x00\x03");
    let sent = b"IHAVEOPT\0\0\0\x07\0\0\0\x0d\0\0\0\x05vol-1\0\x01\0\x03";
    let expected: &[&[u8]] = &[
        b"\0\x03\xe8\x89\x04\x55\x65\xa9\0\0\0\x07\0\0\0\x03\0\0\0\x0c",
        b"\0\0\0\0\0\0\x40\0\0\0\x01\x6d",
        b"\0\x03\xe8\x89\x04\x55\x65\xa9\0\0\0\x07\0\0\0\x03\0\0\0\x0e",
        b"\0\x03\0\0\x02\0\0\0\x10\0\0\x80\0\0",
        b"\0\x03\xe8\x89\x04\x55\x65\xa9\0\0\0\x07\0\0\0\x01\0\0\0\0",
    ];
    assert_eq!(client(sent), (expected.concat(), Next::Transmission));
}

#[test]
fn export_name_with_and_without_zeroes() {
    let mut expected = vec![0, 0, 0, 0, 0x40, 0, 0, 0, 1, 0x6d];
    assert_eq!(client(&option(1, b"vol-1")), (expected.clone(), Next::Transmission));
    assert_eq!(client(&option(1, b"")), (expected.clone(), Next::Transmission));
    assert_eq!(client(&option(1, b"other")), (vec![], Next::Close));
    expected.extend([0; 124]);
    let mut plain = Handshake::new();
    assert_eq!(
        run(&mut plain, &[[0, 0, 0, 0].as_slice(), &option(1, b"")].concat()),
        (expected, Next::Transmission)
    );
}

#[test]
fn clients_that_are_not_newstyle_are_closed() {
    for first in [[0x25, 0x60, 0x95, 0x13], [0, 0, 0, 4], *b"GET "] {
        assert_eq!(run(&mut Handshake::new(), &first), (vec![], Next::Close));
    }
    assert_eq!(client(b"NBDMAGIC\0\0\0\x07\0\0\0\0"), (vec![], Next::Close));
}

#[test]
fn list_and_abort_are_answered_and_unknown_options_refused() {
    let listed = [replied(3, REP_SERVER, b"\0\0\0\x05vol-1"), replied(3, REP_ACK, b"")].concat();
    assert_eq!(client(&option(3, b"")), (listed, Next::Wait));
    assert_eq!(client(&option(2, b"")), (replied(2, REP_ACK, b""), Next::Close));
    // STARTTLS, LIST_META_CONTEXT, EXTENDED_HEADERS, and a number from the future
    for unknown in [5, 9, 11, 4711] {
        assert_eq!(client(&option(unknown, b"xyz")), (replied(unknown, REP_ERR_UNSUP, b""), Next::Wait));
    }
}

#[test]
fn info_is_answered_and_negotiation_continues() {
    let (answer, next) = client(&[option(6, &go("", &[1])), option(7, &go("vol-1", &[]))].concat());
    assert_eq!(next, Next::Transmission);
    assert!(answer.windows(7).any(|part| part == b"\0\x01vol-1"), "the name was asked for");
    let (answer, next) = client(&option(7, &go("other", &[])));
    assert_eq!((answer, next), (replied(7, REP_ERR_UNKNOWN, b"the only export here is vol-1"), Next::Wait));
}

#[test]
fn structured_replies_change_the_largest_request() {
    let mut handshake = Handshake::new();
    let sent = [[0, 0, 0, 3].as_slice(), &option(8, b""), &option(7, &go("", &[3]))].concat();
    let (answer, next) = run(&mut handshake, &sent);
    assert_eq!(next, Next::Transmission);
    assert!(handshake.structured());
    assert!(answer.ends_with(
        &[replied(7, REP_INFO, b"\0\x03\0\0\x02\0\0\0\x10\0\x02\0\0\0"), replied(7, REP_ACK, b"")].concat()
    ));
}

#[test]
fn lengths_that_do_not_fit_are_invalid() {
    for data in
        [&b""[..], b"\0\0\0\x09vol-1\0\0", b"\0\0\0\0\0\x02\0\x03", b"\0\0\0\0\0\0\0", b"\xff\xff\xff\xff"]
    {
        let (answer, next) = client(&option(7, data));
        assert_eq!((&answer[12..16], next), (&REP_ERR_INVALID.to_be_bytes()[..], Next::Wait), "{data:?}");
    }
    for kind in [3, 8] {
        assert_eq!(&client(&option(kind, b"x")).0[12..16], REP_ERR_INVALID.to_be_bytes());
    }
}

#[test]
fn too_long_options_pass_by() {
    let long = vec![0; MAX_OPTION_BYTES as usize + 1];
    let sent = [option(7, &long), option(2, b"")].concat();
    let expected = [replied(7, REP_ERR_TOO_BIG, b""), replied(2, REP_ACK, b"")].concat();
    assert_eq!(client(&sent), (expected.clone(), Next::Close));
    let mut handshake = Handshake::new();
    run(&mut handshake, &[0, 0, 0, 3]);
    let (first, rest) = sent.split_at(5000);
    assert_eq!(run(&mut handshake, first), (vec![], Next::Wait));
    assert_eq!(run(&mut handshake, rest), (expected, Next::Close));
    assert_eq!(client(&option(1, &long)).1, Next::Close);
}

proptest! {
    #[test]
    fn any_bytes_end_or_wait(bytes in proptest::collection::vec(any::<u8>(), 0..200), cut in 0usize..200) {
        let mut handshake = Handshake::new();
        run(&mut handshake, &[0, 0, 0, 3]);
        run(&mut handshake, &bytes);
        // As options with any data, whole and cut
        let whole = option(u32::from(bytes.first().copied().unwrap_or(7)) % 12, &bytes);
        let _ = client(&whole);
        let _ = client(&whole[..cut.min(whole.len())]);
    }

    #[test]
    fn pieces_give_the_same_as_the_whole(cuts in proptest::collection::vec(1usize..40, 1..40)) {
        let sent = [option(8, b""), option(5, b"tls"), option(3, b""), option(7, &go("vol-1", &[1, 3]))]
            .concat();
        let whole = client(&sent);
        let mut handshake = Handshake::new();
        run(&mut handshake, &[0, 0, 0, 3]);
        let (mut output, mut input) = (Vec::new(), Vec::new());
        let (mut sent, mut last) = (sent.as_slice(), Next::Wait);
        for cut in cuts.into_iter().cycle() {
            let (piece, rest) = sent.split_at(cut.min(sent.len()));
            input.extend(piece);
            sent = rest;
            loop {
                let (used, next) = handshake.advance(&OFFER, &input, &mut output);
                input.drain(..used);
                last = next;
                if next != Next::Go {
                    break;
                }
            }
            if last != Next::Wait {
                break;
            }
        }
        prop_assert_eq!((output, last), whole);
    }
}
