//! How the system schedules the threads that copy and write.
#![allow(
    unsafe_code,
    reason = "a system call that no safe library offers; it is given one structure of our own"
)]

/// Tells the system that the calling thread is one of batch work (`SCHED_BATCH`, sched(7)): it has
/// its share of the processors as before, but when it wakes it never pushes aside the thread that
/// runs there.
///
/// A model's thread that hands blocks to three threads of ours on a machine of two processors was
/// pushed aside by them in the very call: beginning the dump of 125 blocks took it 0.8 ms and takes
/// 0.2 so (`benches/python/begin_cost.py`). Where the system refuses, nothing changes.
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
