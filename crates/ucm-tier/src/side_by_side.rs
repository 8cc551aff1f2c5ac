//! The media of one root or of several side by side.

use std::sync::Arc;

use ucm_core::Result;
use ucm_infra::Clock;
use ucm_io::IoPool;

use crate::backend::Backend;
use crate::directory::DirectoryBackend;
use crate::layout_kind::LayoutKind;
use crate::posix::PosixBackend;
use crate::segment::{SegmentBackend, SegmentConfig};
use crate::shared::{PosixConfig, Shared};

/// A root as it is set up.
pub struct RootSetup {
    /// What holds whatever its layout.
    pub config: PosixConfig,
    /// How records lie below it; none: as it has it, or segments.
    pub layout: Option<LayoutKind>,
    /// What holds where they lie in segments.
    pub segments: SegmentConfig,
    /// Its threads.
    pub io: Arc<IoPool>,
}

/// A medium for each of these roots. Nothing is touched before they are opened.
///
/// # Errors
/// `Config` where a limit is too small, or a segment too long.
pub fn media(roots: Vec<RootSetup>, clock: &Arc<dyn Clock>) -> Result<Vec<Arc<dyn Backend>>> {
    let mut media = Vec::new();
    for root in roots {
        let shared = Shared::new(root.config, root.layout, root.io, Arc::clone(clock))?;
        let shared = Arc::new(shared);
        let medium: Arc<dyn Backend> = match root.layout {
            None => Arc::new(DirectoryBackend::over(shared, root.segments)),
            Some(LayoutKind::File) => Arc::new(PosixBackend::over(shared)),
            Some(LayoutKind::Segment) => Arc::new(SegmentBackend::over(shared, root.segments)?),
        };
        media.push(medium);
    }
    Ok(media)
}
