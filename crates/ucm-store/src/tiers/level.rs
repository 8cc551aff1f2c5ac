//! Levels: tiers one below the other, and side by side where a level spreads its records over
//! several media.
//!
//! A level of several has one copy of a record, in the member that [`Spread`] offered it to when it
//! was written. A lookup goes to all of them, in the order of the spread; a member without an index
//! is asked only for the records that belong there.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ucm_core::{BlockId, Error, ErrorKind, Result};
use ucm_infra::{Clock, MonotonicTime};
use ucm_media::backend::MediumStats;
use ucm_media::spread::Spread;

use super::config::{Request, TierConfig, TierSetup, WritePolicy};
use super::tier::Tier;

/// Most levels of a store.
pub const MAX_LEVELS: usize = 4;
/// Most tiers of a store.
pub const MAX_TIERS: usize = 32;

/// A level as it is set up.
pub struct LevelConfig {
    /// Its tiers, at least one, all with one policy.
    pub tiers: Vec<TierConfig>,
    /// How records are spread over them.
    pub spread: Arc<Spread>,
}

impl From<TierConfig> for LevelConfig {
    fn from(tier: TierConfig) -> Self {
        Self {
            tiers: vec![tier],
            spread: Arc::new(Spread::alone()),
        }
    }
}

/// One level.
pub(super) struct Level {
    first: usize,
    pub(super) policy: WritePolicy,
    /// Answers at once and ends with its processes.
    pub(super) memory: bool,
    spread: Arc<Spread>,
}

impl Level {
    /// The levels of these tiers. `Config` where they make no sense together.
    pub(super) fn of(config: &[LevelConfig]) -> Result<Vec<Self>> {
        check(config)?;
        let mut first = 0;
        let mut levels = Vec::with_capacity(config.len());
        for level in config {
            levels.push(Self {
                first,
                policy: level.tiers[0].policy,
                memory: level.tiers[0].backend.features().memory.is_some(),
                spread: Arc::clone(&level.spread),
            });
            first += level.tiers.len();
        }
        Ok(levels)
    }

    /// The numbers of its tiers.
    pub(super) fn members(&self) -> Range<usize> {
        self.first..self.first + self.spread.members()
    }

    /// The same in the order in which they are asked for this record.
    pub(super) fn order(&self, id: BlockId) -> impl Iterator<Item = usize> + use<> {
        let (first, members) = (self.first, self.spread.order(id));
        members.into_iter().map(move |member| first + member)
    }

    /// The same in which they are offered it when it is new.
    pub(super) fn offers(&self, id: BlockId) -> impl Iterator<Item = usize> + use<> {
        let (first, members) = (self.first, self.spread.offers(id));
        members.into_iter().map(move |member| first + member)
    }

    /// Whether a record lies where it would be written now, as far as that can be helped.
    pub(super) fn keeps_home(&self) -> bool {
        self.spread.keeps_home()
    }

    /// Whether it has more than one tier.
    pub(super) fn is_spread(&self) -> bool {
        self.spread.members() > 1
    }
}

/// The tiers of a store, top first, and the levels that they form.
pub(crate) struct TierTable {
    pub(super) tiers: Vec<Tier>,
    pub(super) levels: Vec<Level>,
    pub(super) clock: Arc<dyn Clock>,
    /// Requests so far.
    requests: AtomicU64,
}

impl TierTable {
    /// `Config` where the tiers make no sense together.
    pub(super) fn new(config: Vec<LevelConfig>, setup: &TierSetup) -> Result<Self> {
        let levels = Level::of(&config)?;
        let names = names(config.iter().flat_map(|level| &level.tiers));
        let mut tiers = Vec::with_capacity(setup.count);
        for (number, level) in config.into_iter().enumerate() {
            for tier in level.tiers {
                let name = names[tiers.len()].clone();
                tiers.push(Tier::new(tier, name, number, setup)?);
            }
        }
        Ok(Self {
            tiers,
            levels,
            clock: Arc::clone(&setup.clock),
            requests: AtomicU64::new(0),
        })
    }

    /// A new request that is waited for until `deadline`.
    pub(crate) fn request(&self, deadline: MonotonicTime) -> Request {
        let number = self.requests.fetch_add(1, Ordering::Relaxed);
        Request { number, deadline }
    }

    /// Whether a tier was usable once.
    pub(crate) fn is_ready(&self) -> bool {
        self.tiers.iter().any(|tier| tier.health.is_ready())
    }

    /// Whether there is a tier that everything passes to.
    pub(crate) fn is_well(&self) -> bool {
        self.tiers.iter().any(|tier| tier.health.is_well())
    }

    /// Whether everything passes to every tier.
    pub(crate) fn is_all_well(&self) -> bool {
        self.tiers.iter().all(|tier| tier.health.is_well())
    }

    /// Whether lookups are answered from memory, without a system call.
    pub(crate) fn answers_at_once(&self) -> bool {
        let at_once = |tier: &Tier| tier.backend.features().answers_at_once;
        self.is_ready() && self.tiers.iter().all(at_once)
    }

    /// Whether what a dump writes costs a processor and waits for no device as long as all is well.
    pub(crate) fn writes_cached(&self) -> bool {
        let cached = |tier: &Tier| !tier.form.recodes() && tier.backend.features().writes_cached;
        let mut tiers = self.tiers.iter();
        tiers.all(|tier| tier.policy != WritePolicy::Through || cached(tier))
    }

    /// Whether a dump may be stored now: in a tier that outlives this process, or in memory alone
    /// while those tiers are off. One that is read and refuses writes would refuse each block after
    /// memory has copied it, so no dump begins then.
    pub(crate) fn may_take_dumps(&self, now: MonotonicTime) -> bool {
        let (mut memory_takes, mut refuses) = (false, false);
        for tier in &self.tiers {
            if tier.policy != WritePolicy::Through {
                continue;
            }
            let takes = tier.health.may_write(u64::MAX, now);
            if takes && !tier.is_memory() {
                return true;
            }
            memory_takes |= takes;
            refuses |= !tier.is_memory() && tier.health.is_well();
        }
        memory_takes && !refuses
    }

    /// The level of a tier.
    pub(super) fn level_of(&self, number: usize) -> &Level {
        &self.levels[self.tiers[number].level]
    }

    /// The next tier behind `after`, or the first, that a record may be read from for this request:
    /// one that expects it before those that do not know it. Never waits.
    pub(crate) fn place(&self, id: BlockId, after: Option<usize>, request: u64) -> Option<usize> {
        let now = self.clock.now();
        let may = |number: usize| self.tiers[number].health.may(request, now);
        let mut can: Vec<usize> = self
            .levels
            .iter()
            .flat_map(|level| level.order(id))
            .collect();
        if let Some(at) = can.iter().position(|&number| Some(number) == after) {
            can.drain(..=at);
        }
        can.retain(|&number| {
            let tier = &self.tiers[number];
            tier.may_have(id) && !tier.has_refused(id) && may(number)
        });
        let expecting = can.iter().find(|&&number| self.expects(number, id, may));
        expecting.or(can.first()).copied()
    }

    /// Whether a tier would be the first to know this record: it does, or it has no index and the
    /// record belongs there. `is_well`: which tiers are.
    pub(super) fn expects(
        &self,
        number: usize,
        id: BlockId,
        is_well: impl Fn(usize) -> bool,
    ) -> bool {
        if let Some(index) = self.tiers[number].backend.features().index {
            return index.knows(id);
        }
        let level = self.level_of(number);
        if !level.is_spread() || !level.keeps_home() {
            return true;
        }
        level.order(id).find(|&number| is_well(number)) == Some(number)
    }

    /// The member of a level that a copy goes to: the first that is well. Where none is, the first,
    /// which then drops the copy.
    pub(super) fn taker_of_copy(&self, level: &Level, id: BlockId) -> usize {
        let now = self.clock.now();
        let may = |&number: &usize| self.tiers[number].health.may_write(u64::MAX, now);
        let first = || level.offers(id).next().unwrap_or(level.first);
        level.offers(id).find(may).unwrap_or_else(first)
    }

    /// Whether records that are read from this tier are copied to one above it.
    pub(crate) fn is_kept_above(&self, number: usize) -> bool {
        let above = &self.levels[..self.tiers[number].level];
        above.iter().any(|level| level.policy != WritePolicy::Never)
    }

    /// Whether parts of a record can be read by themselves from this tier, and that is of use: not
    /// where a tier above would keep the whole.
    pub(crate) fn reads_parts(&self, number: usize) -> bool {
        let whole = self.is_kept_above(number) || self.recodes(number);
        !whole && self.tiers[number].backend.features().reads_parts
    }

    /// Whether records have another form there, so that only whole ones can be read.
    pub(crate) fn recodes(&self, number: usize) -> bool {
        self.tiers[number].form.recodes()
    }

    /// What the level holds and did whose space is that of the whole: the lowest that outlives this
    /// process.
    pub(crate) fn base_stats(&self) -> MediumStats {
        let lasting = self.levels.iter().rev().find(|level| !level.memory);
        let mut sum = MediumStats::default();
        for (at, number) in lasting.unwrap_or(&self.levels[0]).members().enumerate() {
            let stats = self.tiers[number].backend.stats();
            sum = if at == 0 { stats } else { together(sum, stats) };
        }
        sum
    }
}

/// The statistics of two media side by side, as one.
fn together(mut one: MediumStats, other: MediumStats) -> MediumStats {
    let (sum, of) = (&mut one.usage, other.usage);
    sum.used += of.used;
    sum.capacity += of.capacity;
    sum.records += of.records;
    sum.counted &= of.counted;
    sum.collector |= of.collector;
    sum.paused &= of.paused;
    one.records_removed += other.records_removed;
    one.bytes_removed += other.bytes_removed;
    one.blocks_touched += other.blocks_touched;
    for (name, count) in other.more {
        match one.more.iter_mut().find(|(known, _)| *known == name) {
            Some((_, sum)) => *sum += count,
            None => one.more.push((name, count)),
        }
    }
    one
}

fn check(levels: &[LevelConfig]) -> Result<()> {
    let wrong = |text: &'static str| {
        let tiers = levels.iter().flat_map(|level| &level.tiers);
        let found =
            tiers.map(|tier| format!("{} {}", tier.backend.features().name, tier.policy.name()));
        let found = found.collect::<Vec<_>>().join(", ");
        Err(Error::new(ErrorKind::Config, text).with("tiers", found))
    };
    if !(1..=MAX_LEVELS).contains(&levels.len()) {
        return wrong("a store has one to four levels of tiers");
    }
    let whole = |level: &LevelConfig| {
        let policies = level.tiers.iter().map(|tier| tier.policy);
        let alike = policies
            .zip(level.tiers.iter().skip(1))
            .all(|(one, next)| one == next.policy);
        !level.tiers.is_empty() && level.tiers.len() == level.spread.members() && alike
    };
    if !levels.iter().all(whole)
        || levels.iter().map(|level| level.tiers.len()).sum::<usize>() > MAX_TIERS
    {
        return wrong(
            "the tiers of a level are at least one, as many as it spreads records over, and of one \
             policy",
        );
    }
    let is_memory = |tier: &TierConfig| tier.backend.features().memory.is_some();
    let side_by_side =
        |level: &LevelConfig| level.tiers.len() > 1 && level.tiers.iter().any(is_memory);
    if levels.iter().any(side_by_side)
        || levels
            .iter()
            .skip(1)
            .any(|level| level.tiers.iter().any(is_memory))
    {
        return wrong("memory can only be the top tier");
    }
    let mut tiers = levels.iter().flat_map(|level| &level.tiers);
    if tiers.any(|tier| tier.compressed && is_memory(tier)) {
        return wrong("memory is faster than any codec; give the codec to a tier below it");
    }
    let policies: Vec<WritePolicy> = levels.iter().map(|level| level.tiers[0].policy).collect();
    if policies[0] == WritePolicy::Back {
        return wrong("the top tier has none above it to be written back from");
    }
    if !policies.contains(&WritePolicy::Through) {
        return wrong("no tier is written through, so no block would ever be stored");
    }
    Ok(())
}

/// Names unlike each other: that of the medium, and its number among those of that name from the
/// second on.
fn names<'a>(tiers: impl Iterator<Item = &'a TierConfig>) -> Vec<String> {
    let (mut seen, mut names) = (HashMap::new(), Vec::new());
    for tier in tiers {
        let name = tier.backend.features().name;
        let count = seen.entry(name).or_insert(0);
        *count += 1;
        names.push(match *count {
            1 => name.to_owned(),
            count => format!("{name}{count}"),
        });
    }
    names
}
