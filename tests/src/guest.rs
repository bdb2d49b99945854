//! A load on a volume that knows what every sector may show.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use shorthorn_sim::checker::{Checker, Id, Micros};

use crate::nbd_client::{NbdClient, NbdCompletion, NbdRequest};

const SECTOR_BYTES: usize = 512;
/// The longest request, in sectors: beyond one region of 64 KiB.
const SECTORS_PER_REQUEST_MAX: usize = 192;
/// Reads of a full comparison.
const SECTORS_PER_CHECK: usize = 256;
/// What a sector may show is looked up among the writes since the last full comparison: with more of them that is slow.
const REQUESTS_PER_ROUND: u64 = 20_000;
/// One stall after the other is normal when processes die; one that lasts as long is a bug.
const STALL_LIMIT: Duration = Duration::from_secs(120);
const ENOSPC: u32 = 28;

/// What a load is like.
#[derive(Clone, Debug)]
pub struct GuestOptions {
    /// The same seed makes the same requests, though not in the same order of completion.
    pub seed: u64,
    /// The part of the volume that is used.
    pub first_sector: u64,
    /// How long it is. All of it reads as zeroes at first.
    pub sectors: usize,
    /// Requests in flight.
    pub depth: usize,
    /// Whether "no space left" is an answer like another, of writes that may have happened or not.
    pub full_disk_is_fine: bool,
    /// Whether a power cut may come: then what is durable counts.
    pub counts_flushes: bool,
}

impl GuestOptions {
    /// Sixteen requests in flight on 16 MiB, 1 MiB into the volume.
    #[must_use]
    pub fn new(seed: u64) -> GuestOptions {
        GuestOptions {
            seed,
            first_sector: 2048,
            sectors: 32768,
            depth: 16,
            full_disk_is_fine: false,
            counts_flushes: false,
        }
    }
}

/// What a load has done.
#[derive(Clone, Copy, Debug, Default)]
pub struct GuestCounts {
    /// Requests that were answered.
    pub answered: u64,
    /// Of these, with "no space left".
    pub refused: u64,
    /// The longest time without any answer while there were requests.
    pub longest_stall: Duration,
}

#[derive(Debug)]
struct InFlight {
    sectors: std::ops::Range<usize>,
    /// Of what is written.
    id: Id,
    submitted: Micros,
}

/// A client of a volume that makes random, overlapping requests and checks every answer.
///
/// Each sector is filled with words that have the write's id in their upper and the sector's number in their lower half,
/// so that a torn, misplaced, stale or lost sector shows, and whose it is.
#[derive(Debug)]
pub struct Guest {
    client: NbdClient,
    options: GuestOptions,
    random: fastrand::Rng,
    checker: Checker,
    started: Instant,
    in_flight: BTreeMap<u64, InFlight>,
    next_id: Id,
    round_ends: u64,
    last_answer: Instant,
    counts: GuestCounts,
}

impl Guest {
    /// A load on a part of a volume that has not been written yet.
    #[must_use]
    pub fn new(client: NbdClient, options: GuestOptions) -> Guest {
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
            options,
        }
    }

    /// What was done so far.
    #[must_use]
    pub fn counts(&self) -> GuestCounts {
        self.counts
    }

    /// How often the client had to connect again.
    #[must_use]
    pub fn reconnections(&self) -> u64 {
        self.client.reconnections()
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
    /// A sector shows what it must not show, or not the same twice.
    pub fn compare_everything(&mut self) -> Result<()> {
        self.drain()?;
        let first = self.read_everything()?;
        let second = self.read_everything()?;
        if let Some(at) = (0..first.len()).find(|at| first[*at] != second[*at]) {
            let sector = self.options.first_sector + at as u64;
            bail!("sector {sector} reads as {} and then as {}; {}", first[at], second[at], self.history());
        }
        if !self.options.counts_flushes {
            // Nothing is in flight and all was seen: what came before can be forgotten.
            self.checker = Checker::new(&first);
        }
        Ok(())
    }

    /// Goes on with another device of the same volume. What the old one has not answered may have happened, and will
    /// not happen any more. Returns the client of the old one, with what it waits for.
    pub fn move_to(&mut self, client: NbdClient) -> NbdClient {
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

    /// Where an error can be found again.
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
        self.in_flight.insert(cookie, InFlight { sectors, id, submitted });
    }

    /// Half of the requests are to a small area, where many overlap.
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

    /// The ids of the writes that `data` shows.
    fn ids(&self, first_sector: usize, data: &[u8]) -> Result<Vec<Id>> {
        let ids = data.chunks(SECTOR_BYTES).enumerate().map(|(at, sector)| {
            let word = u64::from_le_bytes(*sector.first_chunk().context("a sector has 512 bytes")?);
            let id = Id::try_from(word >> 32)?;
            let whole = sector.chunks(8).all(|other| other == word.to_le_bytes());
            let expected = if word == 0 { 0 } else { self.word(first_sector + at, id) };
            ensure!(
                whole && word == expected,
                "sector {} is torn, or belongs elsewhere: {:02x?}",
                self.options.first_sector + (first_sector + at) as u64,
                sector
            );
            Ok(id)
        });
        ids.collect()
    }

    fn answered(&mut self, completion: NbdCompletion) -> Result<()> {
        let InFlight { sectors, id, submitted } =
            self.in_flight.remove(&completion.cookie).context("an answer to nothing")?;
        self.counts.answered += 1;
        let now = self.now();
        let fua = match &completion.request {
            NbdRequest::Write { fua, .. } | NbdRequest::WriteZeroes { fua, .. } => *fua,
            _ => false,
        };
        match (&completion.request, completion.outcome) {
            (NbdRequest::Read { .. }, Ok(data)) => {
                let ids = self.ids(sectors.start, &data)?;
                self.checker.read(sectors.start, &ids, submitted, now).map_err(anyhow::Error::msg)?;
            }
            (NbdRequest::Flush, Ok(_)) if self.options.counts_flushes => self.checker.flushed(submitted),
            (NbdRequest::Flush, Ok(_)) => {}
            // A trim may have done nothing.
            (NbdRequest::Trim { .. }, Ok(_)) => self.checker.undecided(sectors, id, submitted, now),
            (_, Ok(_)) => self.checker.acknowledged(sectors, id, submitted, now, fua),
            (request, Err(ENOSPC)) if self.options.full_disk_is_fine => {
                self.counts.refused += 1;
                if !matches!(request, NbdRequest::Flush | NbdRequest::Read { .. }) {
                    self.checker.undecided(sectors, id, submitted, now);
                }
            }
            (request, Err(errno)) => bail!("{} is answered with errno {errno}", describe(request)),
        }
        Ok(())
    }

    fn read_everything(&mut self) -> Result<Vec<Id>> {
        let mut seen = Vec::with_capacity(self.options.sectors);
        while seen.len() < self.options.sectors {
            let first = seen.len();
            let sectors = SECTORS_PER_CHECK.min(self.options.sectors - first);
            let request = NbdRequest::Read { offset: self.offset(first), length: length_bytes(sectors) };
            let submitted = self.now();
            let outcome = self.client.call(request, STALL_LIMIT).with_context(|| self.history())?;
            let data = match outcome {
                Ok(data) => data,
                Err(errno) => bail!("reading everything: errno {errno}; {}", self.history()),
            };
            let ids = self.ids(first, &data).with_context(|| self.history())?;
            let now = self.now();
            let allowed = self.checker.read(first, &ids, submitted, now);
            allowed.map_err(anyhow::Error::msg).with_context(|| self.history())?;
            seen.extend(ids);
        }
        self.last_answer = Instant::now();
        Ok(seen)
    }
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
