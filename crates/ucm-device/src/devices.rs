//! The platforms of this build: one table of their differences.
//!
//! [`open_device`] opens a device by its name in a configuration. Python reads names, spellings,
//! the names used by vLLM and torch, and files from [`PLATFORMS`] (`ucm._core.platforms`).

use std::sync::Arc;

use ucm_core::{Error, ErrorKind, Result};
use ucm_infra::Clock;

use crate::accelerator::{Accelerator, Places, Vendor, VendorLibrary};
use crate::device::Device;
use crate::host::HostDevice;
use crate::queued::QueueOptions;
use crate::transfer::Transfer;

/// The default device of a store.
pub const DEFAULT_DEVICE: &str = "host";

/// A platform: one kind of device.
pub struct Platform {
    /// `platform` in a configuration, and the first part of a device's name.
    pub name: &'static str,
    /// Aliases.
    pub spellings: &'static [&'static str],
    /// vLLM's name: `device_name` of its platform.
    pub in_vllm: &'static [&'static str],
    /// The type of its devices in torch.
    pub in_torch: &'static str,
    /// Its files, as a pattern of glob; empty: it has none.
    pub files: &'static str,
    /// `None`: memory of this process.
    library: Option<VendorLibrary>,
}

/// Every platform, in the order in which `ucm.trans` tries them. torch for HIP and for MACA calls
/// its devices those of CUDA. The names that vLLM has for MUSA and MACA are unverified.
pub static PLATFORMS: &[Platform] = &[
    Platform {
        name: DEFAULT_DEVICE,
        spellings: &["simu", "cpu"],
        in_vllm: &["cpu"],
        in_torch: "cpu",
        files: "",
        library: None,
    },
    Platform {
        name: "cuda",
        spellings: &[],
        in_vllm: &["cuda"],
        in_torch: "cuda",
        files: "/dev/nvidia[0-9]*",
        library: Some(VendorLibrary::Cuda),
    },
    // AMD. All values and signatures: `driver_types.h` and `hip_runtime_api.h` of HIP 5.2.21153, in
    // Debian's `libamdhip64-dev` 5.2.3. The name with `.5` is Debian's; those with other numbers
    // follow ROCm's releases and are unverified.
    Platform {
        name: "hip",
        spellings: &[],
        in_vllm: &["rocm"],
        in_torch: "cuda",
        files: "/dev/kfd",
        library: Some(VendorLibrary::CudaLike(Vendor {
            prefix: "hip",
            library: Places {
                known_by: Some("hipStreamCreateWithPriority"),
                names: &[
                    "libamdhip64.so",
                    "libamdhip64.so.7",
                    "libamdhip64.so.6",
                    "libamdhip64.so.5",
                ],
                below: None,
            },
            not_ready: &[600],
        })),
    },
    // Moore Threads. **Unverified**: no header of MUSA was available. Names and shapes are those
    // that public callers of it use, and the values are CUDA's. CUDA's own number for "not ready"
    // was 34 before 10.1, so both are accepted.
    Platform {
        name: "musa",
        spellings: &[],
        in_vllm: &["musa"],
        in_torch: "musa",
        files: "/dev/mtgpu*",
        library: Some(VendorLibrary::CudaLike(Vendor {
            prefix: "musa",
            library: Places {
                known_by: Some("musaStreamCreateWithPriority"),
                names: &["libmusart.so", "libmusart.so.5", "libmusart.so.4"],
                below: None,
            },
            not_ready: &[600, 34],
        })),
    },
    // MetaX. **Unverified**, as MUSA is; public callers open `lib/libmcruntime.so` below
    // `$MACA_PATH`.
    Platform {
        name: "maca",
        spellings: &[],
        in_vllm: &["maca", "cuda"],
        in_torch: "cuda",
        files: "/dev/mxcd",
        library: Some(VendorLibrary::CudaLike(Vendor {
            prefix: "mc",
            library: Places {
                known_by: Some("mcStreamCreateWithPriority"),
                names: &["libmcruntime.so"],
                below: Some(("MACA_PATH", "lib")),
            },
            not_ready: &[600, 34],
        })),
    },
    Platform {
        name: "ascend",
        spellings: &[],
        in_vllm: &["npu"],
        in_torch: "npu",
        files: "/dev/davinci[0-9]*",
        library: Some(VendorLibrary::Ascend),
    },
];

impl Platform {
    /// All its names, its own first.
    pub fn names(&self) -> impl Iterator<Item = &'static str> {
        std::iter::once(self.name).chain(self.spellings.iter().copied())
    }

    /// Opens its device number `ordinal`; the host ignores the number.
    fn open(
        &'static self,
        ordinal: u32,
        transfer: Transfer,
        clock: Arc<dyn Clock>,
    ) -> Result<Arc<dyn Device>> {
        let Some(library) = &self.library else {
            return Ok(Arc::new(HostDevice::with(QueueOptions::on(clock))));
        };
        Accelerator::open(self.name, library, ordinal, transfer, clock)
    }
}

/// The device of this name (`host`, `cuda`, `cuda:1`), on the clock of its user's deadlines. It
/// belongs to the process that opens it, not to its children. `Config` for a device that this build
/// or machine does not have, `Unsupported` if its vendor's library is missing or lacks a function.
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
    for platform in PLATFORMS {
        if platform.names().any(|known| known == kind) {
            return platform.open(number, transfer, clock);
        }
    }
    let known: Vec<&str> = PLATFORMS.iter().flat_map(Platform::names).collect();
    let unknown = "this build has no such device; use one of the known names";
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
                && text.contains("known=host, simu, cpu, cuda, hip, musa, maca, ascend"),
            "{text}"
        );
        assert_eq!(refused("cuda:first").kind(), ErrorKind::Config);
    }
}
