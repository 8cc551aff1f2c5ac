//! The thread of the ring: takes orders, gives calls to the kernel in batches, hands answers to the pool. It sleeps in the kernel,
//! where news from other threads reaches it as the answer to a read of an eventfd that is always under way.
#![allow(
    unsafe_code,
    reason = "a submitted call points to memory; see `Ring::push` for why that is sound"
)]

use std::os::fd::AsRawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use io_uring::squeue::Entry;
use io_uring::{IoUring, opcode, types};
use rustix::io::Errno;
use ucm_core::{Error, ErrorKind};

use super::buffers::Buffers;
use super::hold::Call;
use super::shared::{Left, Shared};
use super::state::Orders;
use super::work::{Next, Work};
use crate::op::IoBuf;

/// Names of answers that are not an operation's.
const WAKE: u64 = u64::MAX;
const CANCEL: u64 = u64::MAX - 1;

/// The ring and every operation that the kernel has.
pub(super) struct Ring {
    ring: IoUring,
    shared: Arc<Shared>,
    /// By place. Boxed, for the kernel has pointers into them.
    works: Vec<Option<Box<Work>>>,
    /// Whether the kernel has a call of the place's work.
    flying: Vec<bool>,
    /// What is for the pool, once the kernel has got its next calls.
    ended: Vec<(usize, Left)>,
    buffers: Buffers,
    /// Where the wake-ups are read to, and whether the kernel has a call for that.
    woken: Box<u64>,
    listening: bool,
    leaving: bool,
}

impl Ring {
    /// Over a ring that this thread has made.
    pub(super) fn new(ring: IoUring, shared: Arc<Shared>, places: usize) -> Self {
        Self {
            buffers: Buffers::new(&ring),
            ring,
            shared,
            works: (0..places).map(|_| None).collect(),
            flying: vec![false; places],
            ended: Vec::new(),
            woken: Box::new(0),
            listening: false,
            leaving: false,
        }
    }

    /// Works until the engine is shut down and nothing is left in the kernel.
    pub(super) fn run(mut self) {
        let served = catch_unwind(AssertUnwindSafe(|| self.serve()));
        let error = match served {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(error.to_string()),
            Err(_) => Some("its thread panicked; please report".to_owned()),
        };
        if let Some(why) = error {
            // Never seen. What the kernel has stays with it (see `drop`); the others are told and go elsewhere.
            let left = self.shared.change(|state| {
                state.broken = true;
                state.abandon()
            });
            self.shared.report(left, || {
                Error::new(ErrorKind::Io, "the ring is out of order").with("why", &why)
            });
        }
    }

    fn serve(&mut self) -> std::io::Result<()> {
        self.listen();
        loop {
            let orders = self.shared.orders();
            if orders.leave {
                return self.hush();
            }
            self.follow(orders);
            self.submit(self.ended.is_empty())?;
            self.reap();
            if !self.ended.is_empty() {
                // The kernel goes on with the next calls meanwhile.
                self.submit(false)?;
                self.hand_over();
            }
        }
    }

    fn follow(&mut self, orders: Orders) {
        self.shared.report_late(orders.late);
        for place in orders.cancels {
            let call = self.works[place].as_ref().map(|work| work.core.call);
            if self.flying[place] && call.is_some_and(Call::is_cancellable) {
                self.push(opcode::AsyncCancel::new(place as u64).build().user_data(CANCEL));
            }
        }
        for (place, mut work) in orders.starts {
            let next = work.begin();
            self.advance(place, work, next);
        }
        for (place, mut work) in orders.returned {
            let next = work.abandon();
            self.advance(place, work, next);
        }
    }

    /// Does what comes next for an operation.
    fn advance(&mut self, place: usize, mut work: Box<Work>, next: Next) {
        match next {
            Next::Call(call) => {
                let fixed = self.registered(call, &work);
                let entry = work.core.hold.entry(call, fixed).user_data(place as u64);
                self.works[place] = Some(work);
                self.flying[place] = true;
                Shared::count(&self.shared.counters.calls, 1);
                self.push(entry);
            }
            Next::Pool => self.ended.push((place, Left::Work(work))),
            Next::Done(result) => {
                // The buffer is free again before its owner hears of it.
                drop(work);
                self.ended.push((place, Left::Answer(result)));
            }
        }
    }

    /// The number of the buffer for the kernel. Registering pays where pages would have to be pinned: not for copies
    /// from and to the page cache.
    fn registered(&mut self, call: Call, work: &Work) -> Option<u16> {
        let hold = &work.core.hold;
        let moves = matches!(call, Call::Read { .. } | Call::Write { .. });
        match &hold.buf {
            IoBuf::Slot(slot) if moves && hold.is_direct() && !hold.is_several() => {
                let (number, bytes) = self.buffers.number(&self.ring, slot);
                Shared::count(&self.shared.counters.registered, bytes);
                number
            }
            _ => None,
        }
    }

    /// Takes the read of the eventfd back and waits until it is: the kernel must not write here once we are gone.
    fn hush(&mut self) -> std::io::Result<()> {
        self.leaving = true;
        self.push(opcode::AsyncCancel::new(WAKE).build().user_data(CANCEL));
        while self.listening {
            self.submit(true)?;
            self.reap();
        }
        Ok(())
    }

    /// Keeps a read of the eventfd under way.
    fn listen(&mut self) {
        self.listening = !self.leaving;
        if self.leaving {
            return;
        }
        let fd = types::Fd(self.shared.wake.as_raw_fd());
        let into = std::ptr::from_mut(&mut *self.woken).cast();
        self.push(opcode::Read::new(fd, into, 8).build().user_data(WAKE));
    }

    /// Queues a call. There is room: each place has one call and one cancellation at most, and the wake-up is one.
    fn push(&mut self, entry: Entry) {
        loop {
            // SAFETY: everything a call points to is in a boxed `Work` of `works`, in the slot or vector that it owns,
            // in `woken`, or static. It is neither moved nor touched nor dropped until the call's answer is there:
            // `works` gives a work out only in `reap`, and `drop` leaks what is still flying.
            if unsafe { self.ring.submission().push(&entry) }.is_ok() {
                return;
            }
            // Cannot be; an error shows again with the next submission.
            let _ = self.ring.submit();
        }
    }

    /// Gives the kernel what is queued and, if wanted, sleeps until there is an answer. It may come back without having
    /// done either: the next round tries again.
    fn submit(&mut self, sleep: bool) -> std::io::Result<()> {
        if !sleep && self.ring.submission().is_empty() {
            return Ok(());
        }
        let done = self.enter(sleep);
        if sleep {
            // From here on nobody wakes us, so there is no second sleep before the orders were looked at.
            self.shared.state.lock().asleep = false;
            Shared::count(&self.shared.counters.wakeups, 1);
        }
        let Err(error) = done else { return Ok(()) };
        match error.raw_os_error() {
            // A signal, or answers to be taken first: there may be news in any case.
            Some(libc::EINTR | libc::EBUSY) => Ok(()),
            // No memory for a call at the moment. Without answers to wait for, that passes with time.
            Some(libc::EAGAIN | libc::ENOMEM) => {
                if self.ring.completion().is_empty() {
                    std::thread::park_timeout(std::time::Duration::from_millis(1));
                }
                Ok(())
            }
            _ => Err(error),
        }
    }

    fn enter(&self, sleep: bool) -> std::io::Result<usize> {
        #[cfg(test)]
        if let Some(code) = self.shared.fault(sleep && !self.flying.contains(&true)) {
            return Err(std::io::Error::from_raw_os_error(code));
        }
        self.ring.submit_and_wait(usize::from(sleep))
    }

    /// Takes every answer that is there, and does what comes next.
    fn reap(&mut self) {
        let answers: Vec<(u64, i32)> = self
            .ring
            .completion()
            .map(|answer| (answer.user_data(), answer.result()))
            .collect();
        for (name, result) in answers {
            match name {
                WAKE => self.listen(),
                CANCEL => {}
                _ => self.answered(name as usize, result),
            }
        }
    }

    fn answered(&mut self, place: usize, result: i32) {
        let Some(mut work) = self.works.get_mut(place).and_then(Option::take) else {
            return;
        };
        self.flying[place] = false;
        let wanted = self.shared.state.lock().is_wanted(place);
        // The kernel answers an error as its number, negative.
        let answer = u32::try_from(result).map_err(|_| Errno::from_raw_os_error(-result));
        let next = work.step(answer, wanted);
        self.advance(place, work, next);
    }

    /// Hands what has ended to the pool, or drops it where nobody waits.
    fn hand_over(&mut self) {
        for (place, left) in std::mem::take(&mut self.ended) {
            match self.shared.hand_over(place, left) {
                None => {}
                Some(Left::Answer(result)) => {
                    // The bytes first, then the place.
                    drop(result);
                    self.shared.change(|state| state.ended(place));
                }
                Some(Left::Work(mut work)) => {
                    let next = work.abandon();
                    self.advance(place, work, next);
                }
            }
        }
    }
}

impl Drop for Ring {
    /// What the kernel still has must stay where it is for ever; there is nothing of that kind after an orderly end.
    fn drop(&mut self) {
        if self.listening {
            Box::leak(std::mem::take(&mut self.woken));
        }
        for (work, flying) in self.works.iter_mut().zip(&self.flying) {
            if let (Some(work), true) = (work.take(), *flying) {
                Box::leak(work);
            }
        }
    }
}
