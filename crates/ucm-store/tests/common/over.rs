//! What a test needs that not every store has: the suites run unchanged over every layout, I/O
//! engine and tier, and a test that means nothing over one of them says so itself, with the reason.

#![allow(clippy::print_stderr, reason = "a test says why it is skipped")]

use std::io::Write;

use super::{Above, Fixture, Layout};

/// What the store of this run must be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Needs {
    /// One record per file.
    Files,
    /// Nothing above the medium: the breaker is that of the engine.
    OneMedium,
    /// Nothing above the medium that keeps records: whatever is a hit or is read comes from it.
    NothingKept,
    /// One record per file, and nothing above.
    FilesAlone,
    /// One record per file, and nothing above that keeps records.
    FilesUnkept,
}

impl Needs {
    /// Whether the store of this run is that.
    pub(crate) fn met(self) -> bool {
        let above = Above::of_this_run();
        let (files, alone, unkept) = (
            Layout::of_this_run() == Layout::File,
            above == Above::Nothing,
            matches!(above, Above::Nothing | Above::Map(0, _)),
        );
        match self {
            Self::Files => files,
            Self::OneMedium => alone,
            Self::NothingKept => unkept,
            Self::FilesAlone => files && alone,
            Self::FilesUnkept => files && unkept,
        }
    }

    /// Says that a test is skipped, and why: to the log, and to the file that `UCM_TEST_SKIPPED`
    /// names.
    pub(crate) fn skip(self, test: &str, why: &str) {
        let fixture = Fixture::default();
        let text = format!(
            "{test} needs {self:?}, not {:?} below {:?}: {why}\n",
            fixture.layout, fixture.above
        );
        eprint!("skipped: {text}");
        if let Some(path) = std::env::var_os("UCM_TEST_SKIPPED") {
            let file = std::fs::File::options()
                .create(true)
                .append(true)
                .open(path);
            file.unwrap().write_all(text.as_bytes()).unwrap();
        }
    }
}

/// The rest of the test is for stores that are this ([`Needs`]); over others it is skipped, and
/// says why.
#[allow(unused_macros, reason = "each test file uses its part of this")]
macro_rules! only_over {
    ($needs:ident, $why:literal) => {
        if !$crate::common::over::Needs::$needs.met() {
            let name = std::thread::current().name().unwrap_or("a test").to_owned();
            return $crate::common::over::Needs::$needs.skip(&name, $why);
        }
    };
}
#[allow(unused_imports, reason = "each test file uses its part of this")]
pub(crate) use only_over;
