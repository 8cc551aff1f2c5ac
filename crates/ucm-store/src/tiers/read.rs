//! Reading records of one tier, on its threads: in runs that it brings together, each within its
//! time.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ucm_core::{Error, ErrorKind, Result};
use ucm_infra::{LANE_LOAD, MonotonicTime};
use ucm_io::IoJob;
use ucm_media::backend::{BlockRead, Outcome, ReadDone};

use super::config::Request;
use super::level::TierTable;
use super::prefetch::Prefetches;
use super::probes::Probes;
use crate::stats::{StageSpan, add, stage_time};

/// The purpose of a read.
pub(crate) trait Reader: Send + 'static {
    /// The read ended: called once, on a thread of the tier, when the record is in its slot, or
    /// with the reason why it is not. What the read held is free by then, or stuck with its thread.
    /// `span`: its share of the time in which several were read.
    fn read_ended(self, result: Result<ReadDone>, span: StageSpan);
}

/// A record that is to be read from a tier for a load.
pub(crate) struct TierRead<R> {
    pub(crate) tier: usize,
    pub(crate) read: BlockRead,
    pub(crate) request: Request,
    pub(crate) reader: R,
}

/// See the module.
pub(crate) struct TierReads {
    pub(super) table: Arc<TierTable>,
    pub(super) probes: Arc<Probes>,
    pub(super) prefetches: Arc<Prefetches>,
    /// Reads that wait until the index of their tier was refreshed.
    pub(super) awaiting_refresh: AtomicUsize,
}

impl TierReads {
    /// Reads records, those of one tier together.
    pub(crate) fn read<R: Reader>(self: &Arc<Self>, mut reads: Vec<TierRead<R>>) {
        while let Some(tier) = reads.first().map(|one| one.tier) {
            let of_tier = reads.extract_if(.., |one| one.tier == tier).collect();
            self.read_from(tier, of_tier);
        }
    }

    fn read_from<R: Reader>(self: &Arc<Self>, number: usize, reads: Vec<TierRead<R>>) {
        let now = self.table.clock.now();
        let mut admitted: Option<(Request, bool)> = None;
        let mut begun = Vec::with_capacity(reads.len());
        for mut one in reads {
            let admits = match admitted {
                Some((request, admits)) if request.number == one.request.number => admits,
                _ => self.probes.admits(number, one.request, now),
            };
            admitted = Some((one.request, admits));
            if admits {
                one.read.deadline = self.time_for(number, &one, now);
                begun.push(one);
            } else {
                drop(one.read);
                let off = Error::new(ErrorKind::Unhealthy, "this tier is switched off for now");
                let name = self.table.tiers[number].health.name();
                one.reader.read_ended(Err(off.with("tier", name)), None);
            }
        }
        self.prefetches.loads_begin(begun.len());
        let unknown = self.begin(number, begun, false);
        self.refresh_for(number, unknown);
    }

    /// Begins the reads that can begin now, run by run, and returns those of records that the
    /// medium does not know. `refreshed`: there is no second refresh for those that begin here.
    fn begin<R: Reader>(
        self: &Arc<Self>,
        number: usize,
        mut reads: Vec<TierRead<R>>,
        refreshed: bool,
    ) -> Vec<TierRead<R>> {
        let tier = &self.table.tiers[number];
        let wanted: Vec<&BlockRead> = reads.iter().map(|one| &one.read).collect();
        let features = tier.backend.features();
        let runs = features.runs(&wanted, tier.pool.width(LANE_LOAD));
        if refreshed {
            reads.iter_mut().for_each(|one| one.read.looked = true);
        }
        if runs.len() == 1 && runs[0].len() == reads.len() && runs[0].is_sorted() {
            self.read_run(number, reads);
            return Vec::new();
        }
        let mut left: Vec<_> = reads.into_iter().map(Some).collect();
        for run in runs {
            let run = run.into_iter().filter_map(|at| left.get_mut(at)?.take());
            self.read_run(number, run.collect());
        }
        left.into_iter().flatten().collect()
    }

    /// Reads of records that the medium does not know, or not any more, begin again when its index
    /// was refreshed. Where it could not be, those that it knows by then.
    fn refresh_for<R: Reader>(self: &Arc<Self>, number: usize, mut reads: Vec<TierRead<R>>) {
        for one in reads.extract_if(.., |one| one.read.looked) {
            self.fail(number, one, absent());
        }
        reads.sort_by_key(|one| one.read.deadline);
        self.awaiting_refresh
            .fetch_add(reads.len(), Ordering::AcqRel);
        while let Some(deadline) = reads.last().map(|one| one.read.deadline) {
            let first = reads.partition_point(|one| one.read.deadline < deadline);
            let (mut alike, this) = (reads.split_off(first), Arc::clone(self));
            let refreshed = move |result: Result<()>| {
                this.awaiting_refresh
                    .fetch_sub(alike.len(), Ordering::AcqRel);
                if result.is_ok() {
                    alike.iter_mut().for_each(|one| one.read.looked = true);
                }
                for one in this.begin(number, alike, true) {
                    this.fail(number, one, result.clone().err().unwrap_or_else(absent));
                }
            };
            let features = self.table.tiers[number].backend.features();
            features.look(deadline, Box::new(refreshed));
        }
    }

    /// Reads that wait until the index of their tier was refreshed.
    pub(crate) fn awaiting_refresh(&self) -> usize {
        self.awaiting_refresh.load(Ordering::Acquire)
    }

    /// Reads a run on one thread.
    fn read_run<R: Reader>(self: &Arc<Self>, number: usize, run: Vec<TierRead<R>>) {
        let Some(deadline) = run.iter().map(|one| one.read.deadline).max() else {
            return;
        };
        let (mut reads, mut readers) = (Vec::new(), Vec::new());
        for one in run {
            readers.push((one.read.sides, one.request, one.reader));
            reads.push(one.read);
        }
        let (table, this) = (Arc::clone(&self.table), Arc::clone(self));
        let work = move |io: &IoJob| {
            let (tier, began) = (&table.tiers[number], stage_time(&*table.clock));
            Ok((tier.form.read(&*tier.backend, io, reads), began))
        };
        let ended = move |outcomes: Result<(Vec<Outcome>, Option<MonotonicTime>)>| {
            let ((outcomes, began), failed) = match outcomes {
                Ok(outcomes) => (outcomes, Error::internal("a read has no outcome")),
                Err(error) => ((Vec::new(), None), error),
            };
            let (n, ended) = (readers.len() as u64, stage_time(&*this.table.clock));
            let share = |at| Some(MonotonicTime((began?.0 * (n - at) + ended?.0 * at) / n));
            let (mut outcomes, mut moved) = (outcomes.into_iter(), Vec::new());
            for (at, (sides, request, reader)) in (0..).zip(readers) {
                let span = share(at).zip(share(at + 1));
                match outcomes.next() {
                    Some(Outcome::Read(result)) => {
                        if let Ok(read) = &result {
                            this.count(number, sides, read);
                        }
                        this.end(number, request, reader, result, span);
                    }
                    Some(Outcome::Moved(read)) => moved.push(TierRead {
                        tier: number,
                        read,
                        request,
                        reader,
                    }),
                    None => this.end(number, request, reader, Err(failed.clone()), None),
                }
            }
            this.refresh_for(number, moved);
        };
        let pool = &self.table.tiers[number].pool;
        pool.job(LANE_LOAD, deadline, work, ended);
    }

    /// A read ended without its record; its slot is free before that is reported.
    fn fail<R: Reader>(self: &Arc<Self>, number: usize, one: TierRead<R>, error: Error) {
        drop(one.read);
        self.end(number, one.request, one.reader, Err(error), None);
    }

    /// Notes how a read for a load ended, and reports it.
    fn end<R: Reader>(
        self: &Arc<Self>,
        number: usize,
        request: Request,
        reader: R,
        result: Result<ReadDone>,
        span: StageSpan,
    ) {
        self.table.tiers[number].note(request, result.as_ref().err());
        reader.read_ended(result, span);
        self.prefetches.load_ended();
    }

    fn count(&self, number: usize, sides: bool, read: &ReadDone) {
        let counts = &self.table.tiers[number].counts;
        let counter = match sides {
            true => &counts.sides_read,
            false => &counts.blocks_read,
        };
        add(counter, 1);
        add(&counts.bytes_read, read.read as u64);
    }

    /// How long a read may take here: one that may follow in a tier below must have time left.
    fn time_for<R>(&self, number: usize, one: &TierRead<R>, now: MonotonicTime) -> MonotonicTime {
        let deadline = one.read.deadline;
        let (table, asked) = (&self.table, one.request.number);
        let below = || table.place(one.read.id, Some(number), asked);
        if !table.tiers[number].is_memory() && below().is_some() {
            now.after(deadline.since(now) / 2)
        } else {
            deadline
        }
    }
}

fn absent() -> Error {
    Error::new(ErrorKind::NotFound, "the record is not there any more")
}
