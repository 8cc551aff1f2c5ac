//! Levels: tiers one below the other, and side by side where a level spreads its records over
//! several media.
//!
//! A level of several has one copy of a record, in the member that [`Spread`] offered it to when it
//! was written. Looked for it is in all of them, in the order of the spread; a member that would
//! have to be asked for each record is asked for those that belong there.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use ucm_core::{BlockId, Error, ErrorKind, Result};
use ucm_tier::spread::Spread;

use super::{TierConfig, Tiers, WritePolicy};

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
        let level = |level: &LevelConfig| {
            let made = Self {
                first,
                policy: level.tiers[0].policy,
                memory: level.tiers[0].backend.features().memory.is_some(),
                spread: Arc::clone(&level.spread),
            };
            first += level.tiers.len();
            made
        };
        Ok(config.iter().map(level).collect())
    }

    /// The numbers of its tiers.
    pub(super) fn members(&self) -> Range<usize> {
        self.first..self.first + self.spread.members()
    }

    /// The same in the order in which they are asked for this record.
    pub(super) fn order(&self, id: BlockId) -> impl Iterator<Item = usize> + use<> {
        let first = self.first;
        self.spread
            .order(id)
            .into_iter()
            .map(move |member| first + member)
    }

    /// The same in which they are offered it when it is new.
    fn offers(&self, id: BlockId) -> impl Iterator<Item = usize> + use<> {
        let first = self.first;
        self.spread
            .offers(id)
            .into_iter()
            .map(move |member| first + member)
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

impl Tiers {
    /// The level of a tier.
    pub(super) fn level_of(&self, number: usize) -> &Level {
        &self.levels[self.tiers[number].level]
    }

    /// All tiers in the order in which they are asked for a record.
    pub(super) fn order(&self, id: BlockId) -> Vec<usize> {
        self.levels
            .iter()
            .flat_map(|level| level.order(id))
            .collect()
    }

    /// The member of a level that a new record goes to: the first for which `is_well`.
    pub(super) fn taker(
        &self,
        level: &Level,
        id: BlockId,
        is_well: impl Fn(usize) -> bool,
    ) -> Option<usize> {
        level.offers(id).find(|&number| is_well(number))
    }

    /// The same for a copy that no one waits for. Where none is well it is the first, which then
    /// drops the copy.
    pub(super) fn taker_of_copy(&self, level: &Level, id: BlockId) -> usize {
        let now = self.clock.now();
        let well = self.taker(level, id, |number| {
            self.tiers[number].may_write(u64::MAX, now)
        });
        well.unwrap_or_else(|| level.offers(id).next().unwrap_or(level.first))
    }

    /// Whether a tier would be the first to know of this record: it does, or it can only be asked
    /// and the record belongs there. `is_well`: which tiers are.
    pub(super) fn expects(
        &self,
        number: usize,
        id: BlockId,
        is_well: impl Fn(usize) -> bool,
    ) -> bool {
        let features = self.tiers[number].backend.features();
        if let Some(index) = features.index {
            return index.knows(id);
        }
        let level = self.level_of(number);
        if !level.is_spread() || !level.keeps_home() {
            return true;
        }
        level.order(id).find(|&number| is_well(number)) == Some(number)
    }
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
pub(super) fn names<'a>(tiers: impl Iterator<Item = &'a TierConfig>) -> Vec<String> {
    let mut seen: HashMap<&'static str, usize> = HashMap::new();
    let mut name = |tier: &TierConfig| {
        let name = tier.backend.features().name;
        let count = seen.entry(name).or_default();
        *count += 1;
        match *count {
            1 => name.to_owned(),
            count => format!("{name}{count}"),
        }
    };
    tiers.map(&mut name).collect()
}
