//! A load on a volume that knows the possible contents of every sector.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use shorthorn_checker::{Checker, Id, Micros};

use crate::device_client::DeviceClient;
use crate::nbd_client::{NbdClient, NbdCompletion, NbdRequest};

const SECTOR_BYTES: usize = 512;
const SECTORS_PER_BLOCK: usize = 8;
/// The longest request, in sectors: beyond one region of 64 KiB.
const SECTORS_PER_REQUEST_MAX: usize = 192;
/// Reads of a full comparison.
const SECTORS_PER_CHECK: usize = 256;
/// The number of requests between full comparisons. The possible contents of a sector are searched among the
/// writes since the last one, which gets slow with more of them.
const REQUESTS_PER_ROUND: u64 = 20_000;
/// The maximum time without an answer. Stalls one after the other are normal when processes die; a single one
/// of this length is a bug.
const STALL_LIMIT: Duration = Duration::from_secs(120);
/// The number of errors after which a load ends when it reads everything.
const KEPT_ERRORS_MAX: usize = 10_000;

/// The parameters of a load.
#[derive(Clone, Debug)]
pub struct GuestOptions {
    /// The same seed makes the same requests, though not in the same order of completion.
    pub seed: u64,
    /// The part of the volume that is used.
    pub first_sector: u64,
    /// The number of sectors, which all read as zeroes at first.
    pub sectors: usize,
    /// Requests in flight.
    pub depth: usize,
    /// True if errors are kept for [`Guest::take_errors`] instead of ending the load. A write that fails may
    /// have happened or not.
    pub keeps_errors: bool,
    /// True if a power cut may come: then durable writes matter.
    pub counts_flushes: bool,
}

impl GuestOptions {
    /// Returns sixteen requests in flight on 16 MiB, 1 MiB into the volume.
    #[must_use]
    pub fn new(seed: u64) -> GuestOptions {
        GuestOptions {
            seed,
            first_sector: 2048,
            sectors: 32768,
            depth: 16,
            keeps_errors: false,
            counts_flushes: false,
        }
    }
}

/// The counters of a load.
#[derive(Clone, Copy, Debug, Default)]
pub struct GuestCounts {
    /// Requests that were answered.
    pub answered: u64,
    /// The longest time without any answer while there were requests.
    pub longest_stall: Duration,
}

/// The duration of a request, without the time in which an earlier request to the same blocks was in flight.
#[derive(Clone, Debug, Default)]
pub struct Wait {
    /// From the submission, or the end of the request before it.
    pub time: Duration,
    /// The kind and the range of the request, for people.
    pub request: String,
}

/// A sector shows a forbidden content.
#[derive(Debug)]
pub struct WrongByte(String);

impl std::fmt::Display for WrongByte {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        to.write_str(&self.0)
    }
}

impl std::error::Error for WrongByte {}

/// The connection through which a load sends its requests.
pub trait VolumeClient: std::fmt::Debug {
    /// Sends a request and returns its cookie.
    fn submit(&mut self, request: NbdRequest) -> u64;

    /// Waits for the next answer; none if `limit` passes before.
    ///
    /// # Errors
    /// The client does not work any more.
    fn wait(&mut self, limit: Duration) -> Result<Option<NbdCompletion>>;

    /// Requests without an answer, by their cookies.
    fn outstanding(&self) -> &BTreeMap<u64, NbdRequest>;

    /// Returns how often the client had to connect again.
    fn reconnections(&self) -> u64;
}

impl VolumeClient for NbdClient {
    fn submit(&mut self, request: NbdRequest) -> u64 {
        NbdClient::submit(self, request)
    }

    fn wait(&mut self, limit: Duration) -> Result<Option<NbdCompletion>> {
        NbdClient::wait(self, limit)
    }

    fn outstanding(&self) -> &BTreeMap<u64, NbdRequest> {
        NbdClient::outstanding(self)
    }

    fn reconnections(&self) -> u64 {
        NbdClient::reconnections(self)
    }
}

impl VolumeClient for DeviceClient {
    fn submit(&mut self, request: NbdRequest) -> u64 {
        DeviceClient::submit(self, request)
    }

    fn wait(&mut self, limit: Duration) -> Result<Option<NbdCompletion>> {
        DeviceClient::wait(self, limit)
    }

    fn outstanding(&self) -> &BTreeMap<u64, NbdRequest> {
        DeviceClient::outstanding(self)
    }

    /// Returns 0, because the kernel reconnects.
    fn reconnections(&self) -> u64 {
        0
    }
}

impl VolumeClient for Box<dyn VolumeClient + Send> {
    fn submit(&mut self, request: NbdRequest) -> u64 {
        (**self).submit(request)
    }

    fn wait(&mut self, limit: Duration) -> Result<Option<NbdCompletion>> {
        (**self).wait(limit)
    }

    fn outstanding(&self) -> &BTreeMap<u64, NbdRequest> {
        (**self).outstanding()
    }

    fn reconnections(&self) -> u64 {
        (**self).reconnections()
    }
}

#[derive(Debug)]
struct InFlight {
    sectors: std::ops::Range<usize>,
    /// The id of the written data.
    id: Id,
    submitted: Micros,
    /// The time since which no earlier request to these blocks is in flight.
    free_since: Micros,
}

/// A client of a volume that makes random, overlapping requests and checks every answer.
///
/// Each sector is filled with words that have the write's id in their upper and the sector's number in their
/// lower half. So a torn, misplaced, stale or lost sector shows, together with its origin.
#[derive(Debug)]
pub struct Guest<C = NbdClient> {
    client: C,
    options: GuestOptions,
    random: fastrand::Rng,
    checker: Checker,
    started: Instant,
    in_flight: BTreeMap<u64, InFlight>,
    next_id: Id,
    round_ends: u64,
    last_answer: Instant,
    counts: GuestCounts,
    errors: Vec<String>,
    longest_wait: Wait,
}

impl<C: VolumeClient> Guest<C> {
    /// Creates a load on a part of a volume that has not been written yet.
    #[must_use]
    pub fn new(client: C, options: GuestOptions) -> Guest<C> {
        Guest {
            client,
            random: fastrand::Rng::with_seed(options.seed),
            checker: Checker::new(&vec![0; options.sectors]),
            started: Instant::now(),
            in_flight: BTreeMap::new(),
            next_id: 1,
            round_ends: REQUESTS_PER_ROUND,
            last_answer: Instant::now(),
            counts: GuestCounts::default(),
            errors: Vec::new(),
            longest_wait: Wait::default(),
            options,
        }
    }

    /// Returns the current counters.
    #[must_use]
    pub fn counts(&self) -> GuestCounts {
        self.counts
    }

    /// Returns the number of times that the client has connected again.
    #[must_use]
    pub fn reconnections(&self) -> u64 {
        self.client.reconnections()
    }

    /// Returns the errors since the last call, each with its request.
    pub fn take_errors(&mut self) -> Vec<String> {
        std::mem::take(&mut self.errors)
    }

    /// Returns the longest wait for an answer since the last call, requests in flight included.
    pub fn take_longest_wait(&mut self) -> Wait {
        let now = self.now();
        let outstanding = self.client.outstanding();
        let waits = self.in_flight.iter().filter_map(|(cookie, in_flight)| {
            let request = describe(outstanding.get(cookie)?);
            let time = Duration::from_micros(now.saturating_sub(in_flight.free_since));
            Some(Wait { time, request: format!("{request}, in flight") })
        });
        let longest = std::mem::take(&mut self.longest_wait);
        waits.chain([longest]).max_by_key(|wait| wait.time).unwrap_or_default()
    }

    /// Returns for how long the oldest request in flight has been so.
    #[must_use]
    pub fn oldest_in_flight(&self) -> Option<Duration> {
        let oldest = self.in_flight.values().map(|in_flight| in_flight.submitted).min()?;
        Some(Duration::from_micros(self.now().saturating_sub(oldest)))
    }

    /// Keeps requests in flight and checks the answers for a short while.
    ///
    /// # Errors
    /// An answer that must not be, or none for far too long.
    pub fn step(&mut self) -> Result<()> {
        if self.counts.answered >= self.round_ends {
            self.compare_everything()?;
            self.round_ends = self.counts.answered + REQUESTS_PER_ROUND;
        }
        while self.in_flight.len() < self.options.depth {
            self.submit_one();
        }
        self.take_answers(Duration::from_millis(20)).map(drop)
    }

    /// Takes answers for at most `limit`, sends nothing new; returns how many there were.
    ///
    /// # Errors
    /// An answer that must not be, or none for far too long.
    pub fn take_answers(&mut self, limit: Duration) -> Result<u64> {
        let mut taken = 0;
        let mut limit = limit;
        while let Some(completion) = self.client.wait(limit)? {
            self.answered(completion).with_context(|| self.history())?;
            taken += 1;
            limit = Duration::ZERO;
        }
        let stalled = self.last_answer.elapsed();
        if taken > 0 || self.in_flight.is_empty() {
            self.counts.longest_stall = self.counts.longest_stall.max(stalled);
            self.last_answer = Instant::now();
        } else if stalled > STALL_LIMIT {
            let waiting: Vec<&InFlight> = self.in_flight.values().collect();
            bail!("no answer for {stalled:?}; {}; waiting: {waiting:?}", self.history());
        }
        Ok(taken)
    }

    /// Waits for all answers.
    ///
    /// # Errors
    /// An answer that must not be, or none for far too long.
    pub fn drain(&mut self) -> Result<()> {
        while !self.in_flight.is_empty() {
            self.take_answers(Duration::from_millis(200))?;
        }
        Ok(())
    }

    /// Waits for all answers and reads everything twice.
    ///
    /// # Errors
    /// A sector shows a forbidden content, or two different ones.
    pub fn compare_everything(&mut self) -> Result<()> {
        self.drain()?;
        let first = self.read_everything()?;
        let second = self.read_everything()?;
        if let Some(at) = (0..first.len()).find(|at| first[*at] != second[*at]) {
            let sector = self.options.first_sector + at as u64;
            let message = format!("sector {sector} reads as {} and then as {}", first[at], second[at]);
            return Err(anyhow::Error::new(WrongByte(message)).context(self.history()));
        }
        if !self.options.counts_flushes {
            // No request is in flight and everything was compared: the history can be forgotten.
            self.checker = Checker::new(&first);
        }
        Ok(())
    }

    /// Continues with another device of the same volume. Unanswered requests of the old one may have
    /// happened, and will not happen any more. Returns the client of the old one, with its pending requests.
    pub fn move_to(&mut self, client: C) -> C {
        let now = self.now();
        for (_, request) in std::mem::take(&mut self.in_flight) {
            self.checker.undecided(request.sectors, request.id, request.submitted, now);
        }
        self.last_answer = Instant::now();
        std::mem::replace(&mut self.client, client)
    }

    fn now(&self) -> Micros {
        Micros::try_from(self.started.elapsed().as_micros()).unwrap_or(Micros::MAX)
    }

    /// Returns a description of the position, to reproduce an error.
    fn history(&self) -> String {
        format!(
            "seed {}, {} answers, {} connections lost, sectors counted from {}",
            self.options.seed,
            self.counts.answered,
            self.client.reconnections(),
            self.options.first_sector
        )
    }

    fn submit_one(&mut self) {
        let sectors = self.pick_sectors();
        let fua = self.random.u8(..) < 12;
        let kind = self.random.u8(..);
        let flush = kind >= 254;
        let (mut id, mut changes) = (0, true);
        let (offset, length) = (self.offset(sectors.start), length_bytes(sectors.len()));
        let request = match kind {
            0..80 => {
                changes = false;
                NbdRequest::Read { offset, length }
            }
            80..220 => {
                id = self.next_id;
                self.next_id += 1;
                NbdRequest::Write { offset, data: self.content(sectors.clone(), id), fua }
            }
            220..240 => NbdRequest::WriteZeroes { offset, length, fua },
            240..254 => NbdRequest::Trim { offset, length },
            254.. => NbdRequest::Flush,
        };
        let sectors = if flush { 0..0 } else { sectors };
        let submitted = self.now();
        if changes && !flush {
            self.checker.submit(sectors.clone(), id, submitted);
        }
        if self.in_flight.is_empty() {
            self.last_answer = Instant::now();
        }
        let cookie = self.client.submit(request);
        self.in_flight.insert(cookie, InFlight { sectors, id, submitted, free_since: submitted });
    }

    /// Picks sectors: half of the requests are to a small area, where many overlap.
    fn pick_sectors(&mut self) -> std::ops::Range<usize> {
        let area = if self.random.bool() { self.options.sectors.min(512) } else { self.options.sectors };
        let first = self.random.usize(0..area);
        let length = match self.random.u8(..) {
            0..100 => 8,
            100..180 => self.random.usize(1..17),
            180..246 => self.random.usize(1..65),
            246.. => self.random.usize(1..=SECTORS_PER_REQUEST_MAX),
        };
        // Most requests of file systems are whole blocks.
        let first = if self.random.bool() { first / 8 * 8 } else { first };
        first..(first + length).min(self.options.sectors)
    }

    fn offset(&self, sector: usize) -> u64 {
        (self.options.first_sector + sector as u64) * SECTOR_BYTES as u64
    }

    fn word(&self, sector: usize, id: Id) -> u64 {
        (u64::from(id) << 32) | ((self.options.first_sector + sector as u64) & u64::from(u32::MAX))
    }

    fn content(&self, sectors: std::ops::Range<usize>, id: Id) -> Vec<u8> {
        let mut data = Vec::with_capacity(sectors.len() * SECTOR_BYTES);
        for sector in sectors {
            let word = self.word(sector, id).to_le_bytes();
            for _ in 0..SECTOR_BYTES / word.len() {
                data.extend(word);
            }
        }
        data
    }

    /// Returns the ids of the writes that `data` shows.
    fn ids(&self, first_sector: usize, data: &[u8]) -> Result<Vec<Id>> {
        let ids = data.chunks(SECTOR_BYTES).enumerate().map(|(at, sector)| {
            let word = u64::from_le_bytes(*sector.first_chunk().context("a sector has 512 bytes")?);
            let id = Id::try_from(word >> 32)?;
            let whole = sector.chunks(8).all(|other| other == word.to_le_bytes());
            let expected = if word == 0 { 0 } else { self.word(first_sector + at, id) };
            if whole && word == expected {
                return Ok(id);
            }
            let number = self.options.first_sector + (first_sector + at) as u64;
            let message = format!("sector {number} is torn, or belongs elsewhere: {sector:02x?}");
            Err(WrongByte(message).into())
        });
        ids.collect()
    }

    fn answered(&mut self, completion: NbdCompletion) -> Result<()> {
        let in_flight = self.in_flight.remove(&completion.cookie).context("an answer to nothing")?;
        self.counts.answered += 1;
        let now = self.now();
        self.record_wait(&in_flight, &completion, now);
        let InFlight { sectors, id, submitted, .. } = in_flight;
        let fua = match &completion.request {
            NbdRequest::Write { fua, .. } | NbdRequest::WriteZeroes { fua, .. } => *fua,
            _ => false,
        };
        match (&completion.request, completion.outcome) {
            (NbdRequest::Read { .. }, Ok(data)) => {
                let ids = self.ids(sectors.start, &data)?;
                self.checker.read(sectors.start, &ids, submitted, now).map_err(WrongByte)?;
            }
            (NbdRequest::Flush, Ok(_)) if self.options.counts_flushes => self.checker.flushed(submitted),
            (NbdRequest::Flush, Ok(_)) => {}
            // A trim may have done nothing.
            (NbdRequest::Trim { .. }, Ok(_)) => self.checker.undecided(sectors, id, submitted, now),
            (_, Ok(_)) => self.checker.acknowledged(sectors, id, submitted, now, fua),
            (request, Err(errno)) => {
                let message = format!("{} is answered with errno {errno}", describe(request));
                ensure!(self.options.keeps_errors, "{message}");
                self.errors.push(message);
                if !matches!(request, NbdRequest::Flush | NbdRequest::Read { .. }) {
                    self.checker.undecided(sectors, id, submitted, now);
                }
            }
        }
        Ok(())
    }

    /// Handles an answer: requests that had to wait for its blocks wait for the volume from now on.
    fn record_wait(&mut self, answered: &InFlight, completion: &NbdCompletion, now: Micros) {
        for (cookie, later) in &mut self.in_flight {
            let shares = share_a_block(&later.sectors, &answered.sectors);
            if *cookie > completion.cookie && shares {
                later.free_since = now;
            }
        }
        let time = Duration::from_micros(now.saturating_sub(answered.free_since));
        if time > self.longest_wait.time {
            self.longest_wait = Wait { time, request: describe(&completion.request) };
        }
    }

    /// Sends a request while none is in flight, and waits for the answer.
    fn ask(&mut self, request: NbdRequest) -> Result<std::result::Result<Vec<u8>, u32>> {
        let cookie = self.client.submit(request);
        let completion = self.client.wait(STALL_LIMIT)?;
        let completion = completion.with_context(|| format!("no answer within {STALL_LIMIT:?}"))?;
        ensure!(completion.cookie == cookie, "an answer to {:?}", completion.request);
        Ok(completion.outcome)
    }

    fn read_everything(&mut self) -> Result<Vec<Id>> {
        let mut seen = Vec::with_capacity(self.options.sectors);
        while seen.len() < self.options.sectors {
            let first = seen.len();
            let sectors = SECTORS_PER_CHECK.min(self.options.sectors - first);
            let request = NbdRequest::Read { offset: self.offset(first), length: length_bytes(sectors) };
            let submitted = self.now();
            let asked = Instant::now();
            let outcome = self.ask(request).with_context(|| self.history())?;
            if asked.elapsed() > self.longest_wait.time {
                let request = "a read of everything".to_owned();
                self.longest_wait = Wait { time: asked.elapsed(), request };
            }
            let data = match outcome {
                Ok(data) => data,
                Err(errno) if self.options.keeps_errors && self.errors.len() < KEPT_ERRORS_MAX => {
                    self.errors.push(format!("reading everything, at sector {first}: errno {errno}"));
                    continue;
                }
                Err(errno) => bail!("reading everything: errno {errno}; {}", self.history()),
            };
            let ids = self.ids(first, &data).with_context(|| self.history())?;
            let now = self.now();
            let allowed = self.checker.read(first, &ids, submitted, now);
            allowed.map_err(WrongByte).with_context(|| self.history())?;
            seen.extend(ids);
        }
        self.last_answer = Instant::now();
        Ok(seen)
    }
}

/// Returns true if a volume has one wait for the other: it orders requests by whole blocks.
fn share_a_block(a: &std::ops::Range<usize>, b: &std::ops::Range<usize>) -> bool {
    let blocks = |sectors: &std::ops::Range<usize>| {
        sectors.start / SECTORS_PER_BLOCK..sectors.end.div_ceil(SECTORS_PER_BLOCK)
    };
    let (a, b) = (blocks(a), blocks(b));
    a.start < b.end && b.start < a.end
}

fn length_bytes(sectors: usize) -> u32 {
    u32::try_from(sectors * SECTOR_BYTES).expect("requests are short")
}

fn describe(request: &NbdRequest) -> String {
    match request {
        NbdRequest::Write { offset, data, fua } => {
            format!("a write of {} bytes at {offset} (FUA: {fua})", data.len())
        }
        other => format!("{other:?}"),
    }
}
