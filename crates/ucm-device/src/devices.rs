//! The devices of this build, by the names that configurations give them.

use std::sync::Arc;

use ucm_core::{Error, ErrorKind, Result};
use ucm_infra::Clock;

use crate::device::Device;
use crate::host::{HostDevice, HostDeviceOptions};

/// The device of a store whose description names none.
pub const DEFAULT_DEVICE: &str = "host";

/// Makes a device whose waits are measured on this clock.
type Open = fn(Arc<dyn Clock>) -> Result<Arc<dyn Device>>;

/// Every device: its name, and what makes it.
const DEVICES: &[(&str, Open)] = &[(DEFAULT_DEVICE, open_host)];

fn open_host(clock: Arc<dyn Clock>) -> Result<Arc<dyn Device>> {
    Ok(Arc::new(HostDevice::with(HostDeviceOptions {
        clock,
        ..HostDeviceOptions::default()
    })?))
}

/// The device of this name, on the clock of whoever uses it: their deadlines are points on it. `Config` for a device that
/// this build does not have.
pub fn open_device(name: &str, clock: Arc<dyn Clock>) -> Result<Arc<dyn Device>> {
    if let Some((_, open)) = DEVICES.iter().find(|(known, _)| *known == name) {
        return open(clock);
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

    #[test]
    fn every_device_is_opened_by_its_name_and_no_other_is() {
        for (name, _) in DEVICES {
            assert_eq!(open_device(name, SystemClock::shared()).unwrap().name(), *name);
        }
        let error = open_device("abacus", SystemClock::shared()).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Config);
        let text = error.to_string();
        assert!(
            text.contains("device=abacus") && text.contains("known=host"),
            "{text}"
        );
    }
}
