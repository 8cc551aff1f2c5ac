//! The devices of this build, by the names that configurations give them.

use std::sync::Arc;

use ucm_core::{Error, ErrorKind, Result};
use ucm_infra::Clock;

use crate::accelerator::{Accelerator, HIP, MACA, MUSA};
use crate::device::Device;
use crate::host::HostDevice;
use crate::queued::QueueOptions;
use crate::transfer::Transfer;

/// The device of a store whose description names none.
pub const DEFAULT_DEVICE: &str = "host";

/// Makes device number so and so of a kind, whose waits are measured on this clock.
type Open = fn(u32, Transfer, Arc<dyn Clock>) -> Result<Arc<dyn Device>>;

/// Every kind of device: its name, and what makes one.
const DEVICES: &[(&str, Open)] = &[
    (DEFAULT_DEVICE, host),
    ("simu", host),
    ("cuda", Accelerator::cuda),
    ("hip", |at, how, on| Accelerator::vendor(&HIP, at, how, on)),
    ("musa", |at, how, on| {
        Accelerator::vendor(&MUSA, at, how, on)
    }),
    ("maca", |at, how, on| {
        Accelerator::vendor(&MACA, at, how, on)
    }),
    ("ascend", Accelerator::ascend),
];

/// The host's memory is one device, whatever its number.
fn host(_number: u32, _transfer: Transfer, clock: Arc<dyn Clock>) -> Result<Arc<dyn Device>> {
    Ok(Arc::new(HostDevice::with(QueueOptions::on(clock))?))
}

/// The device of this name (`host`, `cuda`, `cuda:1`), on the clock of the caller that uses it:
/// their deadlines are points on it. It belongs to the process that opens it, not to its children.
/// `Config` for a device that this build or machine does not have, `Unsupported` where the library
/// of its vendor is not there or lacks what is needed.
pub fn open_device(
    name: &str,
    transfer: Transfer,
    clock: Arc<dyn Clock>,
) -> Result<Arc<dyn Device>> {
    let (kind, number) = name.split_once(':').unwrap_or((name, "0"));
    let number = number.parse().map_err(|_| {
        let wrong = "a device is named by its kind and, behind a colon, its number";
        Error::new(ErrorKind::Config, wrong).with("device", name)
    })?;
    if let Some((_, open)) = DEVICES.iter().find(|(known, _)| *known == kind) {
        return open(number, transfer, clock);
    }
    let known: Vec<&str> = DEVICES.iter().map(|(name, _)| *name).collect();
    let unknown = "this build has no such device; name one that it knows";
    let unknown = Error::new(ErrorKind::Config, unknown).with("device", name);
    Err(unknown.with("known", known.join(", ")))
}

#[cfg(test)]
mod tests {
    use ucm_infra::SystemClock;

    use super::*;

    fn open(name: &str) -> Result<Arc<dyn Device>> {
        open_device(name, Transfer::Auto, SystemClock::shared())
    }

    #[test]
    fn devices_are_opened_by_name_and_no_others_are() {
        for host in ["host", "simu", "simu:1"] {
            assert_eq!(open(host).unwrap().name(), "host");
        }
        let refused = |name| open(name).err().unwrap();
        let unknown = refused("abacus");
        assert_eq!(unknown.kind(), ErrorKind::Config);
        let text = unknown.to_string();
        assert!(
            text.contains("device=abacus")
                && text.contains("known=host, simu, cuda, hip, musa, maca, ascend"),
            "{text}"
        );
        assert_eq!(refused("cuda:first").kind(), ErrorKind::Config);
    }
}
