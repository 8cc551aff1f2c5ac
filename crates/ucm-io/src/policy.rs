//! Scheduling of the threads that copy and write.
#![allow(
    unsafe_code,
    reason = "a system call without a safe wrapper; it gets one structure of our own"
)]

/// Sets the policy of the calling thread to batch work (`SCHED_BATCH`, sched(7)): it keeps its
/// share of the processors, but when it wakes it does not preempt the running thread.
///
/// On a machine with two processors, three of our threads preempted the model's thread within its
/// call of `dump`: to begin a dump of 125 blocks took 0.8 ms, and takes 0.2 ms with this policy
/// (`benches/python/begin_cost.py`). If the system refuses, nothing changes.
pub fn use_batch_policy() {
    #[cfg(target_os = "linux")]
    {
        // SAFETY: every field of the structure is an integer, for which zero is a value.
        let parameters: libc::sched_param = unsafe { std::mem::zeroed() };
        // SAFETY: 0 is the calling thread; the structure lives through the call, which only reads
        // it.
        unsafe { libc::sched_setscheduler(0, libc::SCHED_BATCH, &raw const parameters) };
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn a_thread_says_that_its_work_is_a_batch() {
        // SAFETY: 0 is the calling thread, and nothing is written.
        let policy = || unsafe { libc::sched_getscheduler(0) };
        let (before, after) = std::thread::spawn(move || {
            let before = policy();
            use_batch_policy();
            (before, policy())
        })
        .join()
        .unwrap();
        assert_eq!((before, after), (policy(), libc::SCHED_BATCH));
    }
}
