//! Reading records of one tier, on its threads: in runs that it brings together, each within its time.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use ucm_core::{BlockId, Error, ErrorKind, Result};
use ucm_infra::{LANE_LOAD, Mono};
use ucm_io::IoJob;

use super::tier::add;
use super::{Request, Tiers, WritePolicy};
use crate::backend::{BlockRead, ReadDone};

/// A record that is to be read for a load, and what it is read for.
pub(crate) struct TierRead<R> {
    /// What is read.
    pub(crate) read: BlockRead,
    /// Who asks.
    pub(crate) request: Request,
    /// Handed back with the outcome.
    pub(crate) whose: R,
}

impl Tiers {
    /// The first tier from number `from` on that a record may be read from for this request. Never waits.
    pub(crate) fn place(&self, id: BlockId, from: usize, request: u64) -> Option<usize> {
        let now = self.clock.now();
        (from..self.tiers.len()).find(|&number| {
            let tier = &self.tiers[number];
            tier.may_have(id) && !tier.has_refused(id) && tier.may(request, now)
        })
    }

    /// Whether parts of a record can be read by themselves from this tier, and that is of use: not where a tier above would
    /// keep the whole.
    pub(crate) fn reads_parts(&self, number: usize) -> bool {
        let above = &self.tiers[..number];
        let kept = above.iter().any(|tier| tier.policy != WritePolicy::Never);
        !kept && self.tiers[number].backend.features().reads_parts
    }

    /// Reads records of one tier. `ended` is called once for each, on a thread of the tier, when the record is in its slot;
    /// what the read holds is free by then, or stuck with its thread.
    pub(crate) fn read<R: Send + 'static>(
        self: &Arc<Self>,
        number: usize,
        reads: Vec<TierRead<R>>,
        ended: &Arc<impl Fn(R, Result<ReadDone>) + Send + Sync + 'static>,
    ) {
        let (tier, now) = (&self.tiers[number], self.clock.now());
        let (mut asked, mut whose) = (Vec::with_capacity(reads.len()), Vec::with_capacity(reads.len()));
        for one in reads {
            if self.admits(number, one.request.number, now) {
                asked.push(BlockRead {
                    deadline: self.time_for(number, &one, now),
                    ..one.read
                });
                whose.push(Some((one.request, one.whose)));
            } else {
                drop(one.read);
                let off = Error::new(ErrorKind::Unhealthy, "this tier is switched off for now");
                ended(one.whose, Err(off.with("tier", &tier.name)));
            }
        }
        self.loading.fetch_add(asked.len(), Ordering::AcqRel);
        let runs = tier.backend.runs(&asked, tier.pool.width(LANE_LOAD));
        let mut asked: Vec<_> = asked.into_iter().map(Some).collect();
        for run in runs {
            let reads: Vec<_> = run.iter().filter_map(|&at| asked[at].take()).collect();
            let whose: Vec<_> = run.iter().filter_map(|&at| whose[at].take()).collect();
            self.read_run(number, reads, whose, Arc::clone(ended));
        }
    }

    /// Reads a run on one thread.
    fn read_run<R: Send + 'static>(
        self: &Arc<Self>,
        number: usize,
        reads: Vec<BlockRead>,
        whose: Vec<(Request, R)>,
        ended: Arc<impl Fn(R, Result<ReadDone>) + Send + Sync + 'static>,
    ) {
        let Some(deadline) = reads.iter().map(|read| read.deadline).max() else {
            return;
        };
        let (tiers, backend) = (Arc::clone(self), Arc::clone(&self.tiers[number].backend));
        let work = move |io: &IoJob| Ok(backend.read(io, reads));
        let told = move |results: Result<Vec<Result<ReadDone>>>| {
            let results = match results {
                Ok(results) => results,
                Err(error) => whose.iter().map(|_| Err(error.clone())).collect(),
            };
            for ((request, whose), result) in whose.into_iter().zip(results) {
                tiers.read_ended(number, request, &result);
                ended(whose, result);
            }
        };
        self.tiers[number].pool.job(LANE_LOAD, deadline, work, told);
    }

    /// How long a read may take here: one that may yet be asked below must leave time for that.
    fn time_for<R>(&self, number: usize, one: &TierRead<R>, now: Mono) -> Mono {
        let (id, deadline) = (one.read.id, one.read.deadline);
        let below = !self.tiers[number].memory && self.place(id, number + 1, one.request.number).is_some();
        if below {
            now.after(deadline.since(now) / 2)
        } else {
            deadline
        }
    }

    /// Notes how a read for a load ended.
    fn read_ended(self: &Arc<Self>, number: usize, request: Request, result: &Result<ReadDone>) {
        self.note(number, request, result.as_ref().err());
        if let Ok(read) = result {
            let counts = &self.tiers[number].counts;
            add(&counts.blocks_read, 1);
            add(&counts.bytes_read, read.read as u64);
        }
        if self.loading.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.pump_prefetch();
        }
    }
}
