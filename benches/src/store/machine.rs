//! What a run says of the machine it was on.

use serde::Serialize;

use super::files::Place;
use super::fio;

/// Where a run took place.
#[derive(Serialize, Debug, Clone)]
pub struct Machine {
    /// Cores this process may use.
    pub cores: usize,
    /// Processor, as the kernel names it.
    pub processor: String,
    /// Kernel release.
    pub kernel: String,
    /// Type of the file system, as mounts name it.
    pub file_system: String,
    /// Version of fio, if it was used.
    pub fio: Option<String>,
}

impl Machine {
    pub(super) fn of(place: &Place, with_fio: bool) -> Self {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let cpu = read("/proc/cpuinfo");
        let model = cpu
            .lines()
            .find_map(|line| line.strip_prefix("model name")?.split_once(':'));
        let mounts = read("/proc/mounts");
        let mount = mounts
            .lines()
            .filter_map(|line| {
                let mut words = line.split(' ').skip(1);
                Some((words.next()?, words.next()?))
            })
            .filter(|(point, _)| place.dir().starts_with(point))
            .max_by_key(|(point, _)| point.len());
        Self {
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            processor: model
                .map_or_else(|| "unknown".to_owned(), |(_, name)| name.trim().to_owned()),
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            file_system: mount.map_or("unknown", |(_, kind)| kind).to_owned(),
            fio: with_fio.then(fio::version).flatten(),
        }
    }
}
