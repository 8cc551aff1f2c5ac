//! Several media as one: memory above a file above a remote share, or any part of that.
//!
//! A composition is a [`Backend`] of [`Backend`]s, the top stage first. *Lookup*: present in any stage; the upper one is
//! asked first, the lower ones for what is missing. *Read*: stage by stage, as the engine asks for the next one when a
//! copy was absent, damaged or late; a record that came from below and was verified is promoted. *Write*: by the policy
//! of each stage ([`WritePolicy`]). Every stage has a breaker of its own, so one that is sick costs its bound once and
//! the others work on. Nobody ever waits for a copy that is made between stages.

mod backend;
mod drain;
mod early;
mod gather;
mod lookup;
mod prefetch;
mod stage;
#[cfg(test)]
mod tests_support;
mod write;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use ucm_core::{BlockId, Error, ErrorKind, Identity, MissReason, Part, Result};
use ucm_device::{HostArena, SlotPool};
use ucm_infra::{Bell, Clock, Lane, Mono, WorkerPool};

use crate::backend::{Backend, BlockRead, ReadDone, Victim};
use crate::events::{Events, Level};
use crate::health::{BreakerConfig, Change};
use crate::record::{Expect, RecordLayout, verify};
use early::Merged;
use stage::{Admission, Stage, add};

pub use prefetch::MAX_WAITING as MAX_PREFETCH;
#[cfg(test)]
pub(crate) use tests_support::Nothing;

/// Most stages of a composition.
pub const MAX_STAGES: usize = 4;
/// Lane of records that are moved between stages.
const LANE_MOVE: usize = 0;
/// Lane of looks at stages that are not usable.
const LANE_PROBE: usize = 1;
/// Times a thread that hangs is replaced.
const REPLACEMENTS: usize = 2;

/// When a dumped record is written to a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WritePolicy {
    /// At once. A dump is published when the lowest such stage that outlives the process has it.
    Through,
    /// When the stage above gives it up, and at shutdown as far as the time for that goes.
    Back,
    /// Never: the stage is only read.
    Never,
}

impl WritePolicy {
    /// Every policy.
    pub const ALL: [Self; 3] = [Self::Through, Self::Back, Self::Never];

    /// Name in the configuration.
    pub fn name(self) -> &'static str {
        match self {
            Self::Through => "through",
            Self::Back => "back",
            Self::Never => "never",
        }
    }
}

/// One stage.
pub struct StageConfig {
    /// The medium.
    pub backend: Arc<dyn Backend>,
    /// When it is written to.
    pub policy: WritePolicy,
    /// Workers lost in operations stuck past their deadline that switch it off at once.
    pub max_stuck: usize,
}

/// What a composition needs to know.
pub struct TiersConfig {
    /// The stages, top first; two to [`MAX_STAGES`].
    pub stages: Vec<StageConfig>,
    /// Where things lie in the records, by which copies are judged before they are kept.
    pub record: RecordLayout,
    /// Whose KV it is.
    pub identity: Identity,
    /// Which part of a block.
    pub part: Part,
    /// When the breaker of a stage opens; `max_stuck` is that of each stage.
    pub breaker: BreakerConfig,
    /// How long a look at a stage may take.
    pub probe: Duration,
    /// How long a copy between stages may take.
    pub copy: Duration,
    /// Records that can be on their way between stages at once; each takes the memory of one.
    pub spare_slots: usize,
}

/// A composition of media.
pub struct Tiers {
    shared: Arc<Shared>,
}

struct Shared {
    stages: Vec<Stage>,
    clock: Arc<dyn Clock>,
    record: RecordLayout,
    identity: Identity,
    part: Part,
    probe: Duration,
    copy_deadline: Duration,
    spare: Arc<SlotPool>,
    /// Rung when a spare slot came back.
    freed: Bell,
    pool: Arc<WorkerPool>,
    prefetch: Mutex<prefetch::Queue>,
    /// Reads of loads under way.
    loading: AtomicUsize,
    early: Merged,
    events: Events,
    /// The engine described the stages; those that become usable later are told of apart.
    described: AtomicBool,
}

impl Tiers {
    /// Puts stages together; nothing is touched before [`Backend::probe`]. `Config` where they make no sense together.
    pub fn new(config: TiersConfig, clock: Arc<dyn Clock>) -> Result<Self> {
        check(&config.stages)?;
        let slot_len = config.record.record_len();
        let arena = HostArena::new(config.spare_slots.max(1) * slot_len.next_multiple_of(4096))?;
        let count = config.stages.len();
        let pool = WorkerPool::builder("ucm-tier")
            .on_demand()
            .size(count + 1)
            .lanes(&[
                Lane {
                    name: "move",
                    capacity: config.spare_slots.max(1),
                    max_running: 1,
                },
                Lane {
                    name: "probe",
                    capacity: count,
                    max_running: count,
                },
            ])
            .max_replacements(REPLACEMENTS)
            .clock(Arc::clone(&clock))
            .build()?;
        let names = names(&config.stages);
        let stages = config.stages.into_iter().zip(names).map(|(stage, name)| {
            let breaker = BreakerConfig {
                max_stuck: stage.max_stuck,
                ..config.breaker
            };
            Stage::new(stage.backend, name, stage.policy, breaker)
        });
        let shared = Arc::new(Shared {
            stages: stages.collect(),
            clock,
            record: config.record,
            identity: config.identity,
            part: config.part,
            probe: config.probe,
            copy_deadline: config.copy,
            spare: SlotPool::new(arena, slot_len)?,
            freed: Bell::new(),
            pool,
            prefetch: Mutex::default(),
            loading: AtomicUsize::new(0),
            early: Merged::default(),
            events: Events::default(),
            described: AtomicBool::new(false),
        });
        let weak = Arc::downgrade(&shared);
        shared.spare.on_release(move || {
            if let Some(shared) = weak.upgrade() {
                shared.freed.ring();
                shared.pump_prefetch();
            }
        });
        for number in 1..shared.stages.len() {
            if shared.stages[number].policy != WritePolicy::Back {
                continue;
            }
            let weak = Arc::downgrade(&shared);
            let hook = Box::new(move |victim: Box<dyn Victim>| {
                if let Some(shared) = weak.upgrade() {
                    shared.demote(number, victim);
                }
            });
            if !shared.stages[number - 1].backend.on_evicted(hook) {
                let wrong = "a stage is written back to from a memory directly above it";
                return Err(Error::new(ErrorKind::Config, wrong).with("stage", &shared.stages[number].name));
            }
        }
        Ok(Self { shared })
    }
}

/// Names unlike each other: that of the medium, and its number among those of that name from the second on.
fn names(stages: &[StageConfig]) -> Vec<String> {
    let mut seen: HashMap<&'static str, usize> = HashMap::new();
    let mut name = |stage: &StageConfig| {
        let name = stage.backend.name();
        let count = seen.entry(name).or_default();
        *count += 1;
        if *count == 1 {
            name.to_owned()
        } else {
            format!("{name}{count}")
        }
    };
    stages.iter().map(&mut name).collect()
}

fn check(stages: &[StageConfig]) -> Result<()> {
    let wrong = |text: &'static str| Err(Error::new(ErrorKind::Config, text).with("stages", stages.len()));
    if !(2..=MAX_STAGES).contains(&stages.len()) {
        return wrong("a pipeline has two to four stages");
    }
    if stages.iter().skip(1).any(|stage| stage.backend.is_memory()) {
        return wrong("memory can only be the top stage");
    }
    if stages[0].policy == WritePolicy::Back {
        return wrong("the top stage has none above it to be written back from");
    }
    if stages.iter().all(|stage| stage.policy != WritePolicy::Through) {
        return wrong("no stage is written through, so no block would ever be stored");
    }
    Ok(())
}

impl Shared {
    /// Whether an operation may go to a stage now; what it brings must be told by [`Shared::note`].
    fn admits(self: &Arc<Self>, number: usize, now: Mono) -> bool {
        let (admission, change) = self.stages[number].admit(now);
        self.changed(number, change, None);
        if admission == Admission::Look {
            self.look(number);
        }
        admission == Admission::Yes
    }

    /// Looks at a stage in the background.
    fn look(self: &Arc<Self>, number: usize) {
        if self.stages[number].probing.swap(true, Ordering::AcqRel) {
            return;
        }
        let deadline = self.clock.now().after(self.probe.saturating_mul(2));
        let (shared, ended) = (Arc::clone(self), Arc::clone(self));
        let look = move || shared.probe_stage(number, shared.clock.now().after(shared.probe));
        let done = move |_: Result<Result<()>>| ended.stages[number].probing.store(false, Ordering::Release);
        if self.pool.submit(LANE_PROBE, deadline, look, done).is_err() {
            self.stages[number].probing.store(false, Ordering::Release);
        }
    }

    fn probe_stage(&self, number: usize, deadline: Mono) -> Result<()> {
        let stage = &self.stages[number];
        let looked = stage.backend.probe(deadline);
        match &looked {
            Ok(()) => {
                let first = !stage.ready.swap(true, Ordering::AcqRel);
                self.changed(number, stage.answered(), None);
                if first && self.described.load(Ordering::Acquire) {
                    self.say(
                        Level::Info,
                        format!("open: {}: {}", stage.name, stage.backend.describe()),
                    );
                }
            }
            Err(error) => self.changed(number, stage.breaker.trip(self.clock.now()), Some(error)),
        }
        looked
    }

    /// Notes how an operation of a stage ended that had time until `deadline`.
    fn note(&self, number: usize, deadline: Mono, error: Option<&Error>) {
        let stage = &self.stages[number];
        match error {
            None => self.changed(number, stage.answered(), None),
            Some(error) => {
                let (of_medium, change) = stage.failed(error, deadline, self.clock.now());
                add(&stage.counts.failures, u64::from(of_medium));
                self.changed(number, change, Some(error));
            }
        }
    }

    fn changed(&self, number: usize, change: Option<Change>, error: Option<&Error>) {
        let name = &self.stages[number].name;
        match change {
            Some(Change::Opened) => {
                let why = error.map_or_else(
                    || "too many operations never returned".to_owned(),
                    ToString::to_string,
                );
                let text =
                    format!("tier {name} is switched off for now, the others are used without it: {why}");
                self.say(Level::Warning, text);
            }
            Some(Change::Recovered) => self.say(Level::Info, format!("tier {name} answers again")),
            None => {}
        }
    }

    fn say(&self, level: Level, text: String) {
        self.events.push(level, text, self.clock.now());
    }

    /// Judges a record that was read; its ordinal if it is sound.
    fn verify(&self, id: BlockId, bytes: &[u8], stored_len: u64) -> Result<u32, MissReason> {
        let expect = Expect {
            id,
            namespace: *self.identity.digest(),
            part: self.part,
            layout: &self.record,
        };
        verify(bytes, stored_len, &expect).map(|header| header.meta.ordinal)
    }

    fn place(&self, id: BlockId, from: usize) -> Option<usize> {
        let now = self.clock.now();
        (from..self.stages.len()).find(|&number| {
            let stage = &self.stages[number];
            stage.backend.may_have(id) && !stage.has_refused(id) && stage.may(now)
        })
    }

    /// Lets a read go to a stage, with the deadline that it has there and what it brings noted; or answers that the stage
    /// is not used now.
    fn admit_read(self: &Arc<Self>, number: usize, read: BlockRead, now: Mono) -> Option<BlockRead> {
        let stage = &self.stages[number];
        if !self.admits(number, now) {
            drop(read.slot);
            let off = Error::new(ErrorKind::Unhealthy, "this tier is switched off for now");
            (read.done)(Err(off.with("tier", &stage.name)));
            return None;
        }
        let (id, deadline, done) = (read.id, read.deadline, read.done);
        // One that may yet be asked below must leave time for that.
        let below = !stage.memory && self.place(id, number + 1).is_some();
        let until = if below {
            now.after(deadline.since(now) / 2)
        } else {
            deadline
        };
        self.loading.fetch_add(1, Ordering::AcqRel);
        let shared = Arc::clone(self);
        let came = move |result: Result<ReadDone>| {
            shared.note(number, deadline, result.as_ref().err());
            if let Ok(read) = &result {
                let counts = &shared.stages[number].counts;
                add(&counts.blocks_read, 1);
                add(&counts.bytes_read, read.read as u64);
            }
            done(result);
            if shared.loading.fetch_sub(1, Ordering::AcqRel) == 1 {
                shared.pump_prefetch();
            }
        };
        Some(BlockRead {
            deadline: until,
            done: Box::new(came),
            ..read
        })
    }

    /// The stage whose space is that of the whole: the lowest that outlives this process.
    fn base(&self) -> &Stage {
        let lasting = self.stages.iter().rev().find(|stage| !stage.memory);
        lasting.unwrap_or(&self.stages[0])
    }
}
