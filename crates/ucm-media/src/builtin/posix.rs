//! The kind `posix`: records below a directory, one per file or many per segment, on anything that
//! mounts; or below several directories side by side, each a tier with trust, space and a breaker
//! of its own ([`crate::spread`]).

use std::path::{Path, PathBuf};
use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;
use ucm_core::{Error, ErrorKind, Result};
use ucm_io::{IoEngine, Process, PsyncEngine};

use crate::directory::medium;
use crate::kind::{
    Age, Amount, BuildContext, BuiltLevel, BuiltTier, CodecName, Directories, Heat, Heats, Mode,
    Size, StoreName, TierKind, seconds,
};
use crate::layout::Modes;
use crate::layout_kind::LayoutKind;
use crate::quota::{Capacity, Rules};
use crate::segment::{Merging, SegmentConfig};
use crate::shared::{PosixConfig, RootSlot};
use crate::spread::{MAX_ROOTS, RootFacts, Spread, StoragePolicy};

/// The options.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
#[schemars(extend("required" = ["storage_backends"]))]
pub(super) struct PosixOptions {
    /// the directory blocks are kept in, or several, `a:b:c` or a list: see
    /// [stores.md](stores.md#several-roots)
    #[schemars(extend(
        "aliases" = ["storage_path", "path"], "env" = ["UCM_STORAGE_PATH"], "unset" = "none \
         given", "unit" = "path"
    ))]
    pub(super) storage_backends: Directories,
    /// which of several directories a block goes to: by a stable hash of its id, any, or a hot one
    /// and the colder ones below it
    storage_policy: StoragePolicy,
    /// `tiered`: which of the directories stand above which (`{/mnt/ssd: hot, /mnt/nfs: cold}`);
    /// the others are warm
    #[schemars(extend("unit" = "path to hot, warm or cold", "unset" = "the first above the others"))]
    tiers: Heats,
    /// limit of the root, of each where there are several, at least 8 blocks; the oldest use is
    /// removed first. 0 no longer means "no limit": the default is used, with a warning
    #[schemars(extend(
        "aliases_gib" = ["posix_capacity_gb"],
        "unset" = "20% of the file system, at most 80% of what is free at the first start"
    ))]
    storage_capacity: Option<Amount>,
    /// bytes of the file system that stay free: below it nothing is stored and the oldest use is
    /// removed. 0: no floor
    #[schemars(extend("minimum" = 0))]
    free_space_floor: Amount,
    /// limit of one model's blocks within the root, kept to at every count of a process that has
    /// this key: give it to all of a root
    #[schemars(extend("unset" = "none", "unit" = "size or percent of `storage_capacity`"))]
    namespace_quota: Option<Amount>,
    /// blocks not used for so long are removed
    #[schemars(extend("unset" = "never"))]
    expire_after: Option<Age>,
    /// permissions of files below the root, less the umask of the process. Blocks reveal the
    /// prompt: open them only to users who may read it
    #[schemars(extend("needs" = 0o600))]
    file_mode: Mode,
    /// the same for directories
    #[schemars(extend("needs" = 0o700))]
    dir_mode: Mode,
    /// read and write past the page cache where the file system can
    #[schemars(extend("aliases" = ["use_direct"], "env" = ["UCM_IO_DIRECT"]))]
    io_direct: bool,
    /// how blocks lie below the root: each in its own file, or many in a segment. See below
    #[schemars(extend("unset" = "what the root has, segment for a new one"))]
    layout: Option<LayoutKind>,
    /// how blocks are stored: as they are, or in a shorter form that comes back to the byte; in
    /// segments only. See [stores.md](stores.md#compression)
    codec: CodecName,
    /// length at which a segment is sealed; never more than a 64th of `storage_capacity`, and never
    /// less than one block
    #[schemars(range(min = 1_048_576, max = 1_073_741_824))]
    segment_size: Size,
    /// how long a written block waits for others to be published with it, unless a caller waits for
    /// it (`wait`, `flush`); never longer than three quarters of `deadlines.dump_s`. 0: as soon as
    /// nothing is being written
    #[schemars(range(min = 0, max = 60), extend("unit" = "seconds"))]
    segment_age: f64,
    /// how much of small segments, and of those most of whose blocks were stored again, is copied
    /// into larger ones in a second at most. 0: never
    #[schemars(range(max = 17_179_869_184_u64))]
    segment_merge_rate: Size,
    /// threads that read and write blocks
    #[schemars(range(min = 1, max = 1024), extend("unit" = "threads"))]
    posix_data_trans_concurrency: u32,
    /// threads that look blocks up
    #[schemars(range(min = 1, max = 1024), extend("unit" = "threads"))]
    posix_lookup_concurrency: u32,
}

impl Default for PosixOptions {
    fn default() -> Self {
        let (modes, segments) = (Modes::default(), SegmentConfig::default());
        Self {
            storage_backends: Directories::default(),
            storage_policy: StoragePolicy::RoundRobin,
            tiers: Heats::default(),
            storage_capacity: None,
            free_space_floor: Amount::Percent(5.0),
            namespace_quota: None,
            expire_after: None,
            file_mode: Mode(modes.file),
            dir_mode: Mode(modes.dir),
            io_direct: false,
            layout: None,
            codec: CodecName::Off,
            segment_size: Size(segments.size),
            segment_age: segments.age.as_secs_f64(),
            segment_merge_rate: Size(segments.merging.rate),
            posix_data_trans_concurrency: 16,
            posix_lookup_concurrency: 8,
        }
    }
}

pub(super) fn kind() -> TierKind {
    let posix = StoreName::new("posix", "UcmPosixStore", "built");
    let nfs = "built: posix, by another name, on the mount point";
    let pc = "built: posix with `layout: segment`, and a load of a whole prefix";
    TierKind::medium(posix, make)
        .also(StoreName::new("nfs", "UcmNfsStore", nfs))
        .also(StoreName::new("pc", "UcmPcStore", pc).fixing("layout", "segment"))
        .tested_with(|scratch| json!({"storage_backends": [scratch], "storage_capacity": 1 << 26, "free_space_floor": 0}))
}

fn make(context: &BuildContext, options: PosixOptions) -> Result<Vec<BuiltLevel>> {
    make_over(context, &options, PsyncEngine::new)
}

/// The same with an I/O engine for each directory. The engine's argument is whether it bypasses the
/// page cache.
pub(super) fn make_over<E: IoEngine + 'static>(
    context: &BuildContext,
    options: &PosixOptions,
    engine: impl Fn(bool) -> Arc<E>,
) -> Result<Vec<BuiltLevel>> {
    let directories = &options.storage_backends.0;
    if directories.is_empty() || directories.len() > MAX_ROOTS {
        let text = "storage_backends names one directory, or several";
        let wrong = Error::new(ErrorKind::Config, text).with("given", directories.len());
        return Err(wrong.with("most", MAX_ROOTS));
    }
    let compressed = options.codec.is_on();
    if compressed && options.layout == Some(LayoutKind::File) {
        let wrong = "compressed records live in segments only, as the lengths of block files are \
                     fixed; write layout: segment, or codec: off";
        return Err(Error::new(ErrorKind::Config, wrong).with("root", directories[0].display()));
    }
    let threads = if context.scope.lookup_only {
        options.posix_lookup_concurrency
    } else {
        options.posix_data_trans_concurrency
    } as usize;
    let (mut levels, mut number) = (Vec::new(), 0);
    for directories in options.levels()? {
        let (mut tiers, mut members) = (Vec::new(), Vec::new());
        for directory in directories {
            let facts: Arc<RootFacts> = Arc::default();
            members.push(Arc::clone(&facts));
            let place = RootSlot { number, facts };
            number += 1;
            let pool = context.pool_over(engine(options.io_direct), "ucm-io", threads)?;
            // Compressed records live in segments only.
            let layout = options.layout.or(compressed.then_some(LayoutKind::Segment));
            let root = config(context, options, directory, place);
            let segments = segments(options)?;
            let (io, clock) = (Arc::clone(&pool), Arc::clone(&context.clock));
            tiers.push(BuiltTier {
                backend: medium(root, layout, segments, io, clock)?,
                pool,
                compressed,
                // As many as are replaced: from there on workers are missing.
                max_stuck: threads.max(2),
            });
        }
        levels.push(BuiltLevel {
            tiers,
            spread: Arc::new(Spread::of(options.storage_policy, members)),
        });
    }
    Ok(levels)
}

impl PosixOptions {
    /// The directories of each level, top first: of `tiered` those of one word side by side, or,
    /// where all have the same word, the first above the others.
    fn levels(&self) -> Result<Vec<Vec<PathBuf>>> {
        let directories = &self.storage_backends.0;
        let strange = |(path, _): &&(PathBuf, Heat)| !directories.contains(path);
        if let Some((stranger, _)) = self.tiers.0.iter().find(strange) {
            let wrong = "tiers names a directory that is none of storage_backends";
            return Err(Error::new(ErrorKind::Config, wrong).with("directory", stranger.display()));
        }
        if self.storage_policy != StoragePolicy::Tiered {
            return Ok(vec![directories.clone()]);
        }
        let mut levels = Vec::new();
        for heat in [Heat::Hot, Heat::Warm, Heat::Cold] {
            let mut level = directories.clone();
            level.retain(|directory| self.heat(directory) == heat);
            if !level.is_empty() {
                levels.push(level);
            }
        }
        if let [level] = &mut levels[..]
            && level.len() > 1
        {
            let others = level.split_off(1);
            levels.push(others);
        }
        Ok(levels)
    }

    /// The configured speed of a directory.
    fn heat(&self, directory: &Path) -> Heat {
        let said = self.tiers.0.iter().find(|(path, _)| path == directory);
        said.map_or(Heat::Warm, |(_, heat)| *heat)
    }
}

/// Settings of one of the directories, for both layouts.
fn config(
    context: &BuildContext,
    options: &PosixOptions,
    root: PathBuf,
    place: RootSlot,
) -> PosixConfig {
    let floor = options.free_space_floor.limit();
    let rules = Rules {
        // No bytes: no floor, while nothing at all is the default.
        free_floor: floor.or(Some(Capacity::Percent(0.0))),
        namespace_quota: options.namespace_quota.and_then(Amount::limit),
        expire_after: options.expire_after.map(Age::duration),
    };
    PosixConfig {
        root,
        scope: context.scope(options.codec.is_on()),
        direct: options.io_direct,
        capacity: options.storage_capacity.and_then(Amount::limit),
        rules,
        process: Process::this(),
        modes: Modes {
            file: options.file_mode.0,
            dir: options.dir_mode.0,
        },
        place,
    }
}

/// Settings for segments.
fn segments(options: &PosixOptions) -> Result<SegmentConfig> {
    Ok(SegmentConfig {
        size: options.segment_size.0,
        age: seconds("segment_age", options.segment_age)?,
        merging: Merging {
            rate: options.segment_merge_rate.0,
            ..Merging::default()
        },
        ..SegmentConfig::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiered_directories_stand_one_below_the_other_by_what_is_said_of_them() {
        for (policy, tiers, levels) in [
            ("round_robin", json!([]), json!([["/a", "/b", "/c"]])),
            ("tiered", json!([]), json!([["/a"], ["/b", "/c"]])),
            (
                "tiered",
                json!([["/b", "hot"]]),
                json!([["/b"], ["/a", "/c"]]),
            ),
            (
                "tiered",
                json!([["/a", "cold"]]),
                json!([["/b", "/c"], ["/a"]]),
            ),
            (
                "tiered",
                json!([["/c", "hot"], ["/a", "cold"]]),
                json!([["/c"], ["/b"], ["/a"]]),
            ),
        ] {
            let written = json!({
                "storage_backends": ["/a", "/b", "/c"], "storage_policy": policy, "tiers": tiers
            });
            let options: PosixOptions = serde_json::from_value(written).unwrap();
            assert_eq!(json!(options.levels().unwrap()), levels, "{policy} {tiers}");
        }
    }
}
