//! Limits on TLS handshakes. A handshake costs a signature, so clients that cannot authenticate get few of
//! them. A flood does not keep the controller out. Addresses that authenticated lately have a share of their
//! own. A new handshake takes the place of the oldest one that waits, silent ones first.
//!
//! A handshake whose client has sent something keeps its place for [`YOUNG_FOR`]. Otherwise a flood of new
//! ones would displace each before it can end. While all places are so young, the new one is refused. So a
//! client in such a flood may have to try several times, and a try that gets a place succeeds.
//!
//! Pure: the caller gives the time.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// An address that has authenticated lately may have the handshakes of other addresses times this factor.
const FRIEND_FACTOR: usize = 4;
/// The number of failures after which an address waits until some are forgiven, one in each
/// [`FORGIVEN_EVERY`]. Fifty signatures a second are a small part of a processor. A controller behind the
/// same address as a client that always fails is lucky in one of its tries.
const FAILURES_MAX: u32 = 50;
const FORGIVEN_EVERY: Duration = Duration::from_millis(20);
/// The time for which an address counts as a friend after it has authenticated, and after its last connection
/// has ended.
const FRIEND_FOR: Duration = Duration::from_hours(1);
/// The time for which a handshake keeps its place. Longer than a handshake between nodes takes, whose way to
/// the other one and back is some milliseconds. The shorter it is, the more tries get a place in a flood.
const YOUNG_FOR: Duration = Duration::from_millis(50);
/// Addresses that are remembered.
const ADDRESSES_MAX: usize = 1024;
/// Failures are logged no more often than that.
const LOG_EVERY: Duration = Duration::from_secs(10);

/// The clients that are known, and their handshakes.
#[derive(Debug)]
pub(crate) struct TlsHandshakes {
    addresses: HashMap<IpAddr, ClientAddress>,
    /// In progress, from the oldest to the newest. At most `max` are of addresses that have authenticated
    /// lately, and at most `max` of others.
    running: Vec<RunningHandshake>,
    next_id: u64,
    max: usize,
    max_of_source: usize,
    logged_at: Option<Instant>,
    not_logged: u64,
}

/// The end of a handshake, as it is counted in the metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HandshakeOutcome {
    /// With a certificate that is accepted here.
    Authenticated,
    /// Without one, if that is permitted.
    Anonymous,
    /// With an error, or not in time.
    Failed,
    /// The client has sent nothing: that has cost no signature.
    Silent,
}

/// A handshake in progress.
#[derive(Debug)]
struct RunningHandshake {
    id: u64,
    address: IpAddr,
    is_friend: bool,
    stage: Stage,
    begun_at: Instant,
}

/// The progress of a handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    /// The client has sent nothing yet.
    Silent,
    /// The client has sent something.
    Heard,
    /// The client has authenticated, and waits for the server. Nothing takes its place.
    Authenticated,
}

#[derive(Debug)]
struct ClientAddress {
    under_way: usize,
    /// Open connections with a certificate.
    connected: usize,
    failures: u32,
    forgiven_at: Instant,
    authenticated_at: Option<Instant>,
}

/// The place of a handshake among those in progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(crate) struct BegunHandshake {
    pub id: u64,
    /// The handshake whose place it has taken, which has to be ended.
    pub displaced: Option<u64>,
    address: IpAddr,
}

impl RunningHandshake {
    /// Returns true if a new handshake may take its place.
    fn yields(&self, now: Instant) -> bool {
        match self.stage {
            Stage::Silent => true,
            Stage::Heard => now.saturating_duration_since(self.begun_at) >= YOUNG_FOR,
            Stage::Authenticated => false,
        }
    }
}

impl ClientAddress {
    fn is_friend(&self, now: Instant) -> bool {
        self.connected > 0 || self.authenticated_at.is_some_and(|at| now.duration_since(at) < FRIEND_FOR)
    }

    fn forgive(&mut self, now: Instant) {
        let periods = now.duration_since(self.forgiven_at).as_millis() / FORGIVEN_EVERY.as_millis();
        let periods = u32::try_from(periods).unwrap_or(u32::MAX);
        self.failures = self.failures.saturating_sub(periods);
        self.forgiven_at = if self.failures == 0 { now } else { self.forgiven_at + FORGIVEN_EVERY * periods };
    }

    fn is_forgotten(&self, now: Instant) -> bool {
        self.under_way == 0 && self.failures == 0 && !self.is_friend(now)
    }
}

impl TlsHandshakes {
    /// At most `max` handshakes at once, and `max_of_source` of one address.
    pub fn new(max: usize, max_of_source: usize) -> TlsHandshakes {
        let (addresses, running, next_id) = Default::default();
        TlsHandshakes { addresses, running, next_id, max, max_of_source, logged_at: None, not_logged: 0 }
    }

    /// Begins a handshake with a client at this address. Returns none if the client has to be disconnected.
    pub fn begin(&mut self, address: IpAddr, now: Instant) -> Option<BegunHandshake> {
        let address = source(address);
        if !self.addresses.contains_key(&address) {
            self.make_room(now)?;
        }
        let known = self.addresses.entry(address).or_insert(ClientAddress {
            under_way: 0,
            connected: 0,
            failures: 0,
            forgiven_at: now,
            authenticated_at: None,
        });
        known.forgive(now);
        let is_friend = known.is_friend(now);
        // The failures of a friend may be those of another client at its address.
        if !is_friend && known.failures >= FAILURES_MAX {
            return None;
        }
        let under_way = known.under_way;
        let displaced = self.make_place((address, is_friend, under_way), now)?;
        let id = self.next_id;
        self.next_id += 1;
        self.running.push(RunningHandshake { id, address, is_friend, stage: Stage::Silent, begun_at: now });
        if let Some(known) = self.addresses.get_mut(&address) {
            known.under_way += 1;
        }
        Some(BegunHandshake { id, displaced, address })
    }

    /// Ends a handshake for a new one of `address` if all places are in use. It ends the oldest one of the
    /// same address, or of the address that has the most. Returns its number, and None if no handshake
    /// yields.
    fn make_place(
        &mut self,
        (address, is_friend, under_way): (IpAddr, bool, usize),
        now: Instant,
    ) -> Option<Option<u64>> {
        let own_max = if is_friend { self.max_of_source * FRIEND_FACTOR } else { self.max_of_source };
        let alike = |one: &RunningHandshake| one.is_friend == is_friend;
        let is_full = self.running.iter().filter(|one| alike(one)).count() >= self.max;
        let victim = if under_way >= own_max {
            self.oldest(|one| one.address == address && (!is_full || alike(one)) && one.yields(now))?
        } else if is_full {
            let of = |address| self.running.iter().filter(|one| alike(one) && one.address == address).count();
            let waiting = |one: &&RunningHandshake| alike(one) && one.stage != Stage::Authenticated;
            let most = self.running.iter().filter(waiting).map(|one| of(one.address)).max()?;
            // Young ones of an address yield to an address that has fewer also with the new one.
            let is_greedy = most > under_way + 1;
            self.oldest(|one| alike(one) && of(one.address) == most && (is_greedy || one.yields(now)))?
        } else {
            return Some(None);
        };
        let RunningHandshake { id, address, .. } = self.running.remove(victim);
        if let Some(known) = self.addresses.get_mut(&address) {
            known.under_way = known.under_way.saturating_sub(1);
        }
        Some(Some(id))
    }

    /// Returns the place of the oldest of these handshakes that waits, a silent one if any is.
    fn oldest(&self, is_one: impl Fn(&RunningHandshake) -> bool) -> Option<usize> {
        let waiting = self.running.iter().enumerate();
        let waiting = waiting.filter(|(_, one)| one.stage != Stage::Authenticated && is_one(one));
        waiting.min_by_key(|(at, one)| (one.stage, *at)).map(|(at, _)| at)
    }

    /// The client of a handshake has sent something.
    pub fn hear(&mut self, begun: BegunHandshake) {
        if let Some(one) = self.running.iter_mut().find(|one| one.id == begun.id) {
            one.stage = Stage::Heard;
        }
    }

    /// The client of a handshake has authenticated: it keeps its place until the server takes the connection.
    /// Returns false if another handshake has taken the place.
    pub fn keep(&mut self, begun: BegunHandshake) -> bool {
        let one = self.running.iter_mut().find(|one| one.id == begun.id);
        one.map(|one| one.stage = Stage::Authenticated).is_some()
    }

    /// A handshake has ended.
    pub fn end(&mut self, begun: BegunHandshake, outcome: HandshakeOutcome, now: Instant) {
        let place = self.running.iter().position(|one| one.id == begun.id);
        let is_running = place.map(|at| self.running.remove(at)).is_some();
        let Some(known) = self.addresses.get_mut(&begun.address) else { return };
        known.under_way = known.under_way.saturating_sub(usize::from(is_running));
        match outcome {
            HandshakeOutcome::Authenticated => (known.failures, known.authenticated_at) = (0, Some(now)),
            HandshakeOutcome::Anonymous | HandshakeOutcome::Silent => {}
            HandshakeOutcome::Failed => known.failures = known.failures.saturating_add(1),
        }
    }

    /// A connection with a certificate begins, whose handshake has not ended yet.
    pub fn connect(&mut self, address: IpAddr) {
        if let Some(known) = self.addresses.get_mut(&source(address)) {
            known.connected += 1;
        }
    }

    /// A connection with a certificate has ended.
    pub fn disconnect(&mut self, address: IpAddr, now: Instant) {
        if let Some(known) = self.addresses.get_mut(&source(address)) {
            known.connected = known.connected.saturating_sub(1);
            known.authenticated_at = Some(now);
        }
    }

    /// Returns the number of earlier failures that were not logged, if this failure is to be logged now.
    pub fn log(&mut self, now: Instant) -> Option<u64> {
        if self.logged_at.is_some_and(|at| now.duration_since(at) < LOG_EVERY) {
            self.not_logged += 1;
            return None;
        }
        self.logged_at = Some(now);
        Some(std::mem::take(&mut self.not_logged))
    }

    /// Forgets addresses that do not count any more, if there are many. None: all count.
    fn make_room(&mut self, now: Instant) -> Option<()> {
        if self.addresses.len() < ADDRESSES_MAX {
            return Some(());
        }
        self.addresses.retain(|_, known| {
            known.forgive(now);
            !known.is_forgotten(now)
        });
        if self.addresses.len() >= ADDRESSES_MAX {
            // Only failures are left to forget, the fewest first. Friends and handshakes under way stay.
            let idle =
                self.addresses.iter().filter(|(_, known)| known.under_way == 0 && !known.is_friend(now));
            let address = idle.min_by_key(|(_, known)| known.failures).map(|(address, _)| *address)?;
            self.addresses.remove(&address);
        }
        Some(())
    }
}

/// Returns the source that limits apply to. For IPv6 this is the /64, because one host can have each address
/// of it.
pub(crate) fn source(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => IpAddr::V6((address.to_bits() >> 64 << 64).into()),
        address => address,
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    fn address(n: u32) -> IpAddr {
        Ipv4Addr::from(0x0a00_0000 + n).into()
    }

    #[test]
    fn an_address_that_fails_waits_and_is_forgiven() {
        let (mut all, now) = (TlsHandshakes::new(16, 4), Instant::now());
        for _ in 0..FAILURES_MAX {
            let begun = all.begin(address(1), now).unwrap();
            all.end(begun, HandshakeOutcome::Failed, now);
        }
        assert_eq!(all.begin(address(1), now), None);
        assert!(all.begin(address(2), now).is_some(), "another address has failed at nothing");
        let later = now + FORGIVEN_EVERY;
        let begun = all.begin(address(1), later).unwrap();
        all.end(begun, HandshakeOutcome::Failed, later);
        assert_eq!(all.begin(address(1), later), None, "one failure was forgiven");
    }

    #[test]
    fn strangers_do_not_keep_out_an_address_that_has_authenticated() {
        let (mut all, now) = (TlsHandshakes::new(16, 4), Instant::now());
        let begun = all.begin(address(0), now).unwrap();
        all.end(begun, HandshakeOutcome::Authenticated, now);
        let friend = all.begin(address(0), now).unwrap();
        let held: Vec<BegunHandshake> = (1..100).filter_map(|n| all.begin(address(n), now)).collect();
        assert_eq!(all.running.len(), 1 + 16, "each takes the place of another stranger");
        assert!(held.iter().all(|begun| begun.displaced != Some(friend.id)));
        let friends: Vec<BegunHandshake> = (0..100).filter_map(|_| all.begin(address(0), now)).collect();
        assert_eq!(all.running.len(), 16 + 16);
        for begun in held.into_iter().chain(friends).chain([friend]) {
            all.end(begun, HandshakeOutcome::Authenticated, now);
        }
        assert!(all.running.is_empty() && all.addresses.values().all(|known| known.under_way == 0));
    }

    #[test]
    fn a_handshake_takes_the_place_of_the_oldest_of_its_address() {
        let (mut all, now) = (TlsHandshakes::new(16, 4), Instant::now());
        let begin = |all: &mut TlsHandshakes| all.begin(address(1), now).unwrap();
        let silent: Vec<BegunHandshake> = (0..4).map(|_| begin(&mut all)).collect();
        let controller = begin(&mut all);
        assert_eq!(controller.displaced, Some(silent[0].id));
        all.hear(controller);
        // Other silent ones take the places of silent ones only.
        for _ in 0..100 {
            assert_ne!(begin(&mut all).displaced, Some(controller.id));
        }
        assert!(all.keep(controller) && !all.keep(silent[0]));
        // Nothing takes the place of a client that has authenticated, and waits for the server.
        let talking: Vec<BegunHandshake> = (0..3).map(|_| begin(&mut all)).collect();
        talking.iter().for_each(|one| assert!(all.keep(*one)));
        assert_eq!(all.begin(address(1), now), None);
        all.end(controller, HandshakeOutcome::Authenticated, now);
        assert_eq!(all.addresses[&address(1)].under_way, 3);
        all.end(silent[0], HandshakeOutcome::Silent, now);
        assert_eq!(all.addresses[&address(1)].under_way, 3, "its place was taken before");
    }

    /// Begins handshakes of one address of `floods` after the other, at random times with the mean interval
    /// `every`. Now and then, a client at address 0 tries, and each try takes `takes`. Strays send something
    /// and stay; their failures are not counted. Returns the share of the tries that succeed, in percent.
    fn flood(all: &mut TlsHandshakes, floods: &[IpAddr], every: Duration, takes: Duration) -> u32 {
        let (mut now, mut random) = (Instant::now(), 1_u64);
        let (mut tries, mut done, mut trying) = (0, 0, None::<(BegunHandshake, Instant)>);
        for from in floods.iter().cycle().take(20_000) {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            now += every * u32::try_from((random >> 33) % 201).unwrap() / 100;
            if let Some((begun, _)) = trying.take_if(|(_, since)| now.duration_since(*since) >= takes) {
                done += u32::from(all.keep(begun));
                all.end(begun, HandshakeOutcome::Anonymous, now); // which makes no friend of it
            }
            if trying.is_none() && (random >> 44) % 97 == 0 {
                tries += 1;
                trying = all.begin(address(0), now).map(|begun| (begun, now));
                trying.iter().for_each(|(begun, _)| all.hear(*begun));
            } else if let Some(stray) = all.begin(*from, now) {
                trying.take_if(|(begun, _)| stray.displaced == Some(begun.id));
                all.hear(stray);
            }
            assert!(all.running.len() <= 2 * all.max, "friends and others");
            assert!(all.addresses.values().all(|known| known.under_way <= FRIEND_FACTOR * all.max_of_source));
        }
        100 * done / tries
    }

    #[test]
    fn a_flood_from_the_same_address_does_not_keep_a_handshake_from_its_end() {
        let (mut all, now) = (TlsHandshakes::new(64, 8), Instant::now());
        let friend = all.begin(address(0), now).unwrap();
        all.end(friend, HandshakeOutcome::Authenticated, now);
        // 250 begin in 50 ms, and 32 of them get a place: 12 %.
        let (every, takes) = (Duration::from_micros(200), Duration::from_millis(20));
        let share = flood(&mut all, &[address(0)], every, takes);
        assert!((5..20).contains(&share), "{share} % of the tries succeed");
    }

    #[test]
    fn a_flood_from_other_addresses_keeps_no_handshake_out() {
        let others: Vec<IpAddr> = (1..20).map(address).collect();
        let (every, takes) = (Duration::from_micros(100), Duration::from_millis(20));
        let share = flood(&mut TlsHandshakes::new(64, 8), &others, every, takes);
        assert!(share >= 99, "{share} % of the tries succeed: the last one may be under way");
    }

    #[test]
    fn young_handshakes_keep_their_places_and_silent_ones_do_not() {
        let (mut all, now) = (TlsHandshakes::new(16, 4), Instant::now());
        let begin = |all: &mut TlsHandshakes, at| all.begin(address(1), at);
        let talking: Vec<BegunHandshake> = (0..3).filter_map(|_| begin(&mut all, now)).collect();
        talking.iter().for_each(|one| all.hear(*one));
        let silent = begin(&mut all, now).unwrap();
        let next = begin(&mut all, now).unwrap();
        assert_eq!(next.displaced, Some(silent.id));
        all.hear(next);
        assert_eq!(begin(&mut all, now + YOUNG_FOR - Duration::from_millis(1)), None, "all are young");
        assert_eq!(begin(&mut all, now + YOUNG_FOR).unwrap().displaced, Some(talking[0].id));
    }

    #[test]
    fn an_address_stays_a_friend_while_it_is_connected() {
        let (mut all, now) = (TlsHandshakes::new(16, 4), Instant::now());
        let begun = all.begin(address(0), now).unwrap();
        all.connect(address(0));
        all.end(begun, HandshakeOutcome::Authenticated, now);
        let later = now + 2 * FRIEND_FOR;
        assert!(all.addresses[&address(0)].is_friend(later));
        all.disconnect(address(0), later);
        assert!(all.addresses[&address(0)].is_friend(later));
        assert!(!all.addresses[&address(0)].is_friend(later + FRIEND_FOR));
    }

    #[test]
    fn one_address_holds_few_handshakes_and_many_addresses_are_forgotten() {
        let (mut all, now) = (TlsHandshakes::new(16, 4), Instant::now());
        let held: Vec<BegunHandshake> = (0..100).filter_map(|_| all.begin(address(1), now)).collect();
        assert_eq!((held.len(), all.running.len()), (100, 4));
        for n in 2..5000 {
            let begun = all.begin(address(n), now).unwrap();
            all.end(begun, HandshakeOutcome::Failed, now);
        }
        assert!(all.addresses.len() <= ADDRESSES_MAX);
        assert_eq!(all.begin(address(1), now).unwrap().displaced, Some(held[96].id), "those under way count");
        let friend = all.begin(address(6000), now).unwrap();
        all.end(friend, HandshakeOutcome::Authenticated, now);
        for n in 7000..9000 {
            let begun = all.begin(address(n), now).unwrap();
            all.end(begun, HandshakeOutcome::Failed, now);
        }
        assert!(all.addresses[&address(6000)].is_friend(now));
        assert!(!all.addresses[&address(6000)].is_friend(now + FRIEND_FOR));
    }

    #[test]
    fn addresses_of_one_network_count_together() {
        let (mut all, now) = (TlsHandshakes::new(16, 2), Instant::now());
        let mut begin = |text: &str| all.begin(text.parse().unwrap(), now);
        let displaced = |begun: Option<BegunHandshake>| begun.and_then(|begun| begun.displaced);
        let first = begin("fd00::1").unwrap();
        assert_eq!(displaced(begin("fd00::2")), None);
        assert_eq!(displaced(begin("fd00::3")), Some(first.id), "the same /64");
        let others = [begin("fd00:0:0:1::1"), begin("10.0.0.1"), begin("::ffff:10.0.0.1")];
        assert!(others.iter().all(|begun| begun.unwrap().displaced.is_none()));
        let other = others[1].unwrap().id;
        assert_eq!(displaced(begin("10.0.0.1")), Some(other), "IPv4, also when it is written as IPv6");
    }

    #[test]
    fn failures_are_logged_now_and_then() {
        let (mut all, now) = (TlsHandshakes::new(16, 4), Instant::now());
        assert_eq!(all.log(now), Some(0));
        assert_eq!((all.log(now), all.log(now)), (None, None));
        assert_eq!(all.log(now + LOG_EVERY), Some(2));
    }
}
