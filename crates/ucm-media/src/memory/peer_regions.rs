//! The regions of the other processes of this host, and the thread that finds them.
//!
//! The thread announces the own region, and again should its file be cleaned away, then lists the
//! registry; about once a second, on the clock it was given. It is the only one here that touches a
//! file system: if that hangs, what is mapped stays mapped and nothing waits.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use ucm_core::sync::{Mutex, RwLock};
use ucm_core::{BlockId, Error, Result};
use ucm_device::{RegionView, Registry, Wanted};
use ucm_infra::{Clock, Completion, MonotonicTime, Notify, begin_thread};

use super::tier::Tier;

/// Time between two scans.
const EVERY: Duration = Duration::from_secs(1);

/// Regions of others, mapped.
pub(super) struct PeerRegions {
    /// The directory of the last scan.
    dir: Mutex<PathBuf>,
    views: RwLock<Arc<Vec<Arc<RegionView>>>>,
    /// Why the last scan was incomplete.
    trouble: Mutex<Option<Error>>,
    notify: Notify,
    over: AtomicBool,
    first: Arc<Completion<()>>,
    ended: Arc<Completion<()>>,
}

impl PeerRegions {
    /// Starts the thread, if anything is shared.
    pub(super) fn start(tier: &Arc<Tier>, clock: Arc<dyn Clock>) -> Result<Arc<Self>> {
        let peers = Arc::new(Self {
            views: RwLock::default(),
            trouble: Mutex::default(),
            notify: Notify::new(),
            over: AtomicBool::new(false),
            first: Completion::new(),
            ended: Completion::new(),
            dir: Mutex::default(),
        });
        if !tier.config.shared {
            peers.first.complete(());
            peers.ended.complete(());
            return Ok(peers);
        }
        let (this, tier) = (Arc::clone(&peers), Arc::downgrade(tier));
        begin_thread("ucm-regions", move || this.run(&tier, &*clock)).map_err(|error| {
            let text = "cannot start the thread that looks for memory regions";
            Error::from_io(error, text)
        })?;
        Ok(peers)
    }

    fn run(&self, tier: &Weak<Tier>, clock: &dyn Clock) {
        loop {
            let seen = self.notify.seen();
            let alive = tier.upgrade();
            let Some(alive) = alive.filter(|_| !self.over.load(Ordering::Acquire)) else {
                break;
            };
            *self.trouble.lock() = self.look_once(&alive).err();
            drop(alive);
            self.first.complete(());
            clock.sleep(&self.notify, seen, Some(clock.now().after(EVERY)));
        }
        if let Some(tier) = tier.upgrade()
            && let Some(region) = &tier.region
        {
            region.withdraw();
        }
        *self.views.write() = Arc::default();
        self.first.complete(());
        self.ended.complete(());
    }

    fn look_once(&self, tier: &Tier) -> Result<()> {
        // Anew each time: the directory of a user's session is removed with the session.
        let dir = tier.config.registry.clone();
        let dir = dir.unwrap_or_else(Registry::default_dir);
        let registry = &Registry::new(dir.clone());
        *self.dir.lock() = dir;
        let region = tier.region.as_ref();
        let announced = region.map_or(Ok(()), |region| region.announce(registry));
        tier.set_visible(announced.is_ok());
        let (least, most) = tier.lengths.range();
        let wanted = Wanted {
            namespace: *tier.config.scope.identity.digest(),
            record_len: (least as usize, most as usize),
            own: region.map(|region| region.nonce()),
        };
        let known = self.views();
        let scan = registry.scan(&wanted, &known)?;
        let mut both = scan.views.iter().zip(known.iter());
        let same = both.all(|(new, old)| Arc::ptr_eq(new, old));
        if !same || scan.views.len() != known.len() {
            *self.views.write() = Arc::new(scan.views);
        }
        announced?;
        scan.refused.map_or(Ok(()), Err)
    }

    /// The regions that are mapped now.
    pub(super) fn views(&self) -> Arc<Vec<Arc<RegionView>>> {
        Arc::clone(&self.views.read())
    }

    pub(super) fn contains(&self, id: BlockId) -> bool {
        self.views().iter().any(|view| view.contains(id))
    }

    pub(super) fn copy_parts(
        &self,
        id: BlockId,
        parts: &[Range<usize>],
        out: &mut [u8],
    ) -> Option<usize> {
        self.views()
            .iter()
            .find_map(|view| view.copy_parts(id, parts, out))
    }

    pub(super) fn count(&self) -> usize {
        self.views().len()
    }

    /// Has the thread scan now.
    pub(super) fn look(&self) {
        self.notify.notify();
    }

    /// Waits until it has scanned once.
    pub(super) fn await_first(&self, clock: &dyn Clock, deadline: MonotonicTime) {
        self.first.wait(clock, Some(deadline));
    }

    /// Has the thread end; the region is removed from the registry and the others are unmapped.
    pub(super) fn stop(&self) {
        self.over.store(true, Ordering::Release);
        self.notify.notify();
    }

    /// Waits until it did.
    pub(super) fn await_end(&self, clock: &dyn Clock, deadline: MonotonicTime) {
        self.ended.wait(clock, Some(deadline));
    }

    /// For the log.
    pub(super) fn words(&self) -> String {
        let dir = self.dir.lock();
        if dir.as_os_str().is_empty() {
            return "not shared".to_owned();
        }
        match &*self.trouble.lock() {
            Some(error) => format!("sharing is limited: {error}"),
            None => {
                let (dir, count) = (dir.display(), self.count());
                format!("announced in {dir}, {count} regions of others")
            }
        }
    }
}
