//! What a root of several has to remove to make room goes to the next colder one first.
//!
//! The collector of a root asks before it removes a file
//! ([`Quota::on_leaving`](ucm_quota::Quota::on_leaving)). The file, a record or a whole segment, is
//! copied as it is to the same place below the next root, against that root's grant, with the time
//! of its last use: so it is as old there as it was here, and goes on from there in its turn. A
//! copy gets its name only when it was read back, past the caches that can be passed, and is the
//! same byte for byte; the file that it was made of is removed after that. So of a record that
//! moves there is always one copy that was read.
//!
//! All of it is done in the background, on the lane below dumps, and keeps to a rate. What cannot
//! be copied, for want of room there or because that root does not answer, is removed all the same:
//! the limit of a root holds whatever the others do.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use ucm_core::{Error, ErrorKind, PAGE, Result, crc32c};
use ucm_infra::{MonotonicTime, Notify};
use ucm_io::{Finish, IoJob, ReadMode};
use ucm_quota::layout::MANIFEST;
use ucm_quota::{Leaving, Reservation};

use crate::shared::Shared;
use crate::spread::Spread;

/// How long one step may take.
const STEP: Duration = Duration::from_secs(10);
/// How long a root that did not answer is spared.
const REST: Duration = Duration::from_secs(30);
/// Bytes that are copied at once.
const CHUNK: u64 = 4 << 20;
/// How long a move waits for the other root to make room, which moves something itself for that.
const WAIT_FOR_ROOM: Duration = Duration::from_secs(60);
/// Time between two looks of a move that waits.
const ASK_AGAIN: Duration = Duration::from_millis(100);
/// The error number of a name that is taken.
const EEXIST: i32 = 17;

/// The roots that files move between.
pub(crate) struct Demotion {
    spread: Arc<Spread>,
    roots: Vec<Root>,
    /// Never rung: what somebody sleeps on who looks at the clock only.
    silence: Notify,
}

struct Root {
    shared: Weak<Shared>,
    /// When it may be asked again after it did not answer.
    rests_until: Mutex<MonotonicTime>,
}

/// A file on its way.
struct Move<'a> {
    demotion: &'a Demotion,
    from: &'a Arc<Shared>,
    to: &'a Arc<Shared>,
    leaving: Leaving<'a>,
    /// Whether it is still wanted.
    go_on: &'a dyn Fn() -> bool,
}

/// Has these roots, which are those of the spread in its order, give each other what they would
/// remove.
pub(crate) fn between(spread: &Arc<Spread>, roots: &[Arc<Shared>]) {
    let root = |shared: &Arc<Shared>| Root {
        shared: Arc::downgrade(shared),
        rests_until: Mutex::default(),
    };
    let demotion = Arc::new(Demotion {
        spread: Arc::clone(spread),
        roots: roots.iter().map(root).collect(),
        silence: Notify::new(),
    });
    for (number, root) in roots.iter().enumerate() {
        let demotion = Arc::clone(&demotion);
        let leaves = move |leaving: Leaving<'_>, go_on: &dyn Fn() -> bool| {
            demotion.leaves(number, leaving, go_on)
        };
        root.space.on_leaving(Box::new(leaves));
    }
}

impl Demotion {
    /// A file of root `number` is about to be removed: copies it down. False where it was used
    /// since and is to stay.
    fn leaves(&self, number: usize, leaving: Leaving<'_>, go_on: &dyn Fn() -> bool) -> bool {
        let Some(from) = self.roots[number].shared.upgrade() else {
            return true;
        };
        let path = from.layout.root().join(leaving.below);
        let until = from.clock.now().after(STEP);
        match from.call(until, move |io| io.look(path)) {
            Ok(Some(meta)) if meta.mtime_ns > leaving.used_ns => return false,
            Ok(Some(_)) => {}
            Ok(None) | Err(_) => return true, // the removal will tell
        }
        let mut colder = self.spread.by_heat().into_iter();
        colder.find(|&root| root == number);
        let mut next = None;
        for root in colder.map(|root| &self.roots[root]) {
            let Some(to) = root.shared.upgrade() else {
                continue;
            };
            next.get_or_insert_with(|| Arc::clone(&to));
            if from.clock.now() < *root.rests_until.lock() {
                continue;
            }
            let moved = Move {
                demotion: self,
                from: &from,
                to: &to,
                leaving,
                go_on,
            };
            match moved.make() {
                Ok(()) => {
                    to.config.place.facts.came(leaving.records, true);
                    return true;
                }
                Err(_) if !go_on() => return false,
                Err(error) if matches!(error.kind(), ErrorKind::Timeout | ErrorKind::Io) => {
                    *root.rests_until.lock() = to.clock.now().after(REST);
                }
                Err(_) => {}
            }
        }
        if let Some(next) = next {
            next.config.place.facts.came(leaving.records, false);
        }
        true
    }
}

impl Move<'_> {
    /// Copies the file, unless it is there.
    fn make(&self) -> Result<()> {
        let target = self.to.layout.root().join(self.leaving.below);
        self.check()?;
        let path = target.clone();
        let there = self.to.call(self.step(), move |io| io.look(path))?;
        if there.is_some_and(|meta| meta.len == self.leaving.len) {
            return Ok(());
        }
        let room = self.room()?;
        let private = self.private();
        let copied = self.copy(&private, &target);
        let kept = match &copied {
            Ok(true) => self.leaving.len,
            Err(error) if matches!(error.kind(), ErrorKind::Timeout | ErrorKind::Io) => {
                self.leaving.len
            }
            _ => 0,
        };
        self.to.space.commit(room, kept, copied.as_ref().err());
        if !matches!(copied, Ok(true)) {
            // Best effort: else swept by its age.
            let _ = self
                .to
                .call(self.step(), move |io| io.remove(&[private]).map(|_| ()));
        }
        copied.map(|_| ())
    }

    /// Whether the other root takes such files: it was opened, is the one that was, and keeps
    /// records in the same way.
    fn check(&self) -> Result<()> {
        let root = self.to.layout.root().display();
        let kind = {
            let known = self.to.root.lock();
            known.uuid.as_ref().and(known.kind)
        };
        let Some(kind) = kind else {
            return Err(
                Error::new(ErrorKind::Unhealthy, "this root was not opened yet").with("root", root),
            );
        };
        let mut names = self.leaving.below.iter();
        if names.nth(1).is_none_or(|name| name != kind.directory()) {
            let text = "this root keeps records in another layout";
            return Err(Error::new(ErrorKind::Unsupported, text).with("root", root));
        }
        self.to.check_marker(self.step())
    }

    /// Room below the other root.
    fn room(&self) -> Result<Reservation> {
        let until = self.to.clock.now().after(WAIT_FOR_ROOM);
        loop {
            let full = match self
                .to
                .space
                .reserve_blocking(self.leaving.len, self.step())
            {
                Err(error) if error.kind() == ErrorKind::NoSpace => error,
                answer => return answer,
            };
            let now = self.to.clock.now();
            if now >= until || self.to.space.usage().paused {
                return Err(full);
            }
            self.wait_until(now.after(ASK_AGAIN))?;
        }
    }

    /// Fills a private file, reads it back and gives it its name; false where somebody else was
    /// faster.
    fn copy(&self, private: &Path, target: &Path) -> Result<bool> {
        self.create(private)?;
        let len = self.leaving.len;
        let first = PAGE.min(len);
        let mut sums = Vec::new();
        for at in (first..len).step_by(CHUNK as usize) {
            let bytes = self.read(at, CHUNK.min(len - at))?;
            sums.push((at, crc32c(&bytes)));
            self.write(private, at, bytes)?;
        }
        for (at, sum) in sums {
            self.read_back(private, at, CHUNK.min(len - at), sum)?;
        }
        // The first page last: with it this would pass for the segment of a dead writer.
        let head = self.read(0, first)?;
        let sum = crc32c(&head);
        self.write(private, 0, head)?;
        self.read_back(private, 0, first, sum)?;
        self.name(private, target)
    }

    /// Makes the private file, and the directories of the namespace where there are none.
    fn create(&self, private: &Path) -> Result<()> {
        let (path, len, mode) = (
            private.to_owned(),
            self.leaving.len,
            self.to.config.modes.file,
        );
        let create = move |io: &IoJob| io.create(&path, &[], len, mode);
        let parent = self.leaving.below.parent().unwrap_or(self.leaving.below);
        let parent = self.to.layout.root().join(parent);
        let made = self.to.make_dir(parent, self.step());
        match made.and_then(|()| self.to.call(self.step(), create.clone())) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                self.furnish()?;
                self.to.call(self.step(), create)
            }
            created => created,
        }
    }

    /// The directories of the namespace, and its manifest, as they are where the file comes from.
    fn furnish(&self) -> Result<()> {
        let root = self.to.layout.root();
        let tmp = private_of(self.leaving.below);
        for dir in [self.leaving.below.parent(), tmp.as_deref()]
            .into_iter()
            .flatten()
        {
            let mut above: Vec<_> = dir
                .ancestors()
                .filter(|dir| !dir.as_os_str().is_empty())
                .collect();
            above.reverse();
            for dir in above {
                self.to.make_dir(root.join(dir), self.step())?;
            }
        }
        let Some(manifest) = self
            .leaving
            .below
            .iter()
            .next()
            .map(|name| Path::new(name).join(MANIFEST))
        else {
            return Ok(());
        };
        let source = self.from.layout.root().join(&manifest);
        let Some(bytes) = self.from.read_document(source, self.step())? else {
            return Ok(());
        };
        self.to.publish_document(
            self.private(),
            root.join(manifest),
            bytes,
            false,
            self.step(),
        )
    }

    /// A private name below the other root, in the file's namespace.
    fn private(&self) -> PathBuf {
        let own = self.to.next_private();
        let tmp = private_of(self.leaving.below).map(|tmp| self.to.layout.root().join(tmp));
        match (tmp, own.file_name()) {
            (Some(tmp), Some(name)) => tmp.join(name),
            _ => own,
        }
    }

    /// Reads a piece of the file, when the rate lets it.
    fn read(&self, at: u64, len: u64) -> Result<Vec<u8>> {
        self.pace(len)?;
        let path = self.from.layout.root().join(self.leaving.below);
        let read = move |io: &IoJob| io.read_piece(&path, at, len as usize, ReadMode::FreshDirect);
        let unread = |error| {
            Error::new(ErrorKind::Corrupt, "what is to be moved cannot be read").caused_by(error)
        };
        match self.from.call(self.step(), read).map_err(unread)? {
            Some((bytes, file_len))
                if bytes.len() as u64 == len && file_len == self.leaving.len =>
            {
                Ok(bytes)
            }
            _ => Err(Error::new(
                ErrorKind::NotFound,
                "what is to be moved is not there any more",
            )),
        }
    }

    fn write(&self, private: &Path, at: u64, bytes: Vec<u8>) -> Result<()> {
        let path = private.to_owned();
        self.to
            .call(self.step(), move |io| io.write_at(&path, at, &bytes, false))
    }

    /// Whether what was written is there.
    fn read_back(&self, private: &Path, at: u64, len: u64, sum: u32) -> Result<()> {
        if !(self.go_on)() {
            return Err(given_up());
        }
        let path = private.to_owned();
        let read = move |io: &IoJob| io.read_piece(&path, at, len as usize, ReadMode::FreshDirect);
        let same = self
            .to
            .call(self.step(), read)?
            .is_some_and(|(bytes, _)| bytes.len() as u64 == len && crc32c(&bytes) == sum);
        let differs = || Error::new(ErrorKind::Corrupt, "a copy is not what it was made of");
        same.then_some(()).ok_or_else(differs)
    }

    fn name(&self, private: &Path, target: &Path) -> Result<bool> {
        let len = self.leaving.len;
        let offset = len - PAGE.min(len);
        let footer = self.read(offset, len - offset)?;
        let (private, target, mtime_ns) =
            (private.to_owned(), target.to_owned(), self.leaving.used_ns);
        let finish = move |io: &IoJob| {
            io.finish(Finish {
                private: &private,
                target: &target,
                footer: &footer,
                offset,
                mtime_ns,
            })
        };
        match self.to.call(self.step(), finish) {
            Err(error) if error.os_code() == Some(EEXIST) => Ok(false),
            named => named.map(|_| true),
        }
    }

    /// Waits until so many bytes may be moved.
    fn pace(&self, bytes: u64) -> Result<()> {
        let now = self.from.clock.now();
        self.wait_until(self.demotion.spread.moves().pass_at(now, bytes))
    }

    /// Waits; an error when the move is not wanted any more.
    fn wait_until(&self, at: MonotonicTime) -> Result<()> {
        let (clock, silence) = (&self.from.clock, &self.demotion.silence);
        loop {
            if !(self.go_on)() {
                return Err(given_up());
            }
            let now = clock.now();
            if now >= at {
                return Ok(());
            }
            clock.sleep(silence, silence.seen(), Some(at.min(now.after(ASK_AGAIN))));
        }
    }

    /// Until when the next step may take.
    fn step(&self) -> MonotonicTime {
        self.to.clock.now().after(STEP)
    }
}

/// Where the private files of a file's namespace lie, below a root.
fn private_of(below: &Path) -> Option<PathBuf> {
    below
        .iter()
        .next()
        .map(|namespace| Path::new(namespace).join("tmp"))
}

fn given_up() -> Error {
    Error::new(ErrorKind::Closed, "the move was given up")
}
