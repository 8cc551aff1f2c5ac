//! The engines under test: every test of an engine runs over each of them.

use std::sync::Arc;

use ucm_io::{IoEngine, PsyncEngine, PsyncOptions, UringEngine, UringOptions};

/// What the tests ask of an engine beyond the trait.
pub trait UnderTest: IoEngine {
    /// How many operations wanted direct I/O and went through the page cache.
    fn direct_fallbacks(&self) -> u64;
    /// Operations of a lane on their way.
    fn running(&self, lane: usize) -> usize;
}

impl UnderTest for PsyncEngine {
    fn direct_fallbacks(&self) -> u64 {
        self.direct_fallbacks()
    }

    fn running(&self, lane: usize) -> usize {
        self.pool_stats().lanes[lane].running
    }
}

impl UnderTest for UringEngine {
    fn direct_fallbacks(&self) -> u64 {
        self.direct_fallbacks()
    }

    fn running(&self, lane: usize) -> usize {
        self.stats().lanes[lane].1
    }
}

/// One of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// The thread pool.
    Psync,
    /// The ring.
    Uring,
}

impl Kind {
    /// An engine with two workers on the real clock.
    pub fn engine(self) -> Arc<dyn UnderTest> {
        self.build(PsyncOptions::with_workers(2))
    }

    /// The same past the page cache.
    pub fn direct(self) -> Arc<dyn UnderTest> {
        self.build(PsyncOptions {
            direct: true,
            ..PsyncOptions::with_workers(2)
        })
    }

    /// With these options; a lane of the ring then runs no more at once than one of the pool, so that queues fill alike.
    pub fn build(self, psync: PsyncOptions) -> Arc<dyn UnderTest> {
        match self {
            Self::Psync => PsyncEngine::new(psync).unwrap(),
            Self::Uring => UringEngine::new(&UringOptions {
                lanes: psync.lanes.clone(),
                ..UringOptions::beside(psync)
            })
            .unwrap(),
        }
    }
}

/// Whether a ring can be made here, or why the test is skipped.
pub fn ring_or_skip(test: &str) -> bool {
    let options = UringOptions::beside(PsyncOptions::with_workers(1));
    super::or_skip(
        test,
        UringEngine::new(&options)
            .map(drop)
            .map_err(|error| error.to_string()),
    )
    .is_some()
}

/// Makes a test over each engine of every function that is named.
#[macro_export]
macro_rules! over_each_engine {
    ($($test:ident),* $(,)?) => {
        mod psync {
            $(#[test] fn $test() { super::$test($crate::common::engines::Kind::Psync) })*
        }
        mod uring {
            $(#[test] fn $test() {
                if $crate::common::engines::ring_or_skip(stringify!($test)) {
                    super::$test($crate::common::engines::Kind::Uring)
                }
            })*
        }
    };
}
