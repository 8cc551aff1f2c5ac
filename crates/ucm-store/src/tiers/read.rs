//! Reading records of one tier, on its threads: in runs that it brings together, each within its
//! time.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use ucm_core::{BlockId, Error, ErrorKind, Result};
use ucm_infra::{LANE_LOAD, MonotonicTime};
use ucm_io::IoJob;
use ucm_tier::backend::{BlockRead, Outcome, ReadDone};

use super::tier::add;
use super::{Request, Tiers, WritePolicy};

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
    /// The next tier behind `after`, or the first, that a record may be read from for this request:
    /// one that knows of it, or could only be asked, before those that do not know of it. Never
    /// waits.
    pub(crate) fn place(&self, id: BlockId, after: Option<usize>, request: u64) -> Option<usize> {
        let now = self.clock.now();
        let may = |number: usize| self.tiers[number].may(request, now);
        let order = self.order(id);
        let behind = after.and_then(|after| order.iter().position(|&number| number == after));
        let rest = &order[behind.map_or(0, |at| at + 1)..];
        let can = |&number: &usize| {
            let tier = &self.tiers[number];
            tier.may_have(id) && !tier.has_refused(id) && may(number)
        };
        let expects = |number: &usize| can(number) && self.expects(*number, id, may);
        rest.iter()
            .copied()
            .find(expects)
            .or_else(|| rest.iter().copied().find(can))
    }

    /// Whether parts of a record can be read by themselves from this tier, and that is of use: not
    /// where a tier above would keep the whole.
    pub(crate) fn reads_parts(&self, number: usize) -> bool {
        let whole = self.is_kept_above(number) || self.recodes(number);
        !whole && self.tiers[number].backend.features().reads_parts
    }

    /// Whether records lie in another form there, so that only a whole one can be read.
    pub(crate) fn recodes(&self, number: usize) -> bool {
        self.tiers[number].recodes()
    }

    /// Whether what is read from this tier is brought up to one above it.
    pub(crate) fn is_kept_above(&self, number: usize) -> bool {
        let above = &self.levels[..self.tiers[number].level];
        above.iter().any(|level| level.policy != WritePolicy::Never)
    }

    /// Reads records of one tier. `ended` is called once for each, on a thread of the tier, when
    /// the record is in its slot; what the read holds is free by then, or stuck with its thread.
    pub(crate) fn read<R: Send + 'static>(
        self: &Arc<Self>,
        number: usize,
        reads: Vec<TierRead<R>>,
        ended: &Arc<impl Fn(R, Result<ReadDone>) + Send + Sync + 'static>,
    ) {
        let (now, mut admitted) = (self.clock.now(), None);
        let mut begun = Vec::with_capacity(reads.len());
        for mut one in reads {
            let request = one.request.number;
            let known = admitted.filter(|(number, _)| *number == request);
            let (_, admits) = *admitted
                .insert(known.unwrap_or_else(|| (request, self.admits(number, request, now))));
            if admits {
                one.read.deadline = self.time_for(number, &one, now);
                begun.push(one);
            } else {
                drop(one.read);
                let off = Error::new(ErrorKind::Unhealthy, "this tier is switched off for now");
                ended(one.whose, Err(off.with("tier", &self.tiers[number].name)));
            }
        }
        self.tally.loading.fetch_add(begun.len(), Ordering::AcqRel);
        let unknown = self.begin(number, begun, false, ended);
        self.look_for(number, unknown, ended);
    }

    /// Begins what can be read now, run by run, and gives back what the medium does not know.
    /// `looked`: there is no other look for what is begun here.
    fn begin<R: Send + 'static>(
        self: &Arc<Self>,
        number: usize,
        mut reads: Vec<TierRead<R>>,
        looked: bool,
        ended: &Arc<impl Fn(R, Result<ReadDone>) + Send + Sync + 'static>,
    ) -> Vec<TierRead<R>> {
        let tier = &self.tiers[number];
        let asked: Vec<&BlockRead> = reads.iter().map(|one| &one.read).collect();
        let runs = tier
            .backend
            .features()
            .runs(&asked, tier.pool.width(LANE_LOAD));
        if looked {
            reads.iter_mut().for_each(|one| one.read.looked = true);
        }
        if runs.len() == 1 && runs[0].len() == reads.len() && runs[0].is_sorted() {
            self.read_run(number, reads, Arc::clone(ended));
            return Vec::new();
        }
        let mut left: Vec<_> = reads.drain(..).map(Some).collect();
        for run in runs {
            let run = run
                .iter()
                .filter_map(|&at| left.get_mut(at).and_then(Option::take));
            self.read_run(number, run.collect(), Arc::clone(ended));
        }
        left.into_iter().flatten().collect()
    }

    /// Reads that the medium does not know, or not any more, begin again when it has looked. Where
    /// it could not look, those that it knows by then.
    fn look_for<R: Send + 'static>(
        self: &Arc<Self>,
        number: usize,
        mut reads: Vec<TierRead<R>>,
        ended: &Arc<impl Fn(R, Result<ReadDone>) + Send + Sync + 'static>,
    ) {
        let gone = || Error::new(ErrorKind::NotFound, "the record is not there any more");
        let again = reads
            .extract_if(.., |one| one.read.looked)
            .collect::<Vec<_>>();
        for one in again {
            // it was looked for, and went once more
            self.read_ended(number, one, Err(gone()), ended);
        }
        reads.sort_by_key(|one| one.read.deadline);
        self.tally
            .awaiting_look
            .fetch_add(reads.len(), Ordering::AcqRel);
        while let Some(deadline) = reads.last().map(|one| one.read.deadline) {
            let mut alike =
                reads.split_off(reads.partition_point(|one| one.read.deadline < deadline));
            let (tiers, ended) = (Arc::clone(self), Arc::clone(ended));
            let looked = move |result: Result<()>| {
                tiers
                    .tally
                    .awaiting_look
                    .fetch_sub(alike.len(), Ordering::AcqRel);
                if result.is_ok() {
                    alike.iter_mut().for_each(|one| one.read.looked = true);
                }
                for one in tiers.begin(number, alike, true, &ended) {
                    let error = result.clone().err().unwrap_or_else(gone);
                    tiers.read_ended(number, one, Err(error), &ended);
                }
            };
            self.tiers[number]
                .backend
                .features()
                .look(deadline, Box::new(looked));
        }
    }

    /// Reads that wait for a look.
    pub(crate) fn awaiting_look(&self) -> usize {
        self.tally.awaiting_look.load(Ordering::Acquire)
    }

    /// Reads a run on one thread.
    fn read_run<R: Send + 'static>(
        self: &Arc<Self>,
        number: usize,
        run: Vec<TierRead<R>>,
        ended: Arc<impl Fn(R, Result<ReadDone>) + Send + Sync + 'static>,
    ) {
        let Some(deadline) = run.iter().map(|one| one.read.deadline).max() else {
            return;
        };
        let sides = run.iter().all(|one| one.read.sides); // reads of one call are all of one kind
        let (reads, whose): (Vec<_>, Vec<_>) = run
            .into_iter()
            .map(|one| (one.read, (one.request, one.whose)))
            .unzip();
        let (tiers, reader) = (Arc::clone(self), Arc::clone(self));
        let work = move |io: &IoJob| Ok(reader.read_here(number, io, reads));
        let told = move |outcomes: Result<Vec<Outcome>>| {
            let mut moved = Vec::new();
            let (mut outcomes, failed) = match outcomes {
                Ok(outcomes) => (
                    outcomes.into_iter(),
                    Error::internal("a read has no outcome"),
                ),
                Err(error) => (Vec::new().into_iter(), error),
            };
            for (request, whose) in whose {
                let outcome = outcomes.next();
                match outcome.unwrap_or_else(|| Outcome::Came(Err(failed.clone()))) {
                    Outcome::Came(result) => {
                        if let Ok(read) = &result {
                            tiers.count_read(number, sides, read);
                        }
                        tiers.tell(number, request, whose, result, &*ended);
                    }
                    Outcome::Moved(read) => moved.push(TierRead {
                        read,
                        request,
                        whose,
                    }),
                }
            }
            tiers.look_for(number, moved, &ended);
        };
        self.tiers[number].pool.job(LANE_LOAD, deadline, work, told);
    }

    /// A read ended without its record; its slot is free by the time that is told.
    fn read_ended<R>(
        self: &Arc<Self>,
        number: usize,
        one: TierRead<R>,
        result: Result<ReadDone>,
        ended: &Arc<impl Fn(R, Result<ReadDone>)>,
    ) {
        drop(one.read);
        self.tell(number, one.request, one.whose, result, &**ended);
    }

    /// Notes how a read for a load ended, and tells.
    fn tell<R>(
        self: &Arc<Self>,
        number: usize,
        request: Request,
        whose: R,
        result: Result<ReadDone>,
        ended: &impl Fn(R, Result<ReadDone>),
    ) {
        self.note(number, request, result.as_ref().err());
        ended(whose, result);
        if self.tally.loading.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.pump_prefetch();
        }
    }

    fn count_read(&self, number: usize, sides: bool, read: &ReadDone) {
        let counts = &self.tiers[number].counts;
        let reads = if sides {
            &counts.sides_read
        } else {
            &counts.blocks_read
        };
        add(reads, 1);
        add(&counts.bytes_read, read.read as u64);
    }

    /// How long a read may take here: one that may yet be asked below must leave time for that.
    fn time_for<R>(&self, number: usize, one: &TierRead<R>, now: MonotonicTime) -> MonotonicTime {
        let (id, deadline) = (one.read.id, one.read.deadline);
        let below = !self.tiers[number].is_memory()
            && self.place(id, Some(number), one.request.number).is_some();
        if below {
            now.after(deadline.since(now) / 2)
        } else {
            deadline
        }
    }
}
